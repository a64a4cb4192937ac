"""What a collective on a flat buffer costs over gloo's own operations, point to point, and through shared memory, on one host.

    python benchmarks/collectives.py                              # 1, 30 and 100 MB of fp32 on 2 and on 4 ranks
    python benchmarks/collectives.py --mb 30 --ranks 2 --dtype bfloat16 --rounds 41
    python benchmarks/collectives.py --mb 1 --rounds 2            # does it work?

Ranks have one thread each. The ways take turns on the same buffer, in an order that rotates. An
operation's time is from a barrier to the end of the last rank. Prints one JSON line: [lower quartile, median, upper] in ms.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
from harness import in_turns, make_parser, measured_on, quartiles_ms, run_ranks

from megazero import comm
from megazero.comm.lane import NativeLane, ThreadLane
from megazero.comm.links import link
from megazero.comm.point_to_point import PointToPointTransport
from megazero.comm.shared_memory import SharedMemoryTransport, area_bytes

TIMEOUT_S = 300.0
ACTIONS = ("all_reduce", "reduce_scatter", "all_gather")


def ways() -> dict[str, NativeLane | ThreadLane]:
    """What carries out an action on a buffer in place, by name."""
    group = comm.world()
    links = link(group, area_bytes(group.size()), TIMEOUT_S)
    if not links:
        raise RuntimeError("this system cannot share memory between ranks, so there is nothing to compare")
    return {
        "gloo": NativeLane(group),
        "point to point": ThreadLane(PointToPointTransport(group, 1, TIMEOUT_S), "a lane"),
        "shared memory": ThreadLane(SharedMemoryTransport(links[0], group.rank()), "a lane"),
    }


def of_rank(args: argparse.Namespace) -> dict:
    """What one rank measures: {"MB": {action: {way: [lower quartile, median, upper quartile] in ms}}}."""
    lanes, dtype, world_size = ways(), getattr(torch, args.dtype), dist.get_world_size()
    found = {}
    for mb in args.mb:
        times: dict[str, dict[str, list[float]]] = {action: {way: [] for way in lanes} for action in ACTIONS}
        numel = mb * 10**6 // dtype.itemsize // world_size * world_size
        buffer = torch.zeros(numel, dtype=dtype)
        for turn, way in in_turns(lanes, args.warmup + args.rounds):
            for action in ACTIONS:
                comm.barrier()
                start = time.perf_counter()
                lanes[way].issue(action, buffer, "the buffer").wait()
                seconds = torch.tensor(time.perf_counter() - start)
                slowest = comm.all_reduced(seconds, comm.world(), dist.ReduceOp.MAX).item()
                if turn >= args.warmup:
                    times[action][way].append(slowest)
        found[f"{mb} MB"] = {action: {way: quartiles_ms(s, 2) for way, s in of.items()} for action, of in times.items()}
    return found


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = make_parser(__doc__, rounds=15, warmup=3)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 30, 100], help="sizes of the buffer, 10^6 bytes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--dtype", default="float32", help="dtype of the buffer")
    args = parser.parse_args()
    question = "milliseconds of a collective in place: gloo's own, point to point, shared memory"
    about = {"dtype": args.dtype, "rounds": args.rounds, **measured_on()}
    found = {f"{n} ranks": run_ranks(of_rank, n, args) for n in args.ranks}
    print(json.dumps({"question": question, **about, "quartiles_ms": found}))


if __name__ == "__main__":
    main()
