"""A checkpoint of the GPT-2 job for other frameworks, with its tokenizer's files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.importers.huggingface import write_huggingface
from megazero.checkpoint.loading import client_state
from megazero.checkpoint.reader import Reader
from megazero.data.gpt2_bpe import find_gpt2_files
from megazero.data.tokenizer import GPT2BPETokenizer, Tokenizer, build_tokenizer
from megazero.model.config import GPT2Config

logger = logging.getLogger(__name__)


def export_huggingface(
    reader: Reader, directory: str | Path, dtype: torch.dtype, tokenizer_files: Sequence[Path] | None = None
) -> None:
    """Returns when `directory` holds the model as transformers' `from_pretrained` opens it. One tensor is in memory at a time.

    Args:
        dtype: of the written weights.
        tokenizer_files: copied beside the weights; by default the training job's, where they still are.

    Raises:
        FileExistsError: there is something in `directory`.
        ValueError: the checkpoint does not say what GPT-2 it is of, or is damaged.
    """
    client = client_state(reader)
    config = _model_config(reader, client)
    tokenizer = _tokenizer(client)
    if tokenizer_files is None:
        tokenizer_files = [] if tokenizer is None else _files(**client["tokenizer"])
    end_of_text = None if tokenizer is None else tokenizer.eod
    write_huggingface(directory, reader.read_weight, config, dtype, tokenizer_files, end_of_text=end_of_text)


def _model_config(reader: Reader, client: Any) -> GPT2Config:
    saved = client.get("model") if isinstance(client, dict) else None
    if not isinstance(saved, dict):
        raise ValueError(
            f"{reader.path} does not say what model it is of: its client state has no 'model', the fields of a GPT2Config. Only "
            "checkpoints of pretrain_gpt2.py, and imported ones, can be exported; zero_to_fp32.py writes the weights of any."
        )
    try:
        return GPT2Config(**saved)
    except TypeError as error:
        raise ValueError(f"{reader.path} is of a model that this version does not know: {error}.") from error


def _tokenizer(client: dict[str, Any]) -> Tokenizer | None:
    """The training job's tokenizer; None, with a word about it, where it is no longer to be had."""
    saved = client.get("tokenizer")
    if saved is None:
        logger.warning("the model is exported without a tokenizer: the checkpoint names none. --tokenizer-files does")
        return None
    files = {"vocab_file": saved.get("vocab_file"), "merge_file": saved.get("merge_file")}
    try:
        tokenizer = build_tokenizer(saved["tokenizer_type"], **files, model_file=saved.get("tokenizer_path"))
    except (OSError, ValueError) as error:
        logger.warning("the model is exported without its tokenizer, which --tokenizer-files can give: %s", error)
        return None
    if tokenizer.sha256 != client.get("tokenizer_sha256"):
        logger.warning("the model is exported without its tokenizer: the files that it was trained with have changed")
        return None
    return tokenizer


def _files(
    tokenizer_type: str, vocab_file: str | None, merge_file: str | None, tokenizer_path: str | None
) -> list[Path]:
    if tokenizer_type == GPT2BPETokenizer.name:
        return [*find_gpt2_files(vocab_file, merge_file, tokenizer_path)]
    path = Path(tokenizer_path or vocab_file or "")
    return [*path.glob("tokenizer.json"), *path.glob("*.model")] if path.is_dir() else [path]
