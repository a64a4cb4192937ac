"""DeepSpeed's `accelerator`: the device of this process, under the names that training scripts call."""

from __future__ import annotations

from typing import Any

import torch

from megazero import comm
from megazero.throughput import memory_bytes, peak_memory_bytes

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """The kind of device that `comm.local_device` gives: a GPU, or the CPU.

    What is not below is torch.cuda's function of that name, or torch.cpu's where there is no GPU (`is_available`, `set_device`,
    `device_count`, `synchronize`, `current_stream`, ...).
    """

    @property
    def _kind(self) -> str:
        return comm.local_device().type

    def __getattr__(self, name: str) -> Any:
        """torch's function for this kind of device."""
        functions = getattr(torch, self._kind)
        if name.startswith("_") or not hasattr(functions, name):
            raise AttributeError(f"the accelerator has no attribute {name!r}, and neither has torch.{self._kind}.")
        return getattr(functions, name)

    def device_name(self, device_index: int | None = None) -> str:
        """What `tensor.to` takes: "cuda:1", or "cuda" without an index; "cpu" with any."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        """What `tensor.to` takes for this process's device."""
        return str(comm.local_device())

    def communication_backend_name(self) -> str:
        """What `init_distributed` takes: "nccl" or "gloo"."""
        return "gloo" if self._kind == "cpu" else "nccl"

    def is_bf16_supported(self) -> bool:
        """Whether bf16 computes; on every CPU it does."""
        return self._kind == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether fp16 computes: everywhere."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's generators, of the host and of every device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that this process has allocated on a GPU, by default its own; without one, that it holds in host memory."""
        return memory_bytes(torch.device(self.device_name(device_index)))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that `memory_allocated` has been."""
        return peak_memory_bytes(torch.device(self.device_name(device_index)))

    def empty_cache(self) -> None:
        """Gives memory that torch keeps on the GPU back; without one there is none."""
        if self._kind != "cpu":
            torch.cuda.empty_cache()


def get_accelerator() -> Accelerator:
    """This process's accelerator."""
    return Accelerator()
