"""The command line: generated flags, did-you-mean, Megatron v0's flags, and errors before anything is built."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from megazero.activation_checkpointing.options import CheckpointSettings
from megazero.arguments import CPU_OPTIMIZER, load_config, make_parser
from megazero.config import Config
from megazero.foreign_flags import ALWAYS_SO, AS_IT_IS, NO_EFFECT, REFUSED, WITH_VALUE
from megazero.inference import InferenceConfig
from megazero.model.config import GPT2Config
from megazero.optim.loss_scaler import LossScaler, PrecisionConfig
from megazero.optim.optimizers import OptimizerConfig
from megazero.zero.config import ZeroConfig

# The GPT-2 script of Megatron-LM's first tree, word for word but for the launcher.
V0_SCRIPT = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --batch-size 8 --seq-length 1024
--max-position-embeddings 1024 --train-iters 320000 --save checkpoints/gpt2_345m --load checkpoints/gpt2_345m
--resume-dataloader --train-data wikipedia --lazy-loader --tokenizer-type GPT2BPETokenizer --cache-dir cache
--split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0
--warmup .01 --checkpoint-activations --fp16""".split()


def test_v0_script_is_understood():
    config = load_config(V0_SCRIPT)
    assert config.model.num_layers == 24 and config.model.checkpoint_activations
    assert config.data.seq_length == 1024
    assert config.data.split == "949,50,1"
    assert config.data.train_data == ["wikipedia"]
    assert config.schedule.lr == 1.5e-4
    assert config.schedule.lr_decay_style == "cosine"
    assert config.schedule.warmup == 0.01
    assert config.precision.fp16 and config.optimizer.weight_decay == 0.01 and config.training.batch_size == 8


def test_defaults_are_those_of_the_v0_trainer():
    config = load_config([])
    assert (config.model.attention_dropout, config.model.hidden_dropout, config.model.num_attention_heads) == (
        0.1,
        0.1,
        16,
    )
    assert (config.model.hidden_size, config.model.num_layers, config.model.max_position_embeddings) == (1024, 24, 512)
    assert (config.model.layernorm_epsilon, config.model.make_vocab_size_divisible_by) == (1e-5, 128)
    training, schedule = config.training, config.schedule
    assert (training.batch_size, training.train_iters, training.log_interval, training.seed) == (
        4,
        1_000_000,
        100,
        1234,
    )
    assert (training.eval_iters, training.eval_interval, config.checkpoint.save_interval) == (100, 1000, 5000)
    assert (schedule.lr, schedule.warmup, schedule.lr_decay_style) == (1e-4, 0.01, "linear")
    assert (config.optimizer.weight_decay, config.optimizer.clip_grad) == (0.01, 1.0)
    assert (config.precision.hysteresis, config.precision.loss_scale_window, config.precision.min_scale) == (2, 1000, 1)
    assert (config.data.split, config.data.seq_length, config.data.num_workers) == ("1000,1,1", 512, 2)


@pytest.mark.parametrize(
    "wrong, right", [("--hiden-size", "--hidden-size"), ("--num_layers", "--num-layers"), ("--lr-decay", "--lr-decay")]
)
def test_unknown_flag_suggests_the_nearest(wrong, right):
    with pytest.raises(ValueError, match=f"Unknown flag {wrong}.* Did you mean {right}"):
        load_config([wrong, "7"])


@pytest.mark.parametrize("flag", ["--log-params-to-tensorboard", "--no-mmap-bin-files", "--world-size"])
def test_what_is_not_near_or_changes_nothing_is_not_suggested(flag):
    with pytest.raises(ValueError, match=f"Unknown flag {flag}. --help lists all flags."):
        load_config([flag, "7"])


def test_all_unknown_flags_are_named_at_once():
    names = "^Unknown flag --num-layer. Did you mean --num-layers. Unknown flag --gpt-size. --help lists all flags.$"
    with pytest.raises(ValueError, match=names):
        load_config(["--num-layer", "2", "--gpt-size=64", "--batch-size", "8"])


def test_abbreviations_are_not_guessed():
    with pytest.raises(ValueError, match="Unknown flag --train-it"):
        load_config(["--train-it", "7"])


def test_flags_that_do_not_apply_hide_no_others():
    refused = "^--train-samples does not apply here: .* Drop it. --mock-data does not apply here: .* Drop it. "
    with pytest.raises(ValueError, match=refused + "Unknown flag --num-layer. Did you mean --num-layers.$"):
        load_config("--train-samples 100 --num-layer 3 --mock-data".split())
    with pytest.raises(ValueError, match=refused + "argument --num-layers: invalid int value: 'three'"):
        load_config("--train-samples 100 --num-layers three --mock-data".split())


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_flags_that_cannot_apply_are_refused_with_the_reason(flag):
    with pytest.raises(ValueError, match=f"^{flag} does not apply here: "):
        load_config([flag])


def test_all_flags_that_cannot_apply_are_named_at_once():
    with pytest.raises(
        ValueError, match="^--lr-warmup-samples does not .* use --lr-warmup-iters.* --num-experts does not"
    ):
        load_config(["--lr-warmup-samples", "100", "--num-experts=8", "--num-layers", "2"])


@pytest.mark.parametrize("flag", sorted(AS_IT_IS))
def test_a_value_that_asks_for_what_is_so_anyway_is_accepted_and_another_refused(flag):
    for value in AS_IT_IS[flag]:
        assert load_config([flag, value]) == load_config([f"{flag}={value}"]) == load_config([])
    for given in ([flag, "2"], [f"{flag}=2"], [flag]):
        with pytest.raises(ValueError, match=f"^{flag} does not apply here: .*{re.escape(REFUSED[flag])}. Drop it.$"):
            load_config(given)


@pytest.mark.parametrize(
    "spelling, ours",
    [
        ("--data-path 0.3 a 0.7 b", "--train-data 0.3 a 0.7 b"),
        ("--ffn-hidden-size 72", "--intermediate-size 72"),
        ("--norm-epsilon 1e-6", "--layernorm-epsilon 1e-6"),
        ("--lr-warmup-fraction 0.1", "--warmup 0.1"),
        ("--fp16 --min-loss-scale 8", "--fp16 --min-scale 8"),
        ("--tensor-model-parallel-size 2", "--model-parallel-size 2"),
        (
            "--checkpoint-activations --distribute-checkpointed-activations",
            "--checkpoint-activations --partition-activations",
        ),
        ("--recompute full --distribute-saved-activations", "--recompute full --partition-activations"),
        ("--overlap-grad-reduce --accumulate-allreduce-grads-in-fp32", ""),
        ("--eod-mask-loss --override-opt_param-scheduler --use-cpu-initialization --no-bias-gelu-fusion", ""),
    ],
)
def test_spellings_of_later_megatrons_mean_the_same(spelling, ours):
    assert load_config(spelling.split()) == load_config(ours.split())


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("--offload-param cpu", "--remote-device nvme", "--remote-device CPU"),
        ("--batch-size 8", "--micro-batch-size 4", "--micro-batch-size=8.0"),
        ("--train-data a b", "--data-path c", "--data-path a b"),
        ("--train-data 0.5 a 0.5 b", "--data-path 0.5 a 0.5 c", "--data-path 0.5 a 0.5 b"),
    ],
)
def test_two_names_of_one_setting_with_different_values_are_refused(one, other, same):
    flags = f"--zero-stage 3 --nvme-path x {one}".split()
    assert load_config([*flags, *same.split()]) == load_config(flags)
    for first, second in ((one, other), (other, one)):
        flags = f"--zero-stage 3 --nvme-path x {first} {second}".split()
        with pytest.raises(ValueError, match="--.* and --.* are names of one setting with different values"):
            load_config(flags)


def test_what_a_script_gives_can_be_taken_back_behind_it(with_file):
    taken_back = "--fp16 --checkpoint-activations --no-checkpoint-activations --no-fp16 --bf16".split()
    assert load_config(taken_back) == load_config(["--bf16"])
    parser = make_parser(list(get_type_hints(Config).values()), "")
    ours = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.const is True]
    assert ours and all(name.startswith("--no-") for action in ours for name in action.option_strings), "no way back"
    with pytest.raises(ValueError, match="--recompute full exclude each other.* give --recompute none"):
        load_config("--recompute full --no-checkpoint-activations".split())
    assert load_config("--recompute full --recompute none".split()).model.recompute_mode == "none"
    document = {"fp16": {"enabled": True}, "communication_data_type": "fp16"}
    with pytest.raises(ValueError, match='communication_data_type "fp16" .* parameters, which is fp32'):
        with_file(document, "--no-fp16")
    config, log = with_file({"bf16": {"enabled": True}}, "--bf16 --no-bf16")
    assert not config.precision.bf16 and log.count("--no-bf16 wins over bf16.enabled true of ") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_help_is_printed_by_the_first_rank_alone(rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit, match="^0$"):
        load_config(["--help"])
    assert capsys.readouterr().out.count("usage:") == (rank == "0")


def test_help_names_every_flag_and_every_default_but_of_switches_that_are_off():
    parser = make_parser(list(get_type_hints(Config).values()), "")
    text = "".join(parser.format_help().split())  # lines end anywhere, within flags too
    assert all(flag in text for flag in (*ALWAYS_SO, *CPU_OPTIMIZER))
    for component in get_type_hints(Config).values():
        for each in (each for each in fields(component) if "help" in each.metadata):
            if each.default is not None and each.default is not False and "default" not in each.metadata["help"]:
                shown = each.metadata["help"].replace("%%", "%") + f" (default: {each.default})"
                assert "".join(shown.split()) in text, f"--help does not say {shown}"
    inference = make_parser([InferenceConfig], "").format_help()
    assert "--zero-reduce-scatter" not in inference, (
        "what a training script asks for says nothing about a trained model"
    )


# All flags of the v0 trainer's arguments.py.
V0_FLAGS = """pretrained-bert attention-dropout num-attention-heads hidden-size intermediate-size num-layers layernorm-epsilon
hidden-dropout max-position-embeddings vocab-size deep-init make-vocab-size-divisible-by cpu-optimizer cpu_torch_adam fp16
fp32-embedding fp32-layernorm fp32-tokentypes fp32-allreduce hysteresis loss-scale loss-scale-window min-scale batch-size
weight-decay checkpoint-activations checkpoint-num-layers deepspeed-activation-checkpointing clip-grad train-iters log-interval
exit-interval seed reset-position-ids reset-attention-mask lr-decay-iters lr-decay-style lr warmup save save-interval
no-save-optim no-save-rng load no-load-optim no-load-rng finetune resume-dataloader distributed-backend local_rank
eval-batch-size eval-iters eval-interval eval-seq-length eval-max-preds-per-seq overlapping-eval cloze-eval eval-hf load-openai
temperature top_p top_k out-seq-length model-parallel-size shuffle train-data use-npy-data-loader train-data-path val-data-path
test-data-path input-data-sizes-file delim text-key eval-text-key valid-data split test-data lazy-loader loose-json
presplit-sentences num-workers tokenizer-model-type tokenizer-path tokenizer-type cache-dir use-tfrecords seq-length
max-preds-per-seq deepspeed deepspeed_config deepscale deepscale_config""".split()


@pytest.mark.parametrize("flag", V0_FLAGS)
def test_every_flag_of_the_v0_trainer_works_or_is_refused_with_the_reason(flag):
    parser = make_parser(list(get_type_hints(Config).values()), "")
    assert f"--{flag}" in parser.takes_value.keys() | REFUSED.keys()


@pytest.mark.parametrize("flag", ["--eval-hf", "--load-openai"])
def test_flags_that_read_foreign_weights_name_the_command_that_imports_them(flag):
    with pytest.raises(ValueError, match="python -m megazero.checkpoint import --from huggingface"):
        load_config([flag])


def test_names_of_nanogpt_are_refused_with_ours():
    names = "train-iters lr seq-length num-layers num-attention-heads hidden-size hidden-dropout global-batch-size clip-grad"
    their_names = (
        "max_iters learning_rate block_size n_layer n_head n_embd dropout gradient_accumulation_steps grad_clip"
    )
    for theirs, ours in zip(their_names.split(), names.split(), strict=True):
        with pytest.raises(ValueError, match=f"--{theirs} does not apply here: use --{ours}"):
            load_config([f"--{theirs}=6"])


def test_the_flags_of_the_zero3_example_are_understood(caplog):
    caplog.set_level(logging.INFO, logger="megazero")
    flags = """--zero-stage 3.0 --zero-contigious-gradients --zero-reduce-scatter --zero-reduce-bucket-size 50000000
    --zero-allgather-bucket-size=0.0 --remote-device None --use-pin-memory --scattered-embeddings --split-transformers
    --cpu-optimizer --partition-activations --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer
    --profile-backward --memory-centric-tiled-linear --tile-factor 2 --deepspeed-activation-checkpointing"""
    config = load_config(flags.split())
    assert config.zero == ZeroConfig(stage=3, offload_optimizer="cpu", reduce_bucket_size=50_000_000)
    assert config.model.tile_factor == 2
    assert "these flags change nothing here: --zero-allgather-bucket-size (buffers are sized" in caplog.text
    assert "--split-transformers (" in caplog.text and "--zero-reduce-scatter" not in caplog.text


def test_the_flags_of_megatrons_llama_example_make_a_llama():
    flags = """--ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --num-attention-heads 32 --hidden-size 4096"""
    model = load_config(flags.split()).model
    assert model.architecture == " ".join(
        f"--{flag}"
        for flag in (
            "normalization RMSNorm",
            "swiglu",
            "position-embedding-type rope",
            "rotary-base 1000000",
            "group-query-attention",
            "num-query-groups 8",
            "disable-bias-linear",
            "untie-embeddings-and-output-weights",
        )
    )
    with pytest.raises(ValueError, match="--use-rotary-position-embeddings does not apply here: use --position-emb"):
        load_config(["--use-rotary-position-embeddings"])


def test_flags_that_tune_the_log_and_kernels_of_later_megatrons_change_nothing_and_are_named(caplog):
    caplog.set_level(logging.INFO, logger="megazero")
    flags = [[flag] + ["5"] * (flag in WITH_VALUE) for flag in NO_EFFECT]
    assert load_config(sum(flags, [])) == load_config([])
    assert all(f"{flag} ({why})" in caplog.text for flag, why in NO_EFFECT.items())
    megatrons = "--tensorboard-queue-size 5 --timing-log-level 2 --manual-gc --manual-gc-interval 10"
    megatrons += " --log-batch-size-to-tensorboard --no-async-tensor-model-parallel-allreduce"
    assert load_config(megatrons.split()) == load_config([])


@pytest.mark.parametrize(
    "flags, world_size, overlaps",
    [
        ("--zero-stage 0", 2, False),
        ("--zero-stage 1", 2, True),
        ("--zero-stage 2", 2, True),
        ("--zero-stage 3", 2, False),
        ("--zero-stage 1", 1, False),
        ("--zero-stage 2 --model-parallel-size 2", 2, False),
        ("--zero-stage 2 --model-parallel-size 2", 4, True),
        ("--zero-stage 1 --model-parallel-size 2", 4, False),
        ("--zero-stage 1 --model-parallel-size 2 --overlap-param-gather", 4, True),
        ("--zero-stage 1 --no-overlap-param-gather", 2, False),
        ("--zero-stage 1 --offload-optimizer cpu", 2, True),
        ("--zero-stage 2 --cpu-optimizer", 1, True),
        ("--zero-stage 1 --offload-optimizer cpu --delayed-param-update 1", 2, False),
    ],
)
def test_new_weights_travel_during_the_forward_unless_something_speaks_against_it(flags, world_size, overlaps):
    assert load_config(flags.split(), world_size).zero.overlap_param_gather == overlaps


@pytest.mark.parametrize("flag", sorted(CPU_OPTIMIZER))
def test_the_optimizer_on_the_host_is_offload_optimizer_cpu(with_file, flag):
    assert load_config([flag, "--zero-stage", "1"]).zero.offload_optimizer == "cpu"
    assert (
        load_config(["--offload-optimizer", "nvme", "--nvme-path", "x", "--zero-stage", "1", flag]).zero.nvme_path
        == "x"
    )
    config, log = with_file({"zero_optimization": {"stage": 2, "cpu_offload": True}}, flag)
    assert config.zero.offload_optimizer == "cpu" and "wins" not in log
    assert with_file({"zero_optimization": {"stage": 2}}, flag)[0].zero.offload_optimizer == "cpu"
    with pytest.raises(
        ValueError, match=f"{flag} keeps the optimizer's states in host memory .* got 0. Add --zero-stage 1"
    ):
        load_config([flag])


@pytest.mark.parametrize("text, is_right", [("3", True), ("3.0", True), ("3e0", True), ("3.5", False), ("inf", False)])
@pytest.mark.parametrize("flag", ["--num-layers", "--rampup-batch-size 1 1"])
def test_integers_may_be_written_as_in_json(flag, text, is_right):
    if is_right:
        assert load_config([*flag.split(), text]) == load_config([*flag.split(), "3"])
    else:
        with pytest.raises(ValueError, match=f"invalid int value: '{text}'"):
            load_config([*flag.split(), text])


@pytest.mark.parametrize(
    "component, given, message",
    [
        (GPT2Config, {"num_layers": 2.0}, "--num-layers must be an integer, got 2.0"),
        (GPT2Config, {"hidden_dropout": "0.1"}, "--hidden-dropout must be a number, got '0.1'"),
        (ZeroConfig, {"shard_size": "2"}, "--zero-shard-size must be an integer, got '2'"),
        (ZeroConfig, {"overlap_param_gather": "no"}, "--overlap-param-gather must be true or false, got 'no'"),
        (PrecisionConfig, {"fp16": True, "initial_loss_scale": float("inf")}, "must be a finite number, got inf"),
        (PrecisionConfig, {"fp16": True, "loss_scale": "8"}, "--loss-scale must be a number, got '8'"),
        (OptimizerConfig, {"weight_decay": True}, "--weight-decay must be a number, got True"),
        (ZeroConfig, {"overlap_comm": "no"}, "ZeroConfig's overlap_comm must be true or false, got 'no'"),
        (
            ZeroConfig,
            {"aio": {"queue_depth": 2}},
            "ZeroConfig's aio must be of class AioConfig, got {'queue_depth': 2}",
        ),
        (LossScaler, {"scale": "128"}, "LossScaler's scale must be a number, got '128'"),
        (CheckpointSettings, {"partition_activations": "no"}, "--partition-activations must be true or false"),
    ],
)
def test_a_component_refuses_values_of_another_type_as_its_flags_do(component, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        component(**given)
    assert GPT2Config(num_layers=np.int64(2), hidden_dropout=np.float32(0.5), init_method_std=1).num_layers == 2


def test_flags_that_are_always_so_are_accepted():
    assert load_config(sorted(ALWAYS_SO)) == load_config([])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--seq-length 64 --max-position-embeddings 32", "--seq-length 64 is longer than --max-position-embeddings 32"),
        ("--num-layers x", "invalid int value: 'x'"),
        ("--train-iters=--", "argument --train-iters: -- is no value"),
        ("--train-data=-- --save --", "argument --train-data: -- is no value"),
        ("--lr-decay-style exponential", "invalid choice"),
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--micro-batch-size 1000000000000", "--batch-size must be at most 1,000,000,000, got 1000000000000"),
        ("--global-batch-size 1000000000000", "--global-batch-size must be at most 1,000,000,000, got"),
        ("--train-iters 1000000000000", "--train-iters must be at most 1,000,000,000, got"),
        ("--num-workers 100000", "--num-workers must be at most 256, got 100000"),
        ("--seq-length 1000000000000", "--seq-length 1000000000000 is longer than --max-position-embeddings 512"),
        ("--phase-transition-iterations 9 0", "--phase-transition-iterations 9 0: iterations count from 1"),
        ("--rampup-batch-size 4 4", "--rampup-batch-size 4 4: give three numbers of at least 1"),
        ("--exit-duration-in-mins 0", "--exit-duration-in-mins must be above 0, got 0"),
        (
            "--hidden-size 100 --num-attention-heads 16",
            "--hidden-size 100 is not divisible by --num-attention-heads 16",
        ),
        ("stray", "Stray argument 'stray'"),
        ("--clip-grad nan", "--clip-grad must be a finite number, got nan"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--lr inf", "--lr must be a finite number, got inf"),
        ("--adam-eps 0", "--adam-eps must be above 0"),
        ("--adam-beta1 1", "--adam-beta1 must lie in .0, 1., got 1.0"),
        ("--adam-beta2 1", "--adam-beta2 must lie in .0, 1., got 1.0"),
        ("--layernorm-epsilon -1", "--layernorm-epsilon must be 0 or more"),
        ("--init-method-std -1", "--init-method-std must be 0 or more"),
        ("--distributed-timeout-s 0", "--distributed-timeout-s must be above 0"),
        ("--distributed-timeout-s 1e14", "--distributed-timeout-s must be at most 1,000,000,000"),
        ("--seed -1", "--seed must be 0 or more, got -1"),
        ("--finetune", "--finetune takes the weights of a checkpoint: name its directory by --load"),
        ("--pretrained-checkpoint a --save b", "pretrained-checkpoint a .* give --load the directory of --save"),
        ("--pretrained-checkpoint a --save b --load c", "To start over each time, give --load a --finetune instead"),
        ("--pretrained-checkpoint a --save b --load b --finetune", "and no --finetune"),
        ("--pretrained-checkpoint a --save b --load b", "--pretrained-checkpoint a: there is no checkpoint in it"),
        ("--exit-on-missing-checkpoint", "name where there has to be one by --load"),
        ("--save-retain-interval 5", "--keep-every 5 keeps some of what --keep-last deletes, which is not given"),
    ],
)
def test_bad_values_are_one_clear_error(flags, message):
    with pytest.raises(ValueError, match=message):
        load_config(flags.split())


@pytest.mark.parametrize(
    "flags, world_size, message",
    [
        ("--model-parallel-size 2", 3, "--model-parallel-size 2"),
        ("--model-parallel-size 16", 8, "--model-parallel-size 16"),
        ("--model-parallel-size 3 --hidden-size 64", 3, "--num-attention-heads 16"),
        (
            "--global-batch-size 10 --batch-size 4",
            1,
            "--global-batch-size 10 is not a multiple of --batch-size 4 x data-parallel size 1",
        ),
        (
            "--global-batch-size 16 --rampup-batch-size 4 8 100",
            1,
            "--rampup-batch-size 4 8 100: from 4 in increments of 8 .* grow to --global-batch-size 16.* a larger .* divides",
        ),
        ("--rampup-batch-size 8 4 100", 1, "--rampup-batch-size 8 4 100: .* does not grow to --global-batch-size 4"),
        (
            "--rampup-batch-size 4 4 100",
            1,
            r"does not grow to --global-batch-size 4 \(the default\). Take",
        ),
        ("--global-batch-size 16 --rampup-batch-size 16 4 100", 1, "does not grow to --global-batch-size 16. Take"),
        (
            "--global-batch-size 16 --rampup-batch-size 4 4 100",
            2,
            "--rampup-batch-size 4 4 100: a batch of 4 is not a multiple of --batch-size 4 x data-parallel size 2 = 8",
        ),
    ],
)
def test_what_does_not_fit_the_world_is_refused_before_any_collective(flags, world_size, message):
    config = load_config(flags.split())
    with pytest.raises(ValueError, match=message):
        config.check_world(world_size)


def test_batch_arithmetic():
    config = load_config("--batch-size 3 --global-batch-size 24 --model-parallel-size 2".split())
    config.check_world(8)
    assert config.accumulation_steps(4) == 2 and config.global_batch_size(4) == 24


def test_a_batch_grows_by_the_samples_that_have_been_consumed():
    config = load_config("--batch-size 2 --global-batch-size 16 --rampup-batch-size 4 4 90".split())
    config.check_world(2)
    sizes = {0: 4, 29: 4, 30: 8, 59: 8, 60: 12, 89: 12, 90: 16, 10**9: 16}
    assert {samples: config.global_batch_size(2, samples) for samples in sizes} == sizes
    assert config.accumulation_steps(2, 60) == 3 and config.accumulation_steps(2) == 4, "of the last steps"
    grown = 8 * 4 + 4 * 8 + 3 * 12  # the steps that begin below 30, 60 and 90 samples: at 100 it is whole
    assert config.samples_after(7, 2, 0) == 7 * 4
    assert config.samples_after(15, 2, 0) == grown and config.samples_after(17, 2, 0) == grown + 2 * 16
    assert config.samples_after(3, 2, 32) == 32 + 3 * 8


def test_describe_names_every_setting():
    text = load_config(["--hidden-size", "128"]).describe()
    assert "hidden_size=128" in text and "lr=0.0001" in text and "model_parallel_size=1" in text


def test_zero_flags():
    config = load_config("--zero-stage 3 --grad-dtype compute --reduce-dtype fp32 --partition-activations".split())
    assert (config.zero.stage, config.zero.grad_dtype, config.zero.reduce_dtype) == (3, "compute", "fp32")
    assert config.activations.partition_activations and load_config([]).zero.stage == 0


def test_deepspeed_without_a_file_means_nothing_more():
    plain, flagged = load_config(V0_SCRIPT), load_config([*V0_SCRIPT, "--deepspeed"])
    assert flagged.deepspeed.deepspeed
    assert all(
        getattr(plain, part) == getattr(flagged, part) for part in ("training", "optimizer", "precision", "zero")
    )


@pytest.fixture
def with_file(tmp_path, caplog) -> Callable[..., tuple[Config, str]]:
    """Loads flags with a JSON file, and returns the configuration and the log."""
    caplog.set_level(logging.INFO, logger="megazero")

    def load(document: dict, flags: str = "", world_size: int = 1, name: str = "--deepspeed_config"):
        file = tmp_path / "ds.config"
        file.write_text(json.dumps(document))
        caplog.clear()
        config = load_config(["--deepspeed", name, str(file), *flags.split()], world_size)
        config.check_world(world_size)
        return config, caplog.text

    return load


FULL_FILE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 7,
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e6,
        "allgather_bucket_size": 5e8,
        "contiguous_gradients": True,
    },
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 3},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.02}},
    "activation_checkpointing": {"partition_activations": True},
    "communication_data_type": "fp16",
}


@pytest.mark.parametrize("spelling", ["--deepspeed_config", "--deepscale_config"])
def test_a_file_says_what_no_flag_does(with_file, spelling):
    config, log = with_file(FULL_FILE, world_size=2, name=spelling)
    assert (config.training.batch_size, config.training.global_batch_size, config.training.log_interval) == (2, 16, 7)
    assert config.accumulation_steps(2) == 4
    assert (config.zero.stage, config.zero.grad_dtype, config.zero.reduce_dtype) == (2, "fp32", "compute")
    assert config.zero.reduce_bucket_size == 5_000_000
    assert (config.precision.fp16, config.precision.initial_loss_scale, config.precision.hysteresis) == (True, 256.0, 3)
    optimizer = config.optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.8, 0.95, 1e-6)
    assert (optimizer.weight_decay, optimizer.clip_grad, config.schedule.lr) == (0.02, 0.5, 3e-4)
    assert config.activations.partition_activations
    assert "wins" not in log and "change nothing here: zero_optimization.allgather_bucket_size\n" in log


def test_what_neither_file_nor_flag_says_has_the_jobs_default(with_file):
    config, _ = with_file({"zero_optimization": {}, "optimizer": {"type": "AdamW"}})
    plain = load_config([])
    for part in ("optimizer", "schedule", "precision", "zero", "parallel", "checkpoint"):
        assert getattr(config, part) == getattr(plain, part), part
    assert config.training == plain.training


def test_flags_win_over_the_file_and_the_log_names_flag_and_key(with_file):
    flags = "--batch-size 4 --lr 1e-3 --adam-beta2 0.9 --zero-stage 1 --bf16 --reduce-dtype fp32 --log-interval 3"
    document = {**FULL_FILE, "communication_data_type": "fp32", "fp16": {"enabled": True}}
    config, log = with_file(document, f"{flags} --clip-grad 0.5", world_size=2)
    assert (config.training.batch_size, config.accumulation_steps(2)) == (4, 2)
    assert (config.schedule.lr, config.optimizer.adam_beta2, config.optimizer.adam_beta1) == (1e-3, 0.9, 0.8)
    assert config.zero.stage == 1 and config.precision.bf16 and not config.precision.fp16
    for line in (
        "--batch-size 4 wins over train_micro_batch_size_per_gpu 2 of ",
        "--lr 0.001 wins over optimizer.params.lr 0.0003 of ",
        "--adam-beta2 0.9 wins over optimizer.params.betas [0.8, 0.95] of ",
        "--zero-stage 1 wins over zero_optimization.stage 2 of ",
        "--bf16 wins over fp16.enabled true of ",
        "--log-interval 3 wins over steps_per_print 7 of ",
    ):
        assert line in log, log
    assert log.count("wins over") == 6, "equal values, and what is not in the file, are no news"


# Each flag of ZeroConfig that has a key: the flag, the file (with bf16, stage 3), what it wins over, the field and its value.
ZERO_FLAGS = [
    ("--zero-stage 1", {}, "stage 3", "stage", 1),
    ("--zero-shard-size 0", {"mics_shard_size": 2}, "mics_shard_size 2", "shard_size", 0),
    ("--placement static", {"placement": "auto"}, 'placement "auto"', "placement", "static"),
    (
        "--gpu-margin-mem-ratio 0.5",
        {"gpu_margin_mem_ratio": 0.8},
        "gpu_margin_mem_ratio 0.8",
        "gpu_margin_mem_ratio",
        0.5,
    ),
    (
        "--no-overlap-param-gather",
        {"stage": 1, "overlap_param_gather": True},
        "overlap_param_gather true",
        "overlap_param_gather",
        False,
    ),
    (
        "--zero-reduce-bucket-size 100",
        {"reduce_bucket_size": 1e3},
        "reduce_bucket_size 1000",
        "reduce_bucket_size",
        100,
    ),
    ("--sub-group-size 100", {"sub_group_size": 1e3}, "sub_group_size 1000", "sub_group_size", 100),
    (
        "--delayed-param-update 0",
        {"delayed_param_update": 3, "offload_optimizer": {"device": "cpu"}},
        "delayed_param_update 3",
        "delayed_param_update",
        0,
    ),
    ("--offload-optimizer cpu", {"offload_optimizer": {"device": "none"}}, 'device "none"', "offload_optimizer", "cpu"),
    ("--offload-optimizer none", {"cpu_offload": True}, 'offload_optimizer.device "cpu"', "offload_optimizer", "none"),
    (
        "--offload-param none",
        {"offload_param": {"device": "cpu"}},
        'offload_param.device "cpu"',
        "offload_param",
        "none",
    ),
    ("--cpu-optimizer", {"offload_optimizer": {"device": "none"}}, 'device "none"', "offload_optimizer", "cpu"),
    (
        "--offload-optimizer-ratio 0.25",
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "offload_optimizer.ratio 0.5",
        "offload_optimizer_ratio",
        0.25,
    ),
    (
        "--nvme-path new",
        {"offload_param": {"device": "nvme", "nvme_path": "old"}},
        'offload_param.nvme_path "old"',
        "nvme_path",
        "new",
    ),
    (
        "--no-use-pin-memory",
        {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "offload_optimizer.pin_memory true",
        "pin_memory",
        False,
    ),
    (
        "--grad-dtype fp32",
        {"data_types": {"grad_accum_dtype": "bf16"}},
        'grad_accum_dtype "bf16"',
        "grad_dtype",
        "fp32",
    ),
    ("--reduce-dtype fp32", {"communication_data_type": "bf16"}, 'data_type "bf16"', "reduce_dtype", "fp32"),
]


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            "--checkpoint-in-cpu",
            "nothing is recomputed, so how activation checkpoints are kept (checkpoint_in_cpu) has",
        ),
        ("--checkpoint-in-cpu --checkpoint-activations", ""),
        (
            "--zero-stage 3 --nvme-path /drive --offload-optimizer cpu",
            "--nvme-path /drive has no effect: it is for --offload-optimizer nvme and --offload-param nvme; activation",
        ),
        ("--zero-stage 3 --nvme-path /drive --offload-optimizer cpu --offload-param nvme", ""),
        ("--zero-stage 3 --nvme-path /drive --offload-optimizer nvme", ""),
        ("--zero-stage 2 --sub-group-size 4096", "--sub-group-size 4096 has no effect: it is for --offload-optimizer"),
        ("--zero-stage 2 --sub-group-size 4096 --offload-optimizer cpu", ""),
        ("--zero-stage 3 --sub-group-size 4096 --no-use-pin-memory --placement auto", ""),
        (
            "--zero-stage 2 --no-use-pin-memory",
            "--no-use-pin-memory has no effect: it is for --offload-optimizer and --offload-param",
        ),
        ("--zero-stage 3 --no-use-pin-memory --offload-param cpu", ""),
        (
            "--zero-stage 3 --gpu-margin-mem-ratio 0.5",
            "--gpu-margin-mem-ratio 0.5 has no effect: it is for --placement",
        ),
        ("--zero-stage 3 --gpu-margin-mem-ratio 0.5 --placement auto", ""),
        (
            "--zero-stage 3 --zero-reduce-bucket-size 9",
            "--zero-reduce-bucket-size 9 has no effect: it is for --zero-st",
        ),
    ],
)
def test_a_flag_without_effect_is_said(caplog, flags, said):
    load_config(flags.split())
    assert said in caplog.text and len(caplog.records) == bool(said), caplog.text


@pytest.mark.parametrize("flag, section, written, field, value", ZERO_FLAGS, ids=[entry[0] for entry in ZERO_FLAGS])
def test_every_flag_of_zero_wins_over_its_key_and_the_log_says_so(with_file, flag, section, written, field, value):
    top = {key: section[key] for key in section if key in ("data_types", "communication_data_type")}
    document = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **section}, **top}
    for key in top:
        del document["zero_optimization"][key]
    config, log = with_file(document, flag)
    assert getattr(config.zero, field) == value
    (line,) = [line for line in log.splitlines() if "wins over" in line]
    assert f"{flag} wins over " in line and f"{written} of " in line, line


def test_the_flags_of_zero_that_have_keys_are_all_in_the_table():
    unlike = {field.name for field in fields(ZeroConfig) if "help" in field.metadata} ^ {f for *_, f, _ in ZERO_FLAGS}
    assert not unlike, "ZERO_FLAGS above has each flag of ZeroConfig, with the key that it wins over"


def test_what_the_file_says_of_a_home_follows_the_flag_that_names_it(with_file):
    section = {"device": "cpu", "ratio": 0.5, "pin_memory": False, "nvme_path": "x"}
    document = {"zero_optimization": {"stage": 3, "offload_optimizer": section}}
    zero = with_file(document, "--offload-optimizer none")[0].zero
    assert (zero.offload_optimizer, zero.offload_optimizer_ratio) == ("none", 1.0)
    zero = with_file(document, "--offload-optimizer nvme")[0].zero
    assert (zero.offload_optimizer_ratio, zero.nvme_path, zero.pin_memory) == (0.5, "x", False)
    for flag in ("--offload-optimizer cpu", "--cpu-optimizer"):
        document = {"zero_optimization": {"stage": 3, "offload_optimizer": {"pin_memory": False}}}
        zero = with_file(document, flag)[0].zero
        assert (zero.offload_optimizer, zero.pin_memory) == ("cpu", False)
    zero = with_file({"zero_optimization": {"cpu_offload": True}}, "--zero-stage 2")[0].zero
    assert (zero.stage, zero.offload_optimizer) == (2, "cpu")
    for device in ("nvme", "NVMe"):
        document = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device, "nvme_path": "x"}}}
        assert with_file(document, "--cpu-optimizer")[0].zero.offload_optimizer == "nvme"


def test_the_file_is_checked_as_it_will_be_run_and_errors_name_the_flags_in_it(with_file):
    document = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    message = r'\.config with --zero-stage 0: zero_optimization.offload_optimizer.device "cpu" needs .*stage 1 .*, got stage 0'
    with pytest.raises(ValueError, match=message):
        with_file(document, "--zero-stage 0")
    with pytest.raises(ValueError, match="--cpu-optimizer and --offload-optimizer none exclude each other"):
        load_config("--cpu-optimizer --offload-optimizer none --zero-stage 1".split())


FP16_FILE = {"fp16": {"enabled": True}, "communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp16"}}


@pytest.mark.parametrize(
    "document, refused, flags, found",
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "--placement auto",
            "--offload-optimizer-ratio 1",
            {"placement": "auto", "offload_optimizer_ratio": 1.0},
        ),
        (FP16_FILE, "--bf16", "--reduce-dtype same --grad-dtype fp32", {"reduce_dtype": "same", "grad_dtype": "fp32"}),
        (FP16_FILE, "--no-fp16", "--reduce-dtype fp32 --grad-dtype compute", {"grad_dtype": "compute"}),
        (FP16_FILE, "--bf16", "--reduce-dtype compute --grad-dtype compute", {"reduce_dtype": "compute"}),
    ],
)
def test_a_flag_rescues_what_the_file_and_another_flag_contradict(with_file, document, refused, flags, found):
    with pytest.raises(ValueError, match=f" with .*{refused}"):
        with_file(document, refused)
    zero = with_file(document, f"{refused} {flags}")[0].zero
    assert {name: getattr(zero, name) for name in found} == found


def test_a_dtype_that_is_the_same_in_the_words_of_flags_and_file_is_no_news(with_file):
    _, log = with_file(FP16_FILE, "--reduce-dtype compute --grad-dtype compute")
    assert "wins over" not in log
    _, log = with_file({**FP16_FILE, "communication_data_type": "fp32"}, "--reduce-dtype same --grad-dtype fp32")
    assert '--reduce-dtype same wins over communication_data_type "fp32" of ' in log
    assert '--grad-dtype fp32 wins over data_types.grad_accum_dtype "fp16" of ' in log and log.count("wins over") == 2


def test_page_locking_that_one_home_is_given_is_for_both(with_file):
    document = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    for flags in ("", "--offload-param cpu"):
        assert not with_file(document, flags)[0].zero.pin_memory


def test_a_batch_number_that_is_null_is_the_flags(with_file):
    config, log = with_file({"train_batch_size": None, "train_micro_batch_size_per_gpu": None}, "--batch-size 3")
    assert (config.training.batch_size, config.training.global_batch_size) == (3, None) and "wins over" not in log


def test_an_optimizer_other_than_the_files_is_told(with_file):
    config, log = with_file({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, "--optimizer muon")
    assert config.optimizer.uses_muon and '--optimizer muon wins over optimizer.type "Adam" of ' in log


def test_keys_without_effect_are_told_by_one_line_about_the_file_and_flags_apart(with_file):
    section = {"stage": 2, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9, "reduce_bucket_size": 1e7}
    _, log = with_file({"zero_optimization": section, "aio": {"queue_depth": 32}})
    idle = "aio.queue_depth, zero_optimization.stage3_max_live_parameters, zero_optimization.sub_group_size"
    assert f"change nothing here: {idle}\n" in log and len(log.splitlines()) == 1
    section = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "x"},
        "offload_optimizer": {"device": "cpu"},
    }
    _, log = with_file({"zero_optimization": section}, "--nvme-path y")
    assert "--nvme-path y wins over" in log and len(log.splitlines()) == 1


def test_a_home_of_parameters_passes_below_stage_3_in_the_file_and_not_as_a_flag(with_file):
    document = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    config, log = with_file(document, "--zero-stage 2")
    assert (config.zero.stage, config.zero.offload_param) == (2, "none")
    assert "change nothing here: zero_optimization.offload_param.device\n" in log
    with pytest.raises(ValueError, match="--offload-param cpu needs --zero-stage 3, got 2"):
        with_file({"zero_optimization": {"stage": 2}}, "--offload-param cpu")


def test_two_batch_flags_decide_all_three_numbers(with_file):
    document = {"train_batch_size": 64, "gradient_accumulation_steps": 3}
    config, log = with_file(document, "--batch-size 2 --global-batch-size 8", world_size=2)
    assert config.accumulation_steps(2) == 2
    assert "--batch-size 2 and --global-batch-size 8 win over gradient_accumulation_steps 3 of " in log


def test_auto_is_what_the_flags_say(with_file):
    document = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    }
    flags = "--batch-size 3 --fp16 --lr 1e-2 --clip-grad 0.1 --adam-beta1 0.7 --warmup 0.25 --train-iters 80"
    config, log = with_file(document, flags, world_size=2)
    assert config.training.batch_size == 3 and config.global_batch_size(2) == 6 and config.precision.fp16
    assert (config.schedule.lr, config.optimizer.clip_grad, config.optimizer.adam_beta1) == (1e-2, 0.1, 0.7)
    assert config.deepspeed.scheduler is not None and "wins" not in log
    assert config.deepspeed.scheduler.params == {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}
    config, _ = with_file(document, flags.replace("--warmup 0.25", "--lr-warmup-iters 7"), world_size=2)
    assert config.deepspeed.scheduler is not None and config.deepspeed.scheduler.params["warmup_num_steps"] == 7
    document["scheduler"] = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": "auto"}}
    config, _ = with_file(document, "--bf16")
    assert config.deepspeed.scheduler is not None and config.deepspeed.scheduler.params["cycle_max_lr"] == 1e-4
    config, _ = with_file(document, "--bf16 --warmup 0.25")
    assert config.deepspeed.scheduler is None


@pytest.mark.parametrize(
    "kind, peak, params",
    [
        ("WarmupLR", "warmup_max_lr", {"warmup_num_steps": 10}),
        ("OneCycle", "cycle_max_lr", {"cycle_min_lr": 0.0}),
        ("OneCycleLR", "max_lr", {"total_steps": 10}),
        ("CyclicLR", "max_lr", {"base_lr": 0.0, "cycle_momentum": False}),
    ],
)
def test_the_files_schedule_is_used_unless_flags_describe_one(with_file, kind, peak, params):
    schedule = {"type": kind, "params": {**params, peak: 0.1}}
    config, log = with_file({"scheduler": schedule}, "--lr 1e-3")
    assert config.deepspeed.scheduler is not None and config.deepspeed.scheduler.params[peak] == 1e-3
    assert f"--lr 0.001 wins over scheduler.params.{peak} 0.1 of " in log
    config, log = with_file({"scheduler": schedule}, "--warmup 0.1 --lr-decay-style cosine")
    assert config.deepspeed.scheduler is None
    assert f"--warmup 0.1 --lr-decay-style cosine wins over scheduler {kind} of " in log
    config, _ = with_file({"scheduler": {"type": kind, "params": {**params, peak: "auto"}}}, "--train-iters 80")
    assert config.deepspeed.scheduler is not None and config.deepspeed.scheduler.params[peak] == 1e-4


def test_flags_describe_a_schedule_in_place_of_one_of_torch_that_scales_the_rate(with_file):
    config, log = with_file({"scheduler": {"type": "StepLR", "params": {"step_size": 10}}}, "--lr-decay-style cosine")
    assert config.deepspeed.scheduler is None and "--lr-decay-style cosine wins over scheduler StepLR of " in log


@pytest.mark.parametrize(
    "document, flags, world_size, message",
    [
        ({"zero_optimization": {"stage": 4}}, "", 1, "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimisation": {}}, "", 1, "Unknown key zero_optimisation. Did you mean 'zero_optimization'"),
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": 1},
            "--batch-size 8 --model-parallel-size 4",
            16,
            "with --batch-size 8: The batch sizes do not fit: train_batch_size 16 must be train_micro_batch_size_per_gpu 8 x "
            r"gradient_accumulation_steps 1 x data-parallel size 4 \(world size 16 / model-parallel size 4\) = 32",
        ),
        (
            {},
            "--model-parallel-size 3",
            4,
            "--model-parallel-size 3 does not divide the world of 4 ranks into equal groups. Use 1, 2, 4, or",
        ),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, "", 1, "optimizer SGD: the GPT-2 job trains with AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "", 1, "Adam with adam_w_mode false"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "", 1, "optimizer.params.amsgrad"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, "", 1, "optimizer: Adam: lr must be a number"),
        ({"scheduler": {"type": "LRRangeTest"}}, "--lr 1", 1, "--lr 1.0 means nothing to scheduler LRRangeTest"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 2}}},
            "",
            1,
            "ratio must lie in",
        ),
        ({"fp16": {"enabled": True}}, "--bf16 --fp16", 1, "--fp16 and --bf16 exclude each other"),
        (
            {"gradient_accumulation_steps": 2},
            "--batch-size 0 --global-batch-size 4",
            1,
            "train_micro_batch_size_per_gpu 0 x .* and each at least 1",
        ),
    ],
)
def test_wrong_files_are_one_clear_line_before_anything_is_built(with_file, document, flags, world_size, message):
    with pytest.raises(ValueError, match=message) as error:
        with_file(document, flags, world_size)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match="--deepspeed_config no_such_file: .*'no_such_file' is neither an existing file"
    ):
        load_config(["--deepspeed_config", "no_such_file"])


CONFIGS = sorted((Path(__file__).parent.parent / "scripts" / "configs").iterdir())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_the_configurations_beside_the_scripts_fit_the_job(file):
    config = load_config(["--deepspeed", "--deepspeed_config", str(file), "--batch-size", "8"], world_size=2)
    config.check_world(2)
    assert config.zero.stage in (1, 2, 3)


@pytest.mark.parametrize("flags", ["--offload-optimizer nvme --nvme-path /", "--grad-dtype compute"])
def test_what_muon_cannot_do_is_refused_by_its_flag(flags):
    flag = flags.split()[0]
    with pytest.raises(ValueError, match=f"--optimizer muon does not go with {flag}.*Drop one of them."):
        load_config(f"--optimizer muon --zero-stage 2 {flags}".split())
    with pytest.raises(ValueError, match=r"--muon-momentum must lie in \[0, 1\), got 1.0"):
        load_config(["--muon-momentum", "1"])
