"""How fast a device is, how much memory a rank has used and may still use, and what glibc keeps of freed memory."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
import time
from pathlib import Path

import torch

# Dense 16-bit peak of one device in TFLOP/s, from the makers' data sheets; the first key found in the device's name applies.
DEVICE_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
}


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Peak TFLOP/s of one rank's device, and where the number comes from.

    For known GPUs in 16-bit dtypes it comes from the maker's data sheet. Otherwise it is the best of a few matrix products, which
    take about a quarter of a second; in fp32 they use TF32 if torch is allowed to use it.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for key, value in DEVICE_TFLOPS.items():
            if re.search(rf"{key}(?!\d)(?!.* MIG )", name):  # not an RTX A1000, and not a slice of a GPU
                return value, f"data sheet of {key}"
    size = 4096 if device.type == "cuda" else 512
    best = _product_s(size, device, dtype, at_least_s=0.25)
    is_tf32 = device.type == "cuda" and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    kind = str(dtype).removeprefix("torch.") + (" (TF32)" if is_tf32 else "")
    return 2 * size**3 / best / 1e12, f"measured with {size} x {size} {kind} matrices"


def cpu_slowdown(dtype: torch.dtype) -> float:
    """How many times as long as in fp32 a CPU takes for a matrix product in `dtype`: ten and more without 16-bit instructions.

    Takes about a twentieth of a second.
    """
    size, cpu = 128, torch.device("cpu")
    return _product_s(size, cpu, dtype, at_least_s=0.02) / _product_s(size, cpu, torch.float32, at_least_s=0.02)


def _product_s(size: int, device: torch.device, dtype: torch.dtype, at_least_s: float) -> float:
    """The fastest of the matrix products that a device makes in `at_least_s` seconds."""
    a, b = (torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype) for _ in range(2))

    def product_s() -> float:
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    product_s()  # a device's first product loads libraries and kernels, which may take longer than all the timed ones
    best, stop = product_s(), time.perf_counter() + at_least_s
    while time.perf_counter() < stop:
        best = min(best, product_s())
    return best


def memory_bytes(device: torch.device) -> int:
    """Bytes that this rank holds now: allocated on its GPU, or resident in its process on a CPU (the peak, without /proc)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _resident_bytes() or peak_memory_bytes(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most bytes that this rank has held: allocated on its GPU, or resident in its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    peak = re.search(rb"VmHWM:\s+(\d+) kB", status.read_bytes()) if status.exists() else None
    # Without /proc, getrusage(2) gives the peak, in bytes on macOS. On Linux /proc is better: there, getrusage(2) starts from the
    # peak of the process that started this one.
    unit = 1 if sys.platform == "darwin" else 1024
    most = (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return max(most, _resident_bytes())  # the kernel updates the peak only now and then


def unreserved_memory_bytes(device: torch.device) -> int:
    """What torch's allocator can still reserve on a GPU: bytes free in the driver, within what this process may use of it.

    The user sets that share by torch.cuda.set_per_process_memory_fraction, or, from torch 2.10 on, by the environment:
    PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.4.
    """
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def _resident_bytes() -> int:
    """Resident bytes of this process; 0 if /proc is missing."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def keep_freed_memory() -> None:
    """Tells glibc to keep large freed blocks for the next step instead of returning them to the kernel.

    Activations are allocated and freed at every step; returning their pages and faulting them in again costs up to a third of a
    CPU step. Call it only from the job's entry point, and only for ranks that compute on a CPU: it changes the whole process, and
    if activations are on a GPU it gains nothing and keeps what loading and saving have freed. Does nothing without glibc.
    """
    _tell_malloc({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> None:
    """Tells glibc to return freed blocks of 1 MiB and more to the kernel at once: for jobs that swap, because they lack memory.

    By default, glibc takes blocks of up to 32 MiB from its heap once one of that size has been freed, and keeps them. Before 2.38
    it does not even reuse a freed block for the next one of its size, because torch asks for aligned memory (glibc's bug 14581).
    So a process would end up holding what it has swapped out. It changes the whole process. Does nothing without glibc.
    """
    _tell_malloc({_MMAP_THRESHOLD: 1 << 20})


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # <malloc.h>


def _tell_malloc(settings: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    for parameter, value in settings.items():
        mallopt(parameter, value)
