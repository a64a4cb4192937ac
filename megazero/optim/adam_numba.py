"""Adam in one pass over memory, compiled by numba. Importing this module needs numba; `adam_kernels` says what happens without.

Operations, their order and their rounding are those of torch's fused CPU kernel (aten/src/ATen/native/cpu/FusedAdamKernel.cpp),
so that the results are equal bit for bit: the sums that its compiler contracts to fused multiply-adds, which are others for other
processors, are written as such here. Without fastmath LLVM neither reorders nor contracts anything by itself.

Numbers of 16 bits come as integers of their bits, bfloat16 as uint16 and float16 as int16: the type alone says which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import extending, types

if getattr(numba.config, "DISABLE_JIT", False):
    raise ImportError("NUMBA_DISABLE_JIT is set")

_njit: Any = numba.njit  # numba's type hints, where it has them, do not know how an intrinsic is called
_intrinsic: Any = extending.intrinsic
_FLOAT, _HALF, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)
_LINE_NUMEL = 32  # 16-bit numbers of a cache line, to which `_write_line` keeps on every machine
BLOCK_NUMEL = 512  # 16-bit numbers that wait in the cache to be written at once: 64 or 2048 are some hundredths slower

# `fuses_old` and `fuses_square` of `adam_pass` as torch is built for AVX2 and AVX512, for NEON, and for SVE.
FUSIONS = (None, True), (True, None), (None, None)


def has_float16() -> bool:
    """Whether this machine converts float16 by an instruction; else LLVM would call a function that may not be there."""
    is_arm = llvmlite.binding.get_process_triple().startswith(("aarch64", "arm64"))
    return is_arm or bool(llvmlite.binding.get_host_cpu_features().get("f16c"))


@_intrinsic
def _fused_multiply_add(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return types.float32(a, b, c), lambda context, builder, signature, args: builder.fma(*args)


@_intrinsic
def _widen(_: Any, number: Any) -> Any:
    """A float32 of the same value."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if number == types.float32:
            return args[0]
        if number == types.int16:
            return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _FLOAT)

    return types.float32(number), generate


@_intrinsic
def _narrow(_: Any, number: Any, target: Any) -> Any:
    """The bits of a float32 rounded to the nearest number of array `target`'s type, ties to even; inf and NaN stay so."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if target.dtype == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], _HALF), _I16)
        bits = builder.bitcast(args[0], _I32)
        high = builder.lshr(bits, _I32(16))
        # Just below one half of the last place, or that half.
        half = builder.add(_I32(0x7FFF), builder.and_(high, _I32(1)))
        rounded = builder.lshr(builder.add(bits, half), _I32(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, builder.or_(high, _I32(0x40)), rounded), _I16)

    return target.dtype(number, target), generate


@_intrinsic
def _write_line(_: Any, out: Any, at: Any, block: Any, start: Any) -> Any:
    """Copies 64 bytes from `block[start:]` to `out[at:]`, which must be a whole line of the cache, past the caches.

    An ordinary store reads the line first: as much traffic as reading the 16-bit gradients.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        def place(index: int) -> ir.Value:
            array = context.make_array(signature.args[index])(context, builder, args[index])
            line = ir.VectorType(_I16, _LINE_NUMEL).as_pointer()
            return builder.bitcast(builder.gep(array.data, [args[index + 1]]), line)

        numbers = builder.load(place(2), align=2)
        store = builder.store(numbers, place(0), align=2 * _LINE_NUMEL)
        store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(out, at, block, start), generate


@_intrinsic
def _fence(_: Any) -> Any:
    """Other threads see what `_write_line` wrote before whatever is written after this."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_njit
def _write(block: np.ndarray, out: np.ndarray, start: int) -> None:
    """Copies a block to `out[start:]`, whole lines of the cache past the caches."""
    head = -(out.ctypes.data // 2 + start) % _LINE_NUMEL
    tail = BLOCK_NUMEL - (BLOCK_NUMEL - head) % _LINE_NUMEL
    for i in range(head):
        out[start + i] = block[i]
    for i in range(head, tail, _LINE_NUMEL):
        _write_line(out, start + i, block, i)
    for i in range(tail, BLOCK_NUMEL):
        out[start + i] = block[i]


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as machine code, which the next process finds on the disk if it can be kept there."""
    options = {"nogil": True, "error_model": "numpy"}  # which divides without looking for zero
    fresh = _njit(**options)(function)
    try:
        kept = _njit(cache=True, **options)(function)
    except RuntimeError:  # there is no directory to write the machine code to
        return fresh

    def call(*arguments: Any) -> None:
        try:
            kept(*arguments)
        except OSError:  # no room for it, or what is there cannot be read; nothing has been computed yet
            fresh(*arguments)

    return call


@_compiled
def adam_pass(
    weights: np.ndarray,
    grads: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    out: np.ndarray | None,
    divisor: np.float32 | None,
    l2: np.float32 | None,
    decay: np.float32 | None,
    lerp: np.float32,
    beta2: np.float32,
    rest2: np.float32,
    root: np.float32,
    eps: np.float32,
    minus_step: np.float32,
    fuses_old: bool | None,
    fuses_square: bool | None,
) -> None:
    """One update of 1-D contiguous arrays of one length, a multiple of `BLOCK_NUMEL`. numba compiles away what is None.

    Args:
        weights: fp32, as are `exp_avg` and `exp_avg_sq`.
        grads: fp32, or 16 bits as this module takes them; left as they are.
        out: 16 bits; becomes the updated weights, rounded to nearest even.
        divisor: of the gradients.
        l2: weight decay that is added to the gradients (Adam).
        decay: what the weights are multiplied with (AdamW): 1 - lr * weight_decay.
        lerp: 1 - beta1.
        beta2: decay of the second moment; `rest2` is 1 - beta2.
        root: square root of the second moment's bias correction.
        minus_step: -lr, divided by the first moment's bias correction.
        fuses_old: the second moment is one rounding of beta2 * its old value + the rounded square; with `fuses_square` of the
            square + the rounded old part. With neither, no sum is fused but the first moment's.
    """
    if out is not None:
        block = np.empty(BLOCK_NUMEL, out.dtype)
    whole = weights.shape[0] // BLOCK_NUMEL * BLOCK_NUMEL  # by its form a multiple: else LLVM makes no vectors
    for start in range(0, whole, BLOCK_NUMEL):
        for j in range(BLOCK_NUMEL):
            # Not negative by its form, so that numba looks for no negative index: else LLVM makes no vectors.
            i = start + j
            w, g, m = weights[i], _widen(grads[i]), exp_avg[i]
            if divisor is not None:
                g = g / divisor
            if l2 is not None:
                if fuses_old is None and fuses_square is None:
                    g = g + w * l2
                else:
                    g = _fused_multiply_add(w, l2, g)
            if decay is not None:
                w = w * decay
            if lerp < 0.5:  # as torch's lerp does
                m = _fused_multiply_add(lerp, g - m, m)
            else:
                m = _fused_multiply_add(lerp - np.float32(1), g - m, g)
            v = exp_avg_sq[i]
            if fuses_square is not None:
                v = _fused_multiply_add(rest2 * g, g, v * beta2)
            elif fuses_old is not None:
                v = _fused_multiply_add(v, beta2, rest2 * g * g)
            else:
                v = v * beta2 + rest2 * g * g
            w = w + minus_step * m / (np.sqrt(v) / root + eps)
            weights[i], exp_avg[i], exp_avg_sq[i] = w, m, v
            if out is not None:
                block[j] = _narrow(w, out)
        if out is not None:
            _write(block, out, start)
    _fence()
