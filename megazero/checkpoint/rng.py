"""Random generator states of one rank, as tensors that a checkpoint can hold."""

from __future__ import annotations

from torch import Tensor

from megazero.mpu.random import RngState

_TRACKED = "tracker/"


def rng_states() -> dict[str, Tensor]:
    """The states of the CPU generator, the CUDA generator and every stream of the tracker; uint8."""
    state = RngState.capture()
    tensors = {"cpu": state.cpu, **{_TRACKED + name: stream for name, stream in state.tracker.items()}}
    return tensors if state.cuda is None else {**tensors, "cuda": state.cuda}


def set_rng_states(states: dict[str, Tensor]) -> None:
    """Puts every generator back to what `rng_states` returned."""
    tracker = {name.removeprefix(_TRACKED): stream for name, stream in states.items() if name.startswith(_TRACKED)}
    RngState(states["cpu"], states.get("cuda"), tracker).restore()
