"""A small checkpoint with every kind of tensor, made without a model and without ranks; and the commands about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.checkpoint.__main__ import main
from megazero.checkpoint.format import TensorEntry
from megazero.checkpoint.offline import write_checkpoint
from megazero.checkpoint.plain import encode
from megazero.checkpoint.ranges import Cut
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.writer import Piece
from megazero.mpu.partition import Partition

TAG = "global_step6"
CUTS = {
    "words": Partition(0, full_size=13),  # padded to 16 rows
    "qkv": Partition(0, stride=3, full_size=36),
    "down": Partition(1, full_size=24),
}
CLIENT_STATE = {"epoch": 3, "best": float("nan"), "betas": (0.9, 0.95), "ema": torch.arange(4.0), "args": {"lr": 0.1}}


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    """By name and state, full values; the same ones each time."""
    torch.manual_seed(0)
    shapes = {"words": (13, 5), "qkv": (36, 7), "qkv_bias": (36,), "down": (3, 24), "norm": (5,)}
    found = {
        name: {state: torch.randn(shape) for state in ("master", "exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    found["frozen"] = {"constant": torch.randn(5, 2).bfloat16()}
    found["count"] = {"constant": torch.tensor(2**40)}
    return found


def flip(path: Path, at: int) -> None:
    """Flips a bit of the file: that of the byte `at`."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def make(
    directory: Path,
    model_parallel_size: int = 2,
    data_parallel_size: int = 2,
    values=None,
    tag: str = TAG,
    client=CLIENT_STATE,
    **index,
) -> Reader:
    """The checkpoint, in files of that many ranks; further arguments go into its index."""
    values = tensors() if values is None else values
    cuts = {name: cut for name, cut in CUTS.items() if name in values}
    padded = {"words": 16, "qkv": 36, "down": 24}
    entries = {
        name: TensorEntry(
            "trained" if "master" in states else "frozen" if name == "frozen" else "buffer",
            tuple(next(iter(states.values())).shape),
            Cut(cuts[name].dim, cuts[name].stride, padded[name]) if name in cuts else None,
            {state: value.dtype for state, value in states.items()},
        )
        for name, states in values.items()
    }

    def read(piece: Piece, state: str) -> torch.Tensor:
        part = values[piece.name][state]
        if piece.name in cuts:
            part = cuts[piece.name].slice(part, piece.model_parallel_rank, model_parallel_size, padded[piece.name])
        return part.reshape(-1)[piece.start : piece.stop]

    client_state, blobs = encode(client)
    whole = {
        "model_parallel_size": model_parallel_size,
        "data_parallel_size": data_parallel_size,
        "zero_stage": 1,
        "device": "cpu",
        "global_steps": 6,
        "skipped_steps": 1,
        "counters": {"global_samples": 48},
        "optimizer": {
            "type": "AdamW",
            "counters": {"step": 5.0},
            "counters_of": {},
            "groups": [{"lr": 0.05, "fused": None}],
        },
        "loss_scaler": {"scale": 1.0},
        "lr_scheduler": None,
        "client_state": client_state,
        "aliases": {"head": "words"},
        "tensors": entries,
        **index,
    }
    path = write_checkpoint(directory, tag, whole, blobs, read)
    return Reader(path.parent, path.name)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    """The status of a command of `python -m megazero.checkpoint`, and the lines that it printed."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert not err
    return status, out.splitlines()
