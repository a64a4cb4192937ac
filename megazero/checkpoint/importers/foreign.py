"""What an importer gives: another framework's checkpoint in full, logical parameters, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ForeignTensor:
    """One parameter or buffer, merged over all ranks that it was cut over.

    Attributes:
        shape: full and unpadded.
        kind: "trained", "frozen" (a parameter without optimizer state) or "buffer".
        states: by name, a function that reads the full tensor of `shape` (CPU). A trained parameter has "master" (fp32) and may
            have the optimizer's tensors ("exp_avg", "exp_avg_sq", fp32); others have "constant" alone, in their own dtype.
    """

    shape: tuple[int, ...]
    kind: str
    states: Mapping[str, Callable[[], Tensor]]


@dataclass
class ForeignCheckpoint:
    """Another framework's checkpoint.

    Attributes:
        tensors: by name; tied parameters once.
        aliases: further names of tied parameters -> the name in `tensors`.
        optimizer_counters: the optimizer's scalar state of every trained parameter ({"step": 1000.0}); None where only weights
            were found, and then no tensor has optimizer states.
        client_state: what the user had saved beside the model: plain containers, numbers, strings and tensors.
    """

    tensors: dict[str, ForeignTensor]
    aliases: dict[str, str] = field(default_factory=dict)
    global_steps: int = 0
    skipped_steps: int = 0
    optimizer_type: str | None = None  # class name, "AdamW"
    optimizer_counters: dict[str, float] | None = None
    optimizer_groups: list[dict[str, Any]] | None = None  # of which the settings are taken: lr, betas, ...
    lr_scheduler: dict[str, Any] | None = None
    loss_scaler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
