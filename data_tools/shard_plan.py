"""Which files a step makes of which: one of all inputs, or one of each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from data_tools.done_marker import marked_outputs
from data_tools.inputs import OUTPUT_FORMATS, URL_FORMATS, list_inputs
from megazero.lines.compressed import uncompressed_name
from megazero.lines.partial_shard import Shard

# Of a name that ends so, nobody expects that a folder is made.
_FILE_SUFFIXES = (".bz2", ".csv", ".gz", ".jsonl", ".ndjson", ".parquet", ".txt", ".wet", ".xz", ".zip", ".zst")


def output_format(path: Path, formats: Sequence[str] = (*OUTPUT_FORMATS, *URL_FORMATS)) -> str | None:
    """Which of the formats the name of a file asks for; None if none of them (a folder's name)."""
    return next((name for name in formats if path.name.endswith(f".{name}")), None)


def names_file(output: str | Path, formats: Sequence[str] = OUTPUT_FORMATS) -> bool:
    """Whether --output names a file of one of `formats`; else it names a folder.

    Raises:
        ValueError: it names a file of another kind.
    """
    output = Path(output)
    if output.is_dir():
        return False
    if output_format(output, formats):
        return True
    if output.suffix in _FILE_SUFFIXES:
        kinds = ", ".join(f".{name}" for name in formats)
        raise ValueError(f"--output {output}: such files are not written. Name one that ends in {kinds}, or a folder.")
    return False


def ending(path: Path, format: str | None, formats: Sequence[str] = OUTPUT_FORMATS) -> str:
    """How the name of what is made of `path` ends: as --format says, else as that of `path`, else the first of `formats`."""
    return format or output_format(path, formats) or formats[0]


def shards_of(
    args: Namespace, formats: Sequence[str] = OUTPUT_FORMATS, tables: Sequence[Path] = ()
) -> tuple[list[Path], list[Shard]]:
    """The inputs, and the shards that become of them, by --input, --output and --format.

    Arguments and errors as of `list_inputs` and `plan_shards`.
    """
    inputs = list_inputs(args.input, formats, output=args.output)
    return inputs, plan_shards(inputs, args.output, args.format, formats, tables, named=args.input)


def plan_shards(
    inputs: Sequence[Path],
    output: str | Path,
    format: str | None = None,
    formats: Sequence[str] = OUTPUT_FORMATS,
    tables: Sequence[Path] = (),
    named: Sequence[str | Path] = (),
) -> list[Shard]:
    """One shard for an --output that names a file, else one per input, under its own name, in the folder --output.

    What lies in subfolders of an input comes into such subfolders: many corpora have the same names in each of them.

    Args:
        format: of the files in a folder; None keeps the input's where it is one of `formats`, and is their first elsewhere.
        tables: as for `check_outputs`.
        named: the values of --input, of which a folder stands for the inputs below it.

    Raises:
        ValueError: two inputs would have the same output, an output is an input, or --output a file of another kind; or an
            earlier run has made the same documents a file of another format, beside which they would be there twice.
    """
    output = Path(output)
    named_alike: set[Path] = set()
    if names_file(output, formats):
        shards = [Shard(tuple(inputs), (output,), output)]
    else:
        shards, roots = [], set(map(Path, named))
        for path in inputs:
            root = next((place for place in (path, *path.parents) if place in roots), path)
            stem, folder = uncompressed_name(path).stem, output / path.relative_to(root).parent
            target = folder / f"{stem}.{ending(path, format, formats)}"
            shards.append(Shard((path,), (target,), target))
            # Directly in --output where an earlier run named the file itself, or its folder.
            named_alike |= {place / f"{stem}.{kind}" for place in (output, folder) for kind in formats}
    check_outputs(shards, tables)
    others = sorted(named_alike - {shard.record for shard in shards})
    _refuse_stale([path for record in others for path in marked_outputs(record)])
    return shards


def plan_parts(inputs: Sequence[Path], folder: Path, names: Iterable[str], format: str | None, record: str) -> Shard:
    """One shard of files of these names, without their ending, in a folder; raises as `check_outputs`.

    Args:
        record: its name, which is the same whatever the kind of the files is: so what an earlier run has made is found.
    """
    kind = ending(inputs[0], format)
    shard = Shard(tuple(inputs), tuple(folder / f"{name}.{kind}" for name in names), folder / f"{record}.jsonl")
    check_outputs([shard])
    return shard


def check_outputs(shards: Sequence[Shard], tables: Sequence[Path] = ()) -> None:
    """Checks which files shards make.

    Args:
        tables: what is read beside the inputs.

    Raises:
        ValueError: two shards have the same output, or one of them an output that is an input; or what an earlier run of a shard
            has made is none of its outputs now, so that it would stay among them and be read with them.
    """
    sources = {path.resolve() for paths in (tables, *(shard.inputs for shard in shards)) for path in paths}
    made: dict[Path, Shard] = {}
    for shard in shards:
        for path in shard.outputs:
            if path.resolve() in sources:
                raise ValueError(f"--output {path} is an input too. Choose another --output.")
            if path in made:
                raise ValueError(
                    f"--input {made[path].inputs[0]} and {shard.inputs[0]} would both become {path}. Rename one of them, "
                    "name a folder above both, or let --output name a single file."
                )
            made[path] = shard
        _refuse_stale([path for path in marked_outputs(shard.record) if path not in shard.outputs])


def _refuse_stale(paths: Sequence[Path]) -> None:
    if stale := [path for path in paths if path.exists()]:
        raise ValueError(
            f"--output: {stale[0].parent} holds {', '.join(path.name for path in stale)} of an earlier run, which this one "
            "would not replace: what reads the folder would take up both. Remove its files, or choose another --output."
        )
