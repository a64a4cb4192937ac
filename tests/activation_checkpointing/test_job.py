"""The GPT-2 job with every way of keeping activation checkpoints at once, under ZeRO and tensor parallelism."""

import torch

from megazero import activation_checkpointing
from tests.ranks import run_ranks
from tests.test_zero_job import end, start, train
from tests.tiny import make_corpus

EVERYTHING = """--checkpoint-activations --partition-activations --contigious-checkpointing --checkpoint-in-cpu
--synchronize-each-layer --profile-backward --attention-dropout 0.2 --hidden-dropout 0.2""".split()


def stages_case(flags):
    found = []
    for stage, more in (("0", EVERYTHING[-4:]), ("0", EVERYTHING), ("2", EVERYTHING), ("3", EVERYTHING)):
        job = start([*flags, *more, "--train-iters", "2", "--zero-stage", stage])
        losses = train(job, 2)
        found.append((losses, job.engine.state_dict()))
        storage, times = activation_checkpointing.default.storage, job.timers.read_and_reset()
        if more is EVERYTHING:
            channel = activation_checkpointing.default._channel
            gathers = channel.traffic["all_gather"].collectives
            assert gathers == 2 * job.config.model.num_layers, "one for each block and step"
            channel.reset_traffic()
            assert {"checkpoint forward", "checkpoint backward"} < times.keys()
        assert storage.kept_bytes == 0
        end(job)
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(weights[name], value) for name, value in found[0][1].items())
    activation_checkpointing.configure(None)


def flags_case(flags):
    found = []
    for more in (
        "",
        "--sequence-parallel --recompute selective",
        "--sequence-parallel --recompute full --partition-activations --contiguous-checkpointing --zero-stage 3",
        "--recompute auto --recompute-budget-gb 1",
        "--sequence-parallel --recompute auto --recompute-budget-gb 0.00012 --zero-stage 2",
    ):
        job = start([*flags, "--train-iters", "3", *more.split()])
        losses = train(job, 3)
        found.append(losses)
        transformer = job.engine.module.transformer
        if "auto" in more:
            budget = job.config.model.recompute_budget_gb
            assert transformer.recompute == (("none", "none") if budget == 1 else ("full", "none"))
        end(job)
    for losses in found[1:]:
        torch.testing.assert_close(losses, found[0], atol=2e-5, rtol=0)
    activation_checkpointing.configure(None)


def test_sequence_parallel_and_recompute_train_alike(tmp_path):
    run_ranks(2, flags_case, [*make_corpus(tmp_path), "--model-parallel-size", "2"])


def test_every_stage_trains_alike_with_dropout_bit_for_bit(tmp_path):
    run_ranks(4, stages_case, [*make_corpus(tmp_path), "--model-parallel-size", "2"])
