"""Activation memory: every way to spend less of it gives the same training, and keeps as many bytes as its formula says.

The formulas are those of arXiv:2205.05198: a block keeps s b h (10 + 24 / t) + 5 a s^2 b / t bytes in 16 bits; all of it over t
with sequence parallelism; not the second term with selective recomputation; and 2 s b h, its input, with full recomputation.
"""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from megazero import activation_checkpointing, mpu
from megazero.model.block import Transformer
from megazero.model.gpt2 import GPT2Model
from megazero.model.recompute import saved_tensors
from megazero.model.state_dict import merge_full, slice_full
from tests.model.plain_gpt2 import PlainGPT2, random_tokens, randomize
from tests.model.test_gpt2 import VOCAB, small_config
from tests.ranks import run_ranks
from tests.zero.models import full_grad, make_engine

CONTIGUOUS = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4}
KEEPS = {
    "plain": {},
    "partitioned": {"partition_activations": True},
    "contiguous": CONTIGUOUS,
    "in cpu": {"checkpoint_in_cpu": True},
    "partitioned in cpu": {"partition_activations": True, "checkpoint_in_cpu": True},
    "contiguous in cpu": {**CONTIGUOUS, "checkpoint_in_cpu": True},
}
MODES = ("none", "selective", "full")
STAGES = (0, 2, 3)
ALL = list(product(KEEPS, MODES, (False, True), STAGES))
# Every pair of values, but for (keep, mode, sequence parallel) alike.
THINNED = [
    (keep, mode, (i + j) % 2 == 0, STAGES[(i + j // 2) % 3])
    for (i, keep), (j, mode) in product(enumerate(KEEPS), enumerate(MODES))
]
Combination = tuple[str, str, bool, int]


# ---- the same training


def gradients_case(model_parallel_size: int, combinations: list[Combination]) -> None:
    """Losses and gradients of two micro-batches, on every data-parallel rank, equal those of a plain GPT-2."""
    groups = mpu.initialize_model_parallel(model_parallel_size)
    shape = {"num_layers": 3, "max_position_embeddings": 8, "hidden_size": 16, "intermediate_size": 40}
    plain = PlainGPT2(small_config(**shape))
    randomize(plain)
    tokens = random_tokens(2 * groups.data_parallel_size * 2, 9, VOCAB).view(2, groups.data_parallel_size, 2, 9)
    plain.loss(tokens[..., :-1].flatten(0, 2), tokens[..., 1:].flatten(0, 2)).mean().backward()
    for keep, mode, sequence_parallel, stage in combinations:
        activation_checkpointing.configure(None, **KEEPS[keep])
        model = GPT2Model(small_config(**shape, recompute=mode, sequence_parallel=sequence_parallel))
        full = slice_full(plain.state_dict(), model, groups.model_parallel_rank, model_parallel_size)
        model.load_state_dict(full)
        mpu.model_parallel_cuda_manual_seed(1)
        cuts, names = mpu.partitions(model), [name for name, _ in model.named_parameters()]
        engine = make_engine(model, stage, gradient_accumulation_steps=2)
        for text in tokens[:, groups.data_parallel_rank]:
            losses = engine(text[:, :-1], targets=text[:, 1:])
            with torch.no_grad():
                assert_close(losses, plain.loss(text[:, :-1], text[:, 1:]), atol=1e-5, rtol=1e-5)
            engine.backward(losses.mean())
            assert activation_checkpointing.default.storage.kept_bytes == 0
            if not engine.is_gradient_accumulation_boundary():
                engine.step()  # counts the micro-batch
        got = merge_full({name: full_grad(engine, name) for name in names}, cuts, groups.model)
        for name, parameter in plain.named_parameters():
            what = f"{name}: {keep}, {mode}, sequence parallel {sequence_parallel}, stage {stage}"
            assert_close(got[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=lambda m, what=what: f"{what}: {m}")
        engine.destroy()
    activation_checkpointing.configure(None)


def test_every_pair_of_ways_trains_alike():
    run_ranks(4, gradients_case, 2, THINNED)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "model_parallel_size"), [(2, 1), (4, 2), (4, 4), (8, 4)])
def test_every_combination_trains_alike(world_size, model_parallel_size):
    run_ranks(world_size, gradients_case, model_parallel_size, ALL, timeout_s=280)


# ---- the bytes of the formulas

# Multiples of 256 bytes everywhere, so that no rounding is in the numbers; and at least two heads on each rank, as torch copies
# Q, K and V of several heads apart and keeps the memory of all three for one.
S, B, H, A = 64, 2, 32, 8
LAYERS = 3


def paper_bytes(t: int, sequence_parallel: bool, mode: str, partitioned: bool = False) -> float:
    """Of a block, 16-bit, table 2 of arXiv:2205.05198 and sec. 5; full recomputation keeps the block's input."""
    n, scores = S * B * H, 5 * A * S * S * B / t
    if mode == "full":
        return 2 * n / (t if sequence_parallel or partitioned else 1)
    return n * (34 / t if sequence_parallel else 10 + 24 / t) + (scores if mode == "none" else 0)


def block_bytes(
    t: int, sequence_parallel: bool, mode: str, partitioned: bool, has_fused_attention: bool, dtype: torch.dtype
) -> float:
    """`paper_bytes` in this dtype, and what differs here on a CPU."""
    e, n, cut = dtype.itemsize, S * B * H, t if sequence_parallel else 1
    nbytes = paper_bytes(t, sequence_parallel, mode, partitioned)
    if mode == "full":
        return nbytes * e / 2
    scores = 5 * A * S * S * B / t if mode == "none" else 0
    masks = 2 * n / cut  # a byte for each element of two dropouts, in the paper
    nbytes = (nbytes - scores - masks) * e / 2 + masks * e  # dropout on a CPU keeps a factor in the activations' dtype
    nbytes += 4 * S * B * e / cut  # mean and deviation of the norms, which the paper leaves out
    if mode == "none" and has_fused_attention:
        return nbytes + 4 * A * S * B / t  # instead of scores, a row's log-sum of exponentials in fp32
    if mode == "none":
        # Without a fused kernel softmax, mask and their product are computed and kept in fp32, and so are Q, K and V.
        return nbytes + 3 * 4 * A * S * S * B / t + 3 * (4 - e) * n / t
    return nbytes


def bytes_case(combinations):
    t = torch.distributed.get_world_size()
    mpu.initialize_model_parallel(t)
    mpu.model_parallel_cuda_manual_seed(1)
    for keep, mode, sequence_parallel, attention_dropout, dtype in combinations:
        activation_checkpointing.configure(None, **KEEPS[keep])
        config = small_config(
            num_layers=LAYERS,
            hidden_size=H,
            num_attention_heads=A,
            hidden_dropout=0.1,
            attention_dropout=attention_dropout,
            recompute=mode,
            sequence_parallel=sequence_parallel,
        )
        model = Transformer(config, dtype=dtype)
        x = torch.randn(S // t if sequence_parallel else S, B, H, dtype=dtype, requires_grad=True)
        with saved_tensors(model.parameters()) as saved:
            x = model.run_blocks(x)
        got = saved.nbytes + activation_checkpointing.default.storage.kept_bytes
        partitioned = KEEPS[keep].get("partition_activations", False)
        want = LAYERS * block_bytes(t, sequence_parallel, mode, partitioned, attention_dropout == 0.0, dtype)
        assert got == want, (keep, mode, sequence_parallel, attention_dropout, dtype, got, want)
        del saved
        x.sum().backward()
        assert activation_checkpointing.default.storage.kept_bytes == 0
    activation_checkpointing.configure(None)


COUNTED = list(product(KEEPS, MODES, (False, True), (0.0, 0.1), (torch.bfloat16, torch.float32)))


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_block_keeps_the_bytes_of_its_formula(world_size):
    run_ranks(world_size, bytes_case, COUNTED if world_size == 4 else COUNTED[:: 1 if world_size == 1 else 2])


def test_the_papers_numbers():
    n, scores = S * B * H, 5 * A * S * S * B
    assert paper_bytes(1, False, "none") == 34 * n + scores
    assert paper_bytes(8, True, "none") == (34 * n + scores) / 8
    assert paper_bytes(8, False, "selective") == n * (10 + 24 / 8) and paper_bytes(8, True, "selective") == 34 * n / 8
    assert paper_bytes(8, False, "full") == 2 * n and paper_bytes(8, False, "full", True) == 2 * n / 8
