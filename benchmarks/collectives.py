"""What a collective on a flat buffer costs over gloo's own operations, point to point, and through shared memory, on one host.

    python benchmarks/collectives.py                              # 1, 30 and 100 MB of fp32 on 2 and on 4 ranks
    python benchmarks/collectives.py --mb 30 --ranks 2 --dtype bfloat16 --rounds 41
    python benchmarks/collectives.py --mb 1 --rounds 2            # does it work?

Ranks have one thread each. The ways take turns on the same buffer, operation by operation, in an order that rotates. An
operation's time is from a barrier to the end of the last rank. Prints one JSON line: [lower quartile, median, upper] in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from megazero import comm
from megazero.comm.host import HostTransport, area_bytes
from megazero.comm.lane import ThreadLane
from megazero.comm.links import link
from megazero.comm.native import NativeLane
from megazero.comm.peers import PeerTransport

TIMEOUT_S = 300.0
ACTIONS = ("all_reduce", "reduce_scatter", "all_gather")
Collective = Callable[[str, Tensor], None]


def ways() -> dict[str, Collective]:
    """What carries out an action on a buffer in place, by name."""
    group = comm.world()
    links = link(group, area_bytes(group.size()), TIMEOUT_S)
    if links is None:
        raise RuntimeError("this system cannot share memory between ranks, so there is nothing to compare")
    lanes = {
        "gloo": NativeLane(group, TIMEOUT_S),
        "point to point": ThreadLane(PeerTransport(group, 1, TIMEOUT_S), "a lane"),
        "shared memory": ThreadLane(HostTransport(links, group.rank()), "a lane"),
    }

    def collective(name: str) -> Collective:
        return lambda action, buffer: lanes[name].issue(action, buffer, "the buffer").wait() and None

    return {name: collective(name) for name in lanes}


def rank_main(rank: int, world_size: int, store: str, result: str, args: argparse.Namespace) -> None:
    """One rank; the first writes {"MB": {action: {way: seconds of every round}}} into `result`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    carry_out, dtype = ways(), getattr(torch, args.dtype)
    times: dict = {mb: {action: {way: [] for way in carry_out} for action in ACTIONS} for mb in args.mb}
    for mb in args.mb:
        numel = mb * 10**6 // dtype.itemsize // world_size * world_size
        buffer = torch.zeros(numel, dtype=dtype)
        for turn in range(args.warmup + args.rounds):
            for action in ACTIONS:
                names = list(carry_out)
                for way in names[turn % 3 :] + names[: turn % 3]:
                    comm.barrier()
                    start = time.perf_counter()
                    carry_out[way](action, buffer)
                    seconds = torch.tensor(time.perf_counter() - start)
                    slowest = comm.all_reduced(seconds, comm.world(), dist.ReduceOp.MAX).item()
                    if turn >= args.warmup:
                        times[mb][action][way].append(slowest)
    if rank == 0:
        with open(result, "w") as file:
            json.dump(times, file)
    comm.barrier()
    dist.destroy_process_group()


def measure(world_size: int, args: argparse.Namespace) -> dict:
    """{"MB": {action: {way: [lower quartile, median, upper quartile] in ms}}} on `world_size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result")
        rank_args = (world_size, os.path.join(folder, "store"), result, args)
        multiprocessing.spawn(rank_main, rank_args, nprocs=world_size)
        with open(result) as file:
            times = json.load(file)
    return {
        f"{mb} MB": {
            action: {way: [round(1e3 * q, 2) for q in statistics.quantiles(v, n=4)] for way, v in of_action.items()}
            for action, of_action in of_size.items()
        }
        for mb, of_size in times.items()
    }


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 30, 100], help="sizes of the buffer, 10^6 bytes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--dtype", default="float32", help="dtype of the buffer")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them")
    args = parser.parse_args()
    print(
        json.dumps(
            {
                "question": "milliseconds of a collective in place: gloo's own, point to point, shared memory",
                "dtype": args.dtype,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "rounds": args.rounds,
                "quartiles_ms": {f"{n} ranks": measure(n, args) for n in args.ranks},
            }
        )
    )


if __name__ == "__main__":
    main()
