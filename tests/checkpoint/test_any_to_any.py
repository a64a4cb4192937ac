"""Saved under any (tensor-parallel, data-parallel, stage), loaded under any other: states bit for bit, and training goes on."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megazero import mpu
from megazero.checkpoint import tensor_file
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tensor_file import CheckedFile
from megazero.engine import Engine
from megazero.zero import ZeroConfig
from tests.checkpoint.checkpoints import make, tensors
from tests.checkpoint.engines import engine_of
from tests.ranks import run_ranks
from tests.zero.models import one_step

WORLDS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1)]  # (tensor-parallel, data-parallel)
SOME = [(1, 1), (1, 3), (2, 2), (4, 1)]
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    """Cut along either dimension, in three stacked matrices, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = mpu.ColumnParallelLinear(12, 36, gather_output=False, stride=3)
        self.down = mpu.RowParallelLinear(36, 12, input_is_parallel=True, stride=3)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Blocks, a vocabulary whose padding depends on the ranks, a frozen layer, a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        ranks = mpu.get_model_parallel_world_size()
        self.embedding = mpu.VocabParallelEmbedding(13, 12, padded_num_embeddings=-(-13 // (4 * ranks)) * 4 * ranks)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.out, self.tied = nn.Linear(12, 12), nn.Linear(12, 12)
        self.tied.weight = self.out.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.tied(self.out(self.frozen(x))).square().mean()


def make_engine(size: int, stage: int, dtype: torch.dtype | None = None, seed: int = 0) -> Engine:
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return engine_of(Net(), torch.optim.AdamW, lr=0.02, decay=0.1, zero=ZeroConfig(stage=stage), dtype=dtype)


def train(engine: Engine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = (torch.arange(10).view(2, 5) * (engine.global_steps + step + 1)) % 13
        losses.append(float(one_step(engine, tokens)))
    return losses


def reference_case(directory: str, dtype: torch.dtype | None) -> list[float]:
    engine = make_engine(1, 0, dtype)
    train(engine, 3)
    engine.module.seen += torch.tensor([1, 2, 3])
    engine.save_checkpoint(directory, tag="reference", client_state={"epoch": 7})
    return train(engine, 3)


def save_case(directory: str, size: int, dtype: torch.dtype | None) -> None:
    for stage in STAGES:
        engine = make_engine(size, stage, dtype, seed=stage + 5)
        engine.load_checkpoint(directory, tag="reference")
        dp = mpu.get_data_parallel_world_size()
        engine.save_checkpoint(
            directory, tag=f"mp{size}-dp{dp}-stage{stage}", client_state={"epoch": 7}, save_latest=False
        )
        engine.destroy()


def check_states(engine: Engine, reference: dict[str, dict[str, Tensor]]) -> None:
    """Every rank's part of everything is that of the reference; cut by `Partition`, which loading does not use."""
    cuts, groups, optimizer = mpu.partitions(engine.module), engine.groups, engine.optimizer
    for bucket in engine.buckets:
        for segment in bucket.layout.segments:
            parts = {}
            for state, full in reference[segment.name].items():
                if segment.name in cuts:
                    full = cuts[segment.name].slice_like(
                        segment.shape, full, groups.model_parallel_rank, groups.model_parallel_size
                    )
                parts[state] = full.reshape(-1)
            if not bucket.is_trainable:
                whole = engine.module_state_dict()[segment.name]  # collective: alike on all ranks
                assert torch.equal(whole.reshape(-1), parts["constant"].to(whole.dtype)), segment.name
                continue
            states, (tile,) = {key: vector.resident for key, vector in bucket.states.items()}, bucket.tiles
            held, place = bucket.owned_part(states["master"], segment)
            assert torch.equal(held, parts["master"][place]), segment.name
            for state in ("exp_avg", "exp_avg_sq"):
                found = list(optimizer.parts_of(states, tile, state, segment))
                assert sum(view.numel() for view, _ in found) == held.numel(), segment.name
                assert all(torch.equal(view, parts[state][at]) for view, at in found), f"{state} of {segment.name}"
    assert engine.module.seen.tolist() == [1, 2, 3]
    assert all(value == {"step": 3.0} for value in optimizer.counters().values())


def load_case(directory: str, size: int, tags: list[str], dtype: torch.dtype | None, thin: int) -> list[list[float]]:
    reader = Reader(directory, "reference")
    reference = {
        name: {state: reader.read(name, state) for state in reader.tensors[name].states} for name in reader.tensors
    }
    losses = []
    for stage in STAGES:
        engine = make_engine(size, stage, dtype, seed=99)
        for tag in tags[stage % thin :: thin]:
            path, client = engine.load_checkpoint(directory, tag=tag)
            assert path.name == tag and client == {"epoch": 7} and engine.global_steps == 3
            check_states(engine, reference)
        losses.append(train(engine, 3))
        engine.destroy()
    return losses


@pytest.mark.parametrize(
    "dtype,worlds,thin",
    [
        (None, SOME, 5),
        pytest.param(torch.bfloat16, SOME[:3], 7, marks=pytest.mark.slow),
        pytest.param(None, WORLDS, 1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, WORLDS, 17, marks=pytest.mark.slow),
    ],
    ids=["fp32", "bf16", "every pair", "bf16, all worlds"],
)
def test_every_state_is_bit_equal_from_any_layout_to_any_other_and_training_goes_on(dtype, worlds, thin, tmp_path):
    """Each layout loads every `thin`th of the others; which, depends on its stage."""
    directory = str(tmp_path)
    (want,) = run_ranks(1, reference_case, directory, dtype)
    for size, dp in worlds:
        run_ranks(size * dp, save_case, directory, size, dtype)
    tags = [f"mp{size}-dp{dp}-stage{stage}" for (size, dp), stage in itertools.product(worlds, STAGES)]
    for size, dp in worlds:
        for losses in run_ranks(size * dp, load_case, directory, size, tags, dtype, thin):
            tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype is None else {"rtol": 2e-2, "atol": 1e-3}
            torch.testing.assert_close(torch.tensor(losses), torch.tensor([want] * 4), **tolerance)
            if (size, dp) == (1, 1):
                assert losses[0] == want, "same layout, same arithmetic: bit for bit"


# ---- what is read


class Wide(nn.Module):
    """Parameters of 1 MiB."""

    def __init__(self, layers: int = 4, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.width = width

    def forward(self) -> Tensor:
        x = torch.ones(1, self.width)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def wide_engine(stage: int, **sizes: int) -> Engine:
    mpu.initialize_model_parallel(1)
    return engine_of(Wide(**sizes), torch.optim.AdamW, lr=1e-3, decay=0.1, zero=ZeroConfig(stage=stage))


def save_wide(directory: str) -> None:
    engine = wide_engine(1)
    engine.backward(engine())
    engine.step()
    tensor_file.BLOCK_BYTES = 4096
    engine.save_checkpoint(directory)


def count_case(directory: str) -> tuple[int, int, int]:
    engine = wide_engine(1)
    read, read_block = [], CheckedFile._read_block

    def counted(file, block, what, out=None):
        content = read_block(file, block, what, out)
        read.append(len(content))
        return content

    with patch.object(CheckedFile, "_read_block", counted):
        engine.load_checkpoint(directory)
        whole = sum(read)
        engine.load_checkpoint(directory, load_module_only=True)
    return sum(bucket.owned_numel for bucket in engine.buckets), whole, sum(read) - whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_rank_reads_the_bytes_that_it_needs_rounded_to_blocks(ranks, tmp_path):
    run_ranks(2, save_wide, str(tmp_path))
    segments, block = 8, 4096
    for owned, whole, weights in run_ranks(ranks, count_case, str(tmp_path)):
        for states, read in ((3, whole), (1, weights)):
            assert 4 * owned * states * 0.99 <= read, "padding apart"
            assert read <= 4 * owned * states + states * segments * 3 * block, (read, owned)


def test_the_states_of_a_parameter_are_located_once(tmp_path):
    reader, located, locate = make(tmp_path), [], Reader._locate
    with patch.object(Reader, "_locate", lambda *wanted: (located.append(wanted[1:]), locate(*wanted))[1]):
        for name in ("words", "qkv"):
            for state, value in tensors()[name].items():
                assert reader.read(name, state).equal(value)
    assert [name for name, *_ in located] == ["words", "qkv"]
    with pytest.raises(CheckpointError, match="the index has no nothing"):
        reader.read_weight("nothing")


def memory_case(directory: str) -> tuple[int, int]:
    """Bytes that loading takes at most, beyond what is held before and after."""
    engine = wide_engine(3, layers=6, width=1536)
    engine.load_checkpoint(directory)  # the moments are there, and every library is loaded
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    engine.load_checkpoint(directory)
    return _resident("VmHWM") - before, 4 * 1536**2


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def save_deep(directory: str) -> None:
    engine = wide_engine(3, layers=6, width=1536)
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(directory)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_loading_takes_no_more_memory_than_its_own_shards_and_the_largest_parameter(tmp_path):
    run_ranks(2, save_deep, str(tmp_path))
    for peak, largest in run_ranks(3, memory_case, str(tmp_path)):
        state = 6 * largest // 3 * 2  # allocate_state makes the moments anew beside the old ones
        assert peak <= state + largest + 8 * 2**20, f"{peak / 2**20:.1f} MiB"
