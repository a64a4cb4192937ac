"""Which parameters share a bucket: the model's units and the layout of every bucket, without communication or storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from megazero.zero.config import Sharding, ZeroConfig
from megazero.zero.layout import NO_GROUP, BucketLayout

ROOT = -1  # unit number of the parameters outside all units
EARLY = 16  # G's memory is allocated once more than 1/EARLY of a unit's gradient bytes have arrived
LARGE_LEAF_NUMEL = 2**22  # a module without children that owns more elements is a unit of its own


def find_units(model: nn.Module) -> list[nn.Module]:
    """The model's units in execution order: the modules that are gathered, computed and released as a whole.

    Units are:

    - the entries of every outermost ModuleList and Sequential (transformer blocks), except as below;
    - modules without children that are large by themselves, other than embeddings, whose weights the output layer commonly reads
      as well, and modules that share weights with another module. A parametrized module (weight_norm) counts as one without
      children.

    Some entries are searched for units instead of being one: an entry of a Sequential that itself contains a ModuleList, and an
    entry of either that is never called because it is a ModuleList or ModuleDict. An entry that contains a module with
    `parts_are_units = True` (a TiledLinear) is divided. That module's parts become units. So do, on the way down to it, the
    children that contain no such module. Parameters owned by the modules on the way stay outside all units.

    A module that the model has under several names is a unit once, and none if it lies inside of another unit.
    """
    owners = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    shared = {parameter for parameter, count in owners.items() if count > 1}
    found = dict.fromkeys(_units_in(model, shared, is_root=True))  # in order, each once
    inside = {part for unit in found for part in unit.modules() if part is not unit}
    return [unit for unit in found if unit not in inside]


def _units_in(module: nn.Module, shared: set[nn.Parameter], is_root: bool = False) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return _units_of_entries(module, shared)
    children = [child for name, child in module.named_children() if name != "parametrizations"]
    if (not children or is_parametrized(module)) and not is_root:
        own = list(module.parameters())
        is_large = sum(math.prod(shape_of(p)) for p in own) > LARGE_LEAF_NUMEL and not hasattr(module, "num_embeddings")
        return [module] if is_large and not shared.intersection(own) else []
    return [unit for child in children for unit in _units_in(child, shared)]


def _units_of_entries(container: nn.Module, shared: set[nn.Parameter]) -> list[nn.Module]:
    units: list[nn.Module] = []
    for entry in container.children():
        if _is_never_called(entry) or _is_divided(entry):
            units += _units_of_entries(entry, shared)
        elif isinstance(container, nn.Sequential) and _has_list(entry):
            units += _units_in(entry, shared)
        elif any(True for _ in entry.parameters()):
            units.append(entry)
    return units


def _is_never_called(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _linear_tiles_in(model: nn.Module) -> set[nn.Module]:
    """The modules inside those that set `parts_are_units`: at most one of these units is meant to be whole at a time."""
    divided = [module for module in model.modules() if getattr(module, "parts_are_units", False)]
    return {part for module in divided for part in module.modules() if part is not module}


def _is_divided(module: nn.Module) -> bool:
    return any(getattr(part, "parts_are_units", False) for part in module.modules())


def _has_list(module: nn.Module) -> bool:
    if is_parametrized(module):  # the ModuleList of its parametrizations does not count
        return False
    return isinstance(module, nn.ModuleList) or any(_has_list(child) for child in module.children())


def select_units(model: nn.Module, wanted: Sequence[nn.Module | type[nn.Module]] | None) -> list[nn.Module]:
    """The units that the user names, by module or by class, in the model's order; `find_units(model)` if `wanted` is None.

    Units that own no parameters are left out.

    Raises:
        ValueError: a named unit is not in the model, or lies inside another one.
        TypeError: `wanted` is no list, but one module or class.
    """
    if wanted is None:
        return find_units(model)
    if not isinstance(wanted, Iterable):
        raise TypeError(f"zero_units is {wanted}. Give a list of modules or classes, such as zero_units=[Block].")
    units = {m: name for name, m in model.named_modules() if any(_is_or_is_a(m, item) for item in wanted)}
    for item in wanted:
        if not any(_is_or_is_a(unit, item) for unit in units):
            kind = item if isinstance(item, type) else type(item)
            raise ValueError(
                f"zero_units names {kind.__name__}, which the model does not contain. Name its modules or their classes."
            )
    for outer in units:
        for inner in outer.modules():
            if inner is not outer and inner in units:
                raise ValueError(
                    f"zero_units: {units[inner]!r} lies inside of {units[outer]!r}, so its parameters would belong to two units. "
                    "Name one of them."
                )
    return [unit for unit in units if any(True for _ in unit.parameters())]


def _is_or_is_a(module: nn.Module, wanted: nn.Module | type[nn.Module]) -> bool:
    return isinstance(module, wanted) if isinstance(wanted, type) else module is wanted


@dataclass(frozen=True)
class BucketPlan:
    """The contents and layout of a bucket that has not been built yet."""

    name: str  # the unit's name in the model; if several units share the bucket, the names of the first and the last
    unit: int  # index in the list of units (of the first unit if several share the bucket), or ROOT
    dtype: torch.dtype  # of P
    is_trainable: bool  # the bucket has G and O; a frozen one has only P
    parameters: dict[str, nn.Parameter]
    layout: BucketLayout
    sharding: Sharding
    grad_dtype: torch.dtype = torch.float32  # of G: fp32 preserves sums over many micro-batches; P's dtype halves G
    reduce_dtype: torch.dtype = torch.float32  # of gradients on the wire
    stays_whole: bool = False  # even though other parameters are sharded
    has_matrices: bool = False  # holds matrices that Muon updates, and nothing else
    is_linear_tile: bool = False  # the unit is a tile of a layer: see `_linear_tiles_in`
    num_units: int = 1
    first_numel: int = 0  # root only: elements registered after a unit, whose gradients come before that unit's

    @property
    def early_bytes(self) -> int:
        """Most bytes of gradients that may wait before G is allocated: a small part of what one unit's gradients take in G."""
        return self.layout.param_numel * self.grad_dtype.itemsize // (self.num_units * EARLY)

    @property
    def owned_numel(self) -> int:
        """Elements that one rank updates."""
        return self.layout.shard_numel if self.sharding.optimizer else self.layout.numel

    def owned_range(self, rank: int) -> slice:
        """The part of the bucket that one rank updates: its shard if O is sharded, else the whole bucket."""
        return slice(*self.layout.shard_range(rank)) if self.sharding.optimizer else slice(0, self.layout.numel)


class _Kind(NamedTuple):
    """The properties that all parameters of one bucket share: fields of `BucketPlan`."""

    unit: int
    dtype: torch.dtype
    is_trainable: bool
    stays_whole: bool
    has_matrices: bool


def plan_buckets(
    model: nn.Module,
    units: Sequence[nn.Module],
    num_shards: int,
    group_of: dict[str, int],
    zero: ZeroConfig,
    dtype: torch.dtype | None = None,
    replicated: Collection[str] = (),
    matrices: Collection[str] = (),
) -> list[BucketPlan]:
    """One bucket per unit, dtype, requires_grad, sharding and optimizer, in the order of backward: last unit first, root last.

    A parameter that several units share is the root's.
    Small buckets may be merged afterwards: see `share_buckets`.

    Args:
        num_shards: number of ranks that sharded states are divided among.
        group_of: index of the optimizer's parameter group, by full parameter name. A parameter in no group is not trained.
        dtype: of the buckets' P, to which parameters are converted (`target_dtype`); None keeps the parameters' own dtypes.
        replicated: names of the parameters that are equal on every tensor-parallel rank.
        matrices: names of the parameters that Muon updates. They get buckets of their own, because Muon keeps one moment and
            AdamW two.
    """
    unit_of, whole = units_of_parameters(units), _persistent(model, zero)
    members: dict[_Kind, dict[str, nn.Parameter]] = {}
    behind: set[str] = set()  # names of the root's parameters that are registered after a unit
    for name, parameter in model.named_parameters():  # yields a tied parameter only once
        target = target_dtype(parameter.dtype, dtype)
        is_trained = parameter.requires_grad and name in group_of
        unit = unit_of.get(parameter, ROOT)
        kind = _Kind(unit, target, is_trained, name in whole, name in matrices)
        members.setdefault(kind, {})[name] = parameter
        if unit == ROOT and any(kind.unit != ROOT for kind in members):
            behind.add(name)
    names = {module: name for name, module in model.named_modules()}
    plans, tiles = [], _linear_tiles_in(model)
    for kind in sorted(members, key=lambda kind: (-kind.unit, str(kind[1:]))):  # the same order on every rank
        entries = [(n, shape_of(p), group_of.get(n, NO_GROUP), n in replicated) for n, p in members[kind].items()]
        grad_dtype = torch.float32 if zero.grad_dtype == "fp32" else kind.dtype
        plans.append(
            BucketPlan(
                name="root" if kind.unit == ROOT else names[units[kind.unit]],
                **kind._asdict(),
                parameters=members[kind],
                layout=BucketLayout.build(entries, num_shards),
                sharding=replace(zero.sharding, parameters=False) if kind.stays_whole else zero.sharding,
                grad_dtype=grad_dtype,
                reduce_dtype={"same": grad_dtype, "fp32": torch.float32, "compute": kind.dtype}[zero.reduce_dtype],
                is_linear_tile=kind.unit != ROOT and units[kind.unit] in tiles,
                first_numel=sum(math.prod(shape) for name, shape, *_ in entries if name in behind),
            )
        )
    return plans


def target_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """What tensors of the dtype `own` are converted to if `dtype` is asked for.

    Floats of 8 bits stay as they are, like integers: they are a quantized weight, which its module scales if it finds that dtype.
    """
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > 1 else own


def share_buckets(plans: Sequence[BucketPlan], most_numel: int) -> list[BucketPlan]:
    """The same plans, with the trained parameters of neighboring units merged into buckets of at most `most_numel` elements.

    A collective and an optimizer call have a fixed cost, however small the bucket is. Units are merged starting from the last
    one, so that the last bucket to be reduced is the smallest: no backward hides its reduction.

    Args:
        plans: one or more for each unit, in the order of backward. Parameters of units that are merged must not be sharded.
    """
    sizes: Counter[int] = Counter()
    for plan in plans:
        if plan.is_trainable and plan.unit != ROOT:
            sizes[plan.unit] += plan.layout.numel
    last_of: dict[int, int] = {}  # for each unit, the last of the units that share a bucket with it
    last, room = ROOT, 0  # elements that may join the last unit's
    for unit, numel in sizes.items():
        if numel > room:
            last, room = unit, most_numel
        last_of[unit], room = last, room - numel
    together: dict[_Kind, list[BucketPlan]] = {}
    for plan in plans:
        unit = last_of.get(plan.unit, ROOT) if plan.is_trainable else plan.unit
        kind = _Kind(unit, plan.dtype, plan.is_trainable, plan.stays_whole, plan.has_matrices)
        together.setdefault(kind, []).append(plan)
    return [_joined(several[::-1]) if len(several) > 1 else several[0] for several in together.values()]


def _joined(plans: Sequence[BucketPlan]) -> BucketPlan:
    """The plan of one bucket that replaces several, given in forward order."""
    first, last = plans[0], plans[-1]
    segments = [segment for plan in plans for segment in plan.layout.segments]
    return replace(
        first,
        name=f"{first.name} to {last.name}",
        parameters={name: parameter for plan in plans for name, parameter in plan.parameters.items()},
        layout=BucketLayout.build(
            [(s.name, s.shape, s.group, s.is_replicated) for s in segments], first.layout.num_shards
        ),
        is_linear_tile=False,
        num_units=len({plan.unit for plan in plans}),
    )


def units_of_parameters(units: Sequence[nn.Module]) -> dict[nn.Parameter, int]:
    """The index of the unit that each parameter belongs to. The root's are left out, and with them what several units share."""
    uses = Counter(parameter for unit in units for parameter in unit.parameters())
    return {p: index for index, unit in enumerate(units) for p in unit.parameters() if uses[p] == 1}


def _persistent(model: nn.Module, zero: ZeroConfig) -> set[str]:
    """Names of the parameters that stay whole while others are sharded: small ones, up to `model_persistence_threshold`."""
    small = zero.param_persistence_threshold if zero.sharding.parameters else 0
    most, total = zero.model_persistence_threshold, 0
    found = set()
    for name, parameter in model.named_parameters():
        numel = math.prod(shape_of(parameter))
        if numel < small and (most is None or total + numel <= most):
            found.add(name)
            total += numel
    return found


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The full shape of a parameter, even if it is released; for any other tensor, its shape."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
