"""A checkpoint of the GPT-2 job as a directory of Hugging Face's, which `from_pretrained` opens.

Its files are those that `importers.huggingface` reads, generation_config.json and those of the tokenizer.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.own_model import gpt2_of
from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tensor_file import LazyTensor, write_tensors
from megazero.checkpoint.vocabulary import saved_flags, saved_tokenizer
from megazero.checkpoint.weight_files import shard_index, sharded
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizer_export import huggingface_files
from megazero.files import aside_name, read_whole, sync_folder, write_json, write_whole
from megazero.model.config import GPT2Config
from megazero.model.huggingface import Match, config_to_huggingface, matching_names, missing_biases

logger = logging.getLogger(__name__)

_MAX_SHARD_BYTES = 5_000_000_000  # of tensors in one file; a single larger tensor has a file of its own
_TOKENIZER_NAMES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}  # OpenAI's names -> transformers'
_GENERATION = "generation_config.json"
_GPT2_VOCABULARY, _GPT2_END_OF_TEXT = 50257, 50256


def export_huggingface(
    reader: Reader, directory: str | Path, dtype: torch.dtype, tokenizer_files: Sequence[Path] | None = None
) -> None:
    """Returns when `directory` holds the model as transformers' `from_pretrained` opens it. One tensor is in memory at a time.

    Args:
        dtype: of the written weights.
        tokenizer_files: copied beside the weights; by default those are written that give the training job's ids. A
            generation_config.json, among them or alone, replaces that of the training job's end of text.

    Raises:
        FileExistsError: there is something in `directory`.
        ValueError: the checkpoint does not say what model it is of, has more than its parameters, or is damaged; or Hugging
            Face's layouts have no such model.
    """
    client = client_state(reader)
    config = gpt2_of(reader, client)
    tokenizer, problem = _tokenizer(client, reader.path)
    files = named_files(tokenizer_files or ())
    if files.keys() - {_GENERATION}:
        if problem and config.vocab_size != _GPT2_VOCABULARY and _GENERATION not in files:
            logger.warning(
                "the exported model does not know which token ends a text, where generate() would stop: %s", problem
            )
    else:
        try:
            files = {**(huggingface_files(tokenizer) if tokenizer else {}), **files}
        except ValueError as error:
            problem = str(error)
        if problem:
            logger.warning("the model is exported without a tokenizer, which --tokenizer-files can give: %s", problem)
    end_of_text = None if tokenizer is None else tokenizer.eod
    write_huggingface(directory, reader.read_weight, config, dtype, files, end_of_text=end_of_text)


def _tokenizer(client: dict[str, Any], path: Path) -> tuple[Tokenizer | None, str]:
    """The training job's tokenizer; or None, and why it is not to be had."""
    if not saved_flags(client):
        return None, "the checkpoint names none"
    try:
        tokenizer = saved_tokenizer(client, path)
    except (OSError, TypeError, ValueError) as error:
        return None, str(error)
    if tokenizer.sha256 != client.get("tokenizer_sha256", tokenizer.sha256):
        return None, "the files that it was trained with have changed"
    return tokenizer, ""


def named_files(paths: Sequence[Path]) -> dict[str, bytes]:
    """What the tokenizer's files and a generation_config.json hold, by the names under which transformers looks for them.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: two would have the same name.
    """
    files: dict[str, bytes] = {}
    for path in paths:
        name = _TOKENIZER_NAMES.get(path.name, path.name)
        if name in files:
            raise ValueError(f"the tokenizer file {path} would take the place of {name}: rename or leave it out.")
        files[name] = read_whole(path)
    if files.keys() - {_GENERATION} and not files.keys() & {"merges.txt", "tokenizer_config.json"}:
        logger.warning(
            "transformers reads a tokenizer of another kind than the model's own only if a tokenizer_config.json says "
            '"tokenizer_class": "PreTrainedTokenizerFast": without, its AutoTokenizer gives other ids, or none'
        )
    return files


def write_huggingface(
    directory: str | Path,
    tensors: Callable[[str], Tensor],
    config: GPT2Config,
    dtype: torch.dtype,
    tokenizer_files: Mapping[str, bytes] | None = None,
    *,
    end_of_text: int | None = None,
) -> None:
    """Returns when `directory` holds the model, whole; before that it does not exist. One tensor is in memory at a time.

    Args:
        tensors: by our name of the parameter, the full and unpadded tensor.
        dtype: of the written weights.
        tokenizer_files: by name, what further files hold.
        end_of_text: the token that ends a document, where `generate` stops, unless a generation_config.json is given; GPT-2's
            own if the vocabulary has GPT-2's size.

    Raises:
        FileExistsError: there is something in `directory`, or it is a mount point.
        ValueError: `dtype` is no floating-point dtype, or a tensor has another shape than `config` says.
        OSError: the disk is full, or the like.
    """
    directory = Path(directory).resolve()
    if not dtype.is_floating_point:
        raise ValueError(
            f"weights cannot be written as {dtype}: choose torch.float32, torch.bfloat16 or torch.float16."
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists already: choose another directory for the model.")
    if os.path.ismount(directory):
        raise FileExistsError(f"{directory} is a mount point, which no folder can replace: name a new folder in it.")
    if end_of_text is None and config.vocab_size == _GPT2_VOCABULARY:
        end_of_text = _GPT2_END_OF_TEXT
    files = tokenizer_files or {}
    if _GENERATION in files:
        ends = _special_ids(files[_GENERATION])
    else:
        ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        files = {**files, _GENERATION: json.dumps({"_from_model_config": True, **ends}, indent=2).encode() + b"\n"}
    with _directory_aside(directory) as aside:
        content = {**config_to_huggingface(config), **ends, "torch_dtype": str(dtype).removeprefix("torch.")}
        write_json(aside / "config.json", content, indent=2)
        for name, held in files.items():
            if (aside / name).exists():
                raise ValueError(f"the tokenizer's file would take the place of {name}: rename or leave it out.")
            write_whole(aside / name, held)
        _write_weights(aside, tensors, config, dtype)  # last: what can be wrong above takes no time


def _special_ids(generation_config: bytes) -> dict[str, Any]:
    """The ids of special tokens in a generation_config.json, which config.json has too."""
    try:
        content = json.loads(generation_config)
        return {name: content[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in content}
    except (ValueError, TypeError) as error:
        raise ValueError(f"the {_GENERATION} that was given is none: {error}.") from error


@contextmanager
def _directory_aside(directory: Path) -> Iterator[Path]:
    """A directory that becomes `directory` when the block ends well, and leaves nothing behind when it raises."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_name(directory)
    aside.mkdir()
    try:
        yield aside
        sync_folder(aside)
        os.rename(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(directory.parent)


def _write_weights(folder: Path, tensors: Callable[[str], Tensor], config: GPT2Config, dtype: torch.dtype) -> None:
    """A tied head is left out, as transformers does."""
    shapes = config.full_shapes()
    tensors = lru_cache(maxsize=1)(tensors)  # of which several of theirs may be made, one after the other

    def read(match: Match, part: int) -> Tensor:
        full = tensors(match.ours).detach()
        if tuple(full.shape) != shapes[match.ours]:
            raise ValueError(
                f"{match.ours} has shape {list(full.shape)}, and the configuration says {list(shapes[match.ours])}."
            )
        return match.split(full)[part].to(dtype)

    to_write = {
        name: LazyTensor(dtype, match.their_shape(shapes[match.ours]), partial(read, match, part))
        for match in matching_names(config)
        for part, name in enumerate(match.theirs)
    }
    for name, shape in missing_biases(config).items():
        to_write[name] = LazyTensor(dtype, shape, partial(torch.zeros, shape, dtype=dtype, device="cpu"))
    files = sharded("model", ".safetensors", to_write, _MAX_SHARD_BYTES)
    for file, shard in files.items():
        write_tensors(folder / file, shard)
    if len(files) > 1:
        write_json(folder / "model.safetensors.index.json", shard_index(files), indent=2)
