"""The largest micro-batch whose step fits into a device, for each way to keep activations, and the time that the way costs.

    python benchmarks/largest_batch.py --model 1.5B                              # on a GPU: all of its memory, bf16
    python benchmarks/largest_batch.py --model 10B --vocab-chunk-size 8192
    python benchmarks/largest_batch.py --model tiny --memory-gb 0.1 --dtype float32      # does it work? Anywhere

A step is forward and backward. Beside activations the device holds parameters and gradients; --other-gb is taken off for what
else there is in training (fp32 gradients, master weights and moments: 16 bytes a parameter beyond these, less what ZeRO cuts or
offloads). The peak is linear in the batch but for the allocator, so two small batches foretell the largest, which is then tried,
and its neighbours. One process: a rank that ran out of memory would leave the others waiting in its layers. Prints one JSON
line, and a table on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from typing import Any

import torch
from activation_memory import Bench, Way, ways
from harness import join, machine_of, make_parser, measured_on, table

from megazero import comm

SIZES = {  # layers, width, heads, tokens of a sequence, vocabulary
    "tiny": (4, 128, 4, 128, 1000),
    "1.5B": (48, 1600, 25, 1024, 50257),
    "10B": (50, 4096, 32, 1024, 50257),
}


def peak_bytes(bench: Bench, way: Way, batch: int) -> float:
    """The most memory of a step beyond what was there before, gradients included; infinite if the device has not as much."""
    bench.tokens = torch.randint(bench.whole.config.require_vocab_size(), (batch, bench.tokens.size(1)))
    bench.tokens = bench.tokens.to(comm.local_device())
    if not bench.tokens.is_cuda:
        return 1e6 * max(size for _, size in bench.timeline(way))
    model = bench.use(way)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        bench.step(model)
    except torch.OutOfMemoryError:
        bench.use(way)  # drops the gradients
        return math.inf
    return torch.cuda.max_memory_allocated() - before


def largest_batch(bench: Bench, way: Way, budget: float) -> int:
    """Sequences of the largest micro-batch whose step fits `budget` bytes; 0 if none does."""
    one, two = peak_bytes(bench, way, 1), peak_bytes(bench, way, 2)
    if two > budget:
        return int(one <= budget)
    batch = max(2, 1 + int((budget - one) / (two - one)))
    if peak_bytes(bench, way, batch) <= budget:
        while peak_bytes(bench, way, batch + 1) <= budget:
            batch += 1
        return batch
    low, high = 2, batch  # the one fits, the other does not
    while high - low > 1:
        middle = high - max(1, (high - low) // 16)  # it is near the foretold one
        if peak_bytes(bench, way, middle) <= budget:
            low = middle
        else:
            high = middle
    return low


def step_seconds(bench: Bench, way: Way, batch: int, rounds: int) -> float:
    """The median time of a step with that batch."""
    peak_bytes(bench, way, batch)  # sets the batch, and warms up
    times = []
    for _ in range(rounds):
        model = bench.use(way)
        start = time.perf_counter()
        bench.step(model)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(bench: Bench, found: dict[str, Way], budget: float, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Largest batch and tokens per second of every way; a way of which no batch fits has batch 0."""
    result: dict[str, dict[str, Any]] = {}
    for name, way in found.items():
        batch = largest_batch(bench, way, budget)
        result[name] = {"batch": batch}
        if batch:
            seconds = step_seconds(bench, way, batch, args.rounds)
            result[name] |= {"step_s": round(seconds, 4), "tokens_per_s": round(batch * args.seq_length / seconds, 1)}
    return result


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = make_parser(__doc__, vocab_chunk_size=0, rounds=3)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument(
        "--memory-gb", type=float, help="of the device (10^9 bytes), parameters included; default: all of it"
    )
    parser.add_argument("--other-gb", type=float, default=0.0, help="taken by what is not in a step")
    parser.add_argument("--dtype", default="bfloat16", help="of parameters and activations")
    parser.add_argument("--hidden-dropout", type=float, default=0.1)
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    args = parser.parse_args()
    args.layers, args.hidden, args.heads, args.seq_length, args.vocab = SIZES[args.model]
    args.batch, args.auto = 1, []
    torch.set_num_threads(1)
    device = join()
    if torch.distributed.get_world_size() > 1:
        raise SystemExit("largest_batch: it measures one rank; start it without a launcher")
    if args.memory_gb is None and device.type != "cuda":
        raise SystemExit("largest_batch: without a GPU say how much memory there is: --memory-gb 0.1")
    bench = Bench(args)
    held = sum(p.numel() * p.element_size() for p in bench.whole.parameters())
    total = torch.cuda.mem_get_info()[1] if args.memory_gb is None else args.memory_gb * 1e9
    result = measure(bench, ways(args, bench.whole), total - held - args.other_gb * 1e9, args)
    print(table("way", result), file=sys.stderr)
    about = {"question": "the largest micro-batch that fits, by way to keep activations", **vars(args), "bytes": total}
    print(json.dumps({**about, **measured_on("deepspeed", machine=machine_of(device)), "ways": result}))
    comm.leave_distributed()


if __name__ == "__main__":
    main()
