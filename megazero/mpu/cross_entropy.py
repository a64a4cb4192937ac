"""Cross-entropy from logits whose vocabulary is cut over the model-parallel ranks (Megatron-LM, arXiv:1909.08053, sec. 3).

With m the largest logit of a token, over all ranks, and z its sum of exponentials,

    loss = log z - (x_target - m)        z = sum_j exp(x_j - m)        d loss / d x_j = exp(x_j - m) / z - [j = target]

Ranks exchange m, z and x_target, three numbers per token, instead of the logits. All of it is fp32 whatever the logits' dtype.
m and log z stay apart: their sum would lose the fraction of a loss whose logits are large.

Nothing of the size of the logits is made besides their gradient, and no fp32 copy of 16-bit logits: tokens are worked off a
few at a time. On a CPU such a chunk stays in its cache, which makes this faster than log_softmax on all tokens at once. On a
device each pass goes through memory, and passes are all that this costs: 20 bytes per 16-bit logit forward, 20 backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero import comm
from megazero.comm import ProcessGroup
from megazero.mpu.groups import group_or_default
from megazero.mpu.utils import check_token_ids, once_differentiable

CHUNK_NUMEL_CPU = 1 << 18  # fp32 elements of a chunk: 1 MB, which a core's second-level cache holds
CHUNK_NUMEL_DEVICE = 1 << 26  # 256 MB: few launches, and still small beside the logits of a large batch


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None, vocab_size: int | None = None
) -> Tensor:
    """Cross-entropy of each token, from this rank's columns of the logits.

    Args:
        logits: [..., v/t], any float dtype; not changed. Contiguous ones are not copied.
        targets: [...] integer ids in the full vocabulary, the same on every rank of `group`.
        group: the ranks that hold the vocabulary, in order; the model-parallel group by default.
        vocab_size: ids in the vocabulary without its padding; columns from there on take no part and get a zero gradient.
            All columns count by default.

    Returns:
        [...] fp32 loss in nats (fp64 for fp64 logits), the same on every rank. Not averaged: mask it first. Its backward may
        run several times (`retain_graph=True`); differentiating its gradient again is a RuntimeError.

    Raises:
        ValueError: `logits` are no floats, their leading shape is not that of `targets`, there are fewer columns than
            `vocab_size`, or a target is outside of the vocabulary. The last is checked on the CPU only, as a check would make a
            CUDA device wait: whoever reads the data checks it there. A target outside that goes unnoticed gives a wrong, finite
            loss. There is no `ignore_index`: give such places any id, and multiply their loss by 0.
    """
    group = group_or_default(group)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"vocab_parallel_cross_entropy: logits {list(logits.shape)} need targets {list(logits.shape[:-1])}, "
            f"got {list(targets.shape)}. Logits are [..., vocabulary columns of this rank] and targets [...]."
        )
    if not logits.is_floating_point():
        raise ValueError(f"vocab_parallel_cross_entropy: logits are {logits.dtype}, and must be of a float dtype.")
    columns = own_columns("vocab_parallel_cross_entropy", targets, vocab_size, logits.size(-1), "columns", group)
    return _VocabParallelCrossEntropy.apply(logits, targets, group, columns)


def own_columns(what: str, targets: Tensor, vocab_size: int | None, held: int, unit: str, group: ProcessGroup) -> int:
    """How many of the `held` columns of the logits on this rank, called `unit` in messages, are no padding.

    Raises:
        ValueError: as in `vocab_parallel_cross_entropy`, of the vocabulary and the targets.
    """
    total = held * group.size()
    if vocab_size is None:
        vocab_size = total
    if vocab_size > total:
        raise ValueError(
            f"{what}: vocab_size={vocab_size} but {group.size()} ranks x {held} {unit} make {total}. Pad the vocabulary of the "
            "output layer upwards."
        )
    check_token_ids(targets, vocab_size)
    return min(max(vocab_size - group.rank() * held, 0), held)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup, columns: int) -> Tensor:
        first = group.rank() * logits.size(-1)  # id of this rank's first column
        rows = logits.reshape(-1, logits.size(-1))  # [tokens, v/t]
        ids = targets.reshape(-1, 1).long()  # [tokens, 1]; in 8 or 16 bits the arithmetic below would overflow
        is_own = (ids >= first) & (ids < first + columns)
        local = (ids - first).masked_fill(~is_own, 0)  # [tokens, 1] column of the target, 0 where another rank has it

        own_max, own_sum = max_and_sum(rows[:, :columns])
        target_logit = rows.gather(1, local)[:, 0].to(own_max.dtype)
        largest, z, loss = over_ranks(own_max[None], own_sum[None], target_logit, is_own[:, 0], group)
        ctx.save_for_backward(logits, local, is_own, largest, z)
        ctx.columns = columns
        return loss.view(targets.shape)

    @staticmethod
    @once_differentiable("vocab_parallel_cross_entropy")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, local, is_own, largest, z = saved
        rows = logits.reshape(-1, logits.size(-1))
        out = torch.empty_like(rows)  # [tokens, v/t]
        if ctx.columns:
            scale = grad.reshape(-1)  # [tokens], the same on every rank
            write_gradient(rows, ctx.columns, local, is_own[:, 0], largest, z, scale, out)
        else:
            out.zero_()
        return out.view(logits.shape), None, None, None


def max_and_sum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element m of each row of [tokens, columns], and sum_j exp(x_j - m); (-inf, 0) of no columns. At least fp32."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    largest = rows.new_full((rows.size(0),), -torch.inf, dtype=dtype)
    total = rows.new_zeros((rows.size(0),), dtype=dtype)
    if rows.size(1):
        chunks = (x.split(tokens_per_chunk(rows.shape, rows.device.type)) for x in (rows, largest, total))
        for x, m, z in zip(*chunks, strict=True):
            m.copy_(x.amax(1))
            finite = m.masked_fill(m == -torch.inf, 0.0)  # a row of -inf only: exp(-inf - 0), not exp(-inf + inf)
            z.copy_(_minus(x, finite).exp_().sum(1))
    return largest, total


def write_gradient(
    x: Tensor, columns: int, column: Tensor, is_here: Tensor, largest: Tensor, z: Tensor, scale: Tensor, out: Tensor
) -> None:
    """Writes the gradient of logits x [tokens, v/t] into `out`, which may be `x` itself.

    Args:
        columns: those before the padding, at least 1.
        column: [tokens, 1] of the target, any one where it is not among these columns.
        is_here: [tokens], whether it is.
        largest, z, scale: [tokens] m, z and the gradient of the loss.
    """
    over_z = scale / z
    at_target = (x.gather(1, column)[:, 0] - largest).exp() * over_z - scale.masked_fill(~is_here, 0.0)
    chunks = (y.split(tokens_per_chunk(x.shape, x.device.type)) for y in (x, largest, over_z, out))
    for some, m, factor, result in zip(*chunks, strict=True):
        torch.mul(_minus(some, m, out=result).exp_(), factor[:, None], out=result)
    out[:, columns:] = 0.0
    # At the end, so that a compiler makes one kernel of the above; and not by scatter_, which takes a CPU longer in 16 bits.
    out[torch.arange(x.size(0), device=x.device), column[:, 0]] = at_target.to(out.dtype)


def _minus(x: Tensor, m: Tensor, out: Tensor | None = None) -> Tensor:
    """x - m of each row of [tokens, columns], in the dtype of m: in new memory, or in `out` where x has that dtype.

    A device casts as it reads. A CPU casts first, whatever it is asked for; so the result of that is what is changed.
    """
    if x.dtype == m.dtype:
        return torch.sub(x, m[:, None], out=out)
    return x.to(m.dtype).sub_(m[:, None]) if x.device.type == "cpu" else x - m[:, None]


def over_ranks(
    own_max: Tensor, own_sum: Tensor, target_logit: Tensor, is_own: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """m, z and the loss of each token [tokens], in two messages, from what `max_and_sum` says of this rank's columns.

    Args:
        own_max, own_sum: [pieces, tokens] of pieces of the columns.
        target_logit: [tokens], of any value where the target is another rank's.
        is_own: [tokens], whether it is this rank's.
    """
    largest = comm.all_reduced(own_max.amax(0), group, dist.ReduceOp.MAX)
    sums = (own_sum * (own_max - largest).exp()).sum(0)
    both = torch.stack((sums, (target_logit - largest).masked_fill(~is_own, 0.0)))
    z, target_logit = comm.all_reduced(both, group).unbind()
    return largest, z, z.log() - target_logit


def tokens_per_chunk(shape: Sequence[int], device_type: str) -> int:
    """How many of the tokens are worked off at a time, at least 1, of logits of this shape: [tokens, columns]."""
    tokens, columns = shape
    numel = CHUNK_NUMEL_CPU if device_type == "cpu" else CHUNK_NUMEL_DEVICE
    if torch.compiler.is_compiling():  # one chunk: the compiler fuses the passes itself
        return max(tokens, 1)
    return max(min(tokens, numel // max(columns, 1)), 1)
