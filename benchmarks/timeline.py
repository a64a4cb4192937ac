"""How long would a step take on GPUs that are not here, and what would wait for what? The real job, at guessed rates.

    python benchmarks/timeline.py --ranks 8 --num-layers 48 --hidden-size 1600 --num-attention-heads 25 --seq-length 1024 \\
        --max-position-embeddings 1024 --vocab-size 50304 --batch-size 8 --bf16 --zero-stage 1
    python benchmarks/timeline.py --ranks 2 --num-layers 2 --hidden-size 64 --vocab-size 100 --zero-stage 3    # does it work?

Flags that are not listed below are the job's. The first of --ranks ranks runs on the pretended CUDA of `tests/pretended_cuda.py`,
where every operation is a step of a stream or of a thread, and each knows which others it comes after. Here every step takes time
as well: it begins when all that it comes after has ended, and lasts as long as its bytes or FLOPs take at the machine's rates. So
what overlaps, and what waits, follows from the library's own streams, events and threads; only the rates are guesses.

Not in it: how kernels that run at the same time slow each other down, ranks that are late, fragmented memory, and Python's time
beyond --host-us for each operation. Compare configurations, look for what waits, and measure on a GPU what matters.

Printed of each stream and thread: how long it works in a step, and what it waits for. `bound_ms` is the most that one of them
works: no schedule of the same work is faster. --trace writes the steps to a file for ui.perfetto.dev. One JSON line, and tables
on stderr.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import make_parser, table
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megazero.arguments import load_config
from megazero.comm.meeting import Meeting
from megazero.config import Config
from megazero.plan.__main__ import parse_size
from tests.plan.fake_world import ACCELERATOR, fake_job, fake_step
from tests.pretended_cuda import HostThread, PretendedCuda, type_of

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
WARM_UP = 2  # steps: the first makes moments, and under --placement auto it is traced, and the second follows the plan
LEAST_WAIT = 0.01  # of a step, to be listed


@dataclass(frozen=True)
class Machine:
    """Rates of one rank's share of a machine. By default an H100 or H200 in a node of eight, as measured or as its makers say."""

    matmul_tflops: float = 600.0  # of matrix products and attention, which is counted without its mask
    memory_gbs: float = 3000.0  # of the device, for all other kernels
    kernel_us: float = 3.0  # the shortest kernel
    host_us: float = 5.0  # of Python and PyTorch for an operation
    link_gbs: float = 55.0  # host to device, and back
    node_gbs: float = 350.0  # of collectives between the GPUs of a node
    network_gbs: float = 45.0  # of collectives that leave it
    collective_us: float = 12.0  # the shortest collective
    node_ranks: int = 8
    adam_gbs: float = 100.0  # of Adam on the host
    host_gbs: float = 40.0  # of what else the host does to memory
    read_gbs: float = 5.0  # of the drive
    write_gbs: float = 3.0

    def collective_s(self, name: str, nbytes: int, ranks: list[int]) -> float:
        """The time of a collective over a buffer of so many bytes."""
        rate = self.node_gbs if ranks[0] // self.node_ranks == ranks[-1] // self.node_ranks else self.network_gbs
        passes = (2 if name == "all_reduce" else 1) * (len(ranks) - 1) / len(ranks)
        return self.collective_us / 1e6 + passes * nbytes / (rate * 1e9)


@dataclass
class Track:
    """What one stream or thread has done: the end of each of its steps, and sums of seconds by what it did and waited for."""

    ends: list[float]
    labels: list[str]
    works: Counter[str]
    waits: Counter[tuple[str, str]]


class TimedCuda(PretendedCuda):
    """A pretended CUDA whose steps take time. It looks for no races.

    Attributes:
        tracks: of each stream and thread.
        events: for a trace: who, what, begin and end in seconds.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tracks: dict[Any, Track] = {}
        self.events: list[tuple[str, str, float, float]] = []
        self._free_at: Counter[str] = Counter()  # links and drive, which take one transfer after the other
        self._flops = 0
        super().__init__()

    # ---- time

    def time_s(self) -> float:
        """When the host's main thread may go on."""
        return self._after(self.host)[0]

    def _after(self, agent: Any) -> tuple[float, str]:
        """When its own steps and all that it has seen of others have ended, and what of the others was the last, if any."""
        last = (self._track(agent).ends[-1], "")
        for other, step in agent.clock.items():
            if other is not agent and step and (end := self.tracks[other].ends[step]) > last[0]:
                last = (end, f"{_kind(other)}: {self.tracks[other].labels[step]}")
        return last

    def _track(self, agent: Any) -> Track:
        return self.tracks.setdefault(agent, Track([0.0], [""], Counter(), Counter()))

    def begin(self, agent: Any, what: str, tensors: list[tuple[Tensor, bool]], group: Any = None) -> None:
        """A step of the agent, after all that it has seen."""
        if what in COLLECTIVES:
            self._spend(self.host, "python", self.machine.host_us / 1e6)
        seconds, way = self._seconds(agent, what, tensors, group)
        super().begin(agent, what, tensors, group)
        self._end(agent, way or what, seconds, way)

    def _spend(self, agent: Any, what: str, seconds: float) -> None:
        agent.issue()
        self._end(agent, what, seconds)

    def _end(self, agent: Any, what: str, seconds: float, way: str = "") -> None:
        """The agent has made one more step, which takes so many seconds."""
        track = self._track(agent)
        mine, number = track.ends[-1], agent.clock[agent]
        assert number == len(track.ends), "every step goes through `begin`"
        begin, cause = self._after(agent)
        if way:
            begin = max(begin, self._free_at[way])
            self._free_at[way] = begin + seconds
        if begin > mine and number > 1:  # an agent's first wait is for its creation
            track.waits[cause, what] += begin - mine
        track.ends.append(begin + seconds)
        track.labels.append(what)
        track.works[what] += seconds
        if seconds > 0:
            self.events.append((_kind(agent), what, begin, begin + seconds))

    def _seconds(self, agent: Any, what: str, tensors: list[tuple[Tensor, bool]], group: Any) -> tuple[float, str]:
        """How long a step lasts, and the link or drive that it takes."""
        machine, nbytes = self.machine, sum(tensor.nbytes for tensor, _ in tensors)
        on_host = [(tensor, writes) for tensor, writes in tensors if type_of(tensor) == "cpu"]
        if isinstance(agent, HostThread):
            if what.endswith("swap file"):
                rate = machine.read_gbs if what.startswith("read") else machine.write_gbs
                return nbytes / (rate * 1e9), what
            written = sum(tensor.nbytes for tensor, writes in tensors if writes)
            if what == "Adam":
                return (nbytes + written) / (machine.adam_gbs * 1e9), ""  # what it writes it reads as well
            return nbytes / (machine.host_gbs * 1e9), ""
        if what in COLLECTIVES:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            return machine.collective_s(what, max(tensor.nbytes for tensor, _ in tensors), ranks), ""
        if on_host and what in ("copy_", "_to_copy"):
            way = "copy to the host" if on_host[0][1] else "copy to the device"
            return machine.kernel_us / 1e6 + on_host[0][0].nbytes / (machine.link_gbs * 1e9), way
        work = max(self._flops / (machine.matmul_tflops * 1e12), nbytes / (machine.memory_gbs * 1e9))
        return max(work, machine.kernel_us / 1e6), ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            self._spend(self.host, "python", self.machine.host_us / 1e6 * (0.2 if is_view else 1.0))
            count = flop_registry.get(func.overloadpacket)
            self._flops = count(*args, **(kwargs or {}), out_val=None) if count is not None else 0
        return super().__torch_dispatch__(func, types, args, kwargs)

    # ---- no races

    def log(self, *_: Any) -> None:
        """Notes no access."""

    def _log(self, *_: Any) -> None:
        pass

    def _let_go(self, memory: Any) -> None:
        pass

    def _frames(self) -> tuple:
        return ()


def _kind(agent: Any) -> str:
    """Streams of collectives by their ranks, without the group's number."""
    return agent.name.partition(" (")[0]


def measure(config: Config, ranks: int, steps: int, machine: Machine, device_bytes: int | None) -> tuple[dict, list]:
    """The figures of a job's step, and the events of all measured steps."""
    cuda = TimedCuda(machine)
    with pytest.MonkeyPatch.context() as patch, cuda.installed():
        patch.setattr(Meeting, "hold", lambda self, what: None)
        with fake_job(config, ranks, device_bytes=device_bytes, held=cuda) as (job, held):
            for _ in range(WARM_UP):
                fake_step(job)
            held.restart()
            start = cuda.time_s()  # as at every step's end: the host has the gradient norm, and what goes on, goes on
            cuda.events.clear()
            for track in cuda.tracks.values():
                track.works.clear()
                track.waits.clear()
            for _ in range(steps):
                fake_step(job)
            seconds, events = (cuda.time_s() - start) / steps, list(cuda.events)
            peak = held.peak[ACCELERATOR.type]
            tokens = config.training.batch_size * config.data.seq_length
            tokens *= config.accumulation_steps(job.groups.data_parallel_size)
            del job
        gc.collect()
    works, waits = _sums(cuda.tracks.items(), steps)
    rows = {
        name: {
            "works_ms": _ms(sum(each.values())),
            "most of it": ", ".join(f"{what} {_ms(s)}" for what, s in each.most_common(4)),
        }
        for name, each in works.items()
    }
    found = {
        "step_ms": _ms(seconds),
        "bound_ms": max(row["works_ms"] for row in rows.values()),
        "tokens_per_s_and_rank": round(tokens / seconds),
        "peak_gb": round(peak / 1e9, 2),
        "tracks": rows,
        "waits": [
            {"who": who, "ms": _ms(sum(each.values())), "for": cause, "mostly before": each.most_common(1)[0][0]}
            for (who, cause), each in sorted(waits.items(), key=lambda item: -sum(item[1].values()))
            if sum(each.values()) > LEAST_WAIT * seconds
        ],
    }
    return found, events


def _sums(
    tracks: Iterable[tuple[Any, Track]], steps: int
) -> tuple[dict[str, Counter[str]], dict[tuple[str, str], Counter[str]]]:
    """Seconds in a step: by what each kind of stream or thread does, and by whom and what it waits for before what."""
    works: dict[str, Counter[str]] = {}
    waits: dict[tuple[str, str], Counter[str]] = {}
    for agent, track in tracks:
        for what, seconds in track.works.items():
            works.setdefault(_kind(agent), Counter())[what] += seconds / steps
        for (cause, what), seconds in track.waits.items():
            waits.setdefault((_kind(agent), cause), Counter())[what] += seconds / steps
    return works, waits


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def as_trace(events: list[tuple[str, str, float, float]]) -> dict:
    """The events in the format of Chrome's traces, which ui.perfetto.dev shows."""
    names = {name: index for index, name in enumerate(dict.fromkeys(name for name, *_ in events))}
    titles = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": n}} for n, i in names.items()]
    bars = [
        {"ph": "X", "name": what, "pid": 0, "tid": names[name], "ts": begin * 1e6, "dur": (end - begin) * 1e6}
        for name, what, begin, end in events
    ]
    return {"traceEvents": [*titles, *bars]}


def main() -> None:
    """Parses, simulates, prints."""
    parser = make_parser(__doc__, ranks=1)
    parser.add_argument("--steps", type=int, default=3, help="(default: 3)")
    parser.add_argument("--device-memory", help="what --placement auto finds, such as 20GB")
    parser.add_argument("--trace", type=Path, help="a file for the steps' events")
    machine = parser.add_argument_group("machine", "rates of one rank's share")
    for each in fields(Machine):
        kind = int if each.name == "node_ranks" else float
        machine.add_argument(
            f"--{each.name.replace('_', '-')}", type=kind, default=each.default, help="(default: %(default)s)"
        )
    args, flags = parser.parse_known_args()
    rates = Machine(**{each.name: getattr(args, each.name) for each in fields(Machine)})
    try:
        memory = None if args.device_memory is None else parse_size(args.device_memory, "--device-memory")
        config = load_config([*flags, "--peak-tflops", "1"], world_size=args.ranks)
        config.check_world(args.ranks)
    except ValueError as error:
        parser.error(str(error))
    found, events = measure(config, args.ranks, args.steps, rates, memory)
    if args.trace is not None:
        args.trace.write_text(json.dumps(as_trace(events)))
    waits = {str(index): each for index, each in enumerate(found["waits"], 1)}
    print(table("a step", found["tracks"]), table("waits", waits), sep="\n", file=sys.stderr)
    about = {"flags": flags, "ranks": args.ranks, "steps": args.steps, "torch": torch.__version__}
    print(json.dumps({**about, "machine": asdict(rates), **found}))


if __name__ == "__main__":
    main()
