"""What --train-data names: indexed files, loose JSON, well-known corpora under data/, each with or without a weight."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megazero.data.sidecar import read_sidecar
from megazero.files import append_suffix
from megazero.lines.compressed import COMPRESSED, uncompressed_name
from megazero.lines.partial_shard import JOURNAL

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")

# Megatron-LM's names for corpora and where it expects them: a tokenized one is preferred to the text that it came from.
NAMED_CORPORA = {
    "webtext": ("data/webtext/*.bin", "data/webtext/data.json"),
    "wikipedia": ("data/wikipedia/*.bin", "data/wikipedia/wikidump_lines.json"),
}
_PARTS = {"--train-data": "train", "--valid-data": "valid", "--test-data": "test"}  # of a corpus, by what names it


@dataclass(frozen=True)
class Corpus:
    """One source of documents.

    Attributes:
        path: prefix of .bin/.idx files, or a file of JSON lines.
        is_indexed: which of the two.
        weight: as given on the command line; None where no weights were.
    """

    path: Path
    is_indexed: bool
    weight: float | None = None


def find_corpora(entries: Sequence[str], flag: str = "--train-data") -> list[Corpus]:
    """The corpora that a flag's values name, in order.

    Args:
        entries: paths or names, or weights and paths in turn ("0.3 a 0.7 b").

    Raises:
        FileNotFoundError: a name stands for nothing that exists; says what was looked for.
        ValueError: weights are not positive, or given for some of the corpora only; a corpus is named twice; or tokens are not
            finished.
    """
    corpora: list[Corpus] = []
    for weight, entry in _weighted(entries, flag):
        found = _find(entry, flag)
        # Several files of one name share its weight evenly.
        corpora += [replace(corpus, weight=weight and weight / len(found)) for corpus in found]
    twice = [path for path, count in Counter(corpus.path.resolve() for corpus in corpora).items() if count > 1]
    if twice:  # each would give its samples in the same order, so that a batch had them several times
        raise ValueError(
            f"{flag} names {twice[0]} more than once. Name it once, with the sum of the weights: it is repeated for as many "
            "epochs as the run needs."
        )
    return corpora


def find_sets(entries: Sequence[str], flag: str) -> dict[str, list[Corpus]]:
    """The corpora of each set that a flag's values name, by the set's name; a single set without one has the name "".

    Args:
        entries: as for `find_corpora`, with NAME= before the first one of each set ("code=a web=0.3 b 0.7 c").

    Raises:
        FileNotFoundError, ValueError: as `find_corpora`; or a set has no name, or that of another one, or no corpus.
    """
    sets: dict[str, list[str]] = {}
    name = ""
    for entry in entries:
        before, first = named_entry(entry)
        if before is not None:
            if not (before and first) or before in sets or "" in sets:
                raise ValueError(
                    f"{flag} {' '.join(entries)}: give every set a name of its own before its first corpus (code=data/a "
                    f"web=data/b data/c), or none at all; a path that looks like a name is written ./{entry}"
                )
            name, entry = before, first
        sets.setdefault(name, []).append(entry)
    return {name: find_corpora(own, flag) for name, own in sets.items()}


def named_entry(entry: str) -> tuple[str | None, str]:
    """NAME and PATH of an entry "NAME=PATH"; no name of a plain path. A path that looks like a name is written ./a=b."""
    name, sign, path = entry.partition("=")
    return (name, path) if sign and "/" not in name else (None, entry)


def has_split_off(entries: Sequence[str], part: str) -> bool:
    """Whether --train-data names one well-known corpus, and a pipeline has left `part` of it ("valid", "test") beside it."""
    if len(entries) != 1 or not _is_named(entries[0]):
        return False
    parts = _files_by_part(entries[0])
    return bool(parts["train"] and parts[part])


def refuse_unfinished(folder: Path, start: str = "", own: Path | None = None) -> None:
    """Raises a ValueError if tokens whose name has this start are still being made in the folder, or their making was killed.

    Whoever takes all that lie there would train on a part of the text. `own` is the prefix of the tokens that the caller makes.
    """
    for journal in sorted(folder.glob(f"{start}*_document{JOURNAL}")):
        prefix = journal.with_name(journal.name.removesuffix(JOURNAL))
        if own is not None and prefix.resolve() == own.resolve():
            continue  # this call makes them
        if not append_suffix(prefix, ".idx").exists():
            raise ValueError(
                f"{prefix}: the run that makes these tokens has not finished. Start it again, which goes on where it stopped; or "
                f"delete {prefix}.* to do without."
            )


def weights_of(entries: Sequence[str]) -> list[float]:
    """The weights among a flag's values; none where no weights are given."""
    return [weight for entry in entries if (weight := _number(entry)) is not None]


def _weighted(entries: Sequence[str], flag: str) -> list[tuple[float | None, str]]:
    weights = [_number(entry) for entry in entries]
    if not any(weight is not None for weight in weights):
        return [(None, entry) for entry in entries]
    if [weight is None for weight in weights] != [False, True] * (len(entries) // 2):
        raise ValueError(
            f"{flag} {' '.join(entries)}: give a weight before every corpus (0.3 data/a 0.7 data/b) or none at all; "
            "a path that looks like a number is written ./7"
        )
    pairs = list(zip(weights[::2], entries[1::2], strict=True))
    for weight, path in pairs:
        if weight is None or weight <= 0:
            raise ValueError(
                f"{flag}: the weight {weight} of {path} is not a positive number. Drop the corpus or weigh it more."
            )
    return pairs


def _number(entry: str) -> float | None:
    return float(entry) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", entry) else None


def _find(entry: str, flag: str) -> list[Corpus]:
    if _is_named(entry):
        return _find_named(entry, flag)
    path = Path(entry)
    prefix = indexed_prefix(path)
    if prefix is not None:
        return [Corpus(prefix, True)]
    if path.is_file():
        if is_json(path):
            return [Corpus(path, False)]
        raise ValueError(
            f"{flag} {entry} is neither an indexed corpus (.bin/.idx) nor loose JSON ({', '.join(_JSON_SUFFIXES)}, also "
            f'{", ".join(COMPRESSED)}). Plain text is to be made JSON lines first, {{"text": ...}} for each document; tables of '
            "documents (.parquet) are read by data_tools/preprocess_data.py, tokens of other trainers (.npy, .parquet) by "
            "python -m data_tools import_tokens."
        )
    raise FileNotFoundError(
        f"{flag} {entry}: found no {entry}.idx, no {entry}_text_document.idx and no file of that name. Give the prefix of a "
        f".bin/.idx pair, a file of JSON lines, or one of {', '.join(NAMED_CORPORA)}."
    )


def _is_named(entry: str) -> bool:
    return entry in NAMED_CORPORA and not Path(entry).exists() and indexed_prefix(Path(entry)) is None


def _files_by_part(name: str) -> dict[str, list[str]]:
    """The files {train,valid,test}_* of a well-known corpus, as scripts/prepare_webtext.sh leaves them."""
    pattern, _ = NAMED_CORPORA[name]
    return {part: sorted(glob.glob(pattern.replace("*", f"{part}_*"))) for part in _PARTS.values()}


def _find_named(name: str, flag: str) -> list[Corpus]:
    pattern, text = NAMED_CORPORA[name]
    parts, part, start = _files_by_part(name), _PARTS.get(flag), ""
    found = sorted(glob.glob(pattern))
    if part and parts["train"]:  # what is for one purpose serves no other
        found, start = parts[part], f"{part}_"
        if not found:
            raise FileNotFoundError(f"{flag} {name}: {pattern} has train_*.bin, but no {part}_*.bin. Give a path.")
    refuse_unfinished(Path(pattern).parent, start)
    if found:
        return [Corpus(Path(path).with_suffix(""), True) for path in found]
    if Path(text).is_file():
        return [Corpus(Path(text), False)]
    raise FileNotFoundError(
        f"{flag} {name}: there is neither {pattern} nor {text} below {Path.cwd()}. Put the corpus there (a link will do: "
        f"ln -s WHERE-IT-IS {Path(text).parent}), or give its path."
    )


def is_json(path: Path) -> bool:
    """Whether the file's name says JSON lines, compressed or not."""
    return uncompressed_name(path).suffix in _JSON_SUFFIXES


def indexed_prefix(path: Path) -> Path | None:
    """The prefix that `path` means: a prefix itself, one without its key and ending, or one of its files."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    for prefix in (path, append_suffix(path, "_text_document")):
        if any(append_suffix(prefix, suffix).is_file() for suffix in (".idx", ".bin")):
            return prefix
    if path.suffix == ".json" and append_suffix(path.with_suffix(""), ".idx").is_file():
        prefix = path.with_suffix("")
        return prefix if read_sidecar(prefix) is not None else None
    return None
