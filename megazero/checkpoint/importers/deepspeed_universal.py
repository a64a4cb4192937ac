"""Where DeepSpeed's universal checkpoints, which its ds_to_universal makes of others, keep each parameter's values.

DIR/TAG/*_model_states.pt              those of the checkpoint that it was made of
DIR/TAG/zero/NAME/fp32.pt              the full tensor: of stages 1 and 2 in a dict, of stage 3 flat
DIR/TAG/zero/NAME/exp_avg.pt, ...      the same; none where the parameter has never had a gradient
DIR/TAG/zero/NAME/step.pt              of stages 1 and 2
DIR/TAG/zero/optimizer_state.pt        what the optimizer of rank 0 had beside these, of stage 3 with its shares and steps
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.importers.deepspeed_partitions import SavedOptimizer, common_counters
from megazero.checkpoint.importers.foreign import Read
from megazero.checkpoint.importers.torch_files import load_torch_file
from megazero.zero.bucket import MASTER


def read_universal(folder: Path, sizes: Mapping[str, tuple[int, ...]]) -> SavedOptimizer:
    """Where the trained parameters' values lie in the folder `zero`; no value is read yet.

    Args:
        sizes: their full shapes.

    Raises:
        FileNotFoundError: the optimizer's file is missing.
        ValueError: it is damaged.
    """
    state = load_torch_file(folder / "optimizer_state.pt")
    readers: dict[str, dict[str, Read]] = {}
    steps = list(state.get("optimizer_state_dict", {}).get("state", {}).values())
    for name, size in sizes.items():
        files = {path.stem: path for path in sorted((folder / name).glob("*.pt"))}
        if step := files.pop("step", None):
            steps.append({"step": load_torch_file(step)})
        files[MASTER] = files.pop("fp32", folder / name / "fp32.pt")  # reading says where it is missing
        readers[name] = {key: partial(_read, path, size) for key, path in files.items()}
    has_run = any(len(states) > 1 for states in readers.values())
    return SavedOptimizer(
        readers, common_counters(steps, str(folder)) if has_run else None, state["param_groups"], state
    )


def _read(path: Path, size: tuple[int, ...]) -> Tensor:
    found = load_torch_file(path)
    tensor = found.get("param") if isinstance(found, dict) else found
    if not isinstance(tensor, Tensor) or tensor.numel() != torch.Size(size).numel():
        what = f"{tensor.numel()} elements" if isinstance(tensor, Tensor) else "no tensor"
        raise ValueError(
            f"{path} has {what} where the model file says {list(size)}: the files do not belong together, or rows that pad the "
            "vocabulary were cut off. Import the checkpoint that this one was made of."
        )
    return tensor.to(torch.float32, copy=True).view(size)
