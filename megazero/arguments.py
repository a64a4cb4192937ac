"""The command line: flags are generated from the configuration's fields, never written twice."""

from __future__ import annotations

import argparse
import difflib
import logging
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn

from megazero.config import Config
from megazero.json_config.job import values_of_file
from megazero.zero.config import ZeroConfig

logger = logging.getLogger(__name__)

_FP32_GRADIENTS = "gradients are accumulated and reduced in fp32, unless --grad-dtype or --reduce-dtype says otherwise"

_ALWAYS_LOGGED = "with --save, all that is logged is in DIR/metrics.jsonl and DIR/tensorboard"
_ONE_ENGINE = "there is one implementation"

# Flags of Megatron-LM's first GPT-2 trainer, and of later ones, that ask for what always happens here: accepted, with the reason.
ALWAYS_SO = {
    "--lazy-loader": "data is always memory-mapped",
    "--loose-json": "the kind of a data file is seen from its name",
    "--shuffle": "samples are always shuffled, by --seed",
    "--resume-dataloader": "data order always continues exactly",
    "--fp32-allreduce": _FP32_GRADIENTS,
    "--fp32-layernorm": "normalisation accumulates in fp32",
    "--accumulate-allreduce-grads-in-fp32": _FP32_GRADIENTS,
    "--attention-softmax-in-fp32": "softmax is in fp32",
    "--eod-mask-loss": "what follows an end-of-text token does not count in the loss",
    "--exit-signal-handler": "SIGTERM saves and exits",
    "--overlap-grad-reduce": "gradients are reduced while backward goes on",
    "--override-lr-scheduler": "the learning-rate schedule is that of the flags, also where a checkpoint goes on",
    "--override-opt_param-scheduler": "the learning-rate schedule is that of the flags, also where a checkpoint goes on",
    "--use-cpu-initialization": "initial values are drawn on the CPU, the same for every model-parallel size",
    "--deepspeed-activation-checkpointing": "there is one activation checkpointing: --checkpoint-activations",
    "--zero-contigious-gradients": "the gradients of a unit lie in one buffer",
    "--zero-reduce-scatter": "a rank gets the gradients that it needs and no others",
    "--deep-init": "output layers are always scaled by 1/sqrt(2 x layers), as GPT-2's are",
    "--use-flash-attn": "attention is torch's scaled_dot_product_attention, whose kernel is the fastest that the device has",
    "--use-mcore-models": _ONE_ENGINE,
    "--log-throughput": _ALWAYS_LOGGED,
    "--log-timers-to-tensorboard": _ALWAYS_LOGGED,
}

# Flags of the ZeRO-3 examples, and of later Megatrons, that tune what is done another way here: accepted, and named in the log.
NO_EFFECT = {
    "--zero-reduce-bucket-size": "buffers are sized by the model's units",
    "--zero-allgather-bucket-size": "buffers are sized by the model's units",
    "--scattered-embeddings": "--sequence-parallel keeps a part of every sequence on each rank, embeddings included",
    "--split-transformers": "--recompute selective keeps less of a block without a second checkpoint in it",
    "--overlap-param-gather": "new weights are gathered beside the update; at stage 3 a unit's beside those that compute",
    **dict.fromkeys(
        (
            "--no-masked-softmax-fusion",
            "--no-bias-gelu-fusion",
            "--no-bias-dropout-fusion",
            "--no-gradient-accumulation-fusion",
        ),
        "no kernel of this project's own is fused; --compile fuses what it can",
    ),
}
_WITH_VALUE = {"--zero-reduce-bucket-size", "--zero-allgather-bucket-size"}

# Flags that ask for an update on the host, as --offload-optimizer cpu does.
CPU_OPTIMIZER = {
    "--cpu-optimizer": "--offload-optimizer cpu",
    "--cpu_torch_adam": "--offload-optimizer cpu: torch's fused Adam, or one pass over memory that gives its results",
}

_NOT_GPT2 = "the model is GPT-2's: learned positions, layer norm, GELU, biases and a tied head"
_WARMUP = "use --warmup, a fraction of --train-iters"
_ITERATIONS = "runs are counted in iterations: --train-iters, --lr-decay-iters, --warmup"
_RECOMPUTED_TOGETHER = (
    "use --checkpoint-activations, with --checkpoint-num-layers for blocks that are recomputed together"
)

# Flags of the same trainers that cannot mean anything here, or something else: refused, with what to do.
REFUSED = {
    "--pretrained-bert": "BERT is not trained here",
    "--fp32-tokentypes": "token types belong to BERT",
    "--fp32-embedding": "parameters have one dtype; the optimizer's copy of every one of them is fp32",
    "--presplit-sentences": "sentences are BERT's; GPT-2 reads documents",
    "--max-preds-per-seq": "masked prediction belongs to BERT",
    "--eval-max-preds-per-seq": "masked prediction belongs to BERT",
    "--use-tfrecords": "use .bin/.idx from data_tools/preprocess_data.py, or JSON lines",
    "--use-npy-data-loader": "use .bin/.idx from data_tools/preprocess_data.py with --train-data",
    "--train-data-path": "use --train-data",
    "--val-data-path": "use --valid-data",
    "--test-data-path": "use --test-data",
    "--input-data-sizes-file": "sizes are in the .idx file",
    "--delim": "use JSON lines, one document a line",
    "--eval-text-key": "--text-key holds for every JSON file",
    "--tokenizer-model-type": "name the vocabulary's files: --vocab-file and --merge-file, or --tokenizer-path",
    "--eval-seq-length": "evaluations during training use --seq-length; evaluate_gpt2.py takes it",
    "--overlapping-eval": "it is a flag of evaluate_gpt2.py",
    "--temperature": "it is a flag of generate_samples.py",
    "--top_p": "it is a flag of generate_samples.py",
    "--top_k": "it is a flag of generate_samples.py",
    "--out-seq-length": "it is a flag of generate_samples.py",
    "--cloze-eval": "use evaluate_gpt2.py --task lambada",
    "--eval-hf": "import the weights first: python -m megazero.checkpoint import --from huggingface",
    "--load-openai": "import the weights first: python -m megazero.checkpoint import --from huggingface",
    # Those of Megatron-LM's later releases.
    "--pipeline-model-parallel-size": "there are no pipelines; --model-parallel-size and --zero-stage 3 split what is too large",
    "--context-parallel-size": "use --sequence-parallel, which cuts sequences over the --model-parallel-size ranks",
    "--expert-model-parallel-size": _NOT_GPT2,
    "--num-experts": _NOT_GPT2,
    "--num-query-groups": _NOT_GPT2,
    "--group-query-attention": _NOT_GPT2,
    "--position-embedding-type": _NOT_GPT2,
    "--use-rotary-position-embeddings": _NOT_GPT2,
    "--normalization": _NOT_GPT2,
    "--swiglu": _NOT_GPT2,
    "--disable-bias-linear": _NOT_GPT2,
    "--untie-embeddings-and-output-weights": _NOT_GPT2,
    "--kv-channels": "heads are as wide as --hidden-size / --num-attention-heads",
    "--encoder-seq-length": "use --seq-length",
    "--lr-warmup-iters": _WARMUP,
    "--lr-warmup-fraction": _WARMUP,
    "--lr-warmup-samples": _WARMUP,
    "--train-samples": _ITERATIONS,
    "--lr-decay-samples": _ITERATIONS,
    "--rampup-batch-size": "the batch has one size, --global-batch-size",
    "--exit-duration-in-mins": "send SIGTERM, which saves and exits: `timeout MINUTESm` before the command, or Slurm's --signal",
    "--recompute-granularity": "use --recompute selective or --recompute full",
    "--recompute-activations": "use --recompute selective",
    "--recompute-method": _RECOMPUTED_TOGETHER,
    "--recompute-num-layers": _RECOMPUTED_TOGETHER,
    "--activations-checkpoint-method": _RECOMPUTED_TOGETHER,
    "--activations-checkpoint-num-layers": _RECOMPUTED_TOGETHER,
    "--use-distributed-optimizer": "use --zero-stage 1, which shards the optimizer's states over the data-parallel ranks",
    "--optimizer-cpu-offload": "use --offload-optimizer cpu",
    "--grad-reduce-in-bf16": "use --grad-dtype compute",
    "--DDP-impl": _ONE_ENGINE,
    "--transformer-impl": _ONE_ENGINE,
    "--apply-query-key-layer-scaling": "softmax is in fp32 without it",
    "--fp16-lm-cross-entropy": "the loss is always fp32",
    "--data-impl": "the kind of a data file is seen from its name",
    "--dataloader-type": "samples are always shuffled, by --seed",
    "--mock-data": "python -m data_tools sample_corpus makes a corpus to try things on",
    "--valid-data-path": "use --valid-data",
    "--tokenizer-model": "use --tokenizer-path",
    "--skip-train": "use evaluate_gpt2.py",
    "--ckpt-step": "write the checkpoint's name, global_stepN, into the file `latest` of --load",
    "--use-checkpoint-args": "give the flags that the checkpoint was trained with; what does not fit its weights is refused",
    "--use-checkpoint-lr-scheduler": "the learning-rate schedule is that of the flags",
    "--use-checkpoint-opt_param-scheduler": "the learning-rate schedule is that of the flags",
    "--distributed-timeout-minutes": "use --distributed-timeout-s",
    "--wandb-project": _ALWAYS_LOGGED,
    "--tensorboard-log-interval": "use --log-interval",
}

# The values of those flags that ask for what is so here: accepted.
AS_IT_IS = {
    "--pipeline-model-parallel-size": ("1",),
    "--context-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
    "--position-embedding-type": ("learned_absolute",),
    "--normalization": ("LayerNorm",),
    "--DDP-impl": ("local", "torch"),
    "--transformer-impl": ("local",),
    "--data-impl": ("infer", "mmap"),
    "--dataloader-type": ("single",),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises instead of printing, so that the caller decides which rank speaks."""
        raise ValueError(message)


def add_flags(parser: argparse.ArgumentParser, component: type) -> None:
    """One flag for each field of a configuration dataclass that is described by `option`."""
    group = parser.add_argument_group(component.__name__, (component.__doc__ or "").splitlines()[0])
    hints = typing.get_type_hints(component)
    for field in fields(component):
        if "help" in field.metadata:
            names = [field.metadata["flag"] or "--" + field.name.replace("_", "-"), *field.metadata["aliases"]]
            group.add_argument(
                *names, dest=field.name, default=argparse.SUPPRESS, **_argparse_kind(field, hints[field.name])
            )


def _argparse_kind(field: Field, hint: Any) -> dict[str, Any]:
    default = field.default if field.default is not MISSING else None
    text = field.metadata["help"].replace("%", "%%")
    if default not in (None, False) and "default" not in text:
        text += f" (default: {default})"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        hint = str
    if hint is bool:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction, "help": text}
    choices = field.metadata["choices"]
    kind: dict[str, Any] = {"help": text, "choices": choices}
    if typing.get_origin(hint) in (list, tuple):
        return {**kind, "nargs": "+", "type": typing.get_args(hint)[0]}
    readers = {int: _integer, float: _finite}
    read = _in_any_case(choices) if hint is str and choices else readers.get(hint, hint)
    return {**kind, "type": read, "metavar": None if choices else hint.__name__.upper()}


def _integer(text: str) -> int:
    """As in JSON, 1.0 and 5e8 are integers too."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        if float(text) == int(float(text)):
            return int(float(text))
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")


def _finite(text: str) -> float:
    """As in JSON, there is no nan and no inf: comparisons with nan are false, so that checks would let it pass."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")


def _in_any_case(choices: Sequence[str]) -> Callable[[str], str]:
    """As in JSON, the case of a choice does not matter: the ZeRO-3 example gives --remote-device None."""
    return lambda text: next((choice for choice in choices if choice.lower() == text.lower()), text)


def make_parser(components: Sequence[type], description: str) -> argparse.ArgumentParser:
    """A parser with the flags of every component, strict about their names."""
    parser = _Parser(description=description, allow_abbrev=False, usage="%(prog)s [flags]")
    for component in components:
        add_flags(parser, component)
    for flag, reason in ALWAYS_SO.items():
        parser.add_argument(
            flag, action="store_true", default=argparse.SUPPRESS, dest="_accepted", help=argparse.SUPPRESS
        )
        parser.epilog = (parser.epilog or "Accepted and always so:") + f" {flag} ({reason});"
    for flag in NO_EFFECT:
        kind: dict[str, Any] = {} if flag in _WITH_VALUE else {"action": "store_true"}
        parser.add_argument(flag, default=argparse.SUPPRESS, dest="_accepted", help=argparse.SUPPRESS, **kind)
    for flag in AS_IT_IS:
        parser.add_argument(flag, default=argparse.SUPPRESS, dest="_accepted", help=argparse.SUPPRESS)
    if ZeroConfig in components:
        for flag, meaning in CPU_OPTIMIZER.items():
            parser.add_argument(
                flag, action="store_const", const=flag, default=argparse.SUPPRESS, dest="cpu_optimizer", help=meaning
            )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags that were given, by field name; absent flags are absent.

    Raises:
        ValueError: a flag is unknown (with the nearest known one), not applicable here, or has a bad value.
    """
    known = [name for action in parser._actions for name in action.option_strings]
    values = {}
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        flag, has_value, value = argument.partition("=")
        values[flag] = value if has_value else following
    refused = [  # all of a script's at once
        flag
        for flag, value in values.items()
        if (value not in AS_IT_IS[flag] if flag in AS_IT_IS else flag in REFUSED and flag not in known)
    ]
    if refused:
        raise ValueError(" ".join(f"{flag} does not apply here: {REFUSED[flag]}. Drop it." for flag in refused))
    given, rest = parser.parse_known_args(argv)
    idle = [f"{flag} ({why})" for flag, why in NO_EFFECT.items() if any(a.partition("=")[0] == flag for a in argv)]
    if idle:
        logger.info("these flags change nothing here: %s", "; ".join(idle))
    for argument in rest:
        flag = argument.partition("=")[0]
        if flag.startswith("-"):
            near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
            raise ValueError(
                f"Unknown flag {flag}." + (f" Did you mean {near[0]}?" if near else " --help lists all flags.")
            )
        raise ValueError(f"Stray argument {argument!r}: every value follows a flag. --help lists all flags.")
    return {name: value for name, value in vars(given).items() if not name.startswith("_")}


def build(components: Sequence[type], values: Mapping[str, Any]) -> list[Any]:
    """One checked configuration object per dataclass, from values by field name; absent ones have their defaults.

    Raises:
        ValueError: a value is wrong.
    """
    return [
        component(**{f.name: values[f.name] for f in fields(component) if f.name in values}) for component in components
    ]


def load_components(components: Sequence[type], description: str, argv: Sequence[str] | None = None) -> list[Any]:
    """One checked configuration object per dataclass, from the command line.

    Raises:
        ValueError: flags that are unknown, or values that are wrong.
    """
    return build(components, parse(make_parser(components, description), sys.argv[1:] if argv is None else argv))


def load_config(argv: Sequence[str] | None = None, world_size: int = 1) -> Config:
    """The training job's configuration from the command line and the JSON file that it names, checked.

    Args:
        world_size: number of ranks, for the file's batch sizes.

    Raises:
        ValueError: flags or keys that are unknown, wrong by themselves, or contradict each other.
    """
    parts = list(typing.get_type_hints(Config).values())
    given = parse(make_parser(parts, "Pretrain GPT-2."), sys.argv[1:] if argv is None else argv)
    config = config_of(given, world_size)
    config.warn_of_idle()
    return config


def config_of(given: Mapping[str, Any], world_size: int = 1) -> Config:
    """The training job's configuration from the flags that were given, by field name, and the JSON file that they name.

    Raises:
        ValueError: as `load_config`.
    """
    components = typing.get_type_hints(Config)
    parts = list(components.values())
    file = given.get("deepspeed_config")
    values = dict(given) if file is None else {**values_of_file(file, given, parts, world_size), **given}
    if "cpu_optimizer" in given and values.get("offload_optimizer", "none") == "none":
        if "offload_optimizer" in given:
            raise ValueError(
                f"{given['cpu_optimizer']} and --offload-optimizer none exclude each other. Drop one of them."
            )
        if not values.get("stage"):
            raise ValueError(
                f"{given['cpu_optimizer']} keeps the optimizer's states in host memory and updates there, as --offload-optimizer "
                "cpu does, which needs --zero-stage 1 or more, got 0. Add --zero-stage 1, or drop it."
            )
        values["offload_optimizer"] = "cpu"
    return Config(**dict(zip(components, build(parts, values), strict=True)))
