"""`python -m megazero.checkpoint`: lists, verifies, compares, rewinds, reshapes and converts checkpoints, and shows samples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.checkpoint.commands.diff import compare, report
from megazero.checkpoint.commands.export import export_huggingface
from megazero.checkpoint.commands.ls import describe, describe_directory, locate, open_checkpoint
from megazero.checkpoint.commands.reshape import reshape
from megazero.checkpoint.commands.rewind import rewind
from megazero.checkpoint.commands.samples import show_samples
from megazero.checkpoint.commands.verify import verify
from megazero.checkpoint.importers.dcp import read_dcp
from megazero.checkpoint.importers.deepspeed import read_deepspeed
from megazero.checkpoint.importers.foreign import write_foreign
from megazero.checkpoint.importers.huggingface import read_huggingface
from megazero.checkpoint.importers.megatron import read_megatron
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tags import named
from megazero.logging import counted, log_to_stderr, prepare_output, printable, until_reader_leaves
from megazero.optim.loss_scaler import DTYPES
from megazero.option import Parser, flag_of, iterations_named
from megazero.zero.memory import size

_PATH = "a directory that a job saves in (its latest checkpoint is meant), or one of the checkpoints in it"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 if a checkpoint is damaged (verify) or two differ (diff); 2 if it could not be done."""
    prepare_output()
    log_to_stderr()
    status = 0
    try:
        with until_reader_leaves():
            arguments = make_parser().parse_args(argv)
            status = arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return status


def make_parser() -> argparse.ArgumentParser:
    """The command line; `run` of what it parses to is the command."""
    description = "What is in checkpoints, and what to make of them."
    parser = Parser(prog="python -m megazero.checkpoint", description=description)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        return sub

    def add_source(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("path", metavar="PATH", help=_PATH)
        sub.add_argument("--tag", help="which checkpoint of a directory (default: the latest)")

    sub = command("ls", _ls, "list the checkpoints in a directory, or what is in one of them")
    sub.add_argument("path", metavar="PATH", help="a directory that a job saves in, or one of the checkpoints in it")
    sub.add_argument("--tag", help="show this checkpoint of the directory")
    add_source(command("verify", _verify, "read every byte, and compare it with what was written"))
    sub = command("diff", _diff, "tell how two checkpoints differ; exit status 1 if they do")
    sub.add_argument("a", metavar="A", help=_PATH)
    sub.add_argument("b", metavar="B", help="the same")
    weights_only = "leave out the optimizer's states, counters and settings"
    sub.add_argument("--weights-only", action="store_true", help=weights_only)
    sub.add_argument("--all", action="store_true", help="list all tensors that differ, not the first 20")
    add_source(command("rewind", _rewind, "make an earlier checkpoint the one that jobs continue from"))
    sub = command("samples", _samples, "show the text that the run has read, or will read, in some iterations")
    add_source(sub)
    sub.add_argument(
        "--iterations", required=True, metavar="A-B", help="which, numbered as in the log: A-B, or A alone"
    )
    sub.add_argument("--max-tokens", type=int, default=200, metavar="N", help="to show of each sample (default: 200)")
    elsewhere = "if it is elsewhere now: as the training job's flag"
    sub.add_argument("--train-data", "--data-path", nargs="+", metavar="DATA", help=elsewhere)
    sub.add_argument("--tokenizer-path", help=elsewhere)
    sub.add_argument("--data-cache-path", help=elsewhere)
    sub = command("reshape", _reshape, "rewrite a checkpoint into files for another number of ranks")
    add_source(sub)
    sub.add_argument("out", metavar="OUT", help="directory in which the checkpoint is written, under the same tag")
    sub.add_argument("--model-parallel-size", type=int, required=True, metavar="M", help="ranks that split each layer")
    sub.add_argument("--data-parallel-size", type=int, required=True, metavar="N", help="ranks that split the data")
    sub = command("export", _export, "write the weights for another framework")
    add_source(sub)
    sub.add_argument("out", metavar="OUT", help="directory to make")
    sub.add_argument("--to", required=True, choices=("huggingface",), help="whose files")
    sub.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="of the written weights (default: fp32)")
    files = "to copy as the tokenizer's, and generation_config.json (default: files that give the training job's ids)"
    sub.add_argument("--tokenizer-files", nargs="+", type=Path, metavar="FILE", help=files)
    sub = command("import", _import, "write what another framework has saved as a checkpoint")
    sub.add_argument("path", metavar="PATH", help="what it has saved: its directory of checkpoints, or of the model")
    sub.add_argument("out", metavar="OUT", help="directory in which the checkpoint is written")
    sources = ("deepspeed", "megatron", "huggingface", "dcp")
    sub.add_argument(
        "--from", dest="source", required=True, choices=sources, help="whose files; dcp: torch.distributed.checkpoint's"
    )
    sub.add_argument("--tag", help="which of its checkpoints (default: its latest); of megatron the iteration")
    sub.add_argument("--vocab-size", type=int, help="megatron: without padding, which is not in its files")
    sub.add_argument("--num-attention-heads", type=int, help="megatron: where its files do not say it")
    return parser


def _ls(arguments: argparse.Namespace) -> int:
    path = Path(arguments.path)
    is_checkpoint = named(path, arguments.tag)[1] is not None or not path.is_dir()
    lines = describe(open_checkpoint(path, arguments.tag)) if is_checkpoint else describe_directory(path)
    _say(*lines)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    found = verify(*locate(arguments.path, arguments.tag))
    what = _size_of(found.reader) if found.reader else str(found.path)
    if not found.problems:
        _say(f"{what}: all is as it was written")
        return 0
    _say("\n  ".join([what, *found.problems]))
    _say(f"{counted(len(found.problems), 'problem')}: copy the checkpoint again, or continue from another one")
    return 1


def _diff(arguments: argparse.Namespace) -> int:
    a, b = open_checkpoint(arguments.a), open_checkpoint(arguments.b)
    found = compare(a, b, weights_only=arguments.weights_only)
    lines = report(found, len(found.values) if arguments.all else 20)
    _say(f"A  {a.path}", f"B  {b.path}", "", *lines)
    return 0 if found.is_equal else 1


def _rewind(arguments: argparse.Namespace) -> int:
    directory, tag = locate(arguments.path, arguments.tag)
    before = rewind(directory, tag)
    _say(f"{directory}: jobs continue from {tag}" + (f", no longer from {before}" if before else ""))
    return 0


def _samples(arguments: argparse.Namespace) -> int:
    if not (iterations := iterations_named(arguments.iterations)):
        raise ValueError(
            f"--iterations {arguments.iterations}: give the first and the last iteration, as in 510-512, or one."
        )
    if arguments.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {arguments.max_tokens}.")
    elsewhere = arguments.train_data, arguments.tokenizer_path, arguments.data_cache_path
    reader = open_checkpoint(arguments.path, arguments.tag)
    for text in show_samples(reader, iterations, arguments.max_tokens, *elsewhere):
        _say(text)
    return 0


def _reshape(arguments: argparse.Namespace) -> int:
    sizes = arguments.model_parallel_size, arguments.data_parallel_size
    if min(sizes) < 1:
        raise ValueError(
            "--model-parallel-size and --data-parallel-size must be 1 or more, got {} and {}.".format(*sizes)
        )
    _show_written(reshape(open_checkpoint(arguments.path, arguments.tag), arguments.out, *sizes))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    reader = open_checkpoint(arguments.path, arguments.tag)
    export_huggingface(reader, arguments.out, DTYPES[arguments.dtype], arguments.tokenizer_files)
    _say(f"wrote {arguments.out}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    megatron_only = {"vocab_size": arguments.vocab_size, "num_attention_heads": arguments.num_attention_heads}
    given = [flag_of(name) for name, value in megatron_only.items() if value is not None]
    if given and arguments.source != "megatron":
        raise ValueError(f"{' and '.join(given)}: for --from megatron only. Drop it.")
    if not Path(arguments.path).is_dir():
        raise FileNotFoundError(
            f"{arguments.path} is no directory: name the one that --from {arguments.source} is to read."
        )
    if arguments.source == "deepspeed":
        foreign = read_deepspeed(arguments.path, arguments.tag)
    elif arguments.source == "megatron":
        if arguments.tag is not None and not arguments.tag.isdecimal():
            raise ValueError(f"--tag {arguments.tag}: of megatron, give the iteration as a number.")
        iteration = None if arguments.tag is None else int(arguments.tag)
        foreign = read_megatron(arguments.path, iteration, **megatron_only)
    elif arguments.tag is not None:
        raise ValueError(f"--tag: a directory of {arguments.source} holds one model. Drop it.")
    else:
        foreign = {"huggingface": read_huggingface, "dcp": read_dcp}[arguments.source](arguments.path)
    _show_written(write_foreign(foreign, arguments.out))
    return 0


def _show_written(path: Path) -> None:
    _say(f"wrote {_size_of(Reader(path.parent, path.name))}")


def _say(*lines: str) -> None:
    print(*map(printable, lines), sep="\n")  # names and values may be somebody else's


def _size_of(reader: Reader) -> str:
    return (
        f"{reader.path}: {len(reader.tensors)} tensors in {counted(len(reader.files), 'file')}, {size(reader.nbytes)}"
    )


if __name__ == "__main__":
    sys.exit(main())
