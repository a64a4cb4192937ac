"""Random streams that differ between model-parallel ranks, beside the default stream that is the same on all of them.

Dropout of a replicated activation must be the same on every rank and draws from the default stream. Dropout of a sharded one
must differ, and draws inside `with get_cuda_rng_tracker().fork():`. Streams belong to the generator of the device that this
process computes on: CUDA where there is one, else the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero import comm
from megazero.mpu.groups import get_model_parallel_rank

MODEL_PARALLEL_RNG = "model-parallel-rng"
MODEL_PARALLEL_SEED_OFFSET = 2718  # Megatron-LM's; keeps the streams of one seed apart from its default stream


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if comm.local_device().type == "cuda" else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if comm.local_device().type == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed(seed: int) -> None:
    if comm.local_device().type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class RngTracker:
    """Named random streams of one device, one of which at a time takes the place of its default stream."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()
        self._active: list[str] = []  # names of the forks that we are in, outermost first

    def reset(self) -> None:
        """Forgets all streams."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of every stream's state (uint8, on the CPU), by name."""
        self._park()
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replaces all streams by copies of `states`."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Adds a stream; the default stream is left as it is.

        Raises:
            ValueError: the name or the seed is in use: two streams would draw the same numbers.
        """
        if name in self._states:
            raise ValueError(
                f"random stream {name!r} exists already. Choose another name, or reset() the tracker first."
            )
        if seed in self._seeds:
            raise ValueError(
                f"seed {seed} for random stream {name!r} belongs to another stream already. Choose another."
            )
        outer = _get_state()
        _seed(seed)
        self._states[name] = _get_state()
        self._seeds.add(seed)
        _set_state(outer)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draws from stream `name` inside; leaves it advanced, and the outer stream as it was, also after an exception.

        Forks nest. Inside a fork of the same name the stream goes on.

        Raises:
            ValueError: there is no such stream.
        """
        if name not in self._states:
            known = ", ".join(repr(known) for known in self._states) or "none"
            raise ValueError(
                f"there is no random stream {name!r} (known: {known}). Call mpu.model_parallel_cuda_manual_seed(seed) once "
                "after initialize_model_parallel, or add() the stream."
            )
        self._park()
        outer = _get_state()
        self._active.append(name)
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._park()
            self._active.pop()
            # The enclosing fork's stream has moved on if it is the one that we drew from.
            _set_state(self._states.get(self._active[-1], outer) if self._active else outer)

    def _park(self) -> None:
        """Writes back the state of the stream that is being drawn from."""
        if self._active and self._active[-1] in self._states:  # it is not after a reset() inside of its fork
            self._states[self._active[-1]] = _get_state()


_tracker = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    """The tracker of this process. Megatron-LM's name; it serves the CPU as well."""
    return _tracker


def own_stream(is_wanted: bool) -> AbstractContextManager[None]:
    """Draws from this rank's model-parallel stream inside, if that `is_wanted`: for dropout of what ranks hold parts of."""
    return _tracker.fork() if is_wanted else nullcontext()


def model_parallel_cuda_manual_seed(seed: int, model_parallel_rank: int | None = None) -> None:
    """Seeds the default stream with `seed` and the model-parallel one with `seed + 2718 + model-parallel rank`.

    The default stream is that of the device this process computes on, and is then the same on all ranks: with data parallelism,
    pass a seed that differs between replicas where their dropout should. Where the device is not the CPU, the CPU's default
    stream, from which initial weights are drawn, is left alone: seed it with `torch.manual_seed`.

    Args:
        model_parallel_rank: in groups that are not `megazero.mpu`'s; by default the one in those.

    Raises:
        RuntimeError: the model-parallel groups do not exist.
    """
    rank = get_model_parallel_rank() if model_parallel_rank is None else model_parallel_rank
    seed = int(seed)  # numpy's too, as for torch.manual_seed
    own_seed = seed + MODEL_PARALLEL_SEED_OFFSET + rank
    _tracker.reset()
    _seed(seed)
    _tracker.add(MODEL_PARALLEL_RNG, own_seed)


@dataclass(frozen=True)
class RngState:
    """Where all random streams of this process stand: the CPU's, the CUDA device's and the tracker's."""

    cpu: Tensor
    cuda: Tensor | None
    tracker: dict[str, Tensor]
    forks: tuple[str, ...]  # that are open, outermost first: they say which stream a device's state is

    @classmethod
    def capture(cls) -> RngState:
        """Copies of the current states."""
        cuda = torch.cuda.get_rng_state() if comm.local_device().type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, _tracker.get_states(), tuple(_tracker._active))

    def restore(self) -> None:
        """Puts every stream back to where it stood, and draws from the one that was drawn from then.

        Where other forks are open now, restore the state of now before they end.
        """
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        _tracker.set_states(self.tracker)
        _tracker._active[:] = self.forks
