"""Reads the two files of a GPT-2 vocabulary into the form that tiktoken takes, and finds them where nobody named them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
DEFAULT_FOLDERS: Sequence[Path] = (Path("data/gpt2_bpe"), Path("data/tokenizer"))
_VOCAB_NAMES = ("encoder.json", "vocab.json")
_MERGE_NAMES = ("vocab.bpe", "merges.txt")
_REMEDY = (
    "Nothing is downloaded: name the files, or their folder by --tokenizer-path, or train a vocabulary by "
    "python -m data_tools train_tokenizer --model-type byte_level_bpe."
)


def byte_of_character() -> dict[str, int]:
    """The printable character by which a byte-level BPE writes each byte, as a table from character to byte.

    Printable Latin-1 bytes stand for themselves; the other 68 are numbered from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def find_gpt2_files(
    vocab_file: str | Path | None, merge_file: str | Path | None, folder: str | Path | None
) -> tuple[Path, Path]:
    """Paths of vocabulary and merges: the two named ones, else those in `folder`, else those in the default folders.

    Raises:
        FileNotFoundError: they are nowhere; says where they were looked for.
        ValueError: only one of the two was named.
    """
    if vocab_file and merge_file:
        return Path(vocab_file), Path(merge_file)
    if vocab_file or merge_file:
        given, missing = ("--vocab-file", "--merge-file") if vocab_file else ("--merge-file", "--vocab-file")
        raise ValueError(f"{given} {vocab_file or merge_file} needs {missing} too: the two files are one vocabulary")
    folders = DEFAULT_FOLDERS
    if folder is not None:
        path = Path(folder)
        if not path.exists():
            raise FileNotFoundError(f"--tokenizer-path {folder}: there is no such file or folder. {_REMEDY}")
        folders = (path.parent if path.is_file() else path,)
    for place in folders:
        vocab, merges = _first_there(place, _VOCAB_NAMES), _first_there(place, _MERGE_NAMES)
        if vocab and merges:
            return vocab, merges
    raise FileNotFoundError(
        "GPT2BPETokenizer needs --vocab-file (encoder.json or vocab.json) and --merge-file (vocab.bpe or merges.txt); "
        f"neither was given, and there are no such two in {' or '.join(str(place) + '/' for place in folders)}. {_REMEDY}"
    )


def is_of_vocabulary(path: Path) -> bool:
    """Whether a .json lies, under such a name, beside the merges of a vocabulary."""
    has_name = path.name in (*_VOCAB_NAMES, "tokenizer.json")
    return has_name and _first_there(path.parent, _MERGE_NAMES) is not None


def _first_there(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_gpt2_vocabulary(
    vocab_file: str | Path, merge_file: str | Path, vocab: bytes, merges: bytes
) -> tuple[dict[bytes, int], dict[str, int]]:
    """The tokens as bytes -> id, and the special tokens as text -> id (every entry that no merge makes).

    A token's id doubles as its merge priority, as it does in GPT-2's own files; that is checked.

    Args:
        vocab_file, merge_file: what messages call them.
        vocab, merges: what they hold.

    Raises:
        ValueError: the files do not belong together, are no byte-level BPE, or lack `<|endoftext|>`.
    """
    vocabulary = _read_vocabulary(vocab_file, vocab)
    alphabet = byte_of_character()
    absent = [character for character in alphabet if character not in vocabulary]
    if absent:
        raise ValueError(
            f"{vocab_file} is not a byte-level BPE vocabulary: {len(absent)} of the 256 byte tokens are missing "
            f"(the first: {absent[0]!r}). For other kinds use --tokenizer-type HuggingFaceTokenizer with a tokenizer.json."
        )
    ordinary = {character: bytes([byte]) for character, byte in alphabet.items()}
    last = -1
    for line, left, right in _read_merges(merge_file, merges):
        token = left + right
        if token not in vocabulary or left not in ordinary or right not in ordinary:
            raise ValueError(f"{merge_file}:{line}: merge {f'{left} {right}'!r} does not belong to {vocab_file}")
        if vocabulary[token] <= last:
            raise ValueError(
                f"{merge_file}:{line}: the ids in {vocab_file} do not rise in the order of the merges, as GPT-2's do. "
                "Use --tokenizer-type HuggingFaceTokenizer with a tokenizer.json."
            )
        last = vocabulary[token]
        ordinary[token] = ordinary[left] + ordinary[right]
    special = {token: i for token, i in vocabulary.items() if token not in ordinary}
    if END_OF_TEXT not in special:
        raise ValueError(f"{vocab_file} has no entry {END_OF_TEXT}, which separates documents")
    return {content: vocabulary[token] for token, content in ordinary.items()}, special


def _read_vocabulary(path: str | Path, held: bytes) -> dict[str, int]:
    try:
        content = json.loads(held)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--vocab-file {path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not all(type(i) is int for i in content.values()):
        raise ValueError(f"--vocab-file {path} is not a table from token to id, as encoder.json and vocab.json are")
    return content


def _read_merges(path: str | Path, held: bytes) -> Iterator[tuple[int, str, str]]:
    try:
        lines = held.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path} is not UTF-8 text, at byte {error.start}") from error
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not right or " " in right:
            raise ValueError(f"--merge-file {path}:{number}: expected two tokens and a space, found {line[:60]!r}")
        yield number, left, right
