"""The engine's update of a state that lies on a drive: pipelined, serial, its IO alone, and through the page cache, in one run.

    python benchmarks/nvme.py --directory /local_nvme                     # 50 million parameters: 800 MB in the file
    python benchmarks/nvme.py --parameters 200e6 --threads 4 --dtype bfloat16
    python benchmarks/nvme.py --parameters 1e6 --rounds 2 --warmup 1      # does it work?

    memory      the state stays in memory: the computing alone
    io          the same bytes read and written through three tiles' buffers, all asked for at once; nothing is computed
    serial      pipeline_read and pipeline_write off: read, update, write, one after the other
    pipelined   both on, as by default: tile i+1 is read and i-1 written while i is updated
    buffered    pipelined, through the page cache; synced, and dropped from the cache before the next turn

What is measured is one `BucketOptimizer.update()` over buckets whose master weights, moments and reduced gradients rest in the
home that the name says: fp32 all of them, so an update reads 16 bytes per parameter and writes 12. The weights that the model
computes with are in memory. The ways take turns in an order that rotates, on one drive, each with files of its own; at the end
all states must be equal bit for bit. Prints one JSON line, with the ratios and their `targets`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from harness import compared, in_turns, make_parser, measured_on, quartiles, table
from torch import Tensor, nn

from megazero import comm, mpu
from megazero.engine import weight_decay_groups
from megazero.nvme import AioConfig, FileTransport, SwapFile, Transfer, aligned_empty, padded
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.optimizers import OptimizerConfig
from megazero.throughput import keep_freed_memory
from megazero.zero.build import build_buckets
from megazero.zero.config import ZeroConfig
from megazero.zero.home import Home, MemoryHome
from megazero.zero.homes import FP32_BYTES, Homes, tile_numel
from megazero.zero.nvme_home import NvmeHome
from megazero.zero.optimizer import BucketOptimizer
from megazero.zero.units import plan_buckets, select_units

WIDTH = 1024
READ, WRITTEN = 16, 12  # bytes per parameter: master weights, two moments and the gradient; without the gradient
TARGETS = {"pipelined by serial": 0.85, "pipelined by io": 1.15}


class Buffered(FileTransport):
    """Through the page cache, although the file system would take O_DIRECT."""

    def _try_direct(self) -> str | None:
        return "the benchmark compares"


class Model(nn.Module):
    """Matrices, each a bucket."""

    def __init__(self, units: int, unit_numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(nn.Linear(WIDTH, unit_numel // WIDTH, bias=False, dtype=dtype) for _ in range(units))


class Way:
    """Buckets whose O rests in `home`, and the optimizer over them."""

    def __init__(self, args: argparse.Namespace, home: Home, tile: int | None) -> None:
        self.home = home
        is_cached = isinstance(home, NvmeHome) and home.swap.why_buffered
        self.cached = home.swap._file if is_cached else None  # the file, if it goes through the page cache
        model = Model(args.units, unit_numel(args), getattr(torch, args.dtype))
        group_of, settings = weight_decay_groups(model, 0.1)
        groups = mpu.get_groups()
        zero = ZeroConfig(stage=2)
        plans = plan_buckets(model, select_units(model, None), 1, group_of, zero)
        homes = Homes(optimizer=home, tile_numel=tile)
        self.buckets = build_buckets(plans, comm.Channel(groups.data), zero, homes)
        settings = [{**group, "lr": 1e-3} for group in settings]
        factory = OptimizerConfig().factory()
        self.optimizer = BucketOptimizer(self.buckets, factory, settings, groups, {}, LossScaler(), 1.0, zero)
        self.numel = sum(bucket.owned_numel for bucket in self.buckets)

    def turn(self, gradients: list[Tensor]) -> float:
        """Seconds of one update; the reduced gradients are at rest before it."""
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.gradient.accumulate(bucket.layout.segments[0], gradient)
            bucket.gradient.reduce()
            bucket.gradient.wait()
        self.settle()
        if self.cached is not None:  # the update shall read from the drive
            os.posix_fadvise(self.cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        self.optimizer.update()
        self.settle()
        return time.perf_counter() - start

    def settle(self) -> None:
        """Makes the drive have everything."""
        self.home.flush()
        if self.cached is not None:
            os.fdatasync(self.cached.fileno())

    def states(self) -> list[Tensor]:
        """Copies of O, to compare."""
        found = []
        for bucket in self.buckets:
            for _, vector in sorted(bucket.states.items()):
                with vector.at_hand() as values:
                    found.append(values.clone())
        return found


class RawIO:
    """What the drive needs for an update's bytes: tiles read and written in turns through three sets of buffers."""

    def __init__(self, swap: SwapFile, tile: int, numel: int) -> None:
        self.swap = swap
        sizes = [min(tile, numel - start) for start in range(0, numel, tile)]
        self.regions = [swap.allocate(READ * size) for size in sizes]
        self.written = [padded(WRITTEN * size) for size in sizes]
        self.buffers = [aligned_empty(padded(READ * tile)) for _ in range(3)]
        for region in self.regions:
            swap.write(region, self.buffers[0][: region.nbytes]).wait()

    def turn(self, _: list[Tensor]) -> float:
        """Seconds of it. Buffer b serves tiles b, b + 3, ...: each of its transfers begins when the one before has ended."""
        last: list[Transfer | None] = [None, None, None]
        start = time.perf_counter()
        for i, (region, written) in enumerate(zip(self.regions, self.written, strict=True)):
            buffer = self.buffers[i % 3]
            read = self.swap.read(region, buffer[: region.nbytes], after=last[i % 3])
            last[i % 3] = self.swap.write(region, buffer[:written], after=read)
        for transfer in last:
            if transfer is not None:
                transfer.wait()
        return time.perf_counter() - start


def unit_numel(args: argparse.Namespace) -> int:
    """Elements of a unit, a multiple of WIDTH."""
    return max(1, int(args.parameters) // args.units // WIDTH) * WIDTH


def make_ways(args: argparse.Namespace, folder: str) -> dict[str, Way | RawIO]:
    """What is compared, by name."""
    numel = unit_numel(args)
    tile = tile_numel(numel * args.units, int(args.sub_group_size))
    aio = AioConfig(block_size=args.block_size, queue_depth=args.queue_depth)
    most = ZeroConfig().optimizer_buffer_count * 3

    def swapped(pipelined: bool, transport: type[FileTransport] = FileTransport) -> Way:
        swap = SwapFile(folder, 0, aio, transport=transport)
        return Way(args, NvmeHome(swap, tile * FP32_BYTES, most, reads_ahead=pipelined, writes_behind=pipelined), tile)

    memory = Way(args, MemoryHome(torch.device("cpu")), None)
    return {
        "memory": memory,
        "io": RawIO(SwapFile(folder, 0, aio), min(tile, numel), memory.numel),
        "serial": swapped(False),
        "pipelined": swapped(True),
        "buffered": swapped(True, Buffered),
    }


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Takes the turns; returns the result line."""
    ways = make_ways(args, folder)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    shape, generator = (args.units, unit_numel(args) // WIDTH, WIDTH), torch.Generator().manual_seed(1)
    gradients = list(torch.randn(shape, generator=generator).to(getattr(torch, args.dtype)))
    for turn, name in in_turns(ways, args.warmup + args.rounds):
        taken = ways[name].turn(gradients)
        if turn >= args.warmup:
            seconds[name].append(taken)
    want = ways["memory"].states()
    for name, way in ways.items():
        if isinstance(way, Way) and not all(map(torch.equal, way.states(), want)):
            raise RuntimeError(f"the state of {name} differs from the one in memory")
    return result(args, ways, seconds)


def result(args: argparse.Namespace, ways: dict[str, Way | RawIO], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Figures of every way, the ratios that have targets, and what they were taken on."""
    numel, swapped = ways["memory"].numel, ways["pipelined"]
    moved = (READ + WRITTEN) * numel
    ratios = {}
    for name, target in TARGETS.items():
        if "io" in name.split(" by ") and swapped.home.swap.why_buffered is not None:
            continue  # which goes through the page cache then, and is neither synced nor dropped from it
        mine, other = (seconds[part] for part in name.split(" by "))
        ratios[name] = {**compared(mine, other), "target": target}
    return {
        "benchmark": "nvme",
        "ways": {
            name: {
                "median_s": round(statistics.median(s), 4),
                "quartiles_s": quartiles(s),
                "read_and_written_gb_s": None if name == "memory" else round(moved / 1e9 / statistics.median(s), 3),
            }
            for name, s in seconds.items()
        },
        "targets": ratios,
        "states": "equal bit for bit",
        "why_buffered": swapped.home.swap.why_buffered,
        "parameters": numel,
        "tiles": sum(len(bucket.tiles) for bucket in swapped.buckets),
        "buffers_mb": round(swapped.home.nbytes / 1e6, 1),
        "moved_mb": round(moved / 1e6, 1),
        **{key: getattr(args, key) for key in ("units", "dtype", "threads", "block_size", "queue_depth", "rounds")},
        **measured_on(),
        "kernel": platform.release(),
    }


def main() -> None:
    """Parses the sizes, measures, prints."""
    # Of two rounds that do not count: the first write into a new file is slower.
    parser = make_parser(__doc__, units=16, threads=1, rounds=9, warmup=2)
    parser.add_argument("--directory", help="on the drive to measure (default: that of temporary files)")
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--sub-group-size", type=float, default=0, help="most elements of a tile (default: an eighth)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model's weights")
    parser.add_argument("--block-size", type=int, default=AioConfig.block_size, help="aio.block_size")
    parser.add_argument("--queue-depth", type=int, default=AioConfig.queue_depth, help="aio.queue_depth")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    comm.init_distributed("gloo")
    mpu.initialize_model_parallel(1)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        found = measure(args, folder)
    print(json.dumps(found))
    print(table("way", found["ways"]), file=sys.stderr)


if __name__ == "__main__":
    main()
