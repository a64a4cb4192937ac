"""Cross-entropy over a cut vocabulary against F.cross_entropy on the whole one: values and gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megazero import mpu
from megazero.mpu import cross_entropy
from tests.mpu.values import shared
from tests.plan.live_bytes import tensors_in
from tests.ranks import run_ranks

V = 11  # padded to 12 columns and more


def plain(logits, targets, upstream):
    """Loss in fp32 of the unpadded columns, and the gradient of the logits."""
    leaf = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(
        leaf.to(torch.promote_types(leaf.dtype, torch.float32)).movedim(-1, 1), targets, reduction="none"
    )
    (loss * upstream).sum().backward()
    return loss.detach(), leaf.grad


def compare(logits, targets, padding, tolerance):
    """`logits` [..., V] are padded by `padding` columns of a large value, which must not matter, and cut."""
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    upstream = torch.rand(targets.shape, generator=torch.Generator().manual_seed(5)) - 0.3
    want, want_grad = plain(logits, targets, upstream)
    full = F.pad(logits, (0, padding), value=3e4)
    own = full.chunk(t, -1)[r].clone().requires_grad_()
    before = own.detach().clone()
    loss = mpu.vocab_parallel_cross_entropy(own, targets, group, V)
    assert loss.dtype == want.dtype and loss.shape == targets.shape
    assert_close(loss, want, **tolerance)
    for _ in range(2):  # a second backward finds what the first one found
        own.grad = None
        (loss * upstream).sum().backward(retain_graph=True)
        assert own.grad.dtype == logits.dtype
        assert_close(own.grad, F.pad(want_grad, (0, padding)).chunk(t, -1)[r], **tolerance)
    assert torch.equal(own.detach(), before), "the caller's logits were changed"


def parity_case():
    generator = torch.Generator().manual_seed(0)
    t = dist.get_world_size()
    for shape in ((5, 3), (1,), (2, 2, 2), (0,)):
        targets = torch.randint(0, V, shape, generator=generator)
        logits = torch.randn(*shape, V, generator=generator)
        for padding in (-V % t, t * 12 - V):  # of the second, the last ranks hold nothing but padding
            exact, rounded = {"atol": 1e-6, "rtol": 1e-5}, {"atol": 4e-3, "rtol": 8e-3}
            compare(logits, targets, padding, exact)
            compare(logits.double(), targets, padding, exact)
            compare(logits.bfloat16(), targets, padding, rounded)
            compare(logits.half(), targets, padding, {"atol": 1e-3, "rtol": 1e-3})


def extreme_case():
    """Logits of +-1e4: the loss keeps its fraction, which log-sum-exp as one fp32 number would round to 1e-3."""
    group = dist.group.WORLD
    t, r = group.size(), group.rank()
    for offset in (1e4, -1e4):
        logits = torch.linspace(0.0, 1.0, 12).repeat(4, 1) + offset
        logits[3] = torch.linspace(-1e4, 1e4, 12)
        targets = torch.tensor([0, 5, 11, 2])
        want, want_grad = plain(logits, targets, torch.ones(4))
        own = logits.chunk(t, -1)[r].clone().requires_grad_()
        loss = mpu.vocab_parallel_cross_entropy(own, targets, group)
        loss.sum().backward()
        assert_close(loss, want, atol=1e-6, rtol=1e-6)
        assert_close(own.grad, want_grad.chunk(t, -1)[r], atol=1e-6, rtol=1e-6)
    # -inf is a logit like others as long as one of the row is finite, also where all of a rank's are -inf.
    logits = torch.full((1, 12), -torch.inf)
    logits[0, 3] = -5e3
    own = logits.chunk(t, -1)[r].clone().requires_grad_()
    loss = mpu.vocab_parallel_cross_entropy(own, torch.tensor([3]), group)
    loss.sum().backward()
    assert loss.item() == 0.0 and not own.grad.any()
    logits[0, 3] = torch.nan
    own = logits.chunk(t, -1)[r].clone()
    assert mpu.vocab_parallel_cross_entropy(own, torch.tensor([3]), group).isnan().all(), "NaN must not get lost"


def chunk_case():
    """The result does not depend on how many tokens are worked off at a time, to the last bit."""
    group = dist.group.WORLD
    own = torch.randn(7, 12 // group.size(), generator=torch.Generator().manual_seed(group.rank()))
    targets = torch.arange(7)
    found = []
    for numel in (1, 30, 1 << 20):
        cross_entropy.CHUNK_NUMEL_CPU = numel
        leaf = own.clone().requires_grad_()
        loss = mpu.vocab_parallel_cross_entropy(leaf, targets, group)
        loss.sum().backward()
        found.append((loss.detach(), leaf.grad))
    for loss, grad in found[1:]:
        assert torch.equal(loss, found[0][0]) and torch.equal(grad, found[0][1])


def error_case():
    group = dist.group.WORLD
    t = group.size()
    logits = shared(2, 3, 12).chunk(t, -1)[group.rank()]
    with pytest.raises(ValueError, match=r"need targets \[2, 3\], got \[3, 2\]"):
        mpu.vocab_parallel_cross_entropy(logits, torch.zeros(3, 2, dtype=torch.int64), group)
    with pytest.raises(ValueError, match="logits are torch.int32, and must be of a float dtype"):
        mpu.vocab_parallel_cross_entropy(logits.int(), torch.zeros(2, 3, dtype=torch.int64), group)
    with pytest.raises(ValueError, match=f"vocab_size=13 but {t} ranks x {12 // t} columns make 12"):
        mpu.vocab_parallel_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64), group, 13)
    for bad in (11, -1):
        with pytest.raises(ValueError, match=f"token id {bad} is outside of the vocabulary: 11 ids"):
            mpu.vocab_parallel_cross_entropy(logits, torch.full((2, 3), bad), group, 11)
    targets = torch.tensor([[0, 5, 10], [7, 2, 9]])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        got, want = (mpu.vocab_parallel_cross_entropy(logits, x, group, 11) for x in (targets.to(dtype), targets))
        assert torch.equal(got, want), dtype
    leaf = logits.clone().requires_grad_()
    loss = mpu.vocab_parallel_cross_entropy(leaf, torch.zeros(2, 3, dtype=torch.int32), group).sum()
    (want,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    assert torch.equal(grad, want), "a graph that nobody goes through costs nothing"
    for again in (lambda: grad.sum().backward(), lambda: torch.autograd.grad(grad.square().sum(), leaf)):
        with pytest.raises(RuntimeError, match="vocab_parallel_cross_entropy is differentiated a second time"):
            again()


def all_cases():
    parity_case()
    extreme_case()
    chunk_case()
    error_case()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss_and_gradient_equal_cross_entropy_of_the_whole_vocabulary(world_size):
    run_ranks(world_size, all_cases)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write: operands and results, each once, and of indexing what is picked."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            unread = name.startswith("new_") or name.endswith("_like")  # but for the shape
            values = [] if unread else [*args[name == "copy_" :], *(v for k, v in kwargs.items() if k != "out")]
            read = list(tensors_in(values))
            touched = [*read, *tensors_in([out])]
            picked = min(x.numel() for x in touched) if name in ("gather", "index", "index_put_") else None
            self.nbytes += sum((picked or x.numel()) * x.element_size() for x in touched)
        return out


@pytest.mark.parametrize(("dtype", "forward", "backward"), [(torch.bfloat16, 20, 20), (torch.float32, 24, 24)])
def test_a_device_moves_as_many_bytes_per_logit_as_are_written_here(one_rank, dtype, forward, backward):
    """Of 16 bits: largest 2, less it in fp32 6, exp 8, sum 4; backward the same without sum and largest, times a factor 6."""
    logits = torch.empty(3000, 50304, dtype=dtype, device="meta", requires_grad=True)  # three chunks
    targets = torch.empty(3000, dtype=torch.int64, device="meta")
    with Traffic() as traffic:
        loss = mpu.vocab_parallel_cross_entropy(logits, targets, vocab_size=50257)
    assert traffic.nbytes / logits.numel() == pytest.approx(forward, abs=0.05)
    with Traffic() as traffic:
        loss.backward(torch.empty_like(loss))
    assert traffic.nbytes / logits.numel() == pytest.approx(backward, abs=0.05)
