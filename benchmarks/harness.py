"""What the benchmarks share: flags, turns, quartiles, tables, ranks, memory, and how two results are compared."""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import distributions
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
# For `tests`, which is never installed, and before this folder, whose data_tools.py hides the package.
sys.path.insert(0, str(ROOT))

from megazero import comm, mpu  # noqa: E402
from megazero.logging import counted  # noqa: E402
from megazero.model.config import GPT2Config  # noqa: E402
from megazero.throughput import keep_freed_memory  # noqa: E402

MACHINE = f"{platform.machine()}, {os.cpu_count()} cores"
MIB = 2**20
_TICK_S = 2.1  # the coarsest clock of a file system, and some
_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


def machine_of(device: torch.device) -> str:
    """What computes: the GPU's name, or this machine's processor and how many threads a rank has."""
    threads = counted(torch.get_num_threads(), "thread")
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{MACHINE}, {threads} a rank"


def measured_on(*packages: str, machine: str = MACHINE) -> dict[str, Any]:
    """For a result line: the machine, its load, the versions of Python and torch, and of those packages that are installed."""
    found = {name: next(iter(distributions(name=name)), None) for name in ("torch", *packages)}
    versions = {name: package.version for name, package in found.items() if package is not None}
    load = round(os.getloadavg()[0], 2)
    return {"machine": machine, "load_average": load, "python": platform.python_version(), **versions}


@cache
def is_installed(module: str, how: str) -> bool:
    """Whether a peer can be imported; if not, a line on stderr says so, and how to install it."""
    if importlib.util.find_spec(module) is not None:
        return True
    print(f"without {module}, which is not installed here ({how})", file=sys.stderr)
    return False


def make_parser(about: str | None, **sizes: int) -> argparse.ArgumentParser:
    """A parser whose --help is `about`, a benchmark's docstring, and that takes a whole number for each of `sizes`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in sizes.items():
        kind = _repeats if name in ("rounds", "steps", "saves") else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"(default: {default})")
    return parser


def _repeats(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text}: quartiles need at least 2")
    return number


def gpt2_config(args: argparse.Namespace, **more: Any) -> GPT2Config:
    """The library's GPT-2 of the sizes on the command line."""
    return GPT2Config(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        max_position_embeddings=args.seq_length,
        vocab_size=args.vocab,
        **more,
    )


def model_line(args: argparse.Namespace) -> str:
    """The GPT-2 of the sizes on the command line, for the result line."""
    parameters = gpt2_config(args).num_parameters()
    return f"{args.layers} x {args.hidden}, vocabulary {args.vocab}, {parameters:,} parameters"


def join() -> torch.device:
    """Starts this process as the library's jobs start, with the others that it was launched with; returns its device."""
    keep_freed_memory()
    comm.init_distributed()
    mpu.initialize_model_parallel(1)
    return comm.local_device()


def in_turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name): all names in every round, which begins with another one than the last."""
    order = list(names)
    for turn in range(rounds):
        for index in range(len(order)):
            yield turn, order[(turn + index) % len(order)]


def quartiles(values: Sequence[float], digits: int = 4) -> list[float]:
    """The first and the third, which lie among the values, however few these are."""
    return [round(q, digits) for q in statistics.quantiles(values, n=4, method="inclusive")[::2]]


def quartiles_ms(seconds: Sequence[float], digits: int = 1) -> list[float]:
    """[lower quartile, median, upper quartile] in milliseconds."""
    low, high = quartiles(seconds, 9)
    return [round(1e3 * s, digits) for s in (low, statistics.median(seconds), high)]


def compared(mine: Sequence[float], other: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """How many times the other's seconds mine are: by the medians, and within each round, which slows both of them down alike."""
    by_rounds = [a / b for a, b in zip(mine, other, strict=True)]
    return {
        "ratio": round(statistics.median(mine) / statistics.median(other), digits),
        "ratio_by_rounds": round(statistics.median(by_rounds), digits),
        "quartiles_by_rounds": quartiles(by_rounds, digits),
    }


def table(title: str, rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """Rows of figures with aligned columns, for a person. `columns` names the keys that are shown, by default all."""
    columns = columns or {key: key for row in rows.values() for key in row}
    cells = [[title, *columns.values()], *([name, *(_cell(row.get(k)) for k in columns)] for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells) + "\n"


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)


def check_close(name: str, got: Iterable[Tensor], want: Iterable[Tensor], tolerance: float) -> None:
    """Raises unless each tensor has the wanted one's values, by the norm of the difference relative to that of the wanted."""
    for a, b in zip(got, want, strict=True):
        error, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
        if not error <= tolerance * size:
            raise RuntimeError(f"{name} differs by {error:.3g} of {size:.3g}")


def memory_timeline(step: Callable[[], object], device_type: str) -> list[tuple[float, float]]:
    """(milliseconds since the first change, MB (10^6) beyond what was there before) at each change of memory during a step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e for e in changes if e.device_type().name.lower() == device_type]
    changes.sort(key=lambda event: event.start_ns())
    sizes = accumulate(event.nbytes() for event in changes)
    return [((e.start_ns() - changes[0].start_ns()) / 1e6, size / 1e6) for e, size in zip(changes, sizes, strict=True)]


def legend(measured: Mapping[str, str]) -> str:
    """How each figure was measured, a line each."""
    return "\n".join(f"{name}: {how}" for name, how in measured.items())


def kernel_bytes(file: str, field: str) -> int:
    """What Linux says of memory in /proc/FILE: of all that can still be had (meminfo, MemAvailable), ..."""
    for line in Path("/proc", file).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{file} has no {field}: memory cannot be measured here")


def status_bytes(field: str) -> int:
    """Of this process's memory: VmRSS is what it holds now, VmHWM what it held at most, ..."""
    return kernel_bytes("self/status", field)


def trim() -> None:
    """Gives freed memory back to the kernel, so that what is resident is what is held."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2.split()]


def malloc_bytes() -> int:
    """What malloc has given out and not got back: no free memory that it keeps, unlike the resident size. glibc 2.33 or newer."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class MallocPeak:
    """Context: the most that `malloc_bytes` was inside, looked at every half millisecond by a thread; `bytes` afterwards."""

    def __enter__(self) -> MallocPeak:
        self.bytes, self._ended = malloc_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(5e-4):
            self.bytes = max(self.bytes, malloc_bytes())


def forget_peak() -> None:
    """Starts VmHWM anew."""
    Path("/proc/self/clear_refs").write_text("5")


def run_ranks(work: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """What `work(*args)` has returned, as JSON, on the first of `world_size` new processes of one thread, joined over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank_main, (world_size, folder, work, args), nprocs=world_size)
        return json.loads(Path(folder, "result").read_text())


def _rank_main(rank: int, world_size: int, folder: str, work: Callable[..., Any], args: tuple) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is for the driver's one line, whatever a library prints
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    found = work(*args)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(found))
    comm.leave_distributed()


def in_fork(work: Callable[[], object]) -> resource.struct_rusage:
    """What a call takes in a fork of this process, where packages are loaded; what it remembers of its input helps no other call.

    Raises:
        RuntimeError: it failed.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"{work} failed; see above")
    return usage


def settle(source: Path) -> None:
    """Waits until a file, or those of a folder, are so old that their time shows every change; before, steps read them twice."""
    files = list(source.iterdir()) if source.is_dir() else [source]
    time.sleep(max(0.0, max(path.stat().st_ctime for path in files) + _TICK_S - time.time()))
