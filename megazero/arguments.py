"""The command line: flags are generated from the configuration's fields, never written twice."""

from __future__ import annotations

import argparse
import difflib
import logging
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from megazero.config import Config
from megazero.foreign_flags import ALWAYS_SO, AS_IT_IS, NO_EFFECT, REFUSED, WITH_VALUE
from megazero.json_config.job import values_of_file
from megazero.option import Parser, own_flag, without_none
from megazero.zero.config import ZeroConfig

logger = logging.getLogger(__name__)

# What the training job's configuration is composed of, in the order of its fields.
COMPONENTS: tuple[type, ...] = tuple(typing.get_type_hints(Config).values())

# Flags that ask for an update on the host, as --offload-optimizer cpu does.
CPU_OPTIMIZER = {
    "--cpu-optimizer": "the same as --offload-optimizer cpu",
    "--cpu_torch_adam": "the same as --offload-optimizer cpu: torch's fused Adam, or one pass over memory with the same results",
}


def add_flags(parser: argparse.ArgumentParser, component: type) -> None:
    """One flag for each field of a configuration dataclass that is described by `option`."""
    group = parser.add_argument_group((component.__doc__ or component.__name__).splitlines()[0].removesuffix("."))
    hints = typing.get_type_hints(component)
    for field in fields(component):
        if "help" in field.metadata:
            names = [own_flag(field), *field.metadata["aliases"]]
            kind = _argparse_kind(field, hints[field.name])
            if hints[field.name] is bool:  # the last one wins, so a user can undo a script's flag
                kind["action"] = "store_true" if names[0].startswith("--no-") else argparse.BooleanOptionalAction
            group.add_argument(*names, dest=field.name, default=argparse.SUPPRESS, **kind)
    if component is ZeroConfig:
        for flag, meaning in CPU_OPTIMIZER.items():
            group.add_argument(
                flag, action="store_const", const=flag, default=argparse.SUPPRESS, dest="cpu_optimizer", help=meaning
            )


def _argparse_kind(field: Field, hint: Any) -> dict[str, Any]:
    default = field.default if field.default is not MISSING else None
    text = field.metadata["help"].replace("%", "%%")
    if default is not None and default is not False and "default" not in text:  # 0 == False, but 0 is shown
        text += f" (default: {default})"
    hint = without_none(hint)
    if typing.get_origin(hint) is typing.Literal:
        hint = str
    if hint is bool:
        return {"help": text}
    choices = field.metadata["choices"]
    kind: dict[str, Any] = {"help": text, "choices": choices}
    is_list = typing.get_origin(hint) in (list, tuple)
    each = typing.get_args(hint)[0] if is_list else hint
    read = _in_any_case(choices) if each is str and choices else _integer if each is int else each
    if is_list:
        return {**kind, "nargs": "+", "type": read}
    return {**kind, "type": read, "metavar": None if choices else hint.__name__.upper()}


def _integer(text: str) -> int:
    """As in JSON, 1.0 and 5e8 are integers too."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if (value := float(text)).is_integer():  # false for inf and nan
            return int(value)
    raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")


def _in_any_case(choices: Sequence[str]) -> Callable[[str], str]:
    """As in JSON, the case of a choice does not matter: the ZeRO-3 example gives --remote-device None."""
    return lambda text: next((choice for choice in choices if choice.lower() == text.lower()), text)


def make_parser(components: Sequence[type], description: str) -> Parser:
    """A parser with the flags of every component, strict about flag names."""
    parser = Parser(
        description=description,
        allow_abbrev=False,
        usage="%(prog)s [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for component in components:
        add_flags(parser, component)
    for flag in (*ALWAYS_SO, *NO_EFFECT, *AS_IT_IS):
        kind: dict[str, Any] = {} if flag in WITH_VALUE else {"action": "store_true"}
        kind = {"nargs": "?"} if flag in AS_IT_IS else kind  # `parse` checks their values, or that one is missing
        parser.add_argument(flag, default=argparse.SUPPRESS, dest="_accepted", help=argparse.SUPPRESS, **kind)
    if ZeroConfig in components:
        parser.epilog = _always_so()
    return parser


def _always_so() -> str:
    """The --help text for ALWAYS_SO: a line for each reason, with all flags that share it."""
    flags: dict[str, list[str]] = {}
    for flag, reason in ALWAYS_SO.items():
        flags.setdefault(reason, []).append(flag)
    width = shutil.get_terminal_size().columns - 2  # as in argparse
    wrapper = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    lines = [wrapper.fill(f"{', '.join(names)}: {reason}") for reason, names in flags.items()]
    return "\n".join(["Accepted, because what they ask for always happens:", *lines])


def parse(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags that were given, by field name; flags that were not given are absent.

    Raises:
        ValueError: flags are unknown or do not apply here (all are named at once, with the nearest known flag), one has a bad
            value, or two names of one setting have different values.
    """
    known, foreign = parser.takes_value, {*ALWAYS_SO, *NO_EFFECT, *AS_IT_IS}
    settings = [flag for flag in known if flag not in foreign]
    values: dict[str, list[str]] = {}  # the words after each flag
    words: list[str] = []
    for argument in argv:
        flag, has_value, value = argument.partition("=")
        if flag.startswith("--") or flag in known:
            words = values[flag] = [value] if has_value else []
        else:
            words.append(argument)
    refused = [
        flag
        for flag, value in values.items()
        if (" ".join(value) not in AS_IT_IS[flag] if flag in AS_IT_IS else flag in REFUSED and flag not in known)
    ]
    told = [f"{flag} does not apply here: {REFUSED[flag]}. Drop it." for flag in refused]
    try:
        given, rest = parser.parse_known_args(argv)
    except ValueError as error:  # argparse stops at the first bad value
        raise ValueError(" ".join([*told, str(error)])) from error
    if idle := [f"{flag} ({why})" for flag, why in NO_EFFECT.items() if flag in values]:
        logger.info("these flags change nothing here: %s", "; ".join(idle))
    dashed = [flag for argument in rest if (flag := argument.partition("=")[0]).startswith("-")]
    unknown = [flag for flag in dashed if flag not in refused]
    near = {flag: difflib.get_close_matches(flag.replace("_", "-"), settings, n=1, cutoff=0.75) for flag in unknown}
    told += [f"Unknown flag {flag}." + (f" Did you mean {found[0]}?" if found else "") for flag, found in near.items()]
    if told:
        raise ValueError(" ".join(told) + ("" if all(near.values()) else " --help lists all flags."))
    if rest:
        raise ValueError(f"Stray argument {rest[0]!r}: every value follows a flag. --help lists all flags.")
    for names in parser.contradictions(values):
        both = " and ".join(" ".join([name, *values[name]]) for name in names)
        raise ValueError(
            f"{both} are names of one setting with different values. Give one of them; what a script gives is overridden "
            "under the script's own name."
        )
    return {name: value for name, value in vars(given).items() if not name.startswith("_")}


def build(components: Sequence[type], values: Mapping[str, Any]) -> list[Any]:
    """One checked configuration object per dataclass, from values by field name; absent ones take their defaults.

    Raises:
        ValueError: a value is wrong.
    """
    return [
        component(**{f.name: values[f.name] for f in fields(component) if f.name in values}) for component in components
    ]


def load_components(components: Sequence[type], description: str, argv: Sequence[str] | None = None) -> list[Any]:
    """One checked configuration object per dataclass, from the command line.

    Raises:
        ValueError: a flag is unknown, or a value is wrong.
    """
    return build(components, parse(make_parser(components, description), sys.argv[1:] if argv is None else argv))


def load_config(argv: Sequence[str] | None = None, world_size: int = 1) -> Config:
    """The training job's checked configuration, from the command line and the JSON file that it names.

    Which checkpoint --pretrained-checkpoint means is settled here: that, or the newest of the run itself.

    Args:
        world_size: number of ranks, which the file's batch sizes depend on.

    Raises:
        ValueError: flags or keys are unknown, invalid on their own, or contradict each other; or there is no such checkpoint.
    """
    given = parse(make_parser(COMPONENTS, "Pretrain GPT-2."), sys.argv[1:] if argv is None else argv)
    config = config_of(given, world_size)
    config.warn_of_idle(given)
    return replace(config, checkpoint=config.checkpoint.resolved())


def config_of(given: Mapping[str, Any], world_size: int = 1) -> Config:
    """The training job's configuration from the flags that were given, by field name, and the JSON file that they name.

    Raises:
        ValueError: as `load_config`.
    """
    file = given.get("deepspeed_config")
    values = dict(given) if file is None else {**values_of_file(file, given, COMPONENTS, world_size), **given}
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
    if given.get("checkpoint_activations") is False and values.get("recompute") == "full":
        raise ValueError(
            "--no-checkpoint-activations and --recompute full exclude each other. To recompute nothing, give --recompute none."
        )
    if "overlap_param_gather" not in values:
        values["overlap_param_gather"] = _may_overlap_param_gather(values, world_size)
    return Config(*build(COMPONENTS, values))


def _may_overlap_param_gather(values: Mapping[str, Any], world_size: int) -> bool:
    """Whether there are new weights that can come during the next forward. The job has no reader that the engine could not see.

    Split layers at stage 1 need the one hardware queue that `set_up_backends` gives them, and gathers need several.
    """
    stage, split = values.get("stage", 0), values.get("model_parallel_size", 1)
    do_come = world_size > split or values.get("offload_optimizer", "none") != "none"
    may = stage == 2 or (stage == 1 and split == 1)
    return may and do_come and not values.get("delayed_param_update")
