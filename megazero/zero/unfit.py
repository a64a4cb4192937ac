"""Models, and settings for them, that cannot be trained here as torch would train them: each function raises for one kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.logging import some
from megazero.mpu.groups import ParallelGroups
from megazero.zero.config import ZeroConfig
from megazero.zero.parameter import ReleasedParameter
from megazero.zero.storage import storage_id
from megazero.zero.units import shape_of, units_of_parameters

# By name, so that nothing imports torch's FSDP to ask.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def refuse_unfit(
    model: nn.Module,
    units: Sequence[nn.Module],
    groups: ParallelGroups,
    group_of: Mapping[str, int],
    num_groups: int,
    zero: ZeroConfig,
) -> None:
    """Raises if this rank's engine cannot train `model` with these settings; communicates nothing.

    Args:
        units: of the model, as `select_units` returns them.
        group_of: as for `Engine`; empty if nothing is to be trained.
        num_groups: of the optimizer's parameters.
    """
    refuse_other_worlds(groups)
    refuse_wrapped(model)
    refuse_undense(model)
    refuse_inference_tensors(model.named_parameters())
    refuse_other_groups(model, group_of, num_groups)
    if group_of:
        refuse_shared_memory(model)
        if groups.data_parallel_size > 1 and not zero.sharding.parameters:
            refuse_max_norm(model)  # sharded parameters refuse every write in a forward
    if zero.sharding.gradients:
        refuse_scripted(model, set(model.modules() if zero.sharding.parameters else units), zero.stage)


def refuse_other_worlds(groups: ParallelGroups) -> None:
    """Raises if the world has ranks besides those of the groups."""
    size = groups.model_parallel_size * groups.data_parallel_size
    if size != comm.world().size():
        raise ValueError(
            f"{groups.model_parallel_size} model-parallel x {groups.data_parallel_size} data-parallel ranks do not make up the "
            f"world of {comm.world().size()} ranks. Further kinds of parallelism (pipelines) are not supported."
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raises if torch's own parallelism has taken the parameters, whose hooks would work against an engine's, or has cut them."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS:
                raise ValueError(
                    f"{name or 'the model'} is under torch's {kind.__name__}, which averages gradients or shards parameters "
                    "itself, as the engine does. Give the engine the model without it; the ZeRO stage says what is sharded."
                )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor).__name__ == "DTensor":
            raise ValueError(
                f"{name} is a DTensor, of torch's tensor parallelism (parallelize_module, distribute_tensor), whose groups the "
                "engine does not know. Build layers that ranks split from megazero.mpu's ColumnParallelLinear and "
                "RowParallelLinear; or give the engine the model of plain tensors."
            )


def refuse_undense(model: nn.Module) -> None:
    """Raises if a parameter or buffer is no dense array, of which neither ranks nor checkpoints can exchange the memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            form = "nested" if tensor.is_nested else str(tensor.dtype if tensor.is_quantized else tensor.layout)
            raise ValueError(
                f"The {kind} {name!r} is a tensor of form {form.removeprefix('torch.')}, and ranks and checkpoints exchange "
                "dense ones. Give its module a dense one (to_dense(), dequantize()), from which the forward makes the other; or "
                "keep it as a plain attribute, the same on every rank."
            )


def refuse_inference_tensors(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises if a parameter was made under `torch.inference_mode`: it can be neither trained nor watched for writes."""
    for name, parameter in named:
        if not isinstance(parameter, ReleasedParameter) and parameter.is_inference():
            raise ValueError(
                f"Parameter {name!r} was made under torch.inference_mode(), so that it can be neither trained nor given new "
                "values. Build and load the model outside of it, and run only forwards inside."
            )


def refuse_shared_memory(model: nn.Module) -> None:
    """Raises if two parameters are one memory, of which one is trained: here each has its own, and the tie would be lost."""
    found: dict[Any, tuple[str, nn.Parameter]] = {}  # by where each begins
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ReleasedParameter) or not parameter.numel():
            continue
        first, other = found.setdefault((storage_id(parameter), parameter.storage_offset()), (name, parameter))
        if other is not parameter and (other.requires_grad or parameter.requires_grad):
            raise ValueError(
                f"Parameters {first!r} and {name!r} are two parameters in one memory, as after a.weight.data = b.weight.data or "
                "load_state_dict(assign=True), and would be trained apart from each other. Make them one parameter "
                "(a.weight = b.weight), or give each its own memory (a.weight.data = a.weight.data.clone())."
            )


def refuse_other_groups(model: nn.Module, group_of: Mapping[str, int], num_groups: int) -> None:
    """Raises if parameters that the model has not are to be trained, or some in a group that there is not."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if wrong := [name for name, group in group_of.items() if name not in known or not 0 <= group < num_groups]:
        raise ValueError(
            f"group_of has {some(wrong)}: each name must be one of model.named_parameters(), and its group one of the "
            f"{num_groups} in group_settings, counted from 0."
        )


def refuse_other_models(
    named: Iterable[tuple[str, Tensor]],
    group_of: Mapping[str, int],
    group: comm.ProcessGroup,
    units: Sequence[nn.Module] = (),
) -> None:
    """Raises on every rank if data-parallel ranks have different models, whose values and gradients cannot be exchanged.

    Collective over the data-parallel `group`.

    Args:
        named: the tensors that its ranks exchange, in the model's order.
        group_of: index of the optimizer's parameter group, by full parameter name.
        units: of the model, as `select_units` returns them.
    """
    unit_of: Mapping[Any, int] = units_of_parameters(units)
    mine, before = {}, ""
    for name, tensor in named:
        kind = shape_of(tensor), str(tensor.dtype), tensor.requires_grad
        mine[name] = before, *kind, group_of.get(name), unit_of.get(tensor)
        before = name  # in another order, ranks would exchange one parameter for another
    if unlike := comm.differing_names(mine, group):
        raise ValueError(
            f"The data-parallel ranks have different models: {some(unlike)} are not on all of them, or differ in shape, dtype, "
            "requires_grad, optimizer group, unit, or what comes before them. Build the model alike on every rank, in one order "
            "(that of a Python set differs from process to process), convert, freeze and group its parameters alike, and give "
            "the same zero_units."
        )


def refuse_other_optimizers(optimizer: torch.optim.Optimizer) -> None:
    """Raises on every rank if ranks have different optimizers, or the same with different settings. Collective over the world."""
    mine = {"class": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        mine |= {f"param_groups[{index}][{key!r}]": _plain(value) for key, value in group.items()}
    if unlike := comm.differing_names(mine, comm.world()):
        here = some([f"{name} (here {mine.get(name)!r})" for name in unlike])
        raise ValueError(
            f"The ranks have different optimizers and would train different models: {here} are not the same on all of them. Give "
            "every rank the same optimizer, settings and schedule."
        )


def _plain(value: Any) -> Any:
    """A setting of an optimizer, or None for what says nothing to other ranks: its parameters, or objects."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    return value if isinstance(value, (int, float, str)) else None


def refuse_max_norm(model: nn.Module) -> None:
    """Raises if an embedding writes to its own weights in its forward, to the rows that this rank happens to look up."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"{name or 'the model'} is an {type(module).__name__} with max_norm={module.max_norm}, which scales the rows "
                "that it looks up in place. Data-parallel ranks look up different rows, so their weights would differ. Drop "
                "max_norm; to limit norms, scale the rows of all ranks between two steps."
            )


def refuse_scripted(model: nn.Module, hooked: Set[nn.Module], stage: int) -> None:
    """Raises if one of the modules on which this stage puts hooks takes none."""
    for name, module in model.named_modules():
        if module in hooked and isinstance(module, torch.jit.RecursiveScriptModule):
            raise ValueError(
                f"{name or 'the model'} was made by torch.jit.script and takes no hooks, which stage {stage} needs there. Give "
                "the engine the module itself, and compile it with torch.compile; or use stage 0 or 1."
            )
