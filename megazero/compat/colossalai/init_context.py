"""Colossal-AI's `ZeroInitContext`: builds a model in half precision, and shards it while it is built."""

from __future__ import annotations

import math
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megazero import comm, zero
from megazero.compat.colossalai.shard_strategy import BucketTensorShardStrategy
from megazero.mpu.random import RngState
from megazero.zero.units import shape_of


class ZeroInitContext:
    """Context manager in which modules are built with parameters in fp16 or bf16, and sharded if `shard_param` is true.

    Initial values are those of an unsharded construction with the first rank's generators, rounded to 16 bits: initializers see
    full shapes. At the end, the generators of this process are restored to their state at the beginning.

    Args:
        target_device: where parameters, or their shards, are kept: the device that this process computes on, or the CPU.
        shard_strategy: accepted without effect; `ShardedModelV2` uses its own.
        shard_param: true: each module is sharded when it is built (`zero.Init`), and `ShardedModelV2` trains at ZeRO stage 3.
            False: every rank has the whole parameters, and `ShardedModelV2` trains at stage 2.
        rm_torch_payload_on_the_fly: accepted without effect; a module is sharded as soon as its and its parent's constructors
            allow.
        model_numel_tensor: one integer, to which the number of elements of all parameters is added at the end.
        dp_process_group: the ranks to shard over; by default megazero's data-parallel group, or the world if there is none.
        bf16: use bf16 instead of fp16.

    Raises:
        ValueError: `target_device` is any other device.
    """

    def __init__(
        self,
        target_device: torch.device | str | int,
        shard_strategy: BucketTensorShardStrategy | None = None,
        shard_param: bool = False,
        rm_torch_payload_on_the_fly: bool = False,
        model_numel_tensor: torch.Tensor | None = None,
        dp_process_group: comm.ProcessGroup | None = None,
        *,
        bf16: bool = False,
    ) -> None:
        comm.init_distributed()
        self.target_device = _device(target_device)
        self.shard_param = shard_param
        self.dtype = torch.bfloat16 if bf16 else torch.float16
        self.model_numel_tensor = torch.zeros(1, dtype=torch.long) if model_numel_tensor is None else model_numel_tensor
        self._init = zero.Init(
            data_parallel_group=dp_process_group,
            remote_device=self.target_device.type,
            dtype=self.dtype,
            enabled=shard_param,
        )
        self._modules: list[ref[nn.Module]] = []

    def __enter__(self) -> ZeroInitContext:
        """Starts converting the modules that are constructed."""
        self._rng = RngState.capture()
        self._handle = register_module_parameter_registration_hook(self._on_parameter)
        self._init.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        """Converts the remaining parameters, counts them all, and restores the generators."""
        self._handle.remove()
        self._init.__exit__(kind, *details)
        modules = {module: None for module in (reference() for reference in self._modules) if module is not None}
        self._modules.clear()
        if kind is None:
            self._finish(list(modules))
        self._rng.restore()

    def _on_parameter(self, module: nn.Module, _: str, __: nn.Parameter | None) -> None:
        self._modules.append(ref(module))

    def _finish(self, modules: list[nn.Module]) -> None:
        parameters = {parameter: None for module in modules for parameter in module.parameters(recurse=False)}
        self.model_numel_tensor += sum(math.prod(shape_of(parameter)) for parameter in parameters)
        for parameter in parameters:
            if not self.shard_param and parameter.is_floating_point():
                parameter.data = parameter.data.to(self.target_device, self.dtype)


def _device(device: torch.device | str | int) -> torch.device:
    """The device that `ZeroInitContext` was given. It may be a number, such as torch.cuda.current_device()."""
    local = comm.local_device()
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type == local.type and wanted.index in (None, local.index):
        return local
    if wanted.type == "cpu":
        return wanted
    raise ValueError(
        f"ZeroInitContext(target_device={device!r}) must be the device that this process computes on, {local}, or the CPU. Use "
        "megazero.compat.colossalai.get_current_device()."
    )
