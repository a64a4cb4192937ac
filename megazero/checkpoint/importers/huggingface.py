"""Hugging Face's GPT-2 directories: written so that `from_pretrained` opens them, and read.

DIR/config.json, generation_config.json
DIR/model.safetensors                     or model-00001-of-00003.safetensors, ... and model.safetensors.index.json
DIR/pytorch_model.bin                     read only: what transformers wrote before safetensors
DIR/vocab.json, merges.txt, ...           copies of the tokenizer's files
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor
from megazero.checkpoint.importers.torch_files import load_torch_file
from megazero.checkpoint.writer import TensorSpec, stream_tensors
from megazero.files import append_suffix, sync_folder, written_aside
from megazero.model.config import GPT2Config
from megazero.model.huggingface import (
    HEAD,
    PREFIX,
    bare_names,
    check_head,
    check_huggingface,
    config_from_huggingface,
    config_to_huggingface,
    matching_names,
)

MAX_SHARD_BYTES = 5_000_000_000
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.(safetensors|bin)")
_TOKENIZER_NAMES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}  # OpenAI's names -> transformers'
_GPT2_VOCABULARY, _GPT2_END_OF_TEXT = 50257, 50256


def write_huggingface(
    directory: str | Path,
    tensors: Callable[[str], Tensor],
    config: GPT2Config,
    dtype: torch.dtype,
    tokenizer_files: Sequence[Path] = (),
    *,
    end_of_text: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Returns when `directory` holds the model, whole; before that it does not exist. One tensor is in memory at a time.

    Args:
        tensors: by our name of the parameter, the full and unpadded tensor.
        dtype: of the written weights.
        tokenizer_files: copied, under the names that transformers looks for.
        end_of_text: the token that ends a document, where `generate` stops; GPT-2's own if the vocabulary has GPT-2's size.
        max_shard_bytes: of tensors in one file; a single larger tensor has a file of its own.

    Raises:
        FileExistsError: there is something in `directory`.
        FileNotFoundError: a tokenizer file is missing.
        ValueError: `dtype` is no floating-point dtype, or a tensor has another shape than `config` says.
        OSError: the disk is full, or the like.
    """
    directory = Path(directory).resolve()
    if not dtype.is_floating_point:
        raise ValueError(
            f"weights cannot be written as {dtype}: choose torch.float32, torch.bfloat16 or torch.float16."
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(
            f"{directory} exists already: choose another directory for the model, or delete this one."
        )
    if end_of_text is None and config.vocab_size == _GPT2_VOCABULARY:
        end_of_text = _GPT2_END_OF_TEXT
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = append_suffix(directory, f".tmp{os.getpid()}")
    aside.mkdir()
    try:
        _write_weights(aside, tensors, config, dtype, max_shard_bytes)
        dtype_name = str(dtype).removeprefix("torch.")
        _write_json(aside / "config.json", {**config_to_huggingface(config), **ends, "torch_dtype": dtype_name})
        _write_json(aside / "generation_config.json", {"_from_model_config": True, **ends})
        for source in tokenizer_files:
            _copy(source, aside / _TOKENIZER_NAMES.get(source.name, source.name))
        sync_folder(aside)
        os.rename(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(directory.parent)


def _write_weights(
    folder: Path, tensors: Callable[[str], Tensor], config: GPT2Config, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """The head is left out: it is tied to the embedding, as config.json says."""
    shapes = config.full_shapes()
    ours_of = {f"{PREFIX}{theirs}": (ours, transposed) for ours, theirs, transposed in matching_names(config)}
    specs = {
        theirs: TensorSpec(dtype, shapes[ours][::-1] if transposed else shapes[ours])
        for theirs, (ours, transposed) in ours_of.items()
    }

    def read(theirs: str) -> Tensor:
        ours, transposed = ours_of[theirs]
        full = tensors(ours).detach()
        if tuple(full.shape) != shapes[ours]:
            raise ValueError(f"{ours} has shape {list(full.shape)}, and the configuration says {list(shapes[ours])}.")
        return (full.t() if transposed else full).to(dtype).contiguous()

    shards = _shards(specs, max_shard_bytes)
    if len(shards) == 1:
        stream_tensors(folder / _WEIGHTS[0], specs, read)
        return
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        stream_tensors(folder / name, shard, read)
        weight_map.update(dict.fromkeys(shard, name))
    metadata = {"total_size": sum(spec.nbytes for spec in specs.values())}
    _write_json(_index_of(folder / _WEIGHTS[0]), {"metadata": metadata, "weight_map": weight_map})


def _shards(specs: dict[str, TensorSpec], max_bytes: int) -> list[dict[str, TensorSpec]]:
    """`specs` in order, in as few files as have at most `max_bytes` each."""
    shards: list[dict[str, TensorSpec]] = [{}]
    room = max_bytes
    for name, spec in specs.items():
        if spec.nbytes > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = spec
        room -= spec.nbytes
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with written_aside(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        raise ValueError(f"the tokenizer file {source} would take the place of {target.name}: rename or leave it out.")
    with written_aside(target) as file:
        file.write(source.read_bytes())


@dataclass(frozen=True)
class _Saved:
    """A tensor in a file."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def read_huggingface(directory: str | Path) -> ForeignCheckpoint:
    """The weights of a GPT-2 as transformers saves it, in our names and layout; its GPT2Config is in client_state["model"].

    Weights are read when they are asked for; only a head that is saved beside the embedding is compared with it at once.

    Raises:
        FileNotFoundError: there is no config.json or no file of weights.
        ValueError: it is no GPT-2, is one that this model cannot compute, or is damaged.
    """
    directory = Path(directory)
    config = _read_config(directory)
    saved = dict(_open_weights(directory))
    bare = bare_names(saved)
    head = bare.pop(HEAD, None)
    check_huggingface({name: saved[key].shape for name, key in bare.items()}, config, str(directory))
    if head is not None:
        check_head(saved[head].read(), saved[bare["wte.weight"]].read(), str(directory))
    shapes = config.full_shapes()

    def reader(name: str, key: str, transposed: bool) -> Callable[[], Tensor]:
        def read() -> Tensor:
            tensor = saved[key].read()
            if not tensor.is_floating_point():
                raise ValueError(f"{directory}: {key} is of {tensor.dtype}; quantised checkpoints cannot be read.")
            full = (tensor.t() if transposed else tensor).contiguous()
            return full.to(torch.float32, copy=True)  # never a view of the file

        return read

    tensors = {
        ours: ForeignTensor(shapes[ours], "trained", {"master": reader(ours, bare[theirs], transposed)})
        for ours, theirs, transposed in matching_names(config)
    }
    return ForeignCheckpoint(tensors, client_state={"model": asdict(config)})


def _read_config(directory: Path) -> GPT2Config:
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: a Hugging Face model is a directory with a config.json beside its weights. Download it too."
        )
    content = _read_json(path)
    try:
        return config_from_huggingface(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _open_weights(directory: Path) -> Iterator[tuple[str, _Saved]]:
    """Every tensor by its name in the files."""
    for path in (directory / name for name in _WEIGHTS):
        if path.is_file():
            yield from _open(path).items()
            return
        if _index_of(path).is_file():
            yield from _open_indexed(_index_of(path))
            return
    raise FileNotFoundError(f"{directory} holds no weights: neither {' nor '.join(_WEIGHTS)}, nor an index of shards.")


def _open_indexed(index: Path) -> Iterator[tuple[str, _Saved]]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map, the table of tensors and their files. Download it again.")
    opened: dict[str, dict[str, _Saved]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
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
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. It is damaged or not complete; copy it again.") from error

    def reader(name: str) -> Callable[[], Tensor]:
        return lambda: file.get_tensor(name)

    return {name: _Saved(shape, reader(name)) for name, shape in shapes.items()}


def _index_of(weights: Path) -> Path:
    return append_suffix(weights, ".index.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where an object is expected. Download it again.")
    return content
