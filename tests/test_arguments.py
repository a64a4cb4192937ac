"""The command line: generated flags, did-you-mean, Megatron v0's flags, and errors before anything is built."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from megazero.arguments import ALWAYS_SO, REFUSED, load_config, make_parser
from megazero.config import Config

# The GPT-2 script of Megatron-LM's first tree, word for word but for the launcher.
V0_SCRIPT = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --batch-size 8 --seq-length 1024
--max-position-embeddings 1024 --train-iters 320000 --save checkpoints/gpt2_345m --load checkpoints/gpt2_345m
--resume-dataloader --train-data wikipedia --lazy-loader --tokenizer-type GPT2BPETokenizer --cache-dir cache
--split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0
--warmup .01 --checkpoint-activations --fp16""".split()


def test_v0_script_is_understood():
    config = load_config(V0_SCRIPT)
    assert config.model.num_layers == 24 and config.model.checkpoint_activations
    assert (
        config.data.seq_length == 1024 and config.data.split == "949,50,1" and config.data.train_data == ["wikipedia"]
    )
    assert (
        config.schedule.lr == 1.5e-4 and config.schedule.lr_decay_style == "cosine" and config.schedule.warmup == 0.01
    )
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


def test_abbreviations_are_not_guessed():
    with pytest.raises(ValueError, match="Unknown flag --train-it"):
        load_config(["--train-it", "7"])


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_flags_that_cannot_apply_are_refused_with_the_reason(flag):
    with pytest.raises(ValueError, match=f"^{flag} does not apply here: "):
        load_config([flag])


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
max-preds-per-seq""".split()


@pytest.mark.parametrize("flag", V0_FLAGS)
def test_every_flag_of_the_v0_trainer_works_or_is_refused_with_the_reason(flag):
    parser = make_parser(list(get_type_hints(Config).values()), "")
    accepted = {name for action in parser._actions for name in action.option_strings}
    assert f"--{flag}" in accepted | REFUSED.keys()


def test_flags_that_are_always_so_are_accepted():
    assert load_config(sorted(ALWAYS_SO)) == load_config([])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--seq-length 64 --max-position-embeddings 32", "--seq-length 64 is longer than --max-position-embeddings 32"),
        ("--num-layers x", "invalid int value: 'x'"),
        ("--lr-decay-style exponential", "invalid choice"),
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        (
            "--hidden-size 100 --num-attention-heads 16",
            "--hidden-size 100 is not divisible by --num-attention-heads 16",
        ),
        ("stray", "Stray argument 'stray'"),
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


def test_describe_names_every_setting():
    text = load_config(["--hidden-size", "128"]).describe()
    assert "hidden_size=128" in text and "lr=0.0001" in text and "model_parallel_size=1" in text
