"""Adam's arithmetic on flat tensors: torch's fused kernel, and an update of 16-bit weights through fp32 ones in one pass.

For 16-bit gradients or weights, `mixed` reads gradient, fp32 weight and moments once, and writes each once. numba compiles that
loop. Without numba, torch computes the same bits through fp32 copies of one tile at a time, which stay in the cache. Both release
the GIL while they run. `benchmarks/cpu_adam.py` measures them.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megazero.optim.fused_adam import FusedAdam

logger = logging.getLogger(__name__)

TILE_NUMEL = 1 << 20  # elements that each of numba's threads takes at a time
# Elements that torch casts at a time, per thread: a quarter or four times as many take 1.4 times as long.
CACHED_NUMEL = 1 << 18
NUMBA_NUMEL = 1 << 16  # for fewer elements, loading the compiled kernel does not pay; its bits are the same
THREAD_NUMEL = 1 << 18  # fewer elements are not worth a thread

# The classes whose step, if fused, is torch's kernel alone. Not their subclasses, which may do anything.
TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW, FusedAdam)


@dataclass(frozen=True)
class AdamSettings:
    """The numbers of one parameter group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool  # AdamW (arXiv:1711.05101); else the decay is part of the gradient
    corrects_bias: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> AdamSettings | None:
        """The settings of a group of CPUAdam, or of one of TORCH_ADAMS that is fused; None for any other optimizer or variant."""
        kind = type(optimizer)
        if group.get("amsgrad") or group.get("maximize"):
            return None
        if "adamw_mode" in group:  # CPUAdam's
            is_decoupled, corrects_bias = bool(group["adamw_mode"]), bool(group["bias_correction"])
        elif kind in TORCH_ADAMS and group.get("fused"):
            is_decoupled, corrects_bias = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")), True
        else:
            return None
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        return cls(lr, beta1, beta2, eps, decay, is_decoupled, corrects_bias)


def fused(
    settings: AdamSettings,
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    scale: float = 1.0,
) -> None:
    """One update by torch's fused kernel, in place.

    Args:
        weights: contiguous tensors of one device and dtype; the tensors of the other lists have the same shapes.
        steps: for each of them, the number of this update, counted from 1: 0-d, fp32, on the weights' device.
        scale: multiplies the gradients; unless it is 1, `grads` hold the scaled gradients afterwards.
    """
    device = weights[0].device
    if not settings.corrects_bias:  # 1 - beta ** inf is 1
        steps = [torch.full((), math.inf, device=device)] * len(steps)
    kernel = torch._fused_adamw_ if settings.is_decoupled else torch._fused_adam_
    kernel(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if scale == 1.0 else torch.full((), 1.0 / scale, dtype=torch.float32, device=device),
        found_inf=None,
    )


class Operands(NamedTuple):
    """1-D contiguous tensors of one length and device, whose fp32 weights are updated."""

    weights: Tensor
    grads: Tensor  # fp32, bf16 or fp16
    exp_avg: Tensor
    exp_avg_sq: Tensor
    out: Tensor | None  # bf16 or fp16: becomes the updated weights, rounded to nearest even

    def part(self, start: int, stop: int) -> Operands:
        """Views of a range."""
        return Operands._make(None if tensor is None else tensor[start:stop] for tensor in self)


MixedKernel = Callable[[AdamSettings, Operands, float, float], None]


def mixed(settings: AdamSettings, operands: Operands, step: float, scale: float = 1.0) -> None:
    """One update, by the fastest kernel available.

    Args:
        step: the number of this update, counted from 1.
        scale: multiplies the gradients; `operands.grads` stays unscaled.
    """
    dtypes = {tensor.dtype for tensor in (operands.grads, operands.out) if tensor is not None}
    # Once the compiled kernel is loaded, it does small updates too: after torch's, OpenMP's threads would spin beside its own.
    is_small = operands.weights.numel() < NUMBA_NUMEL and "megazero.optim.adam_numba" not in sys.modules
    kernel = tiled if is_small or operands.weights.device.type != "cpu" else mixed_kernel(torch.float16 in dtypes)
    kernel(settings, operands, step, scale)


@cache
def mixed_kernel(needs_float16: bool = False) -> MixedKernel:
    """The kernel for mixed precision on the CPU: `one_pass` if numba is installed, else `tiled`. Chosen and logged once."""
    try:
        from megazero.optim import adam_numba
    except (ImportError, OSError) as error:  # the latter if its libraries cannot be loaded
        logger.info(f"CPU Adam: 16-bit numbers by torch in tiles; numba would be faster ({error}): megazero[offload]")
        return tiled
    if needs_float16 and not adam_numba.has_float16():
        logger.info("CPU Adam: float16 by torch in tiles (this CPU has no instruction for it)")
        return tiled
    if fusion() is None:
        logger.info("CPU Adam: 16-bit numbers by torch in tiles (its kernel for this CPU rounds unlike numba's)")
        return tiled
    logger.info(f"CPU Adam: {'float16' if needs_float16 else '16-bit numbers'} in one pass by numba")
    return one_pass


@cache
def fusion() -> tuple[bool | None, bool | None] | None:
    """That of numba's `FUSIONS` with which its pass gives the bits of torch's kernel; None if none does.

    torch's compiler decides, for each kind of processor, so it is tried.
    """
    from megazero.optim.adam_numba import BLOCK_NUMEL, FUSIONS, adam_pass

    # Adam, because AdamW has a sum less.
    settings = AdamSettings(
        lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, is_decoupled=False, corrects_bias=True
    )
    # Weights, gradients and both moments.
    drawn = torch.Generator("cpu").manual_seed(0)
    start = torch.rand(4, BLOCK_NUMEL, generator=drawn, dtype=torch.float32, device="cpu")
    want = start.clone()
    with _one_thread():
        unmixed(settings, Operands._make((*want, None)), 3.0, 0.7)
    want[1] = start[1]  # torch's kernel scales the gradients too
    for fuses in FUSIONS:
        got = start.clone()
        adam_pass(*map(_array, (*got, None)), *_coefficients(settings, 3.0, 0.7), *fuses)
        if torch.equal(got, want):
            return fuses
    return None


def tiled(settings: AdamSettings, operands: Operands, step: float, scale: float = 1.0) -> None:
    """Like `mixed`, by torch's fused kernel: copies one tile of the gradients at a time to fp32."""
    numel, device = operands.weights.numel(), operands.weights.device
    tile_numel = CACHED_NUMEL * torch.get_num_threads()
    grads = torch.empty(min(numel, tile_numel), dtype=torch.float32, device=device)
    steps = [torch.full((), step, dtype=torch.float32, device=device)]
    for start in range(0, numel, tile_numel):
        tile = operands.part(start, min(numel, start + tile_numel))
        wide = grads[: tile.grads.numel()].copy_(tile.grads)
        fused(settings, [tile.weights], [wide], [tile.exp_avg], [tile.exp_avg_sq], steps, scale)
        if tile.out is not None:
            tile.out.copy_(tile.weights)


def unmixed(settings: AdamSettings, operands: Operands, step: float, scale: float = 1.0) -> None:
    """Like `mixed`, for fp32 gradients and no `out`, where torch's fused kernel is as fast. Scales the gradients in place."""
    steps = [torch.full((), step, dtype=torch.float32, device=operands.weights.device)]
    fused(settings, [operands.weights], [operands.grads], [operands.exp_avg], [operands.exp_avg_sq], steps, scale)


def one_pass(settings: AdamSettings, operands: Operands, step: float, scale: float = 1.0) -> None:
    """Like `mixed`, by numba, on as many threads as torch would use."""
    from megazero.optim.adam_numba import BLOCK_NUMEL, FUSIONS, adam_pass

    # The rest is torch's, whose kernel rounds the numbers after the last whole vector in another way.
    whole = operands.weights.numel() // BLOCK_NUMEL * BLOCK_NUMEL
    arrays = [_array(tensor) for tensor in operands]
    coefficients = (*_coefficients(settings, step, scale), *(fusion() or FUSIONS[0]))
    threads = min(torch.get_num_threads(), max(1, whole // THREAD_NUMEL))
    parts = 1 if threads == 1 else threads * max(1, whole // (threads * TILE_NUMEL))
    ranges = iter(split(whole, parts, BLOCK_NUMEL))

    def run() -> None:
        for start, stop in ranges:  # the threads share this iterator, so one whose core is busy takes fewer
            adam_pass(*(None if array is None else array[start:stop] for array in arrays), *coefficients)

    futures = [_threads(os.getpid(), torch.get_num_threads()).submit(run) for _ in range(threads - 1)]
    try:
        run()
    finally:  # even after an interrupt, because the caller may use the memory for something else
        wait(futures)
    for future in futures:
        future.result()
    if whole < operands.weights.numel():
        with _one_thread():
            tiled(settings, operands.part(whole, operands.weights.numel()), step, scale)


@contextmanager
def _one_thread() -> Iterator[None]:
    """What torch computes in it takes no other thread. OpenMP's would go on spinning for milliseconds, beside the next pass."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


@cache
def _threads(process: int, number: int) -> ThreadPoolExecutor:
    """Threads that stay for the next update. `process` is a key of the cache, because a forked process has no threads."""
    return ThreadPoolExecutor(number, "cpu-adam")


def split(numel: int, parts: int, multiple: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) that cover `numel` elements, at most `parts`, cut at multiples of `multiple`."""
    size = max(1, -(-numel // (parts * multiple))) * multiple
    return [(start, min(numel, start + size)) for start in range(0, numel, size)]


def _coefficients(settings: AdamSettings, step: float, scale: float) -> tuple[Any, ...]:
    """The numbers that `adam_pass` takes: computed in double precision and rounded once, as torch's kernel does."""
    correction1 = 1 - settings.beta1**step if settings.corrects_bias else 1.0
    correction2 = 1 - settings.beta2**step if settings.corrects_bias else 1.0
    wd = settings.weight_decay
    return (
        None if scale == 1.0 else np.float32(1.0 / scale),
        np.float32(wd) if wd != 0 and not settings.is_decoupled else None,
        np.float32(1 - settings.lr * wd) if wd != 0 and settings.is_decoupled else None,
        np.float32(1 - settings.beta1),
        np.float32(settings.beta2),
        np.float32(1 - settings.beta2),
        np.float32(math.sqrt(correction2)),
        np.float32(settings.eps),
        np.float32(-(settings.lr / correction1)),
    )


def _array(tensor: Tensor | None) -> np.ndarray | None:
    """The tensor's memory as numba takes it: bfloat16 as uint16, float16 as int16."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    bits = tensor.view(torch.int16).numpy()
    return bits.view(np.uint16) if tensor.dtype == torch.bfloat16 else bits
