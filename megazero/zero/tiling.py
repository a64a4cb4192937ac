"""Linear layers cut into tiles, each gathered, used and released by itself (ZeRO-Infinity, arXiv:2104.07857, sec. 5.1.3).

    y_o = sum_i x_i W_oi^T + b_o        W [out, in] in out_splits x in_splits tiles W_oi

A layer is the smallest thing that ZeRO's stage 3 makes whole. Tiled, a layer's working memory is that of one tile, and no
allocation is larger than one. Every tile is a layer of its own, with Megatron's parallel layers too: then each tile is cut over
the model-parallel ranks, and W_oi is the same part of the full W at every model-parallel size. What such a layer communicates,
the tiled one does once: each x_i enters the parallel region before its tiles, and each y_o leaves it when its tiles are added up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megazero.zero.gathered import GatheredParameters
from megazero.zero.tiling_values import Values, drawn_values, merged, whole_layer, write

ParallelLinear = (ColumnParallelLinear, RowParallelLinear)
Product = Tensor | tuple[Tensor, Tensor | None]  # what a layer returns: its bias apart, if it does not add it


class SplitInputError(ValueError, AssertionError):
    """The input does not come in the pieces that the layer takes."""


class TilePlace(NamedTuple):
    """Which part of the whole layer's parameter a tile's own parameter is.

    Attributes:
        whole: the name of the whole layer's.
        bounds: where tiles begin along each of its dimensions, and its size.
        number: the tile's, along each dimension.
    """

    whole: str
    bounds: tuple[tuple[int, ...], ...]
    number: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole layer's."""
        return tuple(bounds[-1] for bounds in self.bounds)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[start, stop) of the tile along each dimension."""
        return [(bounds[i], bounds[i + 1]) for bounds, i in zip(self.bounds, self.number, strict=True)]

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Of the tile's own parameter."""
        return tuple(stop - start for start, stop in self.spans)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the tile lies, as an index."""
        return tuple(slice(*span) for span in self.spans)


class TiledLinear(nn.Module):
    """`linear_cls(in_features, out_features, bias, **kwargs)` in `out_splits` x `in_splits` tiles, `linears[out_id][in_id]`.

    Input [..., in_features] and output [..., out_features] are those of the whole layer, gradients too, to round-off: a product
    over `in_splits` tiles is rounded once more per tile. Only the last tile of each row of tiles has a bias.

    `load_state_dict` takes a whole layer's `weight` and `bias` as well as tiles.

    Initial values are those of the whole layer, for the same seed, and so is the random generator's position afterwards: one
    whole layer is built for a moment (its weight on the CPU, where the layer is one of `mpu`'s) and its values are cut.

    With parallel layers whose output stays cut (`gather_output=False`) a rank's output is its columns of the first tile, then of
    the second, and so on. A row-parallel layer reads them in this order if its `in_splits` are these `out_splits`. With
    `sequence_parallel=True` among `kwargs` input or output are slices [s/t, ..., features], as the layers' own; the gathered
    input of a column-parallel one is kept for backward.

    Args:
        in_features, out_features: of the whole layer, over all model-parallel ranks.
        in_splits, out_splits: number of tiles; sizes differ by one at most, the larger ones first.
        input_is_already_split: the input is a sequence of `in_splits` tensors.
        combine_out_splits: return one tensor; else the list of `out_splits` outputs.
        linear_cls: makes a layer with a `weight` [out, in] and a `bias` from (in_features, out_features, bias=..., **kwargs).
        init_linear: the layer whose values the tiles start with; it is not kept.
        kwargs: for `linear_cls`.

    Attributes:
        in_parts, out_parts: where tiles begin, with the number of features as the last entry.

    Raises:
        RuntimeError: a number of splits is below 1 or above the number of features.
    """

    parts_are_units = True  # for ZeRO: the tiles are gathered one by one, wherever this layer lies in a model

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_parts = _boundaries("in", in_features, in_splits)
        self.out_parts = _boundaries("out", out_features, out_splits)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.linears = nn.ModuleList()
        source = init_linear
        if source is None:
            source = whole_layer(linear_cls, in_features, out_features, bias=bias, **kwargs)
        with GatheredParameters(source.parameters()):
            values = drawn_values(source) if init_linear is None else self._values(source)
            devices = {p.device for p in source.parameters() if p.is_cuda}
            with torch.random.fork_rng(devices=list(devices)):  # what the tiles draw is not used
                for out_id in range(out_splits):
                    row = nn.ModuleList()
                    for in_id in range(in_splits):
                        height, width = _size(self.out_parts, out_id), _size(self.in_parts, in_id)
                        tile = linear_cls(width, height, bias=bias and in_id == in_splits - 1, **kwargs)
                        self._fill(tile, out_id, in_id, values)
                        tile.register_forward_hook(_copy_bias)  # before ZeRO's own, which frees the parameter
                        if type(tile) in ParallelLinear:  # what somebody derived from it communicates by itself
                            tile.is_tile = True  # type: ignore[assignment]
                        row.append(tile)
                    self.linears.append(row)  # zero.Init shards the row's tiles now, before it sees the next ones
        self.register_load_state_dict_pre_hook(_cut_whole)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        """[..., in_features], or a sequence of pieces of it, -> [..., out_features], or the list of its pieces.

        Raises:
            SplitInputError: `x` has another last dimension, or another number of pieces.
            TypeError: a tile returns something else than a tensor (`TiledLinearReturnBias`: or a pair).
        """
        pieces, rows = self._pieces(x), self._rows()
        pieces = [_enter(tile, piece) for tile, piece in zip(rows[0], pieces, strict=True)]
        outputs = [self._checked(_leave(row[-1], _sum(row, pieces))) for row in rows]
        return self._combine(outputs) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, linear: nn.Module) -> None:
        """Gives the tiles the values of `linear`, the whole layer.

        Collective over the data-parallel ranks where one of the two is sharded by ZeRO (`linear` is whole meanwhile, one tile at
        a time), and over the model-parallel ranks where `linear` is cut over them.

        Raises:
            ValueError: `linear` has other sizes, or one of the two has a bias and the other has not.
        """
        with GatheredParameters(linear.parameters()):
            values = self._values(linear)
            for out_id, row in enumerate(self._rows()):
                for in_id, tile in enumerate(row):
                    self._fill(tile, out_id, in_id, values)

    def tile_places(self) -> Iterator[tuple[str, TilePlace]]:
        """The name of every tile's weight and bias, and which part of the whole layer's it is."""
        rows, columns = tuple(self.out_parts), tuple(self.in_parts)
        for out_id in range(self.out_splits):
            for in_id in range(self.in_splits):
                yield f"linears.{out_id}.{in_id}.weight", TilePlace("weight", (rows, columns), (out_id, in_id))
            yield f"linears.{out_id}.{self.in_splits - 1}.bias", TilePlace("bias", (rows,), (out_id,))

    def extra_repr(self) -> str:
        """The sizes of the whole layer and the numbers of tiles."""
        splits = f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        return f"{self.in_features}, {self.out_features}, bias={self.use_bias}, {splits}"

    # ---- a row of tiles: what TiledLinearReturnBias does in another way

    def _checked(self, output: Product) -> Any:
        if not isinstance(output, Tensor):
            raise TypeError(
                "TiledLinear: a tile returned (output, bias). Use TiledLinearReturnBias for such layers, or drop skip_bias_add."
            )
        return output

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    # ---- pieces and values

    def _rows(self) -> list[list[nn.Module]]:
        return [list(row.children()) for row in self.linears]

    def _pieces(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if self.input_is_already_split:
            if isinstance(x, Tensor) or len(x) != self.in_splits:
                found = "one tensor" if isinstance(x, Tensor) else f"{len(x)} pieces"
                raise SplitInputError(
                    f"TiledLinear(input_is_already_split=True) takes a list of in_splits={self.in_splits} tensors, got {found}."
                )
            return x
        if not isinstance(x, Tensor):
            raise SplitInputError(
                f"TiledLinear takes one tensor, got a {type(x).__name__}; input_is_already_split=True takes a list of pieces."
            )
        width = x.size(-1)
        ranks = self.in_features // width if width else 0  # a row-parallel layer's input may be this rank's part
        sizes = [_size(self.in_parts, i) // max(ranks, 1) for i in range(self.in_splits)]
        if sum(sizes) != width:
            raise SplitInputError(
                f"TiledLinear: the input's last dimension is {width}, in_features is {self.in_features} (in {self.in_splits} "
                "tiles). It must be that, or an equal share of it on each model-parallel rank."
            )
        return x.split(sizes, dim=-1)

    def _values(self, linear: nn.Module) -> Values:
        """The full values of a layer that may take this one's place. Collective over the ranks that it is cut over."""
        values = {name: merged(linear, name) for name in ("weight", "bias")}
        weight, bias = values["weight"], values["bias"]
        shape = None if weight is None else tuple(weight.shape)
        if shape != (self.out_features, self.in_features) or (bias is not None) != self.use_bias:
            raise ValueError(
                f"TiledLinear of weight {(self.out_features, self.in_features)}, {'with' if self.use_bias else 'without'} bias, "
                f"cannot take the values of a {type(linear).__name__} of weight {shape}, {'without' if bias is None else 'with'} "
                "bias. Both must agree."
            )
        return values

    def _fill(self, tile: nn.Module, out_id: int, in_id: int, values: Values) -> None:
        rows, columns = slice(*self.out_parts[out_id : out_id + 2]), slice(*self.in_parts[in_id : in_id + 2])
        weight, bias = values["weight"], values["bias"]
        with torch.no_grad(), GatheredParameters(tile.parameters(), modifier_rank=0):
            if weight is not None:
                write(tile, "weight", weight[rows, columns])
            if bias is not None and tile.bias is not None:
                write(tile, "bias", bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` of tiles that return `(output, bias)`: returns `(output, bias)` of the whole layer, the bias not added.

    Outputs are summed over a row of tiles; the rows' biases are concatenated, in their order, and None if no tile has one. A tile
    that returns a tensor alone counts as one without bias. With `combine_out_splits=False` it is a list of such pairs.
    """

    def _checked(self, output: Product) -> tuple[Tensor, Tensor | None]:
        return (output, None) if isinstance(output, Tensor) else output

    def _combine(self, outputs: list[Any]) -> tuple[Tensor, Tensor | None]:
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([out for out, _ in outputs], dim=-1), torch.cat(biases) if biases else None


def tile_places(model: nn.Module) -> dict[str, TilePlace]:
    """What the parameters of a model's tiles are parts of, by their full names."""
    found = {}
    for prefix, module in model.named_modules():
        for name, place in module.tile_places() if isinstance(module, TiledLinear) else ():
            whole = ".".join(filter(None, (prefix, place.whole)))
            found[".".join(filter(None, (prefix, name)))] = place._replace(whole=whole)
    return found


def join_tiles(state: Mapping[str, Tensor], places: Mapping[str, TilePlace]) -> dict[str, Tensor]:
    """A state dictionary in which tiles are what they are parts of: whole layers' parameters, as checkpoints have them.

    Those of a layer stay each by itself where some are not in `state`, are tied, or have another shape.

    Args:
        state: whole over the model-parallel ranks; a tied parameter is one tensor under several names.
        places: of the tiles, as `tile_places` gives them.
    """
    names_of, numels = Counter(map(id, state.values())), Counter[str]()  # of a tensor; of what is there of each whole
    for name, place in places.items():
        value = state.get(name)
        if value is not None and value.shape == place.tile_shape and names_of[id(value)] == 1:
            numels[place.whole] += value.numel()
    joined: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in places and numels[places[name].whole] == math.prod(places[name].shape):
            place = places[name]
            if place.whole not in joined:
                joined[place.whole] = value.new_empty(place.shape)
            joined[place.whole][place.slices] = value
        else:
            joined[name] = value
    return joined


def cut_whole(state: dict[str, Any], places: Mapping[str, TilePlace]) -> list[str]:
    """Puts tiles into `state` for what there is of whole layers' parameters; those that have another shape, in words."""
    wholes = {place.whole: place.shape for place in places.values() if place.whole in state}
    fitting = {key for key, shape in wholes.items() if state[key].shape == shape}  # slices of a larger one would fit
    state.update({name: state[p.whole][p.slices] for name, p in places.items() if p.whole in fitting})
    given = {key: tuple(state.pop(key).shape) for key in wholes}
    return [
        f"size mismatch for {key}: it has shape {given[key]}, the whole layer's has {shape}."
        for key, shape in wholes.items()
        if key not in fitting
    ]


def _cut_whole(tiled: TiledLinear, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Before `load_state_dict`."""
    names, errors = {name for name, _ in tiled.named_parameters()}, others[-1]
    places = ((name, place) for name, place in tiled.tile_places() if name in names)
    errors += cut_whole(state, {prefix + name: p._replace(whole=prefix + p.whole) for name, p in places})


def _enter(tile: nn.Module, piece: Tensor) -> Tensor:
    """A piece of the input as the tiles of its column take it."""
    return tile.enter(piece) if isinstance(tile, ParallelLinear) and tile.is_tile else piece


def _sum(row: Sequence[nn.Module], pieces: Sequence[Tensor]) -> Product:
    """The sum of what the tiles of a row return; the bias is that of the last tile, as no other has one."""
    total: Tensor | None = None
    part: Product
    for tile, piece in zip(row, pieces, strict=True):
        # A view of its own for each tile: when its gradient comes, the tile's backward is over, and frozen tiles go as well.
        part = tile(piece.view_as(piece))
        if not isinstance(part, (Tensor, tuple)):
            raise TypeError(f"TiledLinear: a tile returned a {type(part).__name__}, not a tensor or (output, bias).")
        product = part if isinstance(part, Tensor) else part[0]
        total = product if total is None else total + product
    assert total is not None  # there is at least one tile
    return total if isinstance(part, Tensor) else (total, part[1])


def _leave(last: nn.Module, product: Product) -> Product:
    """What the layer returns of the sum of a row of tiles, of which `last` is one."""
    if not isinstance(last, ParallelLinear) or not last.is_tile:
        return product
    total, bias = product
    return (last.leave(total), bias) if last.skip_bias_add else last.leave(total, bias)


def _copy_bias(_: nn.Module, __: Any, output: Any) -> Any:
    """The bias as a copy: the parameter itself is released when its tile has run, and it is added later."""
    if isinstance(output, tuple) and isinstance(output[1], Tensor):
        return output[0], output[1].clone()
    return output


def _boundaries(side: str, features: int, splits: int) -> list[int]:
    """Where `splits` parts of `features` begin, and `features` itself; the larger parts come first."""
    if not 1 <= splits <= features:
        raise RuntimeError(
            f"TiledLinear: {side}_splits={splits} for {side}_features={features}; it must lie in [1, {side}_features]."
        )
    size, rest = divmod(features, splits)
    return [part * size + min(part, rest) for part in range(splits + 1)]


def _size(parts: list[int], index: int) -> int:
    return parts[index + 1] - parts[index]
