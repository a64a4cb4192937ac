"""--calculate-per-token-loss against one plain PyTorch step over the whole global batch, however that is cut."""

from __future__ import annotations

import json
import os
import resource
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu
from megazero.arguments import load_config
from megazero.job import Job, build_job, setup_distributed
from megazero.job_batches import batches, take_counted
from megazero.model.state_dict import merge_full
from megazero.training import evaluate, train_step
from pretrain_gpt2 import count_tokens, forward_step, make_model
from tests.model.plain_gpt2 import PlainGPT2, decay_groups, random_tokens
from tests.ranks import run_ranks, run_script
from tests.test_zero_job import end
from tests.tiny import TINY_MODEL, make_corpus, run_job

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY, EOD = 3, 12, 10, 131, 0
DECAY, EPS, RATE = 0.1, 1e-2, 1e-2  # with so large an eps updates grow with gradients, and hide no factor
JOB = f"""--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --init-method-std 0.2 --attention-dropout 0 --hidden-dropout 0
    --num-workers 0 --peak-tflops 1 --global-batch-size {GLOBAL_BATCH} --weight-decay {DECAY} --adam-eps {EPS} --clip-grad 0
    --lr {RATE} --lr-decay-style constant --warmup 0 --train-iters {STEPS} --eval-iters 1""".split()
ON = "--calculate-per-token-loss"


def samples() -> list[dict[str, Tensor]]:
    """Of the first samples of a global batch most tokens count, of the last ones few, and of some none."""
    texts = random_tokens(STEPS * GLOBAL_BATCH, LENGTH + 1, VOCABULARY - 1) + 1
    for place, text in enumerate(texts):
        ends = place % GLOBAL_BATCH * (LENGTH + 1) // (GLOBAL_BATCH - 2)
        text[:ends] = EOD
    return [{"text": text} for text in texts]


def make_job(arguments: list[str]) -> Job:
    config = load_config([*JOB, *arguments], torch.distributed.get_world_size())
    config.check_world(torch.distributed.get_world_size())
    tokenizer: Any = SimpleNamespace(eod=EOD)
    return build_job(config, setup_distributed(config), tokenizer, make_model, forward_step, count_tokens)


def full_weights(job: Job) -> dict[str, Tensor]:
    state = job.engine.module_state_dict()
    names = [name for name, _ in job.engine.module.named_parameters()]
    weights = {name: state[name].float() for name in names}
    return merge_full(weights, mpu.partitions(job.engine.module), job.groups.model)


def plain_loss(model: PlainGPT2, data: list[dict[str, Tensor]]) -> Tensor:
    """The mean over all counted tokens."""
    text = torch.stack([sample["text"] for sample in data])
    tokens, targets = text[:, :-1], text[:, 1:].masked_fill(text[:, :-1] == EOD, -100)
    return F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="sum") / (targets != -100).sum()


def plain_training(start: dict[str, Tensor], config: Any) -> tuple[list[float], list[float], dict[str, Tensor], float]:
    """Losses and gradient norms of the steps, the weights after them, and an evaluation's loss with these: by torch alone."""
    model = PlainGPT2(config)
    model.load_state_dict(start)
    optimizer, data = torch.optim.AdamW(decay_groups(model, DECAY), lr=RATE, eps=EPS), samples()
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = plain_loss(model, data[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
    with torch.no_grad():
        loss = plain_loss(model, data[:GLOBAL_BATCH])
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}, loss.item()


def case(arguments: list[str], batch_size: int, rtol: float = 1e-4, atol: float = 1e-5) -> tuple[list[str], int]:
    """What of the job is not as in plain PyTorch, and the steps that it has skipped."""
    job = make_job([*arguments, "--batch-size", str(batch_size)])
    flags, size = job.config.training, job.groups.data_parallel_size
    assert flags.eval_iters * job.config.eval_batch_size * size == GLOBAL_BATCH
    want = plain_training(full_weights(job), job.config.model)
    iterator = batches(job, samples(), "training", batch_size, 0, job.accumulation_steps)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(train_step(job, iterator)[0])
        norms.append(job.engine.get_global_grad_norm())
    got = losses, norms, full_weights(job), evaluate(job, samples())
    others = []
    for part, ours, theirs in zip(PARTS, got, want, strict=True):
        try:
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        except AssertionError as error:
            others.append(f"{part}: {error}")
    return others, job.engine.skipped_steps


def cut(ranks: int, batch_size: int, *arguments: str) -> list[tuple[list[str], int]]:
    """Of every rank, with evaluations of a global batch in two."""
    size = ranks // (2 if "--model-parallel-size" in arguments else 1)
    each = str(GLOBAL_BATCH // size // 2)
    return run_ranks(ranks, case, [*arguments, "--eval-iters", "2", "--eval-batch-size", each], batch_size)


PARTS = ("losses", "gradient norms", "weights", "evaluation")
CUTS = [(1, 12), (1, 4), (1, 1), (2, 6), (2, 3), (3, 4), (3, 1)]  # ranks, and sequences in a micro-batch
FEW_CUTS = [(1, 12), (1, 1), (2, 3), (3, 4)]  # the others with -m slow


@pytest.mark.parametrize("stage", ["0", "2"])
@pytest.mark.parametrize("ranks, batch_size", CUTS)
def test_every_cut_of_a_global_batch_trains_as_one_plain_step_over_all_its_tokens(ranks, batch_size, stage):
    assert cut(ranks, batch_size, ON, "--zero-stage", stage) == [([], 0)] * ranks


@pytest.mark.parametrize(
    "ranks, batch_size", [cut if cut in FEW_CUTS else pytest.param(*cut, marks=pytest.mark.slow) for cut in CUTS]
)
def test_without_the_flag_each_cut_trains_otherwise(ranks, batch_size):
    """But for one micro-batch of everything."""
    for others, _ in cut(ranks, batch_size):
        is_whole = (ranks, batch_size) == (1, 12)
        assert [text.partition(":")[0] for text in others] == [*PARTS][3 if is_whole else 0 :], others


@pytest.mark.parametrize(
    "arguments",
    [
        "--zero-stage 1",
        "--zero-stage 3",
        "--zero-stage 1 --vocab-chunk-size 16 --sequence-chunk-size 4",
        "--zero-stage 2 --model-parallel-size 2 --sequence-parallel",
        "--zero-stage 0 --model-parallel-size 2",
    ],
)
def test_so_it_does_whatever_else_is_asked_for(arguments):
    assert cut(2, 2, ON, *arguments.split()) == [([], 0)] * 2


def test_split_layers_on_two_data_parallel_ranks_train_as_one_plain_step():
    assert cut(4, 2, ON, "--zero-stage", "2", "--model-parallel-size", "2") == [([], 0)] * 4


def fp16_case() -> None:
    """At the first scale, of 65536: the gradient of a sum over tokens would be too large for 16 bits."""
    others, skipped = case([ON, "--fp16", "--eval-iters", "2", "--eval-batch-size", "3"], 3, rtol=2e-2, atol=2e-3)
    assert (others, skipped) == ([], 0)


def test_fp16_skips_no_step():
    run_ranks(2, fp16_case)


def bits_case() -> None:
    """Where all tokens count, the flag changes no bit."""
    runs = []
    for on in ([], [ON]):
        job = make_job(["--no-eod-mask-loss", "--batch-size", "2", *on])
        iterator = batches(job, samples(), "training", 2, 0, job.accumulation_steps)
        runs.append(([train_step(job, iterator)[0] for _ in range(STEPS)], full_weights(job), evaluate(job, samples())))
        end(job)
    assert runs[0][0] == runs[1][0] and runs[0][2] == pytest.approx(runs[1][2], rel=1e-6)
    assert all(torch.equal(x, runs[1][1][name]) for name, x in runs[0][1].items())


def test_where_all_tokens_count_the_flag_changes_no_bit_of_training():
    run_ranks(3, bits_case)


def no_token_case() -> None:
    job = make_job([ON, "--batch-size", "2", "--weight-decay", "0"])
    before = full_weights(job)
    iterator = batches(job, [{"text": torch.full((LENGTH + 1,), EOD)}] * GLOBAL_BATCH, "training", 2, 0, lambda _: 3)
    assert train_step(job, iterator)[0] == 0.0 and job.engine.get_global_grad_norm() == 0.0
    assert all(torch.equal(x, before[name]) for name, x in full_weights(job).items())
    assert evaluate(job, [{"text": torch.full((LENGTH + 1,), EOD)}] * 3 * GLOBAL_BATCH) == 0.0


def test_a_step_in_which_no_token_counts_changes_nothing():
    run_ranks(2, no_token_case)


def test_a_step_may_have_more_micro_batches_than_a_process_may_have_files():
    """A worker of the loader shares each one as an open file."""
    groups = SimpleNamespace(model_parallel_rank=0, data_parallel_rank=0, data_parallel_size=1)
    job: Any = SimpleNamespace(
        config=load_config(["--num-workers", "1"]),
        groups=groups,
        device=torch.device("cpu"),
        tokenizer=SimpleNamespace(eod=EOD),
        timers=lambda _: nullcontext(),
        count_tokens=count_tokens,
    )
    iterator = batches(job, samples() * 6, "training", 1)
    first, _ = take_counted(job, iterator, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    try:
        taken, counts = take_counted(job, iterator, 150)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    texts = [batch["text"] for batch in (*first, *taken)]
    assert torch.equal(torch.cat(texts), torch.stack([sample["text"] for sample in (samples() * 6)[:151]]))
    assert counts == [int((text[0, :-1] != EOD).sum()) for text in texts[1:]]


def test_a_run_that_is_resumed_equals_the_whole_run_bit_for_bit(tmp_path):
    corpus = make_corpus(tmp_path / "corpus")

    def run(save: Path, *more: str) -> str:
        where = ["--save", str(save), "--load", str(save), "--train-iters", "6", "--log-interval", "1"]
        dropout = "--attention-dropout 0.2 --hidden-dropout 0.2 --global-batch-size 12 --eval-iters 1".split()
        done = run_job([*TINY_MODEL, *corpus, *where, *dropout, "--eval-interval", "2", "--zero-stage", "2", *more], 2)
        assert done.returncode == 0, done.stdout
        return done.stdout

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, ON)
    run(cut, ON, "--exit-interval", "3")
    assert "continuing after iteration 3" in run(cut, ON)
    lines = [[json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()] for save in (whole, cut)]
    ours, theirs = ([(x["iteration"], x["section"], x["loss"]) for x in each] for each in lines)
    assert ours == theirs and len(ours) == 6 + 3 + 1
    files = sorted(path.name for path in (whole / "global_step6").glob("rank_*.safetensors"))
    assert files
    assert all((whole / "global_step6" / f).read_bytes() == (cut / "global_step6" / f).read_bytes() for f in files)
    said = run(cut, "--train-iters", "7")
    assert f"{ON}: not as in the run that saved the checkpoint; losses from here on" in said


OWN_FORWARD_STEP = """
import pretrain_gpt2
from megazero.entry import run_script
from megazero.training import pretrain

def forward_step(job, iterator):
    return 2 * pretrain_gpt2.forward_step(job, iterator)

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, pretrain_gpt2.make_model, forward_step))
"""


def test_a_forward_step_of_ones_own_without_its_count_is_refused(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN_FORWARD_STEP)
    arguments = [*TINY_MODEL, *make_corpus(tmp_path / "corpus"), "--train-iters", "2"]
    done = run_script(1, str(script), [*arguments, ON])
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert "error: --calculate-per-token-loss weighs" in done.stdout and "pretrain(..., count_tokens=)" in done.stdout
    assert run_script(1, str(script), arguments).returncode == 0
