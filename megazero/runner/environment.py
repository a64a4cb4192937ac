"""Environment variables for the ranks of a node: their GPUs, and variables from this process and from files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

# Exported to other nodes: what carries data, and what all ranks must have alike. Without the settings of torch's allocators
# (PYTORCH_CUDA_ALLOC_CONF), only the other nodes would run out of memory through fragmentation.
EXPORTED: tuple[str, ...] = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "UCX_", "MLFLOW_", "PYTHON", "OMP_NUM_THREADS")
EXPORTED += ("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG")  # no other CUDA_*: slots set the visible devices
# Not exported, because all users of this machine see ssh's command line: MLflow's token, password, passphrase and key.
_SECRET = re.compile(r"MLFLOW_.*(TOKEN|PASSWORD|PASSPHRASE|KEY)")


def exported() -> dict[str, str]:
    """The variables for nodes that do not share this process's environment: those of its own that matter, and the files'."""
    own = {key: value for key, value in os.environ.items() if key.startswith(EXPORTED) and not _SECRET.fullmatch(key)}
    return own | from_files()


def from_files() -> dict[str, str]:
    """The variables in ~/.deepspeed_env, overridden by those in ./.deepspeed_env."""
    found: dict[str, str] = {}
    # A container's user may have no home, which leaves "~" as it is, or root's, into which it may not look: isfile then says no,
    # where Path.is_file raises.
    for folder in (os.path.expanduser("~"), "."):
        path = Path(folder) / ".deepspeed_env"
        if os.path.isfile(path):
            found |= parse_environment(path.read_text(), str(path))
    return found


def parse_environment(text: str, name: str = ".deepspeed_env") -> dict[str, str]:
    """The variables in a file of KEY=VALUE lines; blank lines and `#` lines are skipped, and values are taken literally.

    Raises:
        ValueError: a line is not of that form.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or re.fullmatch(r"[A-Za-z_]\w*", key.strip(), re.ASCII) is None:
            raise ValueError(f"{name} line {number}: {line!r} is not of the form KEY=VALUE.")
        found[key.strip()] = value
    return found


def of_slots(slots: Sequence[int], *, local: bool, has_gpus: bool) -> dict[str, str]:
    """The variables for ranks on these slots of a node, in addition to torchrun's; `local`: the node is this process's."""
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES") if local else None
    devices = {"CUDA_VISIBLE_DEVICES": visible_devices(slots, inherited)} if has_gpus else {}
    return {"LOCAL_SIZE": str(len(slots)), **devices}


def visible_devices(slots: Sequence[int], inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a node; if `inherited` is set, slots are positions in that list.

    Raises:
        ValueError: `inherited` lists fewer devices than a slot needs.
    """
    if inherited is None:
        return ",".join(map(str, slots))
    if hides_gpus(inherited):
        return inherited
    devices = [device for device in inherited.split(",") if device.strip()]
    if max(slots) >= len(devices):
        raise ValueError(
            f"slot {max(slots)} does not exist: CUDA_VISIBLE_DEVICES={inherited} leaves {len(devices)} devices."
        )
    return ",".join(devices[slot] for slot in slots)


def refuse_other_nodes(nodes: str, alone: str) -> None:
    """Raises if the environment tells of other nodes to a launcher whose user did not: each node would train by itself.

    On Kubernetes, Kubeflow sets torchrun's PET_NNODES in each pod; its older PyTorchJob only WORLD_SIZE, the number of pods.

    Args:
        nodes: what to set instead in pods that have WORLD_SIZE and RANK.
        alone: what to set for a job on this node alone.
    """
    name, way = "WORLD_SIZE", f"Set {nodes}"
    if os.environ.get("PET_NNODES"):  # WORLD_SIZE then counts ranks
        name, way = "PET_NNODES", "Start the script by `python -m megazero.launch`, which reads torchrun's variables"
    value = os.environ.get(name) or "1"
    if value.rpartition(":")[2] != "1":  # or a range, 2:4
        raise ValueError(
            f"{name}={value} in the environment: other nodes take part, and each would train by itself. {way}; or {alone}, if "
            "this node is to work alone."
        )


def hides_gpus(visible: str | None) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES hides all GPUs on purpose: as for CUDA, by a first entry that names no device."""
    return visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)
