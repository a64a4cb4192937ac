"""The real job without memory and without other ranks: fake tensors on a pretended accelerator, in a fake process group.

The accelerator is the meta device, which is another one than the host's, so that what is offloaded is told from what is not.
Kernels of a CUDA device are called by name where PyTorch chooses others for the meta device: attention, dropout, fused AdamW.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

# makes collectives of fake tensors known, below torch 2.9
import torch.distributed._tools.fake_collectives  # noqa: F401
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

import megazero.activation_checkpointing as checkpointing
from megazero import comm, engine, mpu
from megazero.checkpoint import writer
from megazero.config import Config
from megazero.job import Job, build_job
from megazero.nvme import Region, SwapFile, Transfer
from megazero.optim import adam_kernels
from megazero.zero import background, homes, init, link, nvme_home
from megazero.zero.placement import placed
from pretrain_gpt2 import count_tokens, forward_step, make_model
from tests.plan.live_bytes import LiveBytes, tensors_in

ACCELERATOR = torch.device("meta")
aten = torch.ops.aten


class Held(LiveBytes):
    """Counts fake tensors, by the device that they pretend to be on, and says something where their values are asked for.

    Every number is 1, and two tensors are always equal. It also is what the world is made of beside tensors: whoever pretends
    more of it overrides that.

    Attributes:
        waits: what the host has waited for the accelerator for: the operation, and who asked for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def swap_file(self, folder: str, rank: int, aio: Any = None) -> SwapFile:
        """A `SwapFile`."""
        return PretendedSwapFile(folder, rank, aio)

    def thread(self, target: Callable[[], None], name: str) -> Any:
        """A `threading.Thread`."""
        return ThreadAtOnce(target, name)

    def queue(self) -> Any:
        """A `queue.SimpleQueue`."""
        return SimpleQueue()

    def aligned_empty(self, nbytes: int, pin: bool = False) -> Tensor:
        """Pages of host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def adam(self, settings: Any, operands: Any, step: float, scale: float = 1.0) -> None:
        """The pass of Numba's kernel over memory, which makes none."""

    def gathered_objects(self, value: Any, group: Any = None) -> list[Any]:
        """`comm.all_gathered_objects`: all ranks have the same."""
        return [value] * dist.get_world_size(group)

    def largest_of_each(self, values: Any, group: Any = None) -> list[int]:
        """`comm.largest_of_each`: all ranks have the same."""
        return list(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(tensors_in(args))
        if host_waits(func, tensors, args, kwargs or {}):
            self.waits.append(f"{func.overloadpacket.__name__} in {_asked_by()}")
        if tensors and not any(isinstance(x, FakeTensor) for x in tensors):  # the state of a random generator
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        if func is aten.equal.default:
            return True
        if func is aten.add.Tensor and not torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            func = aten.add_.Tensor  # autograd adds gradients up in place, but not those of a subclass of Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)


def host_waits(func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the accelerator in this operation."""
    devices = {tensor.device for tensor in tensors}
    if func is aten._to_copy.default:
        is_blocking, target = not kwargs.get("non_blocking"), kwargs.get("device")
        return is_blocking and target is not None and devices != {torch.device(target)}
    if func is aten.copy_.default:
        return len(devices) > 1 and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    asks = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default)
    return func in asks and ACCELERATOR in devices


def _asked_by() -> str:
    """The library's innermost function under way."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("megazero."):
        frame = frame.f_back
    return "nothing of the library" if frame is None else frame.f_code.co_name


class Gauge:
    """Measures the pretended accelerator, of `total` bytes, for --placement auto."""

    def __init__(self, held: Held, total: int) -> None:
        self._held, self._total = held, total

    def used_bytes(self) -> int:
        """The most since the last call."""
        return self._held.lap()[ACCELERATOR.type]

    def free_bytes(self) -> int:
        """What is left."""
        return self._total - self._held.now[ACCELERATOR.type]


class DirectStream:
    """A stream of copies on the pretended accelerator, which has memory to plan, and nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        pass

    def start(self, work: Callable[[], object]) -> None:
        """Does the work at once."""
        work()

    def hold_back(self, event: None) -> None:
        """Does nothing."""

    def wait(self, event: None) -> None:
        """Does nothing."""


class SlowTransfer(Transfer):
    """Has begun and ended when somebody waits for it, and not before: so as much memory is in use as may be."""

    def __init__(self, filled: Callable[[], None] | None) -> None:
        super().__init__(1)
        self._filled = filled

    def error(self) -> BaseException | None:
        if not self.done():
            if self._filled is not None:
                self._filled()
            self.end(None)
        return super().error()


class PretendedSwapFile(SwapFile):
    """Gives places in a file that nothing is written to."""

    def __init__(self, folder: str, rank: int, aio: Any = None) -> None:
        with unset_fake_temporarily():
            super().__init__(tempfile.gettempdir(), rank, aio)

    def _extend(self, to: int) -> None:
        pass

    def _start(
        self,
        kind: Any,
        region: Region,
        buffer: Tensor,
        offset: int,
        after: Transfer | None,
        filled: Callable[[], None] | None = None,
    ) -> Transfer:
        assert after is None and 0 <= offset <= offset + buffer.nbytes <= region.nbytes
        transfer = SlowTransfer(filled)
        self._regions.hold(region, transfer)
        return transfer


class ThreadAtOnce:
    """Runs when it is started: modes of fake tensors are each thread's own."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._targets = [target]

    def start(self) -> None:
        self._targets.pop()()  # and forgets it, as a thread does

    def join(self) -> None:
        pass


def device_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` as a CUDA device computes it in 16 bits, where K and V may have fewer heads."""
    assert attn_mask is None, "no kernel for masks here"
    assert enable_gqa == (k.size(1) < q.size(1))
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def device_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """`F.dropout` as a CUDA device computes it: the mask is of booleans."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


class _DeviceRMSNorm(torch.autograd.Function):
    """One kernel each way, which saves one fp32 number for each token; on the meta device it would be many small operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def device_rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` as a CUDA device computes it."""
    return _DeviceRMSNorm.apply(x, weight)


@contextmanager
def fake_world(
    world_size: int,
    model_parallel_size: int = 1,
    rank: int = 0,
    device_bytes: int | None = None,
    held: Held | None = None,
) -> Iterator[Held]:
    """This process is one of many ranks, and what it makes inside has no memory. Nothing that it makes may be used outside.

    Args:
        device_bytes: memory of the accelerator, for --placement auto.
        held: what it is made of.
    """
    held = held or Held()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "local_device", lambda: ACCELERATOR)
        if not comm.has_streams(ACCELERATOR):
            patch.setattr(link, "CudaCopyStream", DirectStream)
        patch.setattr(F, "scaled_dot_product_attention", device_attention)
        patch.setattr(F, "dropout", device_dropout)
        patch.setattr(F, "rms_norm", device_rms_norm)
        patch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_, **__: None)
        patch.setattr(adam_kernels, "mixed_kernel", lambda needs_float16: held.adam)
        for module in (link, nvme_home, writer):
            patch.setattr(module, "aligned_empty", held.aligned_empty)
        for module in (homes, init, checkpointing.storage):
            patch.setattr(module, "SwapFile", held.swap_file)
        patch.setattr(background, "threading", SimpleNamespace(Thread=held.thread))
        patch.setattr(background, "queue", SimpleNamespace(SimpleQueue=held.queue))
        for module in (comm, sys.modules["megazero.comm.world"]):
            patch.setattr(module, "all_gathered_objects", held.gathered_objects)
            patch.setattr(module, "largest_of_each", held.largest_of_each)
        channel = comm.Channel
        patch.setattr(channel, "compare_first", lambda _: None)  # there is nobody to compare with

        def open_channel(group: comm.ProcessGroup, **sets: Any) -> comm.Channel:
            with unset_fake_temporarily():  # ranks tell each other names
                return channel(group, **sets)

        for module in (comm, mpu.sequence_mappings, checkpointing.checkpointer):
            patch.setattr(module, "Channel", open_channel)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            mpu.initialize_model_parallel(model_parallel_size)
            mpu.model_parallel_cuda_manual_seed(1)
            with FakeTensorMode(), held:
                if device_bytes is not None:
                    gauge = Gauge(held, device_bytes)
                    patch.setattr(engine, "placed", lambda zero, _: placed(zero, gauge))
                yield held
        finally:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
            mpu.sequence_mappings.sequence_channel.cache_clear()
            checkpointing.configure(None)


@contextmanager
def fake_job(
    config: Config, world_size: int, rank: int = 0, device_bytes: int | None = None, held: Held | None = None
) -> Iterator[tuple[Job, Held]]:
    """The job that `config` describes, built as `pretrain_gpt2.py` builds it, on one of `world_size` ranks."""
    tokenizer: Any = SimpleNamespace(eod=0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with fake_world(world_size, config.parallel.model_parallel_size, rank, device_bytes, held) as held:
        try:
            job = build_job(config, mpu.get_groups(), tokenizer, make_model, forward_step, count_tokens)
            held.watch(bucket.weights.flat for bucket in job.engine.buckets)
            yield job, held
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def fake_step(job: Job) -> None:
    """One optimizer step of the job, on token ids that all are the same."""
    flags = job.config
    shape = flags.training.batch_size, flags.data.seq_length
    ids = torch.zeros(shape, dtype=torch.int64, device=ACCELERATOR)
    for _ in range(flags.accumulation_steps(job.groups.data_parallel_size)):
        job.engine.backward(job.engine(ids, targets=ids).mean())
        job.engine.step()
