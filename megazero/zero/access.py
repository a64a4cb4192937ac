"""Full values of sharded states, by parameter: DeepSpeed's `utils.safe_get_*` and `safe_set_*`, and whole state dictionaries.

Getters are collective over the data-parallel group: every rank calls them, for the same parameters in the same order. With
`shard_size` several ranks hold the same part of a parameter, and all of them must set it to the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.logging import some
from megazero.zero.bucket import MASTER, Bucket, Tile
from megazero.zero.layout import NO_GROUP, Segment
from megazero.zero.optimizer import BucketOptimizer
from megazero.zero.registry import bucket_of
from megazero.zero.storage import view_of
from megazero.zero.units import shape_of


class _Place(NamedTuple):
    """Where a trained parameter lies, and what trains it."""

    bucket: Bucket
    segment: Segment
    optimizer: BucketOptimizer


def _find(parameter: Tensor) -> _Place | None:
    """The place of a trained parameter; None if it is frozen or no engine holds it."""
    bucket = bucket_of(parameter)
    if bucket is None or bucket.optimizer is None or not bucket.is_trainable:
        return None
    bucket.optimizer.finish()
    return _Place(bucket, bucket.segment_of(parameter), bucket.optimizer)


@contextmanager
def _collective(what: str) -> Iterator[None]:
    """Adds the function's name to the error of a collective that the other ranks have not entered."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} failed on rank {torch.distributed.get_rank()}. It is collective: every data-parallel rank calls it, for the "
            f"same parameters in the same order. ({error})"
        ) from error


def _state_keys(place: _Place, key: str) -> list[str]:
    """The names of the states that a parameter has on any rank; `key` is what is asked for. Collective."""
    bucket, segment, optimizer = place
    # A parameter without elements lies in no slice: it has what the bucket's others have.
    with _collective(f"reading the optimizer's state {key!r}"):
        return optimizer.state_keys_everywhere([bucket], segment if segment.numel else None)[bucket]


@contextmanager
def _owned_state(place: _Place, key: str) -> Iterator[Tensor | None]:
    """The owned range of one state, zeros if this rank has trained nothing yet; None if the parameter has no such state."""
    bucket, _, optimizer = place
    if key == MASTER:
        bucket.adopt_written()
    elif key not in _state_keys(place, key):
        yield None
        return
    with optimizer.state_at_hand(Tile(bucket, 0, bucket.owned_numel), [key]) as states:
        device = bucket.optimizer_home.device
        yield states[key] if key in states else torch.zeros(bucket.owned_numel, device=device)


def _reduced(parameter: Tensor) -> _Place | None:
    """The place of a parameter whose gradient has been summed over the group; else None."""
    found = _find(parameter)
    return found if found is not None and found.bucket.gradient.is_reduced else None


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """A copy of the full fp32 master weight; None if the parameter is not trained. Collective."""
    return safe_get_full_optimizer_state(param, MASTER)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A copy of the full state `optim_state_key` ("exp_avg", "exp_avg_sq"); None if there is none (yet). Collective."""
    place = _find(param)
    if place is None:
        return None
    bucket, segment, _ = place
    name = "safe_get_full_fp32_param" if optim_state_key == MASTER else "safe_get_full_optimizer_state"
    with _owned_state(place, optim_state_key) as owned, _collective(f"{name} of {segment.name}"):
        return None if owned is None else view_of(bucket.whole(owned), segment).clone()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The full mean gradient, fp32, without loss scale; None unless it has been reduced and not been used. Collective.

    It is reduced by a step's last backward; at stages 2 and 3 by every backward, as the sum so far.
    """
    place = _reduced(param)
    if place is None:
        return None
    bucket, segment, _ = place
    with bucket.gradient.at_hand() as owned, _collective(f"safe_get_full_grad of {segment.name}"):
        return _mean(view_of(bucket.whole(owned), segment), place)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """A copy of this rank's part of the fp32 master weight: 1-D, possibly empty."""
    return safe_get_local_optimizer_state(param, MASTER)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A copy of this rank's part of a state: 1-D, possibly empty. Collective: a rank may own nothing that has state."""
    place = _find(param)
    if place is None:
        return None
    with _owned_state(place, optim_state_key) as owned:
        return None if owned is None else place.bucket.owned_part(owned, place.segment)[0].detach().clone()


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the mean gradient, without loss scale; None except between a step's last backward and step()."""
    place = _reduced(param)
    if place is None:
        return None
    with place.bucket.gradient.at_hand() as owned:
        return _mean(place.bucket.owned_part(owned, place.segment)[0], place)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Writes the fp32 master weight, and the parameter that the model reads. Every rank calls it with the same full values."""
    bucket, segment, _ = _to_set(param, "safe_set_full_fp32_param", value)
    with bucket.master_to_write() as master:
        _set_full(bucket.owned_part(master, segment), value)
    bucket.publish_master()


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Writes the state `optim_state_key`. Every rank calls it with the same full values.

    Raises:
        KeyError: the optimizer has no such state of the parameter, or has not trained it yet.
    """
    if optim_state_key == MASTER:
        safe_set_full_fp32_param(param, value)
        return
    place = _to_set(param, "safe_set_full_optimizer_state", value)
    _refuse_stateless(place, optim_state_key)
    _set_state(place, optim_state_key, value.reshape(-1), first=0)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Writes the mean gradient (without loss scale) that step() will apply. Every rank calls it with the same full values."""
    place = _to_set(param, "safe_set_full_grad", value)
    bucket, segment, _ = place
    if not bucket.gradient.is_reduced:
        raise RuntimeError(
            "safe_set_full_grad: there is no gradient; call it between engine.backward() and engine.step()."
        )
    with bucket.gradient.at_hand(writes=True) as owned:
        _set_full(bucket.owned_part(owned, segment), _summed(value, place))


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Writes this rank's part of the fp32 master weight: 1-D, with the size that the getter returns. Collective."""
    bucket, segment, _ = _to_set(param, "safe_set_local_fp32_param")
    with bucket.master_to_write() as master:
        _set_local(bucket.owned_part(master, segment)[0], value)
    bucket.publish_master()


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Writes this rank's part of a state: 1-D, with the size that the getter returns. Collective, like the getter."""
    if optim_state_key == MASTER:
        safe_set_local_fp32_param(param, value)
        return
    place = _find(param)
    if place is None:
        raise KeyError(f"the parameter has no state {optim_state_key!r} (yet).")
    _refuse_stateless(place, optim_state_key)
    owned, segment = place.bucket.owned_range, place.segment
    low, high = segment.clip(owned.start, owned.stop)
    _refuse_other_shape(torch.Size([high - low]), value)
    _set_state(place, optim_state_key, value, first=low - segment.start)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Writes this rank's part of the mean gradient (without loss scale): 1-D, with the size that the getter returns."""
    place = _reduced(param)
    if place is None:
        raise RuntimeError(
            "safe_set_local_grad: there is no gradient; call it between engine.backward() and engine.step()."
        )
    with place.bucket.gradient.at_hand(writes=True) as owned:
        _set_local(place.bucket.owned_part(owned, place.segment)[0], _summed(value, place))


def _mean(total: Tensor, place: _Place) -> Tensor:
    """The mean gradient, unscaled, from a sum of scaled ones."""
    return total.float() * (place.bucket.gradient.to_mean / place.optimizer.cur_scale)


def _summed(mean: Tensor, place: _Place) -> Tensor:
    """The sum of scaled gradients that has this mean. In fp32: a loss scale can be too large for fp16 values."""
    return mean.float() * (place.optimizer.cur_scale / place.bucket.gradient.to_mean)


def _refuse_stateless(place: _Place, key: str) -> None:
    """Raises a KeyError, on every rank, if nothing could be written: one without a part of the parameter cannot tell."""
    keys = _state_keys(place, key)
    if key not in keys:
        raise KeyError(
            f"the optimizer has no state {key!r} of {place.segment.name}: it has {keys}, after a step that trains it."
        )


def _set_state(place: _Place, key: str, values: Tensor, first: int) -> None:
    """Writes this rank's part of one state from `values`, the elements of the flattened parameter from `first` on."""
    bucket, segment, optimizer = place
    for tile in bucket.tiles:
        with optimizer.state_at_hand(tile, [key], writes=True) as states:
            for view, part in optimizer.parts_of(states, tile, key, segment):
                view.detach().copy_(values[part.start - first : part.stop - first])


def _set_full(part: tuple[Tensor, slice], values: Tensor) -> None:
    """Writes this rank's part, which lies there in the flattened parameter, of a parameter's full values."""
    mine, place = part
    mine.detach().copy_(values.reshape(-1)[place])


def _set_local(part: Tensor, values: Tensor) -> None:
    _refuse_other_shape(part.shape, values)
    part.detach().copy_(values)


def _refuse_other_shape(shape: torch.Size, values: Tensor) -> None:
    if shape != values.shape:
        raise ValueError(f"this rank's part of the parameter has shape {tuple(shape)}, got {tuple(values.shape)}.")


def _to_set(parameter: Tensor, setter: str, values: Tensor | None = None) -> _Place:
    """The place of a trained parameter that `setter` may write to. Returns once every data-parallel rank has called.

    Args:
        values: the full parameter's new values, to compare shapes.

    Raises:
        ValueError: the parameter is not trained, or has another shape.
        RuntimeError: a GatheredParameters context holds the parameter, or a rank did not call: only half of it would be set.
    """
    place, bucket = _find(parameter), bucket_of(parameter)
    if place is None:
        segment = None if bucket is None or bucket.schedule is None else bucket.segment_of(parameter)
        if segment is not None and segment.group != NO_GROUP and parameter.requires_grad:
            raise ValueError(
                f"{segment.name} has been unfrozen, and has fp32 weights, gradient and optimizer state from the next forward "
                "on: call engine(...) before."
            )
        raise ValueError(
            "the parameter is not trained by an engine, so it has no fp32 weights, gradient or optimizer state."
        )
    bucket, segment, _ = place
    bucket.refuse_if_held("setting a value")
    if values is not None and tuple(values.shape) != segment.shape:
        raise ValueError(
            f"{segment.name}: values of shape {tuple(values.shape)} for a parameter of shape {segment.shape}."
        )
    bucket.channel.meet(f"{setter} of {segment.name}")
    return place


def copied(value: Any) -> Any:
    """A copy, of a tensor on the CPU."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def state_dict(
    module: nn.Module, buckets: list[Bucket], exclude_frozen: bool = False, kept: Callable[[Any], Any] = copied
) -> dict[str, Any]:
    """The module's state dictionary with full parameters and buffers under every name, copies on the CPU. Collective.

    What modules' `get_extra_state` returns, or their hooks make, is in it, as in torch. Parameters are gathered one bucket at a
    time.

    Args:
        exclude_frozen: leave out parameters that are not trained now, and do not gather buckets of such alone.
        kept: takes each full value once, in the same order on every rank, and returns what goes into the dictionary for it.
    """
    known = module.state_dict(keep_vars=True)
    copies: dict[int, Any] = {}  # by id, so that a tied parameter stays one tensor
    parameters = ids_of_parameters(buckets)
    for value in known.values():
        if id(value) not in parameters:
            copies[id(value)] = kept(value)
    for bucket in buckets:
        wanted = [p for p in bucket.parameters.values() if p.requires_grad or not exclude_frozen]
        if not wanted:
            continue
        was_gathered = bucket.weights.is_gathered
        bucket.weights.gather()
        bucket.weights.wait_gathered()
        for parameter in wanted:
            copies[id(parameter)] = kept(parameter)
        if not was_gathered:
            bucket.weights.release()
    return {name: copies[id(value)] for name, value in known.items() if id(value) in copies}


def load_state_dict(module: nn.Module, buckets: list[Bucket], state: dict[str, Any], strict: bool = True) -> None:
    """Writes full values, the same on every rank, into parameters and buffers, master weights included. Collective.

    Raises:
        RuntimeError: names are missing or unknown (with `strict`), or a value is no tensor or of another shape, on some rank, or
            ranks were given other names; nothing has been written.
    """
    known, again = (module.state_dict(keep_vars=True) for _ in range(2))
    # What a module makes anew cannot be written to, and its extra state is its own to take.
    made = {name for name, value in known.items() if value is not again[name] or not isinstance(value, Tensor)}
    made |= {name for name in known if name.rpartition(".")[2] == "_extra_state"}
    parameters, extra = ids_of_parameters(buckets), {name: state[name] for name in state if name in made}
    # In the module's order: the last name of a buffer that has several decides, as in torch, and alike on all ranks.
    given = {name: state[name] for name in known if name in state and name not in made}

    def check() -> None:
        missing, unknown = sorted(known.keys() - state.keys()), sorted(state.keys() - known.keys())
        if strict and (missing or unknown):
            raise RuntimeError(
                f"load_module_state_dict: missing {missing}, unknown {unknown}. strict=False takes what is there."
            )
        for name, value in given.items():
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if found != (shape := shape_of(known[name])):
                raise RuntimeError(f"load_module_state_dict: {name} has shape {shape}, got {found}.")

    comm.together(check)  # a script may have given the state to the first rank only
    if unlike := comm.differing_names(dict.fromkeys(given), buckets[0].channel.group):
        raise RuntimeError(
            f"load_module_state_dict: not all ranks were given {some(unlike)}. Each loads its own part of every parameter: give "
            "all of them the same values, also with strict=False."
        )
    with torch.no_grad():
        for name, value in given.items():
            if id(known[name]) not in parameters:
                known[name].copy_(value)
        if extra:
            module.load_state_dict(extra, strict=False)  # hands them to the modules that know what they are
        # A tied parameter gets the value under the last of its names, as in torch.
        values = {id(value): state[name] for name, value in known.items() if name in state}
        saved = {own: values.get(id(p)) for bucket in buckets for own, p in bucket.parameters.items()}
        for bucket in buckets:
            for tile in bucket.tiles:
                for segment, part, start in bucket.weight_parts(tile):
                    if (value := saved[segment.name]) is not None:
                        part.copy_(value.reshape(-1)[start : start + part.numel()])
            bucket.publish_master()


def ids_of_parameters(buckets: list[Bucket]) -> set[int]:
    """The parameters in the buckets, by which what else a state dictionary holds is told from them."""
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters.values()}
