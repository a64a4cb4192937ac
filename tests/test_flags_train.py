"""Every flag that decides what a run learns, off its default, in the real job against a loop of plain PyTorch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.arguments import load_config
from megazero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from megazero.data.build import build_tokenizer_from
from megazero.data.indexed_dataset import IndexedDataset
from megazero.job import build_job, setup_distributed
from pretrain_gpt2 import forward_step, make_model
from tests.model.plain_gpt2 import PlainGPT2
from tests.ranks import run_ranks
from tests.tiny import logged, run_job

STEPS, LAYERS, LENGTH, MICRO, GLOBAL_BATCH = 8, 3, 20, 2, 8
SEEDS = (77, 78)
STD, NORM_EPS, RATE, LEAST_RATE, WARMUP, DECAY_ITERS = 0.3, 0.5, 3e-2, 4e-3, 2, 4
# With so large an eps an update grows with its gradient: else clipping, one factor for all elements, would hardly show.
CLIP, BETAS, EPS, DECAY = 2.0, (0.6, 0.8), 1e-2, 0.5
HIDDEN, ATTENTION = 0.25, 0.4  # dropout, where there is any
MODEL = f"""--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH}
    --max-position-embeddings {LENGTH} --init-method-std {STD} --layernorm-epsilon {NORM_EPS} --peak-tflops 1""".split()
FLAGS = f"""--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --eval-iters 0 --log-interval 1
    --batch-size {MICRO} --global-batch-size {GLOBAL_BATCH} --clip-grad {CLIP} --weight-decay {DECAY}
    --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS} --lr {RATE} --min-lr {LEAST_RATE}
    --lr-decay-style cosine --lr-decay-iters {DECAY_ITERS} --warmup {WARMUP / DECAY_ITERS} --train-iters {STEPS}""".split()


Learned = tuple[list[float], list[float], dict[str, Tensor]]  # loss and gradient norm of each step; weights at the end


def train(corpus: list[str], save: Path, ranks: int, *more: str) -> Learned:
    """By pretrain_gpt2.py, which saves at its end."""
    done = run_job([*MODEL, *FLAGS, *corpus, "--save", str(save), *more], ranks)
    assert done.returncode == 0, done.stdout
    lines = logged(save)
    assert [line["lr"] for line in lines] == pytest.approx([plain_rate(step) for step in range(len(lines))])
    weights = get_fp32_state_dict_from_zero_checkpoint(save)
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines], dict(weights)


def plain_order(corpus: list[str], seed: int) -> Tensor:
    """[samples, s + 1] tokens of one epoch, as docs/data.md says: documents shuffled, laid end to end, cut, samples shuffled."""
    source, random = IndexedDataset(corpus[1]), np.random.RandomState(seed)
    documents = np.arange(len(source) * 8 // 10)  # --split 8,1,1
    random.shuffle(documents)
    stream = torch.from_numpy(np.concatenate([source.get(i).astype(np.int64) for i in documents]))
    samples = np.arange((len(stream) - 1) // LENGTH)
    random.shuffle(samples)
    assert len(samples) >= STEPS * GLOBAL_BATCH
    return torch.stack([stream[i * LENGTH : (i + 1) * LENGTH + 1] for i in samples.tolist()])


def plain_rate(step: int) -> float:
    """The learning rate of the step behind `step` others."""
    if step <= WARMUP:
        return RATE * step / WARMUP
    done = min(step - WARMUP, DECAY_ITERS) / DECAY_ITERS
    return max(LEAST_RATE, RATE * (1 + math.cos(math.pi * done)) / 2)


def plain_model(start: dict[str, Tensor], more: Sequence[str] = ()) -> PlainGPT2:
    config = load_config([*MODEL, *more]).model
    model = PlainGPT2(replace(config, vocab_size=len(start["word_embeddings.weight"])))
    model.load_state_dict(start)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = NORM_EPS
    return model


FULL = (GLOBAL_BATCH,) * STEPS  # sequences of each step


def plain_training(
    start: dict[str, Tensor], data: Tensor, eod: int, batches: Sequence[int] = FULL, more: Sequence[str] = ()
) -> Learned:
    """By torch alone; `more` are flags of the model."""
    model = plain_model(start, more)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return run_plain(model, data, eod, batches, [torch.optim.AdamW(groups, betas=BETAS, eps=EPS)])


def run_plain(
    model: nn.Module,
    data: Tensor,
    eod: int,
    batches: Sequence[int],
    optimizers: list[torch.optim.Optimizer],
    before_step: Callable[[], None] = lambda: None,
) -> Learned:
    losses, norms, rest = [], [], iter(data[: sum(batches)].split(MICRO))
    for step, batch in enumerate(batches):
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = plain_rate(step)
        model.zero_grad()
        micros = [next(rest) for _ in range(batch // MICRO)]
        total = torch.zeros(())
        for text in micros:
            targets = text[:, 1:].masked_fill(text[:, :-1] == eod, -100)  # what follows a document is not predicted
            total = total + F.cross_entropy(model(text[:, :-1]).transpose(1, 2), targets) / len(micros)
        total.backward()
        losses.append(total.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        before_step()
        for optimizer in optimizers:
            optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def starts(corpus, tmp_path_factory) -> dict[int, dict[str, Tensor]]:
    """The weights that runs of two seeds begin with: the first step's rate is 0."""
    found = {}
    for seed in SEEDS:
        *_, found[seed] = train(
            corpus, tmp_path_factory.mktemp("start"), 1, "--seed", str(seed), "--exit-interval", "1"
        )
    return found


CASES = [(77, 1, ""), (77, 2, "--zero-stage 0"), (78, 2, "--zero-stage 2"), (77, 2, "--model-parallel-size 2")]


@pytest.mark.parametrize("seed, ranks, more", CASES)
def test_the_job_does_what_each_flag_says(corpus, starts, tmp_path, seed, ranks, more):
    eod = build_tokenizer_from(load_config(corpus).data).eod
    want = plain_training(starts[seed], plain_order(corpus, seed), eod)
    assert min(want[1]) < CLIP < max(want[1])
    got = train(corpus, tmp_path, ranks, "--seed", str(seed), *more.split())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_batch_that_grows_trains_as_in_plain_torch_and_goes_on_growing_on_other_ranks(corpus, starts, tmp_path):
    """To 8 sequences at the 10th sample, in the middle of a step, and to 12 at the 20th; the rates are of iterations."""
    eod = build_tokenizer_from(load_config(corpus).data).eod
    want = plain_training(starts[77], plain_order(corpus, 77), eod, batches=(4, 4, 4, 8, 12, 12, 12, 12))
    ramp = ["--seed", "77", "--load", str(tmp_path), "--num-workers", "1"]
    ramp += "--global-batch-size 12 --rampup-batch-size 4 4 20".split()
    first = [*MODEL, *FLAGS, *corpus, "--save", str(tmp_path), *ramp, "--exit-interval", "3", "--zero-stage", "2"]
    done = run_job(first, 2)
    assert "global batch size 4 from iteration 1 on" in done.stdout, done.stdout
    assert f"{STEPS} iterations in all, {(4 + 4 + 4 + 8 + 12 * 4) * LENGTH:,} tokens, " in done.stdout
    got = train(corpus, tmp_path, 1, *ramp)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    saved = json.loads((tmp_path / f"global_step{STEPS}" / "index.json").read_text())["client_state"]
    assert saved["consumed_samples"] == saved["train_samples"] == 4 + 4 + 4 + 8 + 12 * 4


def plain_muon(start: dict[str, Tensor], data: Tensor, eod: int, momentum: float, more: Sequence[str] = ()) -> Learned:
    """By torch's Muon for the blocks' matrices, with Q, K and V apart, gate and up too, and its AdamW for the rest."""
    model, parts = plain_model(start, more), []
    stacked = {"query_key_value": 3, "key_value": 2, "dense_h_to_4h": 1 + ("--swiglu" in more)}
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "layers." in name:
            views = weight.data.chunk(stacked.get(name.split(".")[-2], 1))
            parts.append((weight, [nn.Parameter(view) for view in views]))  # the same memory
    matrices = {weight for weight, _ in parts}
    rest = [p for p in model.parameters() if p not in matrices]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    views = [view for _, of_weight in parts for view in of_weight]
    muon = torch.optim.Muon(views, momentum=momentum, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")

    def hand_over() -> None:
        for weight, of_weight in parts:
            for view, gradient in zip(of_weight, weight.grad.chunk(len(of_weight)), strict=True):
                view.grad = gradient

    return run_plain(model, data, eod, FULL, [muon, torch.optim.AdamW(groups, betas=BETAS, eps=EPS)], hand_over)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("more", ["--zero-stage 2", "--model-parallel-size 2 --bf16"])
def test_the_job_trains_with_muon(corpus, starts, tmp_path, more):
    eod = build_tokenizer_from(load_config(corpus).data).eod
    want = plain_muon(starts[77], plain_order(corpus, 77), eod, 0.8)
    got = train(corpus, tmp_path, 2, "--seed", "77", "--optimizer", "muon", "--muon-momentum", "0.8", *more.split())
    # Directions are rounded to bf16, which makes more of a last bit.
    torch.testing.assert_close(got[:2], want[:2], rtol=1e-2, atol=0)
    torch.testing.assert_close(got[2], want[2], rtol=0, atol=0.01)


LLAMA = """--normalization RMSNorm --swiglu --position-embedding-type rope --rotary-base 100 --group-query-attention
    --num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights""".split()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_llama_trains_as_in_plain_torch_and_goes_on_under_another_stage_and_split(corpus, tmp_path, optimizer):
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    llama = [*LLAMA, "--seed", "77", "--optimizer", optimizer, "--muon-momentum", "0.8"]
    *_, start = train(corpus, tmp_path / "start", 1, *llama, "--exit-interval", "1")
    data, eod = plain_order(corpus, 77), build_tokenizer_from(load_config(corpus).data).eod
    if optimizer == "muon":
        want = plain_muon(start, data, eod, 0.8, more=LLAMA)
    else:
        want = plain_training(start, data, eod, more=LLAMA)
    save = tmp_path / "run"
    more = [*corpus, "--save", str(save), *llama, "--zero-stage", "3", "--exit-interval", "4"]
    assert run_job([*MODEL, *FLAGS, *more], 2).returncode == 0
    split = "--zero-stage 1 --model-parallel-size 2 --sequence-parallel --recompute selective".split()
    got = train(corpus, save, 2, *llama, *split, "--load", str(save))
    if optimizer == "adamw":
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:  # directions are rounded to bf16
        torch.testing.assert_close(got[:2], want[:2], rtol=1e-2, atol=0)
        torch.testing.assert_close(got[2], want[2], rtol=0, atol=0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_begin_as_wide_as_init_method_std_says(starts, seed):
    """And by 1 / sqrt(2 L) narrower where they add to the residual stream; another seed's are others."""
    other = starts[sum(SEEDS) - seed]
    for name, x in starts[seed].items():
        if x.dim() < 2:
            assert torch.all(x == (1 if name.endswith("layernorm.weight") else 0)), name
            continue
        is_residual = name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight"))
        std = STD / math.sqrt(2 * LAYERS) if is_residual else STD
        assert x.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * x.numel())), name
        assert not torch.any(x == other[name]), name


def dropped(model_parallel_size: int, seed: int) -> list[np.ndarray]:
    """Of two passes in turn: which embeddings are dropped, [s, b, h]; attention to ones, [s, b, h/t]; the block's output."""
    flags = f"--hidden-dropout {HIDDEN} --attention-dropout {ATTENTION} --seed {seed} --batch-size 16 --vocab-size 131"
    config = load_config([*MODEL, *flags.split(), "--model-parallel-size", str(model_parallel_size)], 2)
    tokenizer: Any = SimpleNamespace(eod=0)
    job = build_job(config, setup_distributed(config), tokenizer, make_model, forward_step)
    first, second, _ = job.engine.module.transformer.layers
    seen: list[np.ndarray] = []
    first.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[0] == 0).numpy()))
    first.attention.query_key_value.register_forward_hook(lambda _, inputs, output: torch.ones_like(output))
    first.attention.dense.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numpy()))
    second.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numpy()))
    with torch.no_grad():
        for _ in range(2):
            forward_step(job, iter([{"text": torch.full((16, LENGTH + 1), 5)}]))
    job.engine.destroy()
    mpu.destroy_model_parallel()
    return seen


def dropout_case(model_parallel_size: int) -> list[list[np.ndarray]]:
    return [dropped(model_parallel_size, seed) for seed in (SEEDS[0], *SEEDS)]


@pytest.mark.parametrize("model_parallel_size", [1, 2])
def test_only_what_tensor_parallel_ranks_hold_alike_is_dropped_alike(model_parallel_size):
    """Not what data-parallel ranks hold, nor heads. Another seed or pass drops others, the same seed the same."""
    ranks = run_ranks(2, dropout_case, model_parallel_size)
    for seen, again, other in ranks:
        assert seen[0].mean() == pytest.approx(HIDDEN, abs=0.02)
        kept = np.isclose(seen[1][0], 1 / (1 - ATTENTION))  # by the first token, which attends to itself alone
        assert np.all(kept | (seen[1][0] == 0)) and 0 < kept.mean() < 1
        assert [np.array_equal(x, y) for x, y in zip(seen, again, strict=True)] == [True] * 6
        assert [np.array_equal(x, y) for x, y in zip(seen, other, strict=True)] == [False] * 6
        assert [np.array_equal(x, y) for x, y in zip(seen[:3], seen[3:], strict=True)] == [False] * 3
    for mine, others in zip(*ranks, strict=True):
        equal = [np.array_equal(x, y) for x, y in zip(mine, others, strict=True)]
        assert equal == ([True, False, True] if model_parallel_size == 2 else [False] * 3) * 2
