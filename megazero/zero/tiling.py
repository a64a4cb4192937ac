"""Linear layers cut into tiles, each gathered, used and released separately (ZeRO-Infinity, arXiv:2104.07857, sec. 5.1.3).

    y_o = sum_i x_i W_oi^T + b_o        W [out, in] in out_splits x in_splits tiles W_oi

A layer is the smallest thing that ZeRO's stage 3 makes whole. A tiled layer's working memory is that of one tile, and no
allocation is larger than a tile.

Every tile is a layer of its own. With Megatron's parallel layers each tile is cut over the model-parallel ranks, and W_oi is the
same part of the full W at every model-parallel size. The tiled layer communicates once for all tiles: each x_i enters the
parallel region once, before its tiles, and each y_o leaves it once, after its tiles are added up.
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
Product = Tensor | tuple[Tensor, Tensor | None]  # a layer's output, with its bias if the layer does not add it


class SplitInputError(ValueError, AssertionError):
    """The input is not in the pieces that the layer takes."""


class TilePlace(NamedTuple):
    """The part of a whole layer's parameter that a tile's own parameter is.

    Attributes:
        whole: name of the whole layer's parameter.
        bounds: for each of its dimensions, where tiles begin, followed by the dimension's size.
        number: the tile's index along each dimension.
    """

    whole: str
    bounds: tuple[tuple[int, ...], ...]
    number: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole layer's parameter."""
        return tuple(bounds[-1] for bounds in self.bounds)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """[start, stop) of the tile along each dimension."""
        return [(bounds[i], bounds[i + 1]) for bounds, i in zip(self.bounds, self.number, strict=True)]

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Shape of the tile's own parameter."""
        return tuple(stop - start for start, stop in self.spans)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The tile's place in the whole parameter, as an index."""
        return tuple(slice(*span) for span in self.spans)


class TiledLinear(nn.Module):
    """`linear_cls(in_features, out_features, bias, **kwargs)` in `out_splits` x `in_splits` tiles, `linears[out_id][in_id]`.

    Input [..., in_features], output [..., out_features] and gradients are those of the whole layer, up to round-off: a product
    over `in_splits` tiles is rounded once more per tile. Only the last tile of each row of tiles has a bias.

    `load_state_dict` accepts a whole layer's `weight` and `bias` as well as tiles.

    With the same seed, the initial values and the random generator's position afterwards are those of the whole layer. To get
    them, one whole layer is built temporarily (its weight on the CPU, if it is a layer of `mpu`) and its values are cut.

    With parallel layers whose output stays cut (`gather_output=False`), a rank's output is its columns of the first tile, then
    of the second, and so on. A row-parallel layer reads them in this order if its `in_splits` equal these `out_splits`. With
    `sequence_parallel=True` in `kwargs`, input or output are slices [s/t, ..., features], as they are for the layers themselves.
    The gathered input of a column-parallel layer is kept for backward.

    Args:
        in_features, out_features: sizes of the whole layer, over all model-parallel ranks.
        in_splits, out_splits: number of tiles along each dimension; sizes differ by one at most, larger tiles first.
        input_is_already_split: whether the input is a sequence of `in_splits` tensors.
        combine_out_splits: whether to return one tensor; else the list of `out_splits` outputs.
        linear_cls: makes a layer with a `weight` [out, in] and a `bias` from (in_features, out_features, bias=..., **kwargs).
        init_linear: a layer whose values the tiles start with; it is not kept.
        kwargs: keyword arguments for `linear_cls`.

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
            with torch.random.fork_rng(devices=list(devices)):  # the tiles' own random values are not used
                for out_id in range(out_splits):
                    row = nn.ModuleList()
                    for in_id in range(in_splits):
                        height, width = _size(self.out_parts, out_id), _size(self.in_parts, in_id)
                        tile = linear_cls(width, height, bias=bias and in_id == in_splits - 1, **kwargs)
                        self._fill(tile, out_id, in_id, values)
                        if type(tile) in ParallelLinear:  # a user's subclass communicates by itself
                            tile.is_tile = True  # type: ignore[assignment]
                        row.append(tile)
                    self.linears.append(row)  # zero.Init shards this row's tiles now, before the next row's are made
        self.register_load_state_dict_pre_hook(_cut_whole)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        """[..., in_features] or a sequence of pieces of it -> [..., out_features] or a list of its pieces.

        Raises:
            SplitInputError: `x` has another last dimension, or another number of pieces.
            TypeError: a tile returns something other than a tensor (`TiledLinearReturnBias`: or a pair).
        """
        pieces, rows = self._pieces(x), self._rows()
        pieces = [_enter(tile, piece) for tile, piece in zip(rows[0], pieces, strict=True)]
        outputs = [self._checked(_leave(row[-1], _sum(row, pieces))) for row in rows]
        return self._combine(outputs) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, linear: nn.Module) -> None:
        """Gives the tiles the values of `linear`, the whole layer.

        Collective over the data-parallel ranks if ZeRO shards either of the two (`linear` is whole meanwhile, and tiles are whole
        one at a time), and over the model-parallel ranks if `linear` is cut over them.

        Raises:
            ValueError: `linear` has other sizes, or only one of the two has a bias.
        """
        with GatheredParameters(linear.parameters()):
            values = self._values(linear)
            for out_id, row in enumerate(self._rows()):
                for in_id, tile in enumerate(row):
                    self._fill(tile, out_id, in_id, values)

    def tile_places(self) -> Iterator[tuple[str, TilePlace]]:
        """The name of every tile's weight and bias, each with its place in the whole layer's parameter."""
        rows, columns = tuple(self.out_parts), tuple(self.in_parts)
        for out_id in range(self.out_splits):
            for in_id in range(self.in_splits):
                yield f"linears.{out_id}.{in_id}.weight", TilePlace("weight", (rows, columns), (out_id, in_id))
            yield f"linears.{out_id}.{self.in_splits - 1}.bias", TilePlace("bias", (rows,), (out_id,))

    def extra_repr(self) -> str:
        """The sizes of the whole layer and the numbers of tiles."""
        splits = f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        return f"{self.in_features}, {self.out_features}, bias={self.use_bias}, {splits}"

    # ---- a row of tiles: these methods TiledLinearReturnBias overrides

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
        ranks = self.in_features // width if width else 0  # a row-parallel layer's input may be this rank's part only
        sizes = [_size(self.in_parts, i) // max(ranks, 1) for i in range(self.in_splits)]
        if sum(sizes) != width or width * ranks != self.in_features:
            raise SplitInputError(
                f"TiledLinear: the input's last dimension is {width}, in_features is {self.in_features} (in {self.in_splits} "
                "tiles). It must be that, or an equal share of it on each model-parallel rank."
            )
        return x.split(sizes, dim=-1)

    def _values(self, linear: nn.Module) -> Values:
        """The full values of a layer that could replace this one. Collective over the ranks that `linear` is cut over."""
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

    Outputs are summed over each row of tiles. The rows' biases are concatenated in order; the bias is None if no tile has one. A
    tile that returns only a tensor counts as one without bias. With `combine_out_splits=False` it returns a list of such pairs.
    """

    def _checked(self, output: Product) -> tuple[Tensor, Tensor | None]:
        return (output, None) if isinstance(output, Tensor) else output

    def _combine(self, outputs: list[Any]) -> tuple[Tensor, Tensor | None]:
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([out for out, _ in outputs], dim=-1), torch.cat(biases) if biases else None


def tile_places(model: nn.Module) -> dict[str, TilePlace]:
    """The places of a model's tiles in their whole layers' parameters, by the full names of the tiles' parameters."""
    found = {}
    for prefix, module in model.named_modules():
        for name, place in module.tile_places() if isinstance(module, TiledLinear) else ():
            whole = ".".join(filter(None, (prefix, place.whole)))
            found[".".join(filter(None, (prefix, name)))] = place._replace(whole=whole)
    return found


def join_tiles(state: Mapping[str, Tensor], places: Mapping[str, TilePlace]) -> dict[str, Tensor]:
    """A state dictionary with tiles joined into whole layers' parameters, as in checkpoints.

    A parameter's tiles stay separate if some of them are not in `state`, are tied, or have another shape.

    Args:
        state: values that are whole over the model-parallel ranks; a tied parameter is one tensor under several names.
        places: the tiles' places, as `tile_places` returns them.
    """
    names_of, numels = Counter(map(id, state.values())), Counter[str]()  # names per tensor; elements found per whole
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
    """Replaces whole layers' parameters in `state` with tiles. Returns a message for each parameter of another shape."""
    wholes = {place.whole: place.shape for place in places.values() if isinstance(state.get(place.whole), Tensor)}
    fitting = {key for key, shape in wholes.items() if state[key].shape == shape}  # a larger one's slices would fit too
    state.update({name: state[p.whole][p.slices] for name, p in places.items() if p.whole in fitting})
    given = {key: tuple(state.pop(key).shape) for key in wholes}
    return [
        f"size mismatch for {key}: it has shape {given[key]}, the whole layer's has {shape}."
        for key, shape in wholes.items()
        if key not in fitting
    ]


def _cut_whole(tiled: TiledLinear, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Hook before `load_state_dict`: cuts whole parameters into tiles."""
    names, errors = {name for name, _ in tiled.named_parameters()}, others[-1]
    places = ((name, place) for name, place in tiled.tile_places() if name in names)
    errors += cut_whole(state, {prefix + name: p._replace(whole=prefix + p.whole) for name, p in places})


def _enter(tile: nn.Module, piece: Tensor) -> Tensor:
    """A piece of the input, in the form that the tiles of its column take."""
    return tile.enter(piece) if isinstance(tile, ParallelLinear) and tile.is_tile else piece


def _sum(row: Sequence[nn.Module], pieces: Sequence[Tensor]) -> Product:
    """The sum of the outputs of a row's tiles; the bias is that of the last tile, the only one that has one."""
    total: Tensor | None = None
    part: Product
    for tile, piece in zip(row, pieces, strict=True):
        # Each tile gets its own view: when the view's gradient comes, the tile's backward is over, and even frozen tiles are
        # released.
        part = tile(piece.view_as(piece))
        if not isinstance(part, (Tensor, tuple)):
            raise TypeError(f"TiledLinear: a tile returned a {type(part).__name__}, not a tensor or (output, bias).")
        product = part if isinstance(part, Tensor) else part[0]
        total = product if total is None else total + product
    assert total is not None  # there is at least one tile
    return total if isinstance(part, Tensor) else (total, part[1])


def _leave(last: nn.Module, product: Product) -> Product:
    """The layer's output, from the sum of a row of tiles, one of which is `last`."""
    if not isinstance(last, ParallelLinear) or not last.is_tile:
        return product
    total, bias = product
    return (last.leave(total), bias) if last.skip_bias_add else last.leave(total, bias)


def _boundaries(side: str, features: int, splits: int) -> list[int]:
    """Where `splits` parts of `features` begin, followed by `features` itself; the larger parts come first."""
    if not 1 <= splits <= features:
        raise RuntimeError(
            f"TiledLinear: {side}_splits={splits} for {side}_features={features}; it must lie in [1, {side}_features]."
        )
    size, rest = divmod(features, splits)
    return [part * size + min(part, rest) for part in range(splits + 1)]


def _size(parts: list[int], index: int) -> int:
    return parts[index + 1] - parts[index]
