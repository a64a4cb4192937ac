"""Reads Hugging Face's directories of a GPT-2 or a Llama; `megazero.checkpoint.commands.export` writes them.

DIR/config.json
DIR/model.safetensors                     or model-00001-of-00003.safetensors, ... and model.safetensors.index.json
DIR/pytorch_model.bin                     what transformers wrote before safetensors; in shards too
DIR/tokenizer.json                        or vocab.json and merges.txt: the vocabulary, if there is one
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.format import PLAIN_NAME
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor, Read
from megazero.checkpoint.importers.torch_files import load_torch_file
from megazero.checkpoint.vocabulary import vocabulary_state
from megazero.data.tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer, Tokenizer, build_tokenizer
from megazero.files import append_suffix, read_whole
from megazero.logging import get_logger
from megazero.model.config import GPT2Config
from megazero.model.huggingface import Match, config_from_huggingface, saved_names
from megazero.zero.bucket import MASTER

logger = get_logger(__name__)

_TOKENIZERS: tuple[type[Tokenizer], ...] = (HuggingFaceTokenizer, GPT2BPETokenizer)  # the first one that is there
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # smaller ones go with scales
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them


class _Saved(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    read: Read


def read_huggingface(directory: str | Path) -> ForeignCheckpoint:
    """The weights of a model as transformers saves it, in our names and layout; its GPT2Config is in client_state["model"].

    The client state also has the tokenizer, if one lies beside the weights.
    Weights are read when they are asked for; only a head that is saved beside the embedding is compared with it at once.

    Raises:
        FileNotFoundError: there is no config.json or no file of weights.
        ValueError: it is neither a GPT-2 nor a Llama, is one that this model cannot compute, is quantised or damaged, or is an
            adapter.
    """
    directory = Path(directory)
    config = _read_config(directory)
    saved = _open_weights(directory)

    def read_saved(key: str) -> Tensor:
        tensor = saved[key].read()
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{directory}: {key} is of {tensor.dtype}; quantised checkpoints cannot be read.")
        return tensor

    matches = saved_names(saved, config, str(directory), read_saved)
    shapes = config.full_shapes()

    def read(match: Match) -> Tensor:
        return match.join(map(read_saved, match.theirs)).to(torch.float32, copy=True)  # never a view of the file

    tensors = {
        match.ours: ForeignTensor(shapes[match.ours], "trained", {MASTER: partial(read, match)}) for match in matches
    }
    vocabulary = _vocabulary(directory, config.require_vocab_size())
    return ForeignCheckpoint(tensors, client_state={"model": asdict(config), **vocabulary})


def _vocabulary(directory: Path, vocab_size: int) -> dict[str, Any]:
    """Entries of the client state for the tokenizer in the directory; none where there is none, or none that could be used."""
    kinds = [kind.name for kind in _TOKENIZERS if all((directory / name).is_file() for name in kind.file_names)]
    if not kinds:
        return {}
    try:
        tokenizer = build_tokenizer(kinds[0], tokenizer_path=directory)
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(f"it has {tokenizer.vocab_size} entries, and the model {vocab_size}")
        return vocabulary_state(tokenizer, {})
    except ValueError as error:
        logger.warning(
            "the tokenizer in %s is not imported, so evaluation needs --tokenizer-path: %s", directory, error
        )
        return {}


def _read_config(directory: Path) -> GPT2Config:
    path = directory / "config.json"
    if not path.is_file():
        if (directory / "adapter_config.json").is_file():
            raise ValueError(
                f"{directory} holds an adapter of PEFT's, not a model: merge it into its base first "
                "(model.merge_and_unload()), and save the result."
            )
        raise FileNotFoundError(
            f"{path} is missing: a Hugging Face model is a directory with a config.json beside its weights. Download it too."
        )
    content = _read_json(path)
    try:
        return config_from_huggingface(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _open_weights(directory: Path) -> dict[str, _Saved]:
    """Every tensor by its name in the files."""
    for path in (directory / name for name in _WEIGHTS):
        index = append_suffix(path, ".index.json")
        if path.is_file():
            return _open(path)
        if index.is_file():
            return dict(_open_indexed(index))
    raise FileNotFoundError(f"{directory} holds no weights: neither {' nor '.join(_WEIGHTS)}, nor an index of shards.")


def _open_indexed(index: Path) -> Iterator[tuple[str, _Saved]]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map, the table of tensors and their files. Download it again.")
    opened: dict[str, dict[str, _Saved]] = {}
    for tensor, name in weight_map.items():
        is_plain = isinstance(name, str) and PLAIN_NAME.fullmatch(name)
        if not is_plain or not name.endswith((".safetensors", ".bin")):
            raise ValueError(
                f"{index} says that {tensor} is in {name!r}: only .safetensors and .bin files of the index's own directory are "
                "read. Do not use this checkpoint if you do not know why its index points elsewhere."
            )
        if name not in opened:
            if not (index.parent / name).is_file():
                raise ValueError(f"{index} names the file {name}, which is missing. Download it too.")
            opened[name] = _open(index.parent / name)
        if tensor not in opened[name]:
            raise ValueError(f"{index} says that {tensor} is in {name}, and it is not. Download both again.")
        yield tensor, opened[name][tensor]


def _open(path: Path) -> dict[str, _Saved]:
    if path.suffix == ".bin":
        content = load_torch_file(path)
        if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
            raise ValueError(f"{path} is no state dict, which maps names to tensors.")
        return {name: _Saved(tuple(tensor.shape), tensor.detach) for name, tensor in content.items()}
    try:
        file = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no dict)
        return {name: _Saved(shape, partial(file.get_tensor, name)) for name, shape in shapes.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. It is damaged or not complete; copy it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where an object is expected. Download it again.")
    return content
