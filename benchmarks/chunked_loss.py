"""Head and loss of one micro-batch, forward and backward: with the logits as a whole, and in chunks of ids or tokens.

    python benchmarks/chunked_loss.py                                     # 512 tokens, hidden 384 and 768, fp32
    python benchmarks/chunked_loss.py --tokens 2048 --hidden 768 --dtype bfloat16 --vocab-chunks 2048 8192
    python benchmarks/chunked_loss.py --tokens 64 --hidden 16 --vocab-chunks 2048 --token-chunks 16 --rounds 2     # does it work?

    whole                the logits are stored; their gradient takes their place
    vocabulary N         N ids at a time, logits computed again in backward: `--vocab-chunk-size N`
    tokens N             N tokens at a time, logits computed again in backward: `--sequence-chunk-size`, of one sequence
    N ids of M tokens    both

The ways take turns. The peak is the most memory of one step beyond the inputs, in MB (10^6); the two gradients, which every way
leaves behind, are in it. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from harness import check_close, in_turns, join, machine_of, make_parser, measured_on, memory_timeline, quartiles_ms
from torch import Tensor

from megazero import comm, mpu
from megazero.mpu.chunked_loss import chunked_vocab_parallel_loss

VOCAB, PADDED = 50257, 50304
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x [tokens, h], weight [v, h], targets, share of each token


def whole(x: Tensor, weight: Tensor, targets: Tensor, share: Tensor) -> Tensor:
    """The logits of all tokens and ids at once."""
    return (mpu.vocab_parallel_cross_entropy(F.linear(x, weight), targets, vocab_size=VOCAB) * share).sum()


def in_chunks(sizes: dict[str, int], x: Tensor, weight: Tensor, targets: Tensor, share: Tensor) -> Tensor:
    """The library's chunks."""
    return (chunked_vocab_parallel_loss(x, weight, targets, vocab_size=VOCAB, **sizes) * share).sum()


def ways(args: argparse.Namespace) -> dict[str, Loss]:
    """What is compared, by name."""
    found: dict[str, Loss] = {"whole": whole}
    found.update({f"vocabulary {n}": partial(in_chunks, {"chunk_size": n}) for n in args.vocab_chunks})
    for m in args.token_chunks:
        found[f"tokens {m}"] = partial(in_chunks, {"sequence_chunk_size": m})
        for n in args.vocab_chunks:
            sizes = {"chunk_size": n, "sequence_chunk_size": m}
            found[f"{n} ids of {m} tokens"] = partial(in_chunks, sizes)
    return found


def make_inputs(hidden: int, args: argparse.Namespace) -> list[Tensor]:
    """Hidden states and weight, which get gradients, targets, and shares with some masked tokens."""
    torch.manual_seed(0)
    dtype, device = getattr(torch, args.dtype), comm.local_device()
    x = torch.randn(args.tokens, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(PADDED, hidden, device=device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (args.tokens,), device=device)
    counts = (targets % 10 != 0).float()
    return [x, weight, targets, counts / counts.sum()]


def step(loss_of: Loss, inputs: list[Tensor]) -> float:
    """The loss, with the gradients of the first two inputs made anew."""
    for leaf in inputs[:2]:
        leaf.grad = None
    loss = loss_of(*inputs)
    loss.backward()
    return loss.item()  # also waits for a GPU


def peak_mb(loss_of: Loss, inputs: list[Tensor]) -> float:
    """The most memory that torch's allocator has out for one step, beyond what it had before, in MB (10^6)."""
    for leaf in inputs[:2]:
        leaf.grad = None
    return max(size for _, size in memory_timeline(partial(step, loss_of, inputs), inputs[0].device.type))


def measure(hidden: int, args: argparse.Namespace) -> dict[str, dict]:
    """Times and peak of every way; each must agree with the first one in loss and gradients."""
    inputs, found = make_inputs(hidden, args), ways(args)
    times: dict[str, list[float]] = {name: [] for name in found}
    want: list = []
    for turn, name in in_turns(found, args.warmup + args.rounds):
        start = time.perf_counter()
        loss = step(found[name], inputs)
        if turn >= args.warmup:
            times[name].append(time.perf_counter() - start)
        if turn == 0:
            got = [torch.tensor(loss), *(leaf.grad.detach() for leaf in inputs[:2])]
            want = want or got
            check_close(name, got, want, 1e-5 if args.dtype == "float32" else 1e-2)
    return {
        name: {
            "quartiles_ms": quartiles_ms(seconds),
            "peak_mb": round(peak_mb(found[name], inputs), 1),
        }
        for name, seconds in times.items()
    }


def main() -> None:
    """Parses the sizes, measures, prints."""
    parser = make_parser(__doc__, tokens=512, rounds=9, warmup=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=[384, 768], help="widths")
    parser.add_argument("--dtype", default="float32", help="of hidden states and weight")
    parser.add_argument("--vocab-chunks", type=int, nargs="+", default=[2048, 4096, 8192], help="ids at a time")
    parser.add_argument("--token-chunks", type=int, nargs="+", default=[128], help="tokens at a time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = machine_of(join())
    result = {f"hidden {hidden}": measure(hidden, args) for hidden in args.hidden}
    question = "head and loss, forward and backward: time and memory of the whole logits, and of chunks"
    about = {"vocabulary": VOCAB, "tokens": args.tokens, "dtype": args.dtype, "rounds": args.rounds}
    print(json.dumps({"question": question, **about, **measured_on(machine=machine), **result}))


if __name__ == "__main__":
    main()
