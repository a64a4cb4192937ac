"""`zero.Init`, for building a model that never exists whole: it shards modules while the constructors around them still run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import count
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from megazero import comm
from megazero.json_source import read_source
from megazero.mpu.groups import get_groups, model_parallel_is_initialized
from megazero.nvme import AioConfig, SwapFile
from megazero.zero.bucket import Bucket
from megazero.zero.config import Sharding, ZeroConfig
from megazero.zero.gathered import GatheredParameters
from megazero.zero.home import Home, MemoryHome
from megazero.zero.layout import NO_GROUP, BucketLayout
from megazero.zero.nvme_home import NvmeHome
from megazero.zero.parameter import refuse_loading, writers
from megazero.zero.registry import bucket_of, keep
from megazero.zero.unfit import refuse_inference_tensors
from megazero.zero.units import ROOT, BucketPlan, target_dtype

# DeepSpeed's keywords that must stay off, as they are by default, and what to use instead.
_QUANTIZED = "nothing is quantized; dtype=torch.bfloat16 halves what is held and sent of fp32 parameters"
_OFF = {
    "param_swapper": "shards go to a swap file by remote_device='nvme' and the configuration's offload_param.nvme_path",
    "sequence_data_parallel_group": "sequences are not split; data_parallel_group says which ranks shard",
    "zero_param_parallel_group": "there is no second sharding inside of a node; data_parallel_group says which ranks shard",
    "zero_quantized_weights": _QUANTIZED,
    "zero_quantized_nontrainable_weights": _QUANTIZED,
}
_BUFFERS, _BUFFER_NBYTES = 4, 1 << 22  # host buffers on the way to the swap file
_active: list[Init] = []  # the innermost last


@contextmanager
def suspended() -> Iterator[None]:
    """Inside the block, modules are constructed as outside of every `zero.Init` around it."""
    around = [*_active]
    for init in around:
        init._stop()
    try:
        yield
    finally:
        for init in around:
            init._start()


class Init:
    """Context manager in which every `nn.Module` that is constructed keeps only this rank's shard of its parameters.

    When a module is attached to a parent, its constructor has finished, so everything below it is sharded. Its own parameters
    stay whole for its parent's constructor, which commonly initializes them. They are sharded when the parent is attached in
    turn, or when the context ends. So a rank holds at most its share of the parameters, plus, whole, the parameters that are
    owned directly by the modules under construction, by their lists, and by the direct children of both. The leaves in a plain
    list stay whole until the list is attached.

    Values are those of rank 0 of the group, and equal those of an unsharded construction with rank 0's seed. Each module's
    parameters form a small bucket; an engine later rearranges them into its units. While the context is active, these work on
    parameters that are sharded already:

    - in-place functions (`p.normal_()`, `nn.init.normal_(p)`), `p.data`, `copy.deepcopy`, and questions about the shape;
    - under `torch.no_grad()` everything (`p.norm()`, `p[0].zero_()`), except functions that hand out memory (`p.numpy()`).

    Each such access gathers one bucket, so every rank must make it, and computes in the sharded dtype.

    `megazero.initialize` suspends the context: what its callables construct is not sharded.

    Parameters on the meta device, such as those that `from_pretrained` loads, have no values yet. They are sharded at the end of
    the context.

    Args:
        module: a module to shard immediately, whatever is constructed.
        data_parallel_group: ranks to shard over; by default those of `mpu`, of megazero's groups, or the world.
        remote_device: where shards rest: "none" the accelerator, "cpu" host memory, "nvme" a swap file. None means what the
            configuration's zero_optimization.offload_param specifies, else the accelerator.
        pin_memory: page-lock the host memory that shards take, for CUDA. A configuration with offload_param.pin_memory true does
            the same. That is the key's default for `initialize`, which soon takes the shards over, but not here.
        config_dict_or_path, config, deepspeed_config: a configuration. Its fp16 or bf16 section gives the dtype,
            zero_optimization.offload_param the device and the swap file's directory, aio the settings of the swap file's
            requests, and mics_shard_size the number of ranks to shard over. The rest is for `initialize`, such as buffer_count:
            here shards go to the file through four buffers of 4 MiB, because no units are known yet.
        enabled: False makes the context do nothing.
        dtype: the dtype of the sharded parameters; by default the configuration's, else each parameter's own.
        mem_efficient_linear: accepted for compatibility; it has no effect.
        others: DeepSpeed's further keywords (`zero_quantized_weights`, ...), accepted only with their defaults.

    Raises:
        ValueError: `remote_device` is none of the above, or is nvme without a directory; one of `others` is not off; or, within
            the context, ranks construct different modules.
        OSError: the swap file cannot be created; OtherRankError on the other ranks.
        TypeError: an unknown keyword, a `module` that is none, or a `dtype` that is not a torch.dtype.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: comm.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        deepspeed_config: Any = None,
        **others: Any,
    ) -> None:
        _check_others(others)
        if not isinstance(module, nn.Module | None):
            raise TypeError(
                f"zero.Init({module!r}): the first argument is a module to shard. Give a configuration by config_dict_or_path=."
            )
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(
                f"zero.Init(dtype={dtype!r}) is {type(dtype).__name__}: give torch.bfloat16, torch.float16, ..."
            )
        self.enabled = enabled
        self._handles: list[Any] = []
        self._seen: list[ref[nn.Module]] = []  # in the same order on every rank
        self._numbers = count()  # of its buckets
        if not enabled:
            return
        comm.init_distributed()
        group = data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        if group is None:
            group = get_groups().data if model_parallel_is_initialized() else comm.world()
        source = next((c for c in (config_dict_or_path, config, deepspeed_config) if c is not None), None)
        sections = {} if source is None else read_source(source)
        self.dtype = dtype or _dtype_of(sections)
        self.channel = comm.Channel(group, shard_size=_num_shards(sections, group.size()))
        self._home = _home_of(remote_device, pin_memory, sections, group)
        if module is not None:
            self._shard_tree(module)

    def __enter__(self) -> Init:
        """Starts to shard modules as they are constructed."""
        if self.enabled:
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Shards the modules without a parent, and ends."""
        if self.enabled:
            self._stop()
        if kind is None and self.enabled:
            gc.collect()  # what constructors have dropped, in cycles, is gone on every rank, so that all broadcast the same
            for seen in self._seen:
                module = seen()
                if module is not None:
                    self._shard(module)
            self._agree("the end of the context")
        self._seen = []

    def _start(self) -> None:
        """Watches the construction of modules, until `_stop`."""
        self._handles = [
            register_module_module_registration_hook(self._on_child),
            register_module_parameter_registration_hook(self._on_parameter),
        ]
        writers.append(_write)
        _active.append(self)

    def _stop(self) -> None:
        """Ends what `_start` began; what has been constructed until now is sharded when the context ends."""
        for handle in self._handles:
            handle.remove()
        writers.remove(_write)
        _active.remove(self)

    def _on_child(self, _: nn.Module, __: str, child: nn.Module | None) -> None:
        if child is not None:  # the constructor that attaches it may still write its own parameters
            for below in child.children():
                self._shard_tree(below)

    def _on_parameter(self, module: nn.Module, _: str, __: nn.Parameter | None) -> None:
        self._seen.append(ref(module))

    def _shard_tree(self, module: nn.Module) -> None:
        for part in module.modules():
            self._shard(part)

    def _shard(self, module: nn.Module) -> None:
        own = {n: p for n, p in module.named_parameters(recurse=False) if bucket_of(p) is None and not p.is_meta}
        refuse_inference_tensors(own.items())
        by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for name, parameter in own.items():
            by_dtype.setdefault(target_dtype(parameter.dtype, self.dtype), {})[name] = parameter
        for dtype, parameters in by_dtype.items():
            entries = [(name, tuple(p.shape), NO_GROUP, False) for name, p in parameters.items()]
            layout = BucketLayout.build(entries, self.channel.size)
            name = f"{type(module).__name__} {next(self._numbers)}"
            self._agree(f"{name} ({', '.join(f'{n}: {list(shape)}' for n, shape, *_ in entries)})")
            plan = BucketPlan(name, ROOT, dtype, False, parameters, layout, Sharding.of_stage(3))
            bucket = Bucket(plan, self.channel, param_home=self._home, device=comm.local_device())
            comm.broadcast_(bucket.weights.flat, self.channel.group)
            bucket.adopt_gathered()
            bucket.weights.release()
            for parameter in parameters.values():
                keep(parameter, bucket)
            for hook in refuse_loading([module]):
                finalize(bucket, hook.remove)  # an engine, which takes the parameters over, has hooks of its own

    def _agree(self, what: str) -> None:
        """Raises on every rank unless all have come to `what`: a rank with another module would take its values, or wait."""
        if unlike := comm.differing_names({what: True}, self.channel.group):
            raise ValueError(
                f"zero.Init: data-parallel ranks construct different models: one has come to {', another to '.join(unlike)}. "
                "Construct the same modules in the same order on every rank."
            )


def _check_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in _OFF:
            raise TypeError(f"zero.Init() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            raise ValueError(f"zero.Init({name}=...) is not possible here: {_OFF[name]}. Drop it.")


def _write(parameter: nn.Parameter, function: Callable[[], Any]) -> Any:
    """The result of `function`, run with `parameter` gathered; rank 0's values of the parameter are kept. Collective."""
    with GatheredParameters(parameter, modifier_rank=0):
        shape, dtype = parameter.shape, parameter.dtype
        result = function()
        # Constructors assign tensors of torch's default dtype, even if parameters are sharded in 16 bits.
        if shape != parameter.shape or parameter.dtype not in (dtype, torch.get_default_dtype()):
            raise RuntimeError(
                f"Inside zero.Init a sharded parameter of shape {tuple(shape)} and {dtype} was given another shape or dtype, "
                f"{tuple(parameter.shape)} and {parameter.dtype}. Write its values only, or assign a new nn.Parameter to its "
                "module; zero.Init(dtype=) decides in which dtype all are kept."
            )
    return result


def _dtype_of(sections: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a configuration's fp16 or bf16 section turns on; None for neither. `initialize` checks the rest.

    Raises:
        ValueError: both are turned on, or `enabled` is not true, false or "auto". `initialize` would say so as well, after the
            model has been built, and in fp32.
    """
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    enabled = {key: _section(sections, key).get("enabled") for key in kinds}
    for key, value in enabled.items():
        if value not in (True, False, None, "auto"):
            raise ValueError(f'zero.Init: {key}.enabled must be true, false or "auto", got {value!r}.')
    dtypes = {kinds[key] for key, value in enabled.items() if value is True}
    if len(dtypes) > 1:
        raise ValueError("zero.Init: fp16 and bf16 are both enabled. Enable one.")
    return next(iter(dtypes), None)


def _num_shards(sections: Mapping[str, Any], num_ranks: int) -> int:
    """The number of ranks to shard over, by the configuration's zero_optimization.mics_shard_size; all by default."""
    size = _section(sections, "zero_optimization").get("mics_shard_size")
    return ZeroConfig(stage=3, shard_size=max(0, size) if isinstance(size, int) else 0).num_shards(num_ranks)


def _section(sections: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The section at `path`; empty if it is absent, null or "auto"."""
    for key in path:
        inner = sections.get(key)
        sections = inner if isinstance(inner, Mapping) else {}
    return sections


def _home_of(
    remote_device: str | None, pin_memory: bool, sections: Mapping[str, Any], group: comm.ProcessGroup
) -> Home | None:
    """Where shards rest until `initialize` takes them over; None is the accelerator. Collective over `group`."""
    offload = _section(sections, "zero_optimization", "offload_param")
    pin_memory = pin_memory or offload.get("pin_memory") is True
    if remote_device is None:
        device = offload.get("device")
        remote_device = device.lower() if isinstance(device, str) and device != "auto" else None
    if remote_device in (None, "none", comm.local_device().type):
        return None
    if remote_device == "cpu":
        return MemoryHome(torch.device("cpu"), pin_memory)
    if remote_device != "nvme":
        raise ValueError(f"zero.Init(remote_device={remote_device!r}) must be None, 'none', 'cpu' or 'nvme'.")
    path = offload.get("nvme_path")
    if not path:
        raise ValueError(
            "zero.Init(remote_device='nvme') needs the directory to swap to: give config_dict_or_path with "
            "zero_optimization.offload_param.nvme_path."
        )
    swap = comm.together(partial(SwapFile, path, torch.distributed.get_rank(), _aio_of(sections)), group)
    return NvmeHome(swap, _BUFFER_NBYTES, _BUFFERS, pin=pin_memory)


def _aio_of(sections: Mapping[str, Any]) -> AioConfig:
    """The swap file's settings in a configuration's aio section. Values of a wrong type are left for `initialize` to refuse."""
    given: dict[str, Any] = {k: v for k, v in _section(sections, "aio").items() if isinstance(v, int)}
    if "intra_op_parallelism" in given:
        given["thread_count"] = given["intra_op_parallelism"]  # thread_count is its old name
    return AioConfig(**{field.name: given[field.name] for field in fields(AioConfig) if field.name in given})
