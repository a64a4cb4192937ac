"""Turns a checkpoint into plain fp32 weights: no GPU, no configuration, one parameter in memory at a time.

    ./zero_to_fp32.py . pytorch_model.bin          one file that torch.load(weights_only=True) reads
    ./zero_to_fp32.py . model.safetensors          one safetensors file
    ./zero_to_fp32.py . weights/                   a directory of files of at most --max_shard_size, with their index

The first argument is the directory that holds `latest`; the second ends in .bin, .pt or .safetensors, or names a directory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tensor_file import LazyTensor, naming, write_tensors
from megazero.checkpoint.weight_files import shard_index, sharded

_FILE_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """All trained and frozen parameters in fp32, and the buffers, 16-bit ones too, under every name that they have; on the CPU.

    Args:
        checkpoint_dir: the directory that holds `latest`.
        tag: which checkpoint of it; the latest by default.
        lazy_mode: accepted for DeepSpeed's callers; tensors are read, one after the other, in any case.

    Raises:
        ValueError: `tag` is None and there is no file `latest`; or the checkpoint is damaged (CheckpointError).
        FileNotFoundError: there is no checkpoint of this tag.
    """
    reader = _open(checkpoint_dir, tag)
    found = {name: stored.read() for name, stored in _tensors(reader, exclude_frozen_parameters).items()}
    return _under_all_names(found, reader.aliases)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | int | None = None
) -> nn.Module:
    """The model, on the CPU, with the weights of a checkpoint; names that only one of the two has are left alone."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 weights of a checkpoint, one parameter in memory at a time.

    Args:
        output_dir: a file ending in .bin, .pt, .pth or .safetensors, or a directory. A directory gets `pytorch_model.bin`, or
            with `safe_serialization` `model.safetensors`; where they pass `max_shard_size`, several and their `.index.json`.
        max_shard_size: bytes, as a number or like "5GB"; None for one file.

    Raises:
        ValueError, FileNotFoundError: as `get_fp32_state_dict_from_zero_checkpoint`.
        ValueError: safetensors are there, which readers would take instead of a new .bin.
        OSError: a file could not be written; files appear under their names when they are whole.
    """
    reader, output = _open(checkpoint_dir, tag), Path(output_dir)
    tensors, aliases = _tensors(reader, exclude_frozen_parameters), reader.aliases
    _announce(reader, output, tensors)
    if output.suffix in _FILE_SUFFIXES and not output.is_dir():
        with _folder_aside(output.parent) as folder:
            _write_file(Path(folder) / output.name, tensors, aliases)
            os.replace(Path(folder) / output.name, output)
    else:
        _write_directory(output, tensors, aliases, _bytes(max_shard_size), safe_serialization)


def _open(directory: str | Path, tag: str | int | None) -> Reader:
    if tag is None and not (Path(directory) / "latest").is_file():
        raise ValueError(
            f"There is no file `latest` in {directory}: give the directory that the job saves in, or a checkpoint's tag."
        )
    return Reader(directory, None if tag is None else str(tag))


def _tensors(reader: Reader, exclude_frozen: bool) -> dict[str, LazyTensor]:
    """What to write, by name."""
    kept = [name for name, entry in reader.tensors.items() if not (exclude_frozen and entry.kind == "frozen")]
    return {name: _fp32(reader, name) for name in kept}


def _under_all_names(found: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """What is found by one name, and for tied parameters by their further names too."""
    return {**found, **{alias: found[name] for alias, name in aliases.items() if name in found}}


def _fp32(reader: Reader, name: str) -> LazyTensor:
    """Parameters and 16-bit buffers in fp32, other buffers in their own dtype."""
    entry = reader.tensors[name]
    own = entry.states[entry.weight_state]
    is_cast = own.is_floating_point and (entry.kind != "buffer" or own.itemsize == 2)  # `initialize` has cast buffers
    dtype = torch.float32 if is_cast else own
    return LazyTensor(dtype, entry.shape, lambda: reader.read_weight(name).to(dtype))


def _announce(reader: Reader, output: Path, names: Iterable[str]) -> None:
    total = sum(reader.tensors[name].numel for name in names if reader.tensors[name].kind != "buffer")
    try:
        print(f"Processing zero checkpoint at {reader.path.name}")
        stage, ranks = reader.index.get("zero_stage"), len(reader.files)
        print(f"Detected checkpoint of type zero stage {stage!r}, world_size: {ranks}")
        print(f"Saving fp32 state dict to {output} (total_numel={total})", flush=True)
    except OSError:  # a full disk, or a reader that has left: no reason to give up. Python would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bytes(size: str | int | None) -> int:
    if size is None or isinstance(size, int):
        return size or sys.maxsize
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"max_shard_size {size!r} is no number of bytes like 5GB, 500MB or 2GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def _folder_aside(directory: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder in `directory` whose files become its own by `os.replace`, when they are whole; gone after the block."""
    directory.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=directory, prefix=".zero_to_fp32.")


def _write_directory(
    output: Path,
    tensors: Mapping[str, LazyTensor],
    aliases: Mapping[str, str],
    max_bytes: int,
    safe_serialization: bool,
) -> None:
    """Writes files of at most `max_bytes`, and their index if they are several, in place of those of an earlier conversion."""
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    if not safe_serialization and any((output / f"model.safetensors{end}").exists() for end in ("", ".index.json")):
        raise ValueError(
            f"{output} has a model.safetensors already, which is read before the pytorch_model.bin that would be written beside "
            "it. Choose another directory, or --safe_serialization."
        )
    files, index = sharded(stem, suffix, tensors, max_bytes), f"{stem}{suffix}.index.json"
    with _folder_aside(output) as folder:
        aside = Path(folder)
        for file, shard in files.items():
            _write_file(aside / file, shard, aliases)
        if len(files) > 1:
            content = shard_index(files)
            if not safe_serialization:
                content["weight_map"] = _under_all_names(content["weight_map"], aliases)
            with _synced(aside / index) as opened:
                opened.write(json.dumps(content, indent=2).encode())
        # The index leads to the rest: gone first and back last, it never leads to files of two conversions.
        digits = "[0-9]" * 5
        for older in (output / index, output / f"{stem}{suffix}", *output.glob(f"{stem}-{digits}-of-{digits}{suffix}")):
            older.unlink(missing_ok=True)
        for file in [*files, *([index] if len(files) > 1 else [])]:
            os.replace(aside / file, output / file)


def _write_file(path: Path, tensors: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> None:
    """Writes and syncs tensors, in a .bin under all of their names; safetensors files hold each once, as transformers has it."""
    if path.suffix == ".safetensors":
        write_tensors(path, tensors)
        return
    # torch.save wants all tensors at once: they lie in a file that is mapped, so that the kernel can drop what is not in use. It
    # goes with the folder: SMB shares remove no file that is mapped, and an rclone mount takes its bytes away at once.
    file = path.with_name("tensors")
    starts = write_tensors(file, tensors).offsets
    with naming(file):
        mapped = np.memmap(file, dtype=np.uint8, mode="r+")  # one for all: each keeps a descriptor
    state = {}
    for name, stored in tensors.items():
        values = torch.from_numpy(mapped[starts[name] : starts[name] + stored.nbytes])  # a storage of its own
        state[name] = values.view(stored.dtype).view(stored.shape)
    with _synced(path) as opened:  # of a path, torch.save says nothing of a full disk
        torch.save(_under_all_names(state, aliases), opened)


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is on the disk at the end of the block."""
    with naming(path), open(path, "wb") as opened:
        yield opened
        opened.flush()
        os.fsync(opened.fileno())


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", help="the directory that holds `latest`, e.g. .")
    parser.add_argument("output_dir", metavar="output", help="a file (.bin, .pt, .safetensors) or a directory")
    parser.add_argument("--max_shard_size", default="5GB", help="of the files in a directory (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="a directory gets safetensors files")
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what is not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error comes from")
    options = vars(parser.parse_args(arguments))
    shows_traceback = options.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**options)
    except (ValueError, OSError) as error:
        if shows_traceback:
            raise
        # Of what the checkpoint says, nothing commands the terminal.
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))
        print(f"error: {text}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
