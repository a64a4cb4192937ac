"""A pretended CUDA: the real job's streams, events, NCCL and memory on fake tensors, of which every access is checked for races.

Nothing is computed and nothing takes time. Every operation of PyTorch, every collective, every copy and every transfer of the
swap file is a step of an agent (`tests.happens_before`): of a stream, or of a thread of the host. Agents see each other where
CUDA, NCCL and Python say so, and nowhere else; so whatever a schedule of threads and kernels could do wrong is seen in any one.

What is pretended of PyTorch 2.8 and later:

- A kernel comes behind what its stream was given before, and behind the host's call. Streams do not wait for the default one.
- Copies between host and device: with non_blocking on the stream, as from and to pinned memory, where the device casts; else the
  host waits for it, and casts by itself: what it sends it reads at once.
- An asynchronous collective of NCCL runs on the communicator's own stream, behind the current one; `wait` has the stream that is
  current then wait for it, and keeps its tensors until then. One that is not asynchronous runs on the current stream.
- Device memory belongs to the stream that was current when it was taken. As soon as nobody refers to it, or its storage is
  resized to nothing, that stream may use it for something else: whoever else used it must be seen by then, by the stream, by
  the host, or by a stream that was announced by `record_stream`.
- Pinned memory of PyTorch's own waits for copies by itself; pages that we have pinned do not.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megazero import comm
from megazero.activation_checkpointing import call, storage
from megazero.comm import lane
from megazero.nvme import Region, SwapFile
from megazero.zero import home
from megazero.zero.link import Crossing
from megazero.zero.nvme_home import NvmeHome
from tests.happens_before import Access, Agent, Block, Clock, Frames, frames_of_the_project
from tests.plan.fake_world import ACCELERATOR, Held, PretendedSwapFile, SlowTransfer, ThreadAtOnce, host_waits
from tests.plan.live_bytes import tensors_in

is_machinery = True  # for reports
aten = torch.ops.aten
WITHOUT_ACCESS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "record_stream"}


class Stream(Agent):
    """`torch.cuda.Stream`."""

    def __init__(self, cuda: PretendedCuda, name: str) -> None:
        super().__init__(name)
        self._cuda, self.device = cuda, ACCELERATOR

    def issue(self) -> int:
        """A step that the host's current thread has called for."""
        self.see(self._cuda.host.clock)
        return self.step()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._cuda)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.see(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.see(other.record_event().clock)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, cuda: PretendedCuda, **_: bool) -> None:
        self._cuda = cuda
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or self._cuda.current_stream()).place()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._cuda.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._cuda.host.see(self.clock)

    def query(self) -> bool:
        return False


class HostThread(Agent):
    """A thread, with its current stream."""

    def __init__(self, name: str, stream: Stream) -> None:
        super().__init__(name)
        self.stream = stream

    def issue(self) -> int:
        """A step that it makes by itself."""
        return self.step()


class Memory(Block):
    """What a storage has.

    Attributes:
        owner: the stream that it was taken on; None of the host's.
        is_unguarded: pages that go back although a copy may be under way.
        recorded: streams that were announced.
        seen: what those had seen who have let go of it: whoever is the last to do so comes behind them.
    """

    def __init__(self, name: str, owner: Stream | None, is_unguarded: bool = False) -> None:
        super().__init__(name)
        self.owner, self.is_unguarded = owner, is_unguarded
        self.recorded: set[Agent] = set()
        self.seen: Clock = {}


class Work:
    """What an asynchronous collective of NCCL returns."""

    def __init__(self, cuda: PretendedCuda, end: Clock, tensors: list[Tensor]) -> None:
        self._cuda, self._end, self._tensors = cuda, end, tensors
        cuda.under_way.append(self)  # nobody but `wait` gives the tensors back: until torch itself sees that it is over

    def wait(self) -> None:
        self._cuda.current_stream().see(self._end)
        self._tensors = []


class Transfer(SlowTransfer):
    """A transfer by a thread of its own, between the file and memory."""

    def __init__(self, cuda: PretendedCuda, buffer: Tensor, file: Block, place: tuple[int, int], **how: Any) -> None:
        super().__init__(None)
        self._cuda, self._buffer, self._file, self._place = cuda, buffer, file, place
        self._kind, self._after, self._when_filled = how["kind"], how["after"], how["filled"]
        self._thread = cuda.new_thread(f"{self._kind} of the swap file")

    def done(self) -> bool:
        """Never before somebody waits."""
        is_done = super().done()
        if is_done:
            self._cuda.host.see(self._thread.clock)
        return is_done

    def error(self) -> BaseException | None:
        if not super().done():
            with self._cuda.on(self._thread):
                if self._after is not None:
                    self._after.error()
                if self._when_filled is not None:
                    self._when_filled()
                self._cuda.host_step(f"{self._kind} of the swap file", [(self._buffer, self._kind == "read")])
                self._cuda.log(self._file, self._thread, *self._place, self._kind == "write", "the file")
                del self._buffer
                self.end(None)
        self._cuda.host.see(self._thread.clock)
        return None


class CheckedSwapFile(PretendedSwapFile):
    """Gives places in a file; whoever reads or writes them is seen."""

    def __init__(self, cuda: PretendedCuda, folder: str, rank: int, aio: Any = None) -> None:
        super().__init__(folder, rank, aio)
        self._cuda, self._block = cuda, Block("swap file")

    def _start(
        self, kind: Any, region: Region, buffer: Tensor, offset: int, after: Any, filled: Any = None
    ) -> Transfer:
        start = region.offset + offset
        place = start, start + buffer.nbytes
        transfer = Transfer(self._cuda, buffer, self._block, place, kind=kind, after=after, filled=filled)
        self._regions.hold(region, transfer)
        return transfer


class CheckedThread(ThreadAtOnce):
    """A thread that has done everything when it starts, and is seen by whoever joins it."""

    def __init__(self, cuda: PretendedCuda, target: Callable[..., None], name: str, args: tuple = ()) -> None:
        super().__init__(lambda: target(*args), name)
        self._cuda, self._name = cuda, name

    def start(self) -> None:
        self._agent = self._cuda.new_thread(self._name)
        with self._cuda.on(self._agent):
            super().start()

    def join(self) -> None:
        self._cuda.host.see(self._agent.clock)


class CheckedQueue:
    """A queue whose reader sees who has written, and when."""

    def __init__(self, cuda: PretendedCuda) -> None:
        self._cuda = cuda
        self._items: deque[tuple[Clock, Any]] = deque()

    def put(self, item: Any) -> None:
        self._items.append((self._cuda.host.place(), item))

    def get(self) -> Any:
        clock, item = self._items.popleft()
        self._cuda.host.see(clock)
        return item


class HostLane:
    """`ThreadLane` over the work of a transport on the host's memory: each job when it is issued, as a step of its thread."""

    def __init__(self, cuda: PretendedCuda) -> None:
        self._cuda, self._thread = cuda, cuda.new_thread("lane")

    def issue(self, action: str, buffer: Tensor, name: str) -> Any:
        job = lane._Job(action, buffer, name, "the pretended lane")
        self._thread.see(self._cuda.host.clock)
        with self._cuda.on(self._thread):
            failure = job.run(self)
        assert failure is None, failure
        end = self._thread.place()

        def wait() -> None:
            self._cuda.host.see(end)
            job.wait()

        return SimpleNamespace(wait=wait)

    def reduce_scatter_(self, buffer: Tensor, name: str) -> None:
        self._cuda.host_step(f"the lane's reduction of {name}", [(buffer, True)])

    def all_gather_(self, buffer: Tensor, name: str) -> None:
        self._cuda.host_step(f"the lane's gather of {name}", [(buffer, True)])

    def close(self) -> None:
        pass


class PretendedCuda(Held):
    """The pretended device, its host and its memory; a mode, which sees every operation.

    Args:
        over_gloo: collectives of channels are those of gloo, through host memory.

    Attributes:
        races: what was found, as text.
        issued: collectives in the order of their issue: ranks of the communicator, name, numel.
        steps: how many there were, by agent's name.
    """

    def __init__(self, over_gloo: bool = False) -> None:
        super().__init__()
        self.over_gloo = over_gloo
        self.races: list[str] = []
        self._known: set[tuple[Any, ...]] = set()  # pairs of places
        self.issued: list[tuple[tuple[int, ...], str, int]] = []
        self.under_way: list[Work] = []
        self._memory: dict[int, Memory] = {}
        self._pages: set[int] = set()  # storages that are pages of ours
        self._streams: list[Stream] = []
        self._communicators: dict[str, Stream] = {}
        self.compute = self.new_stream("compute")
        self.host = HostThread("main thread", self.compute)

    # ---- agents

    def new_stream(self, name: str | None = None) -> Stream:
        self._streams.append(Stream(self, name or f"stream {len(self._streams)}"))
        return self._streams[-1]

    def new_thread(self, name: str) -> HostThread:
        """A thread that the current one starts."""
        thread = HostThread(name, self.compute)
        thread.see(self.host.clock)
        return thread

    @contextmanager
    def on(self, thread: HostThread) -> Iterator[None]:
        """What is done inside is done by that thread."""
        before, self.host = self.host, thread
        try:
            yield
        finally:
            self.host = before

    def current_stream(self, device: Any = None) -> Stream:
        return self.host.stream

    @contextmanager
    def _stream(self, stream: Stream | None) -> Iterator[None]:
        thread, before = self.host, self.host.stream
        thread.stream = stream or before
        try:
            yield
        finally:
            thread.stream = before

    def synchronize(self, device: Any = None) -> None:
        for stream in self._streams:
            self.host.see(stream.place())

    def begin(
        self, agent: Stream | HostThread, what: str, tensors: list[tuple[Tensor, bool]], group: Any = None
    ) -> None:
        """The agent's next step, which reads or (True) writes tensors; of a collective with the ranks of a group."""
        agent.issue()

    # ---- memory

    def aligned_empty(self, nbytes: int, pin: bool = False) -> Tensor:
        pages = torch.empty(nbytes, dtype=torch.uint8)
        if pin and nbytes:
            self._memory_of(pages).is_unguarded = True
        return pages

    def _memory_of(self, tensor: Tensor) -> Memory:
        return self._memory[tensor.untyped_storage()._cdata]

    def _count(self, storage: torch.UntypedStorage, device: str) -> None:
        key = storage._cdata
        if key not in self._size_of:
            self._memory[key] = Memory(f"{storage.nbytes()} bytes", None)
            if device == ACCELERATOR.type:
                self._take(self._memory[key], storage.nbytes())
        super()._count(storage, device)

    def _take(self, memory: Memory, nbytes: int) -> None:
        memory.owner = owner = self.current_stream()
        # Whoever uses it comes behind whatever had it before.
        memory.accesses = [Access(0, nbytes, owner, owner.clock[owner], True, "took memory that", self._frames())]
        memory.recorded = set()

    def _gone(self, key: int) -> None:
        self._let_go(self._memory.pop(key))
        super()._gone(key)

    def _let_go(self, memory: Memory) -> None:
        """It may be used for something else from here on."""
        if memory.owner is None and not memory.is_unguarded:
            return
        streams = memory.recorded if memory.owner is None else {memory.owner, *memory.recorded}
        for access in memory.unseen(self.host.clock, memory.seen, *(stream.clock for stream in streams)):
            if memory.owner is None and isinstance(access.agent, HostThread):
                continue  # a thread refers to what it reads and writes, so that it has gone on when the last reference goes
            self._report(memory, access, "goes back" if memory.owner is None else f"goes back to {memory.owner}")

    def _resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        memory = self._memory.get(storage._cdata)
        if memory is not None and memory.owner is not None:
            if storage.nbytes():
                self._let_go(memory)
            self._take(memory, nbytes)

    # ---- accesses

    def log(self, block: Block, agent: Agent, low: int, high: int, writes: bool, what: str) -> None:
        """An access of the agent's last step."""
        access = Access(low, high, agent, agent.clock[agent], writes, what, self._frames())
        for other in block.access(access):
            self._report(block, other, f"races with\n{access.describe()}", access.frames)

    def _log(self, tensor: Tensor, agent: Agent, writes: bool, what: str) -> None:
        if tensor.layout != torch.strided or not tensor.numel():
            return
        size = tensor.element_size()
        low = tensor.storage_offset() * size
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.log(self._memory_of(tensor), agent, low, low + (last + 1) * size, writes, what)

    def _report(self, block: Block, access: Access, what: str, frames: Frames | None = None) -> None:
        frames = self._frames() if frames is None else frames
        if (key := (access.frames, frames, access.what)) not in self._known:
            self._known.add(key)
            text = f"of {block.name}:\n{access.describe()}\n  {what}"
            places = Access(0, 0, self.host, 0, False, "", frames).describe().partition("\n")[2]
            self.races.append(text if "races with" in what else f"{text} at\n{places}")

    def _frames(self) -> Frames:
        return frames_of_the_project()

    def host_step(self, what: str, tensors: list[tuple[Tensor, bool]]) -> None:
        """The current thread reads or (True) writes tensors in the host's memory."""
        self.begin(self.host, what, tensors)
        for tensor, writes in tensors:
            self._log(tensor, self.host, writes, what)

    def adam(self, settings: Any, operands: Any, step: float, scale: float = 1.0) -> None:
        written = [operands.weights, operands.exp_avg, operands.exp_avg_sq, operands.out]
        tensors = [(tensor, True) for tensor in written if tensor is not None]
        self.host_step("Adam", [(operands.grads, False), *tensors])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        assert func.namespace != "c10d", f"{func} is not pretended"
        kwargs.pop("pin_memory", None)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        tensors = [*tensors_in((args, *kwargs.values(), out))]
        if name in WITHOUT_ACCESS or not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return out
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return out  # a view
        reads, writes = _operands(func, args, kwargs)
        known = {t.untyped_storage()._cdata for t in (*reads, *writes) if t.layout == torch.strided}
        for tensor in tensors_in((out,)):
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in known:
                writes.append(tensor)
        self.step(name, reads, writes, host_waits(func, list(tensors_in(args)), args, kwargs))
        return out

    def step(self, what: str, reads: list[Tensor], writes: list[Tensor], blocks: bool) -> None:
        tensors = [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]
        here = [(tensor, w) for tensor, w in tensors if type_of(tensor) == "cpu"]
        there = [(tensor, w) for tensor, w in tensors if type_of(tensor) == ACCELERATOR.type]
        if not there:
            return self.host_step(what, here)
        stream = self.current_stream()
        is_copy = bool(here) and what in ("copy_", "_to_copy")
        is_cast = is_copy and blocks and len({tensor.dtype for tensor, _ in tensors}) > 1  # by the host
        if is_cast and not here[0][1]:
            self.host_step(f"{what} (casts)", here)
        self.begin(stream, what, tensors)
        for tensor, writes_it in there:
            self._log(tensor, stream, writes_it, what)
        if is_copy and not is_cast:
            for tensor, writes_it in here:
                self._log(tensor, stream, writes_it, what)
        if blocks:
            self.host.see(stream.place())
        if not is_copy or (is_cast and here[0][1]):
            self.host_step(what, here)  # a number for a kernel, or what was cast
        return None

    # ---- collectives

    def collective(self, group: Any, name: str, reads: list[Tensor], writes: list[Tensor], is_async: bool) -> Any:
        """Starts one of NCCL's."""
        assert all(tensor.device == ACCELERATOR for tensor in (*reads, *writes)), "NCCL takes no memory of the host's"
        group = group or dist.group.WORLD
        self._note(group, name, writes[0].numel())
        stream = self.current_stream()
        if is_async:
            label = f"NCCL of ranks {dist.get_process_group_ranks(group)} ({group.group_name})"
            stream = self._communicators.get(group.group_name) or self.new_stream(label)
            self._communicators[group.group_name] = stream
            stream.see(self.current_stream().place())
        tensors = [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]
        self.begin(stream, name, tensors, group)
        for tensor, writes_it in tensors:
            self._log(tensor, stream, writes_it, name)
        return Work(self, stream.place(), [*reads, *writes]) if is_async else None

    def _all_reduce(self, x: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        return self.collective(group, "all_reduce", [], [x], async_op)

    def _broadcast(self, x: Tensor, group: Any = None, group_src: int = 0) -> Any:
        return self.collective(group, "broadcast", [], [x], is_async=False)

    def _all_gather_list(self, out: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return self.collective(group, "all_gather", [x], out, async_op)

    def _all_gather(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return self.collective(group, "all_gather", [] if _is_within(x, out) else [x], [out], async_op)

    def _reduce_scatter(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        # In place NCCL may use all of it, and what the other ranks have summed is undefined.
        return self.collective(group, "reduce_scatter", *(([], [x]) if _is_within(out, x) else ([x], [out])), async_op)

    def gathered_objects(self, value: Any, group: Any = None) -> list[Any]:
        self._note(group, "objects", 0)
        return super().gathered_objects(value, group)

    def largest_of_each(self, values: Any, group: Any = None) -> list[int]:
        self._note(group, "largest_of_each", len(values))
        return super().largest_of_each(values, group)

    def _note(self, group: Any, name: str, numel: int) -> None:
        self.issued.append((tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), name, numel))

    # ---- in place of torch's

    def swap_file(self, folder: str, rank: int, aio: Any = None) -> SwapFile:
        return CheckedSwapFile(self, folder, rank, aio)

    def thread(self, target: Callable[..., None], name: str, args: tuple = ()) -> CheckedThread:
        return CheckedThread(self, target, name, args)

    def queue(self) -> CheckedQueue:
        return CheckedQueue(self)

    @contextmanager
    def installed(self) -> Iterator[PretendedCuda]:
        """`torch.cuda`, torch.distributed's collectives and the like are this one's inside."""
        with pytest.MonkeyPatch.context() as patch:
            resize = torch.UntypedStorage.resize_
            wait_of_crossing, give_back_of_home, take_of_home = Crossing.wait, NvmeHome.give_back, NvmeHome.take

            def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
                self._resize(storage, nbytes)
                return resize(storage, nbytes)

            def waited(crossing: Crossing) -> None:
                crossing._stream.wait(crossing._event)  # who finds that it is over has seen who saw it
                for tensor in (*crossing._on_device, *crossing._on_host):
                    self._memory_of(tensor).seen = self.host.place()
                wait_of_crossing(crossing)

            def give_back(home: NvmeHome, buffer: Tensor) -> None:
                self._memory_of(buffer).seen = self.host.place()
                give_back_of_home(home, buffer)

            def take(home: NvmeHome, nbytes: int) -> Tensor:
                buffer = take_of_home(home, nbytes)
                self.host.see(self._memory_of(buffer).seen)
                return buffer

            def record(tensor: Tensor, stream: Stream) -> None:
                self._memory_of(tensor).recorded.add(stream)

            cuda = {
                "Stream": lambda device=None, priority=0: self.new_stream(),
                "Event": lambda **how: Event(self, **how),
                "current_stream": self.current_stream,
                "stream": self._stream,
                "device": lambda device: nullcontext(),
                "synchronize": self.synchronize,
                "current_device": lambda: 0,
                "is_available": lambda: True,
                "is_current_stream_capturing": lambda: False,
            }
            for name, value in cuda.items():
                patch.setattr(torch.cuda, name, value)
            # torch's optimizers ask whether a step is captured into a graph, which a CUDA build without a driver cannot say.
            patch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
            patch.setattr(torch.UntypedStorage, "resize_", resized)
            patch.setattr(Tensor, "record_stream", record)
            patch.setattr(Crossing, "wait", waited)
            patch.setattr(NvmeHome, "give_back", give_back)
            patch.setattr(NvmeHome, "take", take)
            patch.setattr(dist, "all_reduce", self._all_reduce)
            patch.setattr(dist, "broadcast", self._broadcast)
            patch.setattr(dist, "all_gather", self._all_gather_list)
            patch.setattr(lane, "_all_gather", self._all_gather)
            patch.setattr(lane, "_reduce_scatter", self._reduce_scatter)
            patch.setattr(sys.modules["megazero.comm.world"], "_WITH_STREAMS", (ACCELERATOR.type,))
            for module in (comm.channel, sys.modules["megazero.comm.world"]):
                patch.setattr(module, "backend_of", lambda group: "fake")
            patch.setattr(call, "Tensor", FakeTensor)  # which it keeps as any of that very class
            pool = SimpleNamespace(empty=lambda nbytes: self.aligned_empty(nbytes, pin=True), spare_nbytes=0)
            for module in (home, storage):
                patch.setattr(module, "PagePool", lambda **_: pool)
            if self.over_gloo:
                lanes = [HostLane(self), HostLane(self)]
                patch.setattr(comm.channel, "_open_lanes", lambda *_: ("pretended", lanes))
            yield self


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(tensors_in((value,)))
    return reads, writes


def type_of(tensor: Tensor) -> str:
    """Of its device; of a fake tensor without an operation."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def _is_within(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage()._cdata == whole.untyped_storage()._cdata
