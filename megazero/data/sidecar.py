"""PREFIX.json beside PREFIX.bin and PREFIX.idx: which tokenizer made the tokens, which the binary format has no room for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megazero.data.tokenizer import Tokenizer
from megazero.files import append_suffix, is_there, read_whole, write_json

FORMAT = "megazero tokens 1"
_LARGEST_SIDECAR = 1 << 26  # of half a million input files; what is larger is a corpus of text, and not read


@dataclass(frozen=True)
class Sidecar:
    """What is recorded of one tokenized corpus.

    Attributes:
        source: description of the run that made it (input files, key, end of text); equal descriptions give equal tokens.
        statistics: counts of that run (lines, bytes of text, lines left out and why).
    """

    tokenizer_type: str
    tokenizer_sha256: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    source: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def tokenizer(self) -> str:
        """What made the tokens, for messages."""
        return _described(self.tokenizer_type, self.vocab_size, self.tokenizer_sha256)


def sidecar_path(prefix: str | Path) -> Path:
    """Where the record of the corpus `prefix` lies."""
    return append_suffix(prefix, ".json")


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Writes the record.

    Raises:
        ValueError: a file of that name exists which is not such a record (a corpus of text, say).
    """
    check_free(prefix)
    write_json(sidecar_path(prefix), {"format": FORMAT, **asdict(sidecar)})


def check_free(prefix: str | Path) -> None:
    """Raises a ValueError when writing the record of `prefix` would destroy a file of another kind."""
    path = sidecar_path(prefix)
    if is_there(path) and _load(path) is None:
        raise ValueError(
            f"{path} exists and is not a record of a tokenized corpus; it would be overwritten. Choose another --output-prefix."
        )


def remove_sidecar(prefix: str | Path) -> None:
    """Removes the record of `prefix`, before it could vouch for other tokens; a file of another kind stays."""
    path = sidecar_path(prefix)
    if _load(path) is not None:
        path.unlink()


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """The record of the corpus `prefix`; None where there is none (files made by Megatron-LM)."""
    path = sidecar_path(prefix)
    if (content := _load(path)) is None:
        return None
    known = {f.name for f in fields(Sidecar)}
    try:
        return Sidecar(**{key: value for key, value in content.items() if key in known})
    except TypeError as error:
        raise ValueError(
            f"{path} lacks an entry ({error}). Make the corpus anew with data_tools/preprocess_data.py."
        ) from error


def lack_of_record(prefix: str | Path) -> str:
    """Why `read_sidecar` has found None, for messages."""
    path = sidecar_path(prefix)
    return f"{path.name} is damaged, or something else" if path.exists() else f"no {path.name}"


def check_tokenizer(prefix: str | Path, num_tokens: int, tokenizer: Tokenizer) -> bool:
    """Whether the corpus `prefix` of `num_tokens` tokens is known to be made with `tokenizer`: False where no record says so.

    Raises:
        ValueError: it was made with another one (names both), or the record belongs to other files.
    """
    sidecar = read_sidecar(prefix)
    if sidecar is None:
        return False
    check_tokens(prefix, sidecar, num_tokens)
    if sidecar.tokenizer_sha256 != tokenizer.sha256:
        raise ValueError(
            f"{prefix} was tokenized with {sidecar.tokenizer}, "
            f"but this run uses {_described(tokenizer.name, tokenizer.vocab_size, tokenizer.sha256)}. Give the vocabulary that "
            "made the data (--tokenizer-type, --vocab-file, --merge-file, --tokenizer-path), or tokenize it again."
        )
    return True


def check_tokens(prefix: str | Path, sidecar: Sidecar, num_tokens: int) -> None:
    """Raises a ValueError where the record of a corpus was made of other files than the one of `num_tokens` tokens beside it."""
    if sidecar.tokens != num_tokens:
        raise ValueError(
            f"{sidecar_path(prefix)} records {sidecar.tokens} tokens, {prefix}.idx {num_tokens}: one of them was replaced. Copy "
            "the three files again, make them anew with data_tools/preprocess_data.py, or delete the record to do without it."
        )


def _described(name: str, vocab_size: int, sha256: str) -> str:
    return f"{name} ({vocab_size} entries, sha256 {sha256[:12]})"


def _load(path: Path) -> dict[str, Any] | None:
    """The content of a record; None where there is none, or a file of another kind."""
    if not is_there(path) or path.stat().st_size > _LARGEST_SIDECAR:
        return None
    try:
        content = json.loads(read_whole(path))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None
