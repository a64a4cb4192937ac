"""The homes of one engine's states, according to its configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megazero import comm
from megazero.cgroups import available_cores
from megazero.logging import ALIKE, get_logger
from megazero.nvme import PAGE, SwapFile
from megazero.zero.config import ZeroConfig
from megazero.zero.gemini_plan import first_that_fit
from megazero.zero.home import Home, MemoryHome
from megazero.zero.link import Link
from megazero.zero.nvme_home import NvmeHome
from megazero.zero.units import ROOT, BucketPlan

logger = get_logger(__name__)

FP32_BYTES = 4
TILES = 8  # of an offloaded update: enough that the first read and the last write, which nothing overlaps, are small
MOST_TILE = 1 << 24  # most elements by default: 64 MiB of each state; larger tiles are not read faster
TILE_MULTIPLE = max(4096, PAGE)  # elements: whole memory pages in every dtype


@dataclass(frozen=True)
class Homes:
    """Where shards of P rest, and where O rests with the reduced G; None is the device that the model computes on.

    Attributes:
        optimizer: the home of O for buckets whose O is offloaded.
        tile_numel: elements of O that come to hand at a time; None if O is at hand anyway.
        kept: indices, among the plans, of the trained buckets whose O stays on the device.
        link: the link between the homes and the device, if they do not share one memory.
    """

    param: Home | None = None
    optimizer: Home | None = None
    tile_numel: int | None = None
    swap: SwapFile | None = None
    kept: frozenset[int] = frozenset()
    link: Link | None = None

    @classmethod
    def of(cls, config: ZeroConfig, plans: Sequence[BucketPlan]) -> Homes:
        """The homes that `config` names. Collective over the world.

        Raises:
            OSError: the swap file cannot be created in `nvme_path`; OtherRankError on the other ranks.
        """
        pin, swap, link = config.pin_memory, None, None
        is_trained = any(plan.is_trainable for plan in plans)
        if is_trained and config.offload_param != "none" and config.offload_optimizer == "none":
            logger.warning(
                "--offload-param %s has no effect on trained parameters while --offload-optimizer is none: the fp32 master "
                "weights on the device serve as their shards. Offload the optimizer as well.",
                config.offload_param,
                extra=ALIKE,
            )
        kept = kept_on_device(config, plans)
        if (config.offload_param, config.offload_optimizer) != ("none", "none"):
            link = Link.to(comm.local_device(), pin)
        if link is not None and config.offload_optimizer != "none" and is_trained:
            _warn_of_one_thread()
        if "nvme" in (config.offload_param, config.offload_optimizer):
            assert config.nvme_path is not None, "ZeroConfig has checked it"
            swap = comm.together(partial(SwapFile, config.nvme_path, torch.distributed.get_rank(), config.aio))

        def home(name: str, buffer_nbytes: int, buffers: int, reads: bool = True, writes: bool = True) -> Home | None:
            if name == "cpu":
                return MemoryHome(torch.device("cpu"), pin, link)
            if swap is None or name != "nvme":
                return None
            return NvmeHome(swap, buffer_nbytes, buffers, reads_ahead=reads, writes_behind=writes, pin=pin, link=link)

        pipelined = config.pipeline_read, config.pipeline_write
        optimizer = home(config.offload_optimizer, *optimizer_buffers(config, plans), *pipelined)
        param = home(config.offload_param, *param_buffers(config, plans))
        is_at_hand = config.offload_optimizer == "cpu" and comm.local_device().type == "cpu"
        has_tiles = optimizer is not None and (not is_at_hand or config.sub_group_size > 0)
        return cls(param, optimizer, offloaded_tile(config, plans) if has_tiles else None, swap, kept, link)

    @property
    def nbytes(self) -> int:
        """Host memory that offloaded states pass through, in addition to their own: buffers, and memory kept for reuse."""
        homes = sum(home.nbytes for home in (self.param, self.optimizer) if home is not None)
        return homes + (0 if self.link is None else self.link.outbox.nbytes)

    def close(self) -> None:
        """Frees the disk space. Call it after the last use of any vector."""
        if self.link is not None:
            self.link.close()
        if self.swap is not None:
            self.swap.close()


def _warn_of_one_thread() -> None:
    """Warns of updates on the host by one thread though there are cores for more: torchrun sets OMP_NUM_THREADS to 1."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = available_cores() // int(ranks) if ranks.isdecimal() and int(ranks) else 1
    if torch.get_num_threads() == 1 < cores:
        logger.warning(
            "the optimizer's update on the host has one thread per rank, and this machine has %d cores for each: set "
            "OMP_NUM_THREADS=%d. The scripts, `megazero` and `python -m megazero.launch` do so by themselves; torchrun sets 1.",
            cores,
            cores,
            extra=ALIKE,
        )


def kept_on_device(config: ZeroConfig, plans: Sequence[BucketPlan]) -> frozenset[int]:
    """Indices in `plans` of the trained buckets whose O stays on the device, where its master weights are the shard of P.

    All of them if O is not offloaded; else first units, then the root, as long as at least `offload_optimizer_ratio` leaves.
    """
    trained = [index for index, plan in enumerate(plans) if plan.is_trainable]
    if config.offload_optimizer == "none":
        return frozenset(trained)
    forward = sorted(trained, key=lambda index: (plans[index].unit == ROOT, plans[index].unit))
    sizes = {index: plans[index].layout.shard_numel for index in forward}
    room = round((1 - config.offload_optimizer_ratio) * sum(sizes.values()))  # 1 - 0.9 is a little less than 0.1
    return frozenset(first_that_fit(sizes, room))


def optimizer_buffers(config: ZeroConfig, plans: Sequence[BucketPlan]) -> tuple[int, int]:
    """Size in bytes and number of the buffers for O in a file: one tile is read while another is updated and a third written."""
    largest = max((plan.layout.shard_numel for plan in plans), default=1)  # a tile lies in one bucket
    return min(offloaded_tile(config, plans), largest) * FP32_BYTES, 3 * config.optimizer_buffer_count


def param_buffers(config: ZeroConfig, plans: Sequence[BucketPlan]) -> tuple[int, int]:
    """Size in bytes and number of the buffers for P in a file; a buffer holds one unit's shard."""
    largest = max((plan.layout.shard_numel * plan.dtype.itemsize for plan in plans), default=1)
    return largest, config.param_buffer_count


def offloaded_tile(config: ZeroConfig, plans: Sequence[BucketPlan]) -> int:
    """Elements of O that an offloaded update brings to hand at a time."""
    kept = kept_on_device(config, plans)
    numel = sum(plan.layout.shard_numel for i, plan in enumerate(plans) if plan.is_trainable and i not in kept)
    return tile_numel(numel, config.sub_group_size)


def tile_numel(numel: int, sub_group_size: int = 0) -> int:
    """The same for a rank that updates `numel` elements of O elsewhere.

    An eighth of them, at most `sub_group_size` (MOST_TILE if that is 0), rounded up to a multiple of TILE_MULTIPLE.
    """
    wanted = min(-(-numel // TILES), sub_group_size or MOST_TILE)
    return max(1, -(-wanted // TILE_MULTIPLE)) * TILE_MULTIPLE
