"""DeepSpeed's `accelerator`: the device of this process, under the names that training scripts call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megazero import comm
from megazero.throughput import memory_bytes, peak_memory_bytes

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """The kind of device that `comm.local_device` returns: a GPU, or the CPU.

    Any name not defined below is torch.cuda's function of that name (`is_available`, `set_device`, `device_count`,
    `synchronize`, `current_stream`, ...). Without a GPU it is torch.cpu's, or what torch itself calls by that name for the CPU
    (`get_rng_state`, `set_rng_state`, `FloatTensor`, ...).
    """

    @property
    def _name(self) -> str:  # as DeepSpeed's, which scripts read
        return comm.local_device().type

    def __getattr__(self, name: str) -> Any:
        """torch's function for this kind of device."""
        for owner in (torch.cpu, torch) if self._name == "cpu" else (torch.cuda,):
            if not name.startswith("_") and hasattr(owner, name):
                return getattr(owner, name)
        raise AttributeError(f"the accelerator has no attribute {name!r}, and neither has torch.{self._name}.")

    def device(self, device_index: int | None = None) -> AbstractContextManager:
        """A `with` block in which this GPU is the current one; without a GPU, one in which nothing changes."""
        return nullcontext() if self._name == "cpu" else torch.cuda.device(device_index)

    def device_name(self, device_index: int | None = None) -> str:
        """The device string for `tensor.to`: "cuda:1", or "cuda" without an index; always "cpu" on the CPU."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The device string for `tensor.to` that names this process's device."""
        return str(comm.local_device())

    def communication_backend_name(self) -> str:
        """The backend name for `init_distributed`: "nccl" or "gloo"."""
        return "gloo" if self._name == "cpu" else "nccl"

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16; every CPU does."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16; every device does."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's generators on the host and on every device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes allocated by this process on a GPU, by default its own; without a GPU, bytes that it holds in host memory."""
        return memory_bytes(torch.device(self.device_name(device_index)))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The highest value that `memory_allocated` has reached."""
        return peak_memory_bytes(torch.device(self.device_name(device_index)))

    def empty_cache(self) -> None:
        """Returns the memory that torch caches on the GPU; does nothing without a GPU."""
        if self._name != "cpu":
            torch.cuda.empty_cache()


def get_accelerator() -> Accelerator:
    """This process's accelerator."""
    return Accelerator()
