"""Head and loss in chunks of vocabulary and sequence against plain torch: losses, gradients, and what is allocated."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megazero import mpu
from megazero.model.gpt2 import GPT2Model
from megazero.mpu.chunked_loss import chunked_vocab_parallel_loss
from megazero.mpu.linear_overlap import column_linear
from tests.model.test_gpt2 import VOCAB, loss_and_gradients_case, small_config
from tests.ranks import run_ranks
from tests.test_parity import engine_case, stages_case

V, H = 11, 5
CHUNKS = [
    *({"chunk_size": size} for size in (1, 3, 4, 100)),
    *({"sequence_chunk_size": size} for size in (1, 2, 100)),
    *({"chunk_size": 4, "sequence_chunk_size": size} for size in (1, 3)),
]
EXACT = {"atol": 1e-6, "rtol": 1e-5}
# 16-bit logits and d are rounded as without chunks; what chunks add is a rounding of each part of the gradient of x.
TOLERANCES = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
    torch.float32: EXACT,
    torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2},
    torch.float16: {"atol": 4e-3, "rtol": 3e-3},
}


def make(shape, dtype, padding=0):
    """Hidden states, the head's weight with padding rows that must not matter, targets, and gradients of the losses."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, H, generator=generator).to(dtype)
    weight = F.pad(torch.randn(V, H, generator=generator), (0, 0, 0, padding), value=100.0).to(dtype)
    targets = torch.randint(0, V, shape, generator=generator)
    upstream = torch.rand(shape, generator=generator) - 0.3
    return x, weight, targets, upstream * (upstream > -0.2)  # some tokens are masked


def gradients(loss_of, x, weight, upstream):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(x, weight)
    (loss * upstream).sum().backward()
    return loss.detach(), x.grad, weight.grad


def parity_case():
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    for shape in ((5, 3), (1,), (0,)):
        for padding in (-V % t, t * 12 - V):  # of the second, the last ranks hold nothing but padding
            for dtype, tolerance in TOLERANCES.items():
                x, weight, targets, upstream = make(shape, dtype, padding)

                def plain(x, weight, targets=targets):
                    logits = F.linear(x, weight[:V]).to(torch.promote_types(x.dtype, torch.float32))
                    return F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")

                want, want_x, want_weight = gradients(plain, x, weight, upstream)
                for sizes in CHUNKS:

                    def chunked(x, weight, targets=targets, sizes=sizes):
                        return chunked_vocab_parallel_loss(x, weight, targets, group=group, vocab_size=V, **sizes)

                    loss, grad_x, grad_weight = gradients(chunked, x, weight.chunk(t)[r], upstream)
                    assert loss.dtype == want.dtype and grad_x.dtype == grad_weight.dtype == dtype
                    assert_close(loss, want, **tolerance)
                    assert_close(grad_x, want_x, **tolerance)
                    assert_close(grad_weight, want_weight.chunk(t)[r], **tolerance)


def one_chunk_case():
    """In one chunk, without padding, all is bit for bit what the two calls give, also under fp16's loss scale."""
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    for dtype in TOLERANCES:
        x, weight, targets, upstream = make((7, 3), dtype, padding=-V % t)
        own, size, upstream = weight.chunk(t)[r], weight.size(0), upstream / 21 * 2.0**12

        def whole(x, weight, targets=targets, size=size):
            logits = column_linear(x, weight, None, group, overlap=False)
            return mpu.vocab_parallel_cross_entropy(logits, targets, group, size)

        def chunked(x, weight, targets=targets, size=size):
            return chunked_vocab_parallel_loss(x, weight, targets, chunk_size=size, group=group)

        want, got = gradients(whole, x, own, upstream), gradients(chunked, x, own, upstream)
        for name, a, b in zip(("loss", "x", "weight"), got, want, strict=True):
            assert torch.equal(a, b), f"{dtype}: {name} differs by {(a - b).abs().max()}"


def uses_case():
    """A second backward, a frozen side, no gradients at all, NaN, autocast, and what is refused."""
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    x, weight, targets, upstream = make((5, 3), torch.float32, padding=-V % t)
    own = weight.chunk(t)[r]

    def chunked(x, weight, targets=targets, chunk_size=2):
        return chunked_vocab_parallel_loss(x, weight, targets, chunk_size=chunk_size, group=group, vocab_size=V)

    want, want_x, want_weight = gradients(chunked, x, own, upstream)
    leaf, head = x.clone().requires_grad_(), own.clone().requires_grad_()
    loss = (chunked(leaf, head) * upstream).sum()
    for _ in range(2):
        grad_x, grad_weight = torch.autograd.grad(loss, (leaf, head), retain_graph=True)
        assert torch.equal(grad_x, want_x) and torch.equal(grad_weight, want_weight)
    assert torch.equal(torch.autograd.grad((chunked(leaf, own) * upstream).sum(), leaf)[0], want_x)
    assert torch.equal(torch.autograd.grad((chunked(x, head) * upstream).sum(), head)[0], want_weight)
    with torch.no_grad():
        assert torch.equal(chunked(leaf, head), want)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            assert torch.equal(chunked(leaf, head, targets.to(dtype)), want), dtype
    # The gradient of one depends on the other, also where the incoming gradient is a constant.
    for first, second in ((leaf, head), (head, leaf)):
        (twice,) = torch.autograd.grad((chunked(leaf, head) * upstream).sum(), first, create_graph=True)
        with pytest.raises(RuntimeError, match="chunked_vocab_parallel_loss is differentiated a second time"):
            torch.autograd.grad(twice.sum(), second)
    assert chunked(torch.full_like(x, torch.nan), own).isnan().all(), "NaN must not get lost"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, grad_x, grad_weight = gradients(chunked, x, own, upstream)
    assert grad_x.dtype == grad_weight.dtype == torch.float32
    low = gradients(chunked, x.bfloat16(), own.bfloat16(), upstream)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip((loss, grad_x, grad_weight), low, strict=True))

    for bad in (0, -3):
        with pytest.raises(ValueError, match=f"loss: chunk_size={bad} must be at least 1"):
            chunked(x, own, chunk_size=bad)
        with pytest.raises(ValueError, match=f"sequence_chunk_size={bad} must be at least 1"):
            chunked_vocab_parallel_loss(x, own, targets, sequence_chunk_size=bad, group=group)
    with pytest.raises(ValueError, match=r"targets \[15\] do not fit"):
        chunked(x, own, targets.flatten())
    with pytest.raises(ValueError, match="vocab_size=11 but .* make"):
        chunked(x, own[:1])
    with pytest.raises(ValueError, match="token id 11 is outside of the vocabulary"):
        chunked(x, own, torch.full_like(targets, V))


def all_cases():
    parity_case()
    one_chunk_case()
    uses_case()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_chunks_equal_the_whole_vocabulary(world_size):
    run_ranks(world_size, all_cases)


@pytest.mark.parametrize("sizes", [{"chunk_size": 1}, {"sequence_chunk_size": 1}], ids=str)
def test_16_bit_parts_of_a_gradient_are_added_up_in_fp32(one_rank, sizes):
    """512 parts of 1/512: in bf16 their sum never gets beyond 1/2."""
    n = 512
    if "chunk_size" in sizes:  # of the gradient of x, from all rows but the target's
        x, weight = torch.zeros(1, 1), (torch.arange(n) > 0).float()[:, None]
    else:  # of that of the head's second row, from all tokens
        x, weight = torch.full((n, 1), 1 / 256), torch.zeros(2, 1)
    x, weight = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    chunked_vocab_parallel_loss(x, weight, torch.zeros(len(x), dtype=torch.int64), **sizes).sum().backward()
    assert x.grad.item() == 1 if "chunk_size" in sizes else weight.grad.flatten().tolist() == [-1, 1]


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation returns, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def largest_numel(tokens, **sizes):
    model = GPT2Model(small_config(**sizes, num_layers=1))
    with LargestTensor() as largest:
        model(tokens, targets=tokens).mean().backward()
    return largest.numel


def test_no_tensor_of_the_logits_size_exists(one_rank):
    tokens = torch.zeros(40, 11, dtype=torch.int64)
    hidden = tokens.numel() * 96  # the MLP's hidden layer
    assert largest_numel(tokens) == tokens.numel() * 136 > hidden  # the logits: all columns, with padding
    assert largest_numel(tokens, vocab_chunk_size=50) == hidden
    assert largest_numel(tokens, sequence_chunk_size=7) == hidden


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"vocab_chunk_size": 50},
        {"vocab_chunk_size": 50, "checkpoint_activations": True},
        {"sequence_chunk_size": 3},
        {"sequence_chunk_size": 2, "vocab_chunk_size": 30},
    ],
    ids=str,
)
def test_a_model_with_chunks_equals_plain_gpt2(world_size, options):
    run_ranks(world_size, loss_and_gradients_case, small_config(**options))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_with_chunks_under_zero_equals_plain_torch(stage):
    run_ranks(2, engine_case, 1, "sgd", {"vocab_chunk_size": 50}, stage)


def test_training_with_chunks_over_model_and_data_ranks_equals_plain_torch():
    sizes = {"vocab_chunk_size": 30, "sequence_chunk_size": 3}
    run_ranks(4, engine_case, 2, "adamw", {**sizes, "checkpoint_activations": True}, 3)


def test_all_stages_with_chunks_equal_stage_0_bit_for_bit():
    run_ranks(2, stages_case, 1, {"vocab_chunk_size": 50})


def test_more_ids_than_a_rank_holds_is_the_whole_vocabulary(one_rank):
    torch.manual_seed(0)
    whole = GPT2Model(small_config())
    chunked = GPT2Model(small_config(vocab_chunk_size=1000, sequence_chunk_size=10))
    chunked.load_state_dict(whole.state_dict())
    tokens = torch.arange(20).view(2, 10) % VOCAB
    assert torch.equal(chunked(tokens, targets=tokens), whole(tokens, targets=tokens))


def test_a_negative_chunk_is_refused():
    with pytest.raises(ValueError, match="--vocab-chunk-size must be 0 or more, got -1"):
        small_config(vocab_chunk_size=-1)
    with pytest.raises(ValueError, match="--sequence-chunk-size must be 0 or more, got -1"):
        small_config(sequence_chunk_size=-1)
