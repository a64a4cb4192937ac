"""Linear layers whose weights are cut over the model-parallel ranks (Megatron-LM, arXiv:1909.08053, sec. 3).

    ColumnParallelLinear      weight [o/t, i]      each rank computes its own columns of y
    RowParallelLinear         weight [o, i/t]      each rank computes a partial sum of y

With `sequence_parallel` x of the first and y of the second are slices of the sequence, their first dimension (arXiv:2205.05198).
What is communicated lies in `enter`, before the product, and `leave`, behind it; of several layers that share an input or are
added up (tiles), one does so for all.
Over a group of one rank both are nn.Linear. Results do not depend on the number of ranks beyond rounding, and initial values
not at all (see init.py). Input, weight and bias have one dtype, as for nn.Linear; torch.autocast works as there.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.init import xavier_normal_

from megazero.comm import ProcessGroup
from megazero.mpu.init import InitMethod
from megazero.mpu.linear_overlap import column_linear, column_linears
from megazero.mpu.mappings import gather_from_model_parallel_region, scatter_to_model_parallel_region
from megazero.mpu.parallel_module import ParallelModule
from megazero.mpu.partition import Partition
from megazero.mpu.sequence_mappings import (
    copy_parameters_to_sequence_parallel_region,
    enter_parallel_region,
    leave_parallel_region,
)


class ColumnParallelLinear(ParallelModule):
    """`y = x W^T + b` with the rows of W (the columns of y) cut over the ranks; the backward sums the gradient of x.

    Args:
        input_size: i, the last dimension of x.
        output_size: o, the last dimension of y.
        bias: whether there is a bias; it starts at zero and is cut like W.
        gather_output: return the full y on every rank, instead of this rank's columns.
        init_method: fills the full [o, i] weight.
        stride: number of matrices stacked in W, each cut on its own: with 3, for [Q; K; V], rank r has [Q_r; K_r; V_r].
        keep_master_weight_for_test: keep the full weight as `master_weight`.
        skip_bias_add: return `(y without bias, this rank's bias)`, for a caller that fuses the addition.
        group: ranks to cut over; the model-parallel group by default.
        overlap_backward: hide the all-reduce of x's gradient behind the weight's gradient; None does so on CUDA.
        sequence_parallel: x is this rank's slice [s/t, ..., i] of the sequence; y [s, ..., o/t] is of all of it.

    Raises:
        ValueError: `output_size` is not divisible by the number of ranks x `stride`; or `sequence_parallel` with
            `gather_output`, as y would be whole in both dimensions.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        group: ProcessGroup | None = None,
        overlap_backward: bool | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        if sequence_parallel and gather_output:
            raise ValueError(
                "ColumnParallelLinear: sequence_parallel=True gathers the sequence and leaves the output cut over the ranks, and "
                "gather_output=True gathers that too. Pass gather_output=False, or sequence_parallel=False."
            )
        self.input_size = input_size
        self.output_size = output_size
        self.gather_output = gather_output
        self.stride = stride
        self.skip_bias_add = skip_bias_add
        self.overlap_backward = overlap_backward
        cut = Partition(dim=0, stride=stride, full_size=output_size)
        rows = self._shard_size("output_size", output_size, stride)
        self.weight = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.partitions["weight"] = cut
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))
            self.partitions["bias"] = cut
        else:
            self.register_parameter("bias", None)
        self._init_weight(init_method, keep_master_weight_for_test)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [..., i], the same on every rank -> y [..., o], or [..., o/t] without `gather_output`.

        With `sequence_parallel`: x [s/t, ..., i] -> y [s, ..., o/t].
        """
        if self.is_tile:
            return F.linear(x, self.weight), self.bias
        bias = None if self.skip_bias_add else self.bias
        # `enter` and the product, overlapped.
        y = self.leave(column_linear(x, self.weight, bias, self.group, self.overlap_backward, self.sequence_parallel))
        return (y, self.bias) if self.skip_bias_add else y

    def enter(self, x: Tensor) -> Tensor:
        """x as the product takes it, [..., i] of the whole sequence; its gradients are summed over the ranks."""
        return enter_parallel_region(x, self.group, self.sequence_parallel)

    def leave(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's y of its product [..., o/t], with `bias` [o/t] added."""
        if bias is not None:
            y = y + bias.to(y.dtype)
        if self.gather_output:
            y = gather_from_model_parallel_region(y, self.group)  # [..., o] in rank order: Q_0 K_0 V_0 Q_1 K_1 V_1
            y = _reorder(y, self.group.size(), self.stride)  # Q_0 Q_1 K_0 K_1 V_0 V_1
        return y

    def extra_repr(self) -> str:
        """The full sizes and the number of ranks."""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, ranks={self.group.size()}"


def parallel_columns(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """What each of the layers makes of `x`, which enters the parallel region once for all of them.

    Args:
        x: as for the layers, which are alike but for their sizes, with `gather_output=False`.
    """
    parameters = [(layer.weight, cast("Tensor | None", layer.bias)) for layer in layers]
    return column_linears(x, parameters, layers[0].group, layers[0].overlap_backward, layers[0].sequence_parallel)


class RowParallelLinear(ParallelModule):
    """`y = x W^T + b` with the columns of W cut over the ranks; the forward sums the partial products.

    Args:
        input_size: i, the last dimension of the full x.
        output_size: o, the last dimension of y.
        bias: whether there is a bias; it starts at zero, is whole on every rank and is added once, after the sum.
        input_is_parallel: x is this rank's part already; otherwise it is whole and is cut here.
        init_method: fills the full [o, i] weight.
        stride: number of matrices stacked along i, each cut on its own.
        keep_master_weight_for_test: keep the full weight as `master_weight`.
        skip_bias_add: return `(y without bias, bias)`, for a caller that fuses the addition.
        group: ranks to cut over; the model-parallel group by default.
        sequence_parallel: y is this rank's slice [s/t, ..., o] of the sequence. With `skip_bias_add` the caller sums the bias's
            gradient over the ranks: `copy_parameters_to_sequence_parallel_region` does so for several parameters at once.

    Raises:
        ValueError: `input_size` is not divisible by the number of ranks x `stride`; or `sequence_parallel` without
            `input_is_parallel`, as x would be cut in both dimensions.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        if sequence_parallel and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear: sequence_parallel=True slices the sequence of the output, so its input must be cut over the "
                "ranks by features: pass input_is_parallel=True, or sequence_parallel=False."
            )
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.stride = stride
        self.skip_bias_add = skip_bias_add
        columns = self._shard_size("input_size", input_size, stride)
        self.weight = nn.Parameter(torch.empty(output_size, columns, device=device, dtype=dtype))
        self.partitions["weight"] = Partition(dim=1, stride=stride, full_size=input_size)
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._init_weight(init_method, keep_master_weight_for_test)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [..., i/t], or [..., i] unless `input_is_parallel` -> y [..., o], the same on every rank.

        With `sequence_parallel`: x [s, ..., i/t] -> y [s/t, ..., o].

        Raises:
            ValueError: with `sequence_parallel`, s is not divisible by the number of ranks.
        """
        if self.is_tile:
            return F.linear(x, self.weight), self.bias
        bias: Tensor | None = None if self.skip_bias_add else self.bias
        if self.group.size() == 1:
            y = F.linear(x, self.weight, bias)
        else:
            y = self.leave(F.linear(self.enter(x), self.weight), bias)
        return (y, self.bias) if self.skip_bias_add else y

    def enter(self, x: Tensor) -> Tensor:
        """x as the product takes it: this rank's part [..., i/t]."""
        if self.input_is_parallel:
            return x
        if x.size(-1) != self.input_size:
            raise ValueError(
                f"RowParallelLinear({self.extra_repr()}) takes [..., {self.input_size}], got {list(x.shape)}."
            )
        return scatter_to_model_parallel_region(_reorder(x, self.stride, self.group.size()), self.group)

    def leave(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's y of its product [s, ..., o], which is this rank's part of a sum, with `bias` [o] added once.

        The product is given up.
        """
        y = leave_parallel_region(y, self.group, self.sequence_parallel)
        if bias is None:
            return y
        if self.sequence_parallel:
            (bias,) = copy_parameters_to_sequence_parallel_region([bias], self.group)
        # Under autocast y has the lower precision, as F.linear's own y with bias.
        return y + bias.to(y.dtype)

    def extra_repr(self) -> str:
        """The full sizes and the number of ranks."""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}, ranks={self.group.size()}"


def _reorder(x: Tensor, outer: int, inner: int) -> Tensor:
    """The last dimension of `x`, read as [outer, inner, rest], in the order [inner, outer, rest]."""
    if outer == 1 or inner == 1:
        return x
    return x.unflatten(-1, (outer, inner, -1)).transpose(-3, -2).flatten(-3)
