"""Head and cross-entropy in one, a piece of the vocabulary or of the sequence at a time: the logits [s, b, v/t] never exist.

With x a token's hidden state and W the head's weight, whose rows are cut into chunks C,

    l_C = x W_C^T      m = max_C max l_C      z = sum_C sum exp(l_C - m)      loss = log z - (l_target - m)
    d_C = g (exp(l_C - m) / z - [target])     grad_W_C = d_C^T x              grad_x = sum_C d_C W_C

where g is the gradient of the token's loss. Only m and z, two numbers per token, are kept for backward, which computes every l_C
again: one matrix product more, for never storing logits nor their gradient (Wijmans et al., arXiv:2411.09009).

Over chunks of the vocabulary grad_x is added up, in fp32, and each row of grad_W is finished by one product. Over chunks of the
sequence it is the other way round: grad_W_C is added up, in fp32, which is [v/t, h] unless the vocabulary is cut too, and more
than the logits of a small batch. So the vocabulary is the better one to cut, until a chunk of all tokens is large. Both may be:
the pieces of the sequence come within those of the vocabulary. Tensor-parallel ranks meet twice, whatever is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megazero.comm import ProcessGroup
from megazero.mpu.cross_entropy import max_and_sum, over_ranks, own_columns, write_gradient
from megazero.mpu.groups import group_or_default
from megazero.mpu.sequence_mappings import enter_parallel_region
from megazero.mpu.utils import as_autocast, once_differentiable


def chunked_vocab_parallel_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_size: int | None = None,
    sequence_chunk_size: int | None = None,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Cross-entropy of each token, from hidden states and this rank's rows of the head: `vocab_parallel_cross_entropy` of
    `x W^T` in less memory.

    At most `chunk_size` logits of `sequence_chunk_size` positions exist at a time. Loss and gradients are those of the two calls
    to round-off, and to the last bit where one chunk holds everything, and a vocabulary without padding. Under autocast, `x` and
    `weight` are cast as for a linear layer. With several ranks the gradient of `x` is summed over `group`.

    Args:
        x: [..., h], the same on every rank of `group`; with `sequence_parallel` this rank's slice [s/t, ..., h].
        weight: [v/t, h].
        targets: [...] integer ids in the full vocabulary, the same on every rank.
        chunk_size: rows of `weight` that are worked off at a time, at least 1; all by default.
        sequence_chunk_size: positions (of the first dimension of `targets`) that are, at least 1; all by default.
        group: the ranks that hold the vocabulary, in order; the model-parallel group by default.
        vocab_size: ids in the vocabulary without its padding; rows from there on take no part and get a zero gradient. All
            rows count by default.
        sequence_parallel: gather `x` along its first dimension, and reduce-scatter its gradient.

    Returns:
        [...] fp32 loss in nats (fp64 for fp64 `x`), the same on every rank. Not averaged: mask it first. Its backward may run
        several times (`retain_graph=True`); differentiating its gradient again is a RuntimeError.

    Raises:
        ValueError: a chunk size is less than 1, shapes do not fit, there are fewer rows than `vocab_size`, or a target is outside
            of the vocabulary (checked on the CPU only, as in `vocab_parallel_cross_entropy`).
    """
    group = group_or_default(group)
    for name, size in (("chunk_size", chunk_size), ("sequence_chunk_size", sequence_chunk_size)):
        if size is not None and size < 1:
            raise ValueError(
                f"chunked_vocab_parallel_loss: {name}={size} must be at least 1; leave it out for all at once."
            )
    x, weight = enter_parallel_region(x, group, sequence_parallel), as_autocast(weight)
    if x.shape[:-1] != targets.shape or weight.dim() != 2 or x.size(-1) != weight.size(1):
        raise ValueError(
            f"chunked_vocab_parallel_loss: x {list(x.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)} do "
            "not fit. They are [..., h], [vocabulary rows of this rank, h] and [...]."
        )
    columns = own_columns("chunked_vocab_parallel_loss", targets, vocab_size, weight.size(0), "rows", group)
    count, positions = targets.numel(), targets.size(0) if targets.dim() else 1
    token_chunk = count if sequence_chunk_size is None else sequence_chunk_size * (count // max(positions, 1))
    return _ChunkedLoss.apply(x, weight, targets, group, columns, chunk_size or weight.size(0), max(token_chunk, 1))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: ProcessGroup,
        columns: int,
        chunk_size: int,
        token_chunk: int,
    ) -> Tensor:
        ctx.columns, ctx.chunk_size, ctx.token_chunk = columns, chunk_size, token_chunk
        rows = x.reshape(-1, x.size(-1))  # [tokens, h]
        first = group.rank() * weight.size(0)  # id of this rank's first row
        # [tokens] column of the target; outside of [0, columns) on another rank
        ids = targets.reshape(-1).long() - first

        none = rows[:, :0]  # a rank with nothing but padding has no chunk
        maxima, sums = ([part] for part in max_and_sum(none))  # [tokens] per chunk of the vocabulary
        target_logit = torch.zeros_like(sums[0])
        for part, column, is_here in _chunks(ids, columns, chunk_size):
            chunk_max, chunk_sum = torch.empty_like(target_logit), torch.empty_like(target_logit)
            for some in _slices(rows.size(0), token_chunk):
                logits = rows[some].mm(weight[part].t())  # [some tokens, chunk]
                chunk_max[some], chunk_sum[some] = max_and_sum(logits)
                own = logits.gather(1, column[some])[:, 0].to(target_logit.dtype)
                target_logit[some] += own.masked_fill(~is_here[some], 0.0)
                del logits  # before the next ones are made
            maxima.append(chunk_max)
            sums.append(chunk_sum)

        is_own = (ids >= 0) & (ids < columns)
        largest, z, loss = over_ranks(torch.stack(maxima), torch.stack(sums), target_logit, is_own, group)
        ctx.save_for_backward(x, weight, ids, largest, z)
        return loss.view(targets.shape)

    @staticmethod
    @once_differentiable("chunked_vocab_parallel_loss")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ids, largest, z = saved
        rows = x.reshape(-1, x.size(-1))
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.zeros_like(rows, dtype=z.dtype) if needs_x else None  # this rank's part of the sum
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        # One product is its own sum. A sum of several in 16 bits would be rounded at each of them.
        sum_dtype = weight.dtype if rows.size(0) <= ctx.token_chunk else z.dtype
        scale = grad.reshape(-1)  # [tokens], with the loss scale: 16-bit d is as large as without chunks
        for part, column, is_here in _chunks(ids, ctx.columns, ctx.chunk_size):
            own = weight[part]
            total = None if grad_weight is None else grad_weight[part].to(sum_dtype)  # zeros
            for some in _slices(rows.size(0), ctx.token_chunk):
                d = rows[some].mm(own.t())  # [some tokens, chunk] logits, then their gradient
                targets = column[some], is_here[some]
                write_gradient(d, d.size(1), *targets, largest[some], z[some], scale[some], out=d)
                if grad_x is not None:
                    grad_x[some] += d.mm(own)
                if total is not None:
                    if total.dtype == d.dtype:
                        total.addmm_(d.t(), rows[some])
                    else:
                        total += d.t().mm(rows[some])
                del d
            if grad_weight is not None and total is not None and total.dtype != grad_weight.dtype:
                grad_weight[part] = total
        if grad_x is not None:
            grad_x = grad_x.to(rows.dtype).view(x.shape)
        return grad_x, grad_weight, None, None, None, None, None


def _slices(length: int, step: int) -> Iterator[slice]:
    """Of at most `step` each, in order."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _chunks(ids: Tensor, columns: int, chunk_size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of each chunk: its columns; the column in it of each token's target [tokens, 1], 0 where it is not in it; whether it is."""
    for part in _slices(columns, chunk_size):
        is_here = (ids >= part.start) & (ids < part.stop)
        yield part, (ids - part.start).masked_fill(~is_here, 0)[:, None], is_here
