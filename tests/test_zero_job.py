"""The GPT-2 job under ZeRO: every stage trains the same model bit for bit, resumes exactly, and loads what another one saved."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megazero import comm, mpu, training
from megazero.arguments import load_config
from megazero.config import Config
from megazero.data.build import build_tokenizer_from
from megazero.job import Job, build_job, setup_distributed, with_vocabulary
from megazero.job_batches import batches, datasets
from megazero.job_checkpoints import has_something_to_load, load, save
from megazero.logging import table
from megazero.model.gpt2 import GPT2Model
from megazero.plan import Limits, Setup, plan_job
from megazero.reporting import describe_memory, describe_start
from megazero.training import train_step
from megazero.zero import ReleasedParameter
from megazero.zero.memory import memory_rows
from pretrain_gpt2 import forward_step, make_model
from tests.ranks import run_ranks
from tests.tiny import ROOT, TINY_MODEL, logged, run_job

STAGES = (0, 1, 2, 3)
Weights = dict[str, torch.Tensor]


def start(flags: list[str], model: list[str] = TINY_MODEL, own_dtype: torch.dtype | None = None, **more: Any) -> Job:
    """The job as `pretrain` sets it up, loaded, within ranks that exist already. Its model has `own_dtype`, if given.

    Args:
        more: for `build_job`.
    """

    def provider(*arguments: Any) -> nn.Module:
        built = make_model(*arguments[:3], own_dtype or arguments[3])
        is_sharded = isinstance(built.transformer.layers[0].mlp.dense_4h_to_h.weight, ReleasedParameter)
        assert is_sharded == (config.zero.stage == 3), "stage 3 shards while it builds, no other one does"
        return built

    config = load_config([*model, *flags], torch.distributed.get_world_size())
    config.check_world(torch.distributed.get_world_size())
    tokenizer = build_tokenizer_from(config.data)
    groups = setup_distributed(config)
    config = replace(config, model=with_vocabulary(config.model, tokenizer))
    loads = has_something_to_load(config.checkpoint)
    job = build_job(config, groups, tokenizer, provider, forward_step, draws=not loads, **more)
    matrices = [value for value in job.engine.state_dict().values() if value.ndim > 1]
    assert all(value.any() != loads for value in matrices), "values are drawn unless they are loaded next"
    load(job, is_expected=loads)
    return job


def train(job: Job, steps: int) -> list[float]:
    """The losses of some steps."""
    flags = job.config.training
    data, _, _ = datasets(job)
    iterator = batches(job, data, "training", flags.batch_size, job.consumed_samples, job.accumulation_steps)
    return [train_step(job, iterator)[0] for _ in range(steps)]


def end(job: Job) -> None:
    job.engine.destroy()
    mpu.destroy_model_parallel()


def check_equal(got: Weights, want: Weights, what: str) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda m: f"{what}: {m}")


def stages_case(flags: list[str], plain: list[str]) -> None:
    """All stages with `flags` against stage 0 with `plain`, which must not matter."""
    want: tuple[Weights, list[float], Weights] | None = None
    for stage, more in ((0, plain), *((stage, flags) for stage in STAGES)):
        job = start(["--train-iters", "4", "--zero-stage", str(stage), *more])
        first, losses, last = job.engine.state_dict(), train(job, 4), job.engine.state_dict()
        want = want or (first, losses, last)
        check_equal(first, want[0], f"starts with other values in stage {stage}")
        assert losses == want[1] and len(set(losses)) == 4, stage
        check_equal(last, want[2], f"was trained to other values in stage {stage}")
        end(job)


RECOMPUTED = ["--checkpoint-activations", "--partition-activations"]


@pytest.mark.parametrize(
    "world_size, flags, recomputed",
    [
        (2, [], []),
        pytest.param(4, ["--model-parallel-size", "2"], [], marks=pytest.mark.slow),
        (4, ["--model-parallel-size", "2"], RECOMPUTED),
    ],
    ids=["2 ranks", "2 x 2 ranks", "2 x 2 ranks, recomputed"],
)
def test_every_stage_starts_and_trains_alike_bit_for_bit(corpus, world_size, flags, recomputed):
    """And recomputing partitioned activations changes nothing either."""
    run_ranks(world_size, stages_case, [*corpus, *flags, *recomputed], [*corpus, *flags])


def own_dtype_case(flags: list[str], own_dtype: torch.dtype) -> None:
    losses = []
    for stage in STAGES:
        job = start([*flags, "--zero-stage", str(stage)], own_dtype=own_dtype)
        assert {p.dtype for p in job.engine.module.parameters()} == {job.config.precision.dtype}, stage
        losses.append(train(job, 1))
        end(job)
    assert losses == losses[:1] * len(STAGES)


@pytest.mark.parametrize(("flags", "own_dtype"), [(["--bf16"], torch.float32), ([], torch.bfloat16)])
def test_the_flags_set_the_dtype_of_any_model_at_every_stage(corpus, flags, own_dtype):
    run_ranks(2, own_dtype_case, [*corpus, *flags], own_dtype)


def of_the_page() -> dict[str, Any]:
    """`Lion` and `make_optimizer` of docs/own_scripts.md."""
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_scripts.md").read_text(), re.DOTALL)[2], names)
    return names


def plain_lion(job: Job, steps: int) -> Weights:
    """The weights after some steps of the page's Lion over whole parameters, with gradients that DDP would give."""
    model = GPT2Model(job.config.model, group=job.groups.model)
    model.load_state_dict(job.engine.state_dict())
    _, group_of, settings = of_the_page()["make_optimizer"](job.config, model)
    groups = [{**each, "params": []} for each in settings]
    for name, parameter in model.named_parameters():
        groups[group_of[name]]["params"].append(parameter)
    optimizer = of_the_page()["Lion"](groups, {})
    data, _, _ = datasets(job)
    iterator = batches(job, data, "training", job.config.training.batch_size, 0, job.accumulation_steps)
    for step in range(steps):
        text = next(iterator)["text"]
        model(text[:, :-1].contiguous(), targets=text[:, 1:].contiguous()).mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = job.config.schedule.lr * (steps - step) / steps * group.get("lr_mult", 1)
            for parameter in group["params"]:
                parameter.grad = comm.all_reduced(parameter.grad, comm.world()) / 2
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def own_optimizer_case(flags: list[str], folder: str) -> None:
    own = {"make_optimizer": of_the_page()["make_optimizer"], "allow_untested_optimizer": True}
    want = None
    for stage in STAGES:
        where = [f"--{flag}={folder}/{stage}" for flag in ("save", "load")]
        for _ in range(2):
            job = start([*flags, *where, "--train-iters", "4", "--zero-stage", str(stage)], **own)
            want = want or plain_lion(job, 4)
            train(job, 2)
            save(job)
            weights = job.engine.state_dict()
            end(job)
        check_equal(weights, want, f"was trained to other values in stage {stage}")


def test_an_optimizer_of_ones_own_trains_and_resumes_as_over_whole_parameters_bit_for_bit(corpus, tmp_path):
    flags = ["--clip-grad", "0", "--no-eod-mask-loss", "--weight-decay", "0.1"]
    run_ranks(2, own_optimizer_case, [*corpus, *flags], str(tmp_path))


def fixed(**settings: Any) -> dict[str, Any]:
    """For `build_job`: a torch optimizer of one group with these settings, without the norms' parameters."""

    def make_optimizer(config: Config, model: nn.Module) -> tuple:
        trained = {name: 0 for name, p in model.named_parameters() if p.ndim > 1}
        return lambda groups: torch.optim.SGD(groups, momentum=0.9), trained, [settings]

    return {"make_optimizer": make_optimizer}


def test_what_an_optimizer_of_ones_own_leaves_out_or_changes_nothing_is_told(corpus, one_rank, caplog):
    mpu.destroy_model_parallel()
    with caplog.at_level("WARNING"):
        job = start([*corpus, "--optimizer", "muon", "--adam-beta2", "0.95", "--clip-grad", "2"], **fixed(lr_mult=2))
    assert "make_optimizer makes the optimizer: --adam-beta2 0.95, --optimizer muon do only what it" in caplog.text
    assert "parameters require a gradient but are in no group" in caplog.text
    before, after = describe_start(job), (train(job, 1), describe_memory(job, "after", job.engine.memory()))[1]
    assert "SGD of make_optimizer" in before and "from the first step on" not in before
    held = [re.findall(r"optimizer \(O\) +(\S+ \S+) +(\S+ \S+)", each)[0] for each in (before, after)]
    assert held[0][0] == held[0][1] != held[1][0] == held[1][1], "momentum is counted once it is there"
    end(job)


NVME = "--zero-stage 1 --offload-optimizer nvme --nvme-path FOLDER"


@pytest.mark.parametrize(
    ("own", "flags", "said"),
    [
        (fixed(lr=1.0), "", "groups with lr, and the job's schedule sets"),
        (
            fixed(lr_mult=2),
            "--deepspeed_config FOLDER/file.json",
            "groups with lr_mult, .* under one of a --deepspeed_",
        ),
        ({}, "", r"Lion is not known to be elementwise.* or allow_untested_optimizer=True of Engine or pretrain"),
        ({"allow_untested_optimizer": True}, NVME, "Lion with states on NVMe would need all of them in memory"),
    ],
    ids=["lr", "lr_mult", "untested", "nvme"],
)
def test_an_optimizer_of_ones_own_that_would_not_be_heeded_or_does_not_work_is_refused(
    corpus, tmp_path, one_rank, own, flags, said
):
    mpu.destroy_model_parallel()
    (tmp_path / "file.json").write_text(json.dumps({"scheduler": {"type": "WarmupLR", "params": {}}}))
    model = TINY_MODEL[: TINY_MODEL.index("--warmup")]  # which would be the flags' schedule
    own = {"make_optimizer": of_the_page()["make_optimizer"], **own}
    with pytest.raises(ValueError, match=said):
        start([*corpus, *flags.replace("FOLDER", str(tmp_path)).split()], model, **own)


def overlap_case(flags: list[str], folder: str) -> None:
    """Weights that arrive during the next forward, against those that step() waits for; with a save and a resume in between."""
    for stage in ("1", "2"):
        runs = []
        for overlap in ("--no-overlap-param-gather", "--overlap-param-gather"):
            where = [f"--{flag}={folder}/{stage}{overlap}" for flag in ("save", "load")]
            job = start([*flags, *where, "--train-iters", "4", "--zero-stage", stage, overlap])
            losses = train(job, 2)
            save(job)
            end(job)
            job = start([*flags, *where, "--train-iters", "4", "--zero-stage", stage, overlap])
            losses += train(job, 2)
            runs.append((losses, job.engine.state_dict()))
            end(job)
        assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) == 4, stage
        check_equal(runs[1][1], runs[0][1], f"was trained to other values in stage {stage}")


@pytest.mark.parametrize(
    "flags",
    [["--bf16", *RECOMPUTED, "--global-batch-size", "8"], ["--sequence-parallel"]],
    ids=["bf16, recomputed, accumulated", "sequence-parallel"],
)
def test_weights_that_arrive_during_the_forward_train_and_resume_alike_bit_for_bit(corpus, tmp_path, flags):
    run_ranks(4, overlap_case, [*corpus, "--model-parallel-size", "2", *flags], str(tmp_path))


def planned_case(flags: list[str]) -> None:
    """What the table of a job's memory plans, and the plan before the launch; with blocks that are recomputed together."""
    job = start([*flags, "--zero-stage", "3", "--checkpoint-activations", "--checkpoint-num-layers", "2"])
    plan = plan_job(Setup.of(job.config, 2, 2, "cpu"))
    assert describe_memory(job, "memory", {}) == table("memory", memory_rows(plan.states, {}))
    end(job)


@pytest.mark.parametrize("more", [[], ["--optimizer", "muon", "--bf16"]], ids=["adam", "muon"])
def test_memory_of_a_job_is_told_as_it_was_planned_before_the_launch(corpus, more):
    run_ranks(2, planned_case, [*corpus, "--num-layers", "4", *more])


def sets_case(flags: list[str], folder: str) -> None:
    """Sets of 2 of 4 data-parallel ranks: what is built and resumed, and what the start table says."""
    where = [*flags, "--train-iters", "4", "--save", folder, "--load", folder]
    plain = start([*flags, "--train-iters", "4", "--zero-stage", "3"])
    first, want = plain.engine.state_dict(), train(plain, 4)
    end(plain)
    cut = start([*where, "--zero-stage", "3", "--zero-shard-size", "2"])
    check_equal(cut.engine.state_dict(), first, "starts with other values in sets")
    assert "sharded over 2 data-parallel ranks, in 2 sets that hold copies" in describe_start(cut)
    got = train(cut, 2)
    save(cut)
    end(cut)
    on = start([*where, "--zero-stage", "2"])
    got += train(on, 2)
    end(on)
    assert got == pytest.approx(want, rel=1e-6)


def test_sets_of_ranks_train_as_all_of_them_do_and_their_checkpoint_goes_on_without_sets(corpus, tmp_path):
    run_ranks(4, sets_case, corpus, str(tmp_path))


def resume_case(flags: list[str]) -> None:
    for stage in ("2", "3"):
        dropout = ["--attention-dropout", "0.2", "--hidden-dropout", "0.2", "--train-iters", "6", "--zero-stage", stage]
        whole = start([*flags, *dropout])
        want = train(whole, 6)
        weights = whole.engine.state_dict()
        end(whole)
        where = [*flags, *dropout, "--save", f"{flags[-1]}/{stage}", "--load", f"{flags[-1]}/{stage}"]
        cut = start(where)
        got = train(cut, 3)
        save(cut)
        end(cut)
        resumed = start(where)
        assert resumed.iteration == 3
        got += train(resumed, 3)
        assert got == want, stage
        check_equal(resumed.engine.state_dict(), weights, f"differs after a resume in stage {stage}")
        end(resumed)


def test_sharded_runs_resume_bit_for_bit_with_dropout(corpus, tmp_path):
    run_ranks(2, resume_case, [*corpus, "--data-cache-path", str(tmp_path)])


def small_host_case(flags: list[str]) -> str:
    """What a job says on this rank if it does not fit the host of the last one."""
    is_small = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    real = training.refuse_what_cannot_fit
    limits = Limits(disk=1000 if is_small else 1 << 40)
    training.refuse_what_cannot_fit = lambda *job, **more: real(*job, limits, **more)
    config = load_config([*TINY_MODEL, *flags], torch.distributed.get_world_size())
    with pytest.raises((ValueError, comm.OtherRankError)) as caught:
        training.pretrain(config, build_tokenizer_from(config.data), make_model, forward_step)
    return str(caught.value)


def test_a_job_that_does_not_fit_one_host_ends_on_all_with_its_reason(corpus, tmp_path):
    nvme = ["--zero-stage", "1", "--offload-optimizer", "nvme", "--nvme-path", str(tmp_path)]
    told = run_ranks(2, small_host_case, [*corpus, *nvme])
    assert "of disk per node, and" in told[1] and told[0] == f"rank 1 failed: ValueError: {told[1]}"


def test_a_checkpoint_that_disappears_while_the_model_is_built_ends_the_job(corpus, tmp_path, one_rank):
    """Training on would begin with zeros."""
    mpu.destroy_model_parallel()
    job = start([*corpus, "--load", str(tmp_path), "--save", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="the checkpoints have disappeared"):
        load(job, is_expected=True)
    end(job)


def whole_run_case(flags: list[str]) -> list[float]:
    job = start(flags)
    losses = train(job, job.config.training.train_iters)
    end(job)
    return losses


def test_a_run_goes_on_under_another_stage_and_tensor_parallel_size(corpus, tmp_path):
    """Stage 3 on 2 data-parallel ranks, then stage 1 on 2 tensor-parallel ones: as one uninterrupted process, to round-off."""
    shape = [*corpus, "--train-iters", "10", "--global-batch-size", "4", "--batch-size", "2", "--num-layers", "4"]
    (want,) = run_ranks(1, whole_run_case, shape)
    flags = [*TINY_MODEL, *shape, "--log-interval", "1", "--save", str(tmp_path), "--load", str(tmp_path)]
    first = run_job([*flags, "--zero-stage", "3", "--exit-interval", "5"], 2)
    assert first.returncode == 0, first.stdout
    assert "stage 3: all model states are sharded over 2 data-parallel ranks" in first.stdout
    second = run_job([*flags, "--zero-stage", "1", "--model-parallel-size", "2"], 2)
    assert second.returncode == 0 and "continuing after iteration 5" in second.stdout, second.stdout
    lines = logged(tmp_path)
    assert [line["iteration"] for line in lines] == list(range(1, 11))
    torch.testing.assert_close([line["loss"] for line in lines], want, rtol=1e-4, atol=1e-4)
    check_memory_tables(first.stdout)


def check_memory_tables(output: str) -> None:
    """What is measured is what was planned, the buffers of a model with four blocks or more included."""
    tables = [part.splitlines()[1:6] for part in output.split("\n  bytes per rank")[1:]]
    assert len(tables) == 2, output
    at_start, after = ({row[2:21].strip(): row[21:].split() for row in rows} for rows in tables)
    for rows in (at_start, after):
        assert rows["parameters (P)"][:2] == rows["parameters (P)"][2:]
    assert at_start["gradients (G)"][2:4] == at_start["optimizer (O)"][2:4] == ["0", "B"]
    assert at_start["buffers, at most"][2] == at_start["peak"][2] == "-"
    assert after["gradients (G)"][:2] == after["gradients (G)"][2:]
    assert float(after["optimizer (O)"][2]) == pytest.approx(float(after["optimizer (O)"][0]), rel=1e-2), "and counters"
    assert after["buffers, at most"][:2] == after["buffers, at most"][2:]


def test_on_a_cpu_the_measured_peak_has_the_states_in_host_memory_as_the_planned_one_has(corpus):
    tables = []
    for home in ("none", "cpu"):
        flags = [*TINY_MODEL, *corpus, "--train-iters", "1", "--zero-stage", "1", "--offload-optimizer", home]
        done = run_job(flags, 2)
        assert done.returncode == 0, done.stdout
        tables.append(done.stdout.partition("memory after the first step\n")[2].splitlines()[:6])
    assert tables[0] == tables[1] and "peak" in tables[0][5]


def test_a_wrong_file_is_one_line_on_every_rank_and_flags_win_in_the_log(corpus, tmp_path):
    file = tmp_path / "ds.config"
    flags = [*TINY_MODEL, *corpus, "--train-iters", "2", "--deepspeed", "--deepspeed_config", str(file)]
    file.write_text('{"train_batch_size": 4, "zero_optimization": {"stge": 1}}')
    done = run_job(flags, 2)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert done.returncode != 0 and "Traceback" not in done.stdout, done.stdout
    assert errors == [f"error: --deepspeed_config {file}: Unknown key zero_optimization.stge. Did you mean 'stage'?"]
    file.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    done = run_job([*flags, "--zero-stage", "2"], 2)
    assert done.returncode == 0, done.stdout
    assert f"--zero-stage 2 wins over zero_optimization.stage 1 of {file}" in done.stdout
    assert "stage 2: optimizer states and gradients are sharded" in done.stdout
    assert "parameters in bfloat16" in done.stdout


def test_a_schedule_of_the_file_sets_the_rates_and_its_checkpoint_is_not_taken_for_the_flags(
    corpus, tmp_path, one_rank
):
    mpu.destroy_model_parallel()
    file = tmp_path / "ds.config"
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    file.write_text(json.dumps({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}, "scheduler": schedule}))
    model = TINY_MODEL[: TINY_MODEL.index("--lr")] + TINY_MODEL[TINY_MODEL.index("--peak-tflops") :]
    where = [*corpus, "--train-iters", "8", "--save", str(tmp_path), "--load", str(tmp_path)]
    job = start([*where, "--deepspeed_config", str(file)], model)
    rates = [job.engine.get_lr()[0] for _ in range(6) if train(job, 1)]
    assert rates == [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]
    save(job)
    end(job)
    with pytest.raises(ValueError, match="another kind of learning-rate schedule"):
        start(where, model)
