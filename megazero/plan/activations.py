"""Bytes of a GPT-2's activations on a rank: what autograd saves between forward and backward, and what backward works with.

The formulas are those of Korthikanti et al. (arXiv:2205.05198, sec. 4), for the kernels that this model runs. Per block, with
n = s b tokens of width h, t tensor-parallel ranks, 16-bit values, on a GPU:

    both norms, and the two layers that read them    8 n h
    Q, K, V, the context, the MLP's 4h before and after GELU    24 n h / t      (SwiGLU: four values of each feature, not two)
    masks of two dropouts    2 n h

The sum is the paper's n h (10 + 24 / t). The paper's 5 a s / h for the scores does not appear, because flash attention keeps one
number per row of scores instead. Statistics in fp32 are added. With --sequence-parallel everything is divided by t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.activation_checkpointing import CheckpointSettings
from megazero.model.config import GPT2Config
from megazero.mpu.cross_entropy import tokens_per_chunk
from megazero.zero.homes import FP32_BYTES

ID_BYTES = 8


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on a rank. `kept`, `outside` and `logits` are what forward saves."""

    kept: int = 0  # by all blocks until their backward: activations, or what they are recomputed from
    kept_on_host: int = 0  # with --checkpoint-in-cpu and a GPU: what blocks are recomputed from
    kept_on_disk: int = 0  # with --checkpoint-nvme-path: what blocks are recomputed from
    block: int = 0  # everything that one block saves
    recomputed: int = 0  # what is recomputed at a time, with --checkpoint-activations or --recompute
    outside: int = 0  # of embeddings, final norm and head, without the logits
    logits: int = 0  # 0 if the loss computes them in chunks
    loss_working: int = 0  # in addition, in the backward of loss and head
    block_working: int = 0  # in the backward of a block: gradients of its largest activations and of a weight
    later_working: int = 0  # the same when the first weight gradient is added up, less what is freed by then
    table_gradient: int = 0  # of the embedding's weight, and of the head's
    head_gradient: int = 0  # the head's, if it is tied: held from the head's backward to the embedding's
    head_working: int = 0  # if it is not tied: this gradient, when the root's G takes it in, and its input's

    @property
    def saved(self) -> int:
        """What is held on the device between forward and backward."""
        return self.kept + self.outside + self.logits


@dataclass(frozen=True)
class Shape:
    """The sizes that activations depend on, besides the model's."""

    batch_size: int
    seq_length: int
    model_parallel_size: int
    dtype: torch.dtype
    device_type: str = "cuda"

    @property
    def tokens(self) -> int:
        """n = s b."""
        return self.seq_length * self.batch_size


def plan_activations(model: GPT2Config, shape: Shape, checkpoints: CheckpointSettings) -> Activations:
    """The activations of `model` on each rank, in training.

    With --recompute auto, what blocks keep and recompute is at most its budget. Excludes masks of --reset-attention-mask and
    savings by torch.compile. Tiles of --memory-centric-tiled-linear do not matter: they save what the whole layers do.
    """
    n, h, e, t = shape.tokens, model.hidden_size, shape.dtype.itemsize, shape.model_parallel_size
    hidden, wide = n * h * e, n * model.mlp_size * e // t
    vocabulary = model.padded_vocab_size(t) // t
    chunked = 0 < model.vocab_chunk_size < vocabulary or 0 < model.sequence_chunk_size < shape.seq_length
    kept, elsewhere, recomputed = _kept(model, shape, checkpoints)
    weight = _working_weight(model) * e // t
    table, is_tied = vocabulary * h * e, not model.untie_embeddings_and_output_weights
    is_on_disk = checkpoints.checkpoint_nvme_path is not None
    return Activations(
        kept=kept,
        kept_on_host=0 if is_on_disk else elsewhere,
        kept_on_disk=elsewhere if is_on_disk else 0,
        block=block_bytes(model, shape),
        recomputed=recomputed,
        outside=_norm_bytes(model, shape) + _per_token(shape) + _position_bytes(model, shape),
        logits=0 if chunked else n * vocabulary * e,
        loss_working=_loss_working(model, shape, vocabulary, chunked, hidden),
        block_working=2 * hidden + wide + weight,
        later_working=2 * hidden + _later_working(model, wide, weight),
        table_gradient=table,
        head_gradient=table if is_tied else 0,
        head_working=0 if is_tied else table + hidden,
    )


def _working_weight(model: GPT2Config) -> int:
    """Elements of the weight whose gradient is made at the peak: the MLP's, or that of Q, K and V if the MLP's are in tiles."""
    return model.hidden_size * (3 * model.hidden_size if model.memory_centric_tiled_linear else model.mlp_size)


def _later_working(model: GPT2Config, wide: int, weight: int) -> int:
    """What the MLP's backward works with, besides two hidden states, from its first weight gradient on, less what is freed.

    The input of the last layer is freed. With SwiGLU there are then three gradients, of gate, silu(gate) and up; and in the end,
    when all four values that the MLP has saved are freed, two of gate and up together, and of their weights.
    """
    first = weight + (wide if model.memory_centric_tiled_linear else 0)
    return max(first, 2 * wide, 2 * weight - 2 * wide) if model.swiglu else first


def _kept(model: GPT2Config, shape: Shape, checkpoints: CheckpointSettings) -> tuple[int, int, int]:
    """Bytes that all blocks keep on the device, bytes that they keep elsewhere, and bytes that are recomputed at a time."""
    block, t = block_bytes(model, shape), shape.model_parallel_size
    layers, together = model.num_layers, min(model.checkpoint_num_layers, model.num_layers)
    cut = shape.tokens * model.hidden_size * shape.dtype.itemsize // t  # [s, b, h / t]
    may_leave = checkpoints.checkpoint_nvme_path or (checkpoints.checkpoint_in_cpu and shape.device_type == "cuda")
    if model.recompute_mode == "auto":
        assert model.recompute_budget_gb is not None  # the configuration was checked
        return min(layers * block, int(model.recompute_budget_gb * 1e9)), 0, 0
    if model.recompute_mode == "none":
        return layers * block, 0, 0
    if model.recompute_mode == "selective":  # Q, K and V are the inputs of what is recomputed
        core = block - block_bytes(model, shape, core=False)
        qkv = _qkv_bytes(model, cut)
        inputs, rest, recomputed = layers * qkv, layers * (block - core - qkv), core
    else:
        calls = -(-layers // together)
        if checkpoints.contiguous_checkpointing and checkpoints.num_checkpoints is not None:
            calls = max(calls, checkpoints.num_checkpoints)
        is_cut = model.sequence_parallel or checkpoints.partition_activations
        inputs, rest, recomputed = calls * (cut if is_cut else cut * t), 0, together * block
    return rest + (0 if may_leave else inputs), inputs if may_leave else 0, recomputed


def block_bytes(model: GPT2Config, shape: Shape, core: bool = True) -> int:
    """What one transformer block saves for its backward.

    Args:
        core: include what belongs to the inside of attention alone, which --recompute selective recomputes.
    """
    n, h, e, t = shape.tokens, model.hidden_size, shape.dtype.itemsize, shape.model_parallel_size
    hidden, wide = n * h * e, n * model.mlp_size * e // t
    context = hidden // t
    inside = _core_bytes(model, shape, context) if core else 0
    mlp = (4 if model.swiglu else 2) * wide  # gate, up, silu(gate) and the product; or before and after GELU
    return 2 * _norm_bytes(model, shape) + mlp + _qkv_bytes(model, context) + context + inside


def _qkv_bytes(model: GPT2Config, cut: int) -> int:
    """Q, of as many bytes as the context, and K and V, of as many or, if heads share them, of fewer."""
    return cut + 2 * cut * model.key_value_heads // model.num_attention_heads


def _core_bytes(model: GPT2Config, shape: Shape, cut: int) -> int:
    """What attention keeps besides Q, K, V and the context [s, b, h/t]: a number per row of scores, or values for all scores."""
    rows = shape.tokens * model.num_attention_heads // shape.model_parallel_size
    fp32_cut, qkv = cut // shape.dtype.itemsize * FP32_BYTES, _qkv_bytes(model, cut)
    if shape.device_type == "cpu" and model.attention_dropout > 0:
        # No fused kernel: softmax, noise and their product for every pair of tokens, and Q, K and V of each head, all in fp32.
        scores = 3 * rows * shape.seq_length * FP32_BYTES
        is_view = shape.dtype == torch.float32 and shape.batch_size == 1  # V then stays where Q and K have been
        is_view = is_view and qkv == 3 * cut and model.position_embedding_type == "learned_absolute"
        return scores + 3 * fp32_cut - qkv + (2 * cut if is_view else 0)
    is_cuda, is_fp32 = shape.device_type == "cuda", shape.dtype == torch.float32
    repeated = 0 if is_cuda and not is_fp32 else 3 * cut - qkv  # K and V, for each head
    # The kernel for fp32 on GPUs does not write the context in the order of its inputs, so it is copied.
    merged = cut if is_cuda and is_fp32 and shape.batch_size > 1 else 0
    return repeated + merged + rows * FP32_BYTES  # the last term: log of the sum of exponentials


def _norm_bytes(model: GPT2Config, shape: Shape) -> int:
    """What a norm, the layer that reads it and a dropout save: two values of each element, a mask, and the norm's statistics.

    The mask is a byte per element on a GPU, a factor in the activations' dtype on a CPU. The statistics are mean and reciprocal
    standard deviation of each token, in fp32 on a GPU.
    """
    n, h, e, is_cuda = shape.tokens, model.hidden_size, shape.dtype.itemsize, shape.device_type == "cuda"
    mask = n * h * (1 if is_cuda else e) if model.hidden_dropout > 0 else 0
    values, statistics = 2 * n * h * e, 2 * n * (FP32_BYTES if is_cuda else e)
    if model.normalization == "RMSNorm":
        # It has no mean. On a CPU it has no kernel either: its input and its result are saved in fp32.
        values = values if is_cuda else n * h * (e + 2 * FP32_BYTES)
        statistics = n * FP32_BYTES
    return (values + mask + statistics) // (shape.model_parallel_size if model.sequence_parallel else 1)


def _per_token(shape: Shape) -> int:
    """Ids of tokens and targets; the largest logit, two sums and the mask of each token."""
    return shape.tokens * (2 * ID_BYTES + 3 * FP32_BYTES + 1)


def _position_bytes(model: GPT2Config, shape: Shape) -> int:
    """Ids of positions; or, of rotary ones, the cosine and sine for each pair of a head's elements."""
    is_rotary = model.position_embedding_type == "rope"
    return shape.seq_length * (model.head_size * shape.dtype.itemsize if is_rotary else ID_BYTES)


def _loss_working(model: GPT2Config, shape: Shape, vocabulary: int, chunked: bool, hidden: int) -> int:
    """The gradient of the logits and an fp32 chunk of them; then, in their place, the gradients of the head's weight and input.

    With --vocab-chunk-size or --sequence-chunk-size, only chunks of the logits exist, which are also made in forward, with a
    chunk of their exponentials. In backward, the gradient of the weight and the fp32 gradient of the input are added, and, with
    chunks of the sequence, the sum over these chunks and a product that is added to it.
    """
    n, e = shape.tokens, shape.dtype.itemsize
    head_gradient = vocabulary * model.hidden_size * e
    # The loss casts 16-bit logits chunk by chunk. In backward, fp32 logits are processed in the memory of their gradient.
    is_cast = e < FP32_BYTES
    if chunked:
        columns = min(model.vocab_chunk_size or vocabulary, vocabulary)
        tokens = min(model.sequence_chunk_size or shape.seq_length, shape.seq_length) * shape.batch_size
        product = columns * model.hidden_size if tokens < n and is_cast else 0
        logits, chunk = tokens * columns * e, _fp32_chunk(shape, tokens, columns)
        gradients = n * model.hidden_size * FP32_BYTES + hidden + head_gradient + product * FP32_BYTES
        return logits + max(chunk, gradients + max(chunk * is_cast, product * e))
    return max(n * vocabulary * e + _fp32_chunk(shape, n, vocabulary) * is_cast, head_gradient + hidden)


def _fp32_chunk(shape: Shape, tokens: int, columns: int) -> int:
    """Bytes of the logits' exponentials, or of their gradient, that exist in fp32 at a time."""
    return tokens_per_chunk((tokens, columns), shape.device_type) * columns * FP32_BYTES
