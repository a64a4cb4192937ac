"""The engine's ZeRO settings: which model states are sharded, in which dtype gradients accumulate, and how they travel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megazero.logging import counted
from megazero.nvme import AioConfig
from megazero.option import check_options, flag_of, option
from megazero.zero.residency import GatherLimits

STAGES = (0, 1, 2, 3)
GRAD_DTYPES = ("fp32", "compute")
REDUCE_DTYPES = ("same", "fp32", "compute")
HOMES = ("none", "cpu", "nvme")
PLACEMENTS = ("static", "auto")
# Sizes of buckets that several units share, in elements. Below 32 MiB of fp32 a collective's time hardly depends on its size; on
# many ranks, where it travels in as many parts, below 4 MiB per rank. The maximum is less than a block of a 10-billion model.
SHARED_NUMEL, SHARED_NUMEL_PER_RANK, MOST_SHARED_NUMEL = 2**23, 2**20, 2**27


@dataclass(frozen=True)
class Sharding:
    """Which states are sharded over the data-parallel group (ZeRO, arXiv:1910.02054, sec. 5): P => G => O."""

    optimizer: bool
    gradients: bool
    parameters: bool

    @classmethod
    def of_stage(cls, stage: int) -> Sharding:
        """Stage 0 shards nothing, 1 O, 2 O and G, 3 O, G and P."""
        return cls(stage >= 1, stage >= 2, stage >= 3)


@dataclass(frozen=True)
class ZeroConfig:
    """Which model states are sharded over the data-parallel group (ZeRO, arXiv:1910.02054) and how gradients are reduced.

    `python -m pretrain_gpt2 --help` says what those fields mean that are flags of the job, too; comments say it of the others.
    """

    stage: int = option(
        0,
        "states sharded over the data-parallel ranks: 0 none, 1 the optimizer's, 2 also gradients, 3 also parameters",
        choices=STAGES,
        flag="--zero-stage",
    )
    grad_dtype: str = option(
        "fp32", "dtype in which gradients accumulate; compute: the dtype of the parameters", choices=GRAD_DTYPES
    )
    reduce_dtype: str = option(
        "same", "dtype in which gradients are sent; same: the dtype of --grad-dtype", choices=REDUCE_DTYPES
    )
    shard_size: int = option(
        0,
        "number of data-parallel ranks that share one copy of the states, such as those of a node; other sets of ranks hold "
        "further copies (hybrid sharding). 0: all ranks share one",
        flag="--zero-shard-size",
    )
    gradient_predivide_factor: float = 1.0  # gradients are divided by it before the sum, and by the rest afterwards
    prescale_gradients: bool = False  # gradients are divided by the number of data-parallel ranks before the sum
    reduce_bucket_size: int = option(
        500_000_000,
        "most elements that small blocks may have together to share a bucket and be reduced together (stages 0 to 2); 0: every "
        "block has its own",
        at_least=0,
        flag="--zero-reduce-bucket-size",
    )
    overlap_comm: bool = True  # gradients travel while backward continues
    overlap_param_gather: bool = option(
        False,
        "send new weights while the next forward runs, which waits for each unit's weights right before the unit (stages 1 and "
        "2). By default on if they come from other ranks or homes, but not at stage 1 with split layers, nor with "
        "--delayed-param-update",
        unsaid=True,
    )
    offload_optimizer: str = option(
        "none",
        "where master weights, moments and reduced gradients rest, and the update runs (stage 1 and above); none: they stay on "
        "the accelerator",
        choices=HOMES,
    )
    offload_optimizer_ratio: float = option(
        1.0,
        "share of the optimizer states that --offload-optimizer offloads; the states of the first units stay on the device",
    )
    offload_param: str = option(
        "none", "where the parameters' shards rest (stage 3)", choices=HOMES, aliases=("--remote-device",)
    )
    placement: str = option(
        "static",
        "auto (stage 3): states rest in host memory, and one traced step decides what is also kept on the device (Gemini)",
        choices=PLACEMENTS,
    )
    gpu_margin_mem_ratio: float = option(
        0.95,
        "share of the device memory found unused by --placement auto that optimizer states of the first units may take",
    )
    delayed_param_update: int = option(
        0,
        "after so many steps, run an offloaded update while the next step computes with weights one step older; 0: never",
    )
    nvme_path: str | None = option(
        None, "directory on the drive to which --offload-optimizer nvme and --offload-param nvme swap", per_host=True
    )
    pin_memory: bool = option(True, "page-lock the host memory of offloaded states, for CUDA", flag="--use-pin-memory")
    sub_group_size: int = option(
        0,
        "most elements of a tile of the offloaded update; 0: an eighth of the rank's, at most 16.8 million",
        at_least=0,
    )
    pipeline_read: bool = True  # the next sub-group is read while one is updated
    pipeline_write: bool = True  # the last sub-group is written while one is updated
    optimizer_buffer_count: int = 4  # nvme: host buffers per sub-group, one for each state that it has
    param_buffer_count: int = 5  # nvme: host buffers, each of one unit's shard
    aio: AioConfig = AioConfig()
    gather_limits: GatherLimits = GatherLimits()  # limits on what stage 3 gathers ahead and keeps
    param_persistence_threshold: int = 0  # parameters with fewer elements stay whole under stage 3
    model_persistence_threshold: int | None = None  # most elements of such parameters in total

    @property
    def sharding(self) -> Sharding:
        """Which states the stage shards."""
        return Sharding.of_stage(self.stage)

    def num_shards(self, data_parallel_size: int) -> int:
        """The number of ranks, out of `data_parallel_size`, that the states are sharded over.

        Raises:
            ValueError: `shard_size` does not divide `data_parallel_size`.
        """
        if data_parallel_size % (self.shard_size or 1):
            raise ValueError(
                f"--zero-shard-size {self.shard_size} (mics_shard_size) does not divide the "
                f"{counted(data_parallel_size, 'data-parallel rank')} into equal sets. Use a divisor of their number, or drop it "
                "to shard over all of them."
            )
        return self.shard_size or data_parallel_size

    def shared_numel(self, data_parallel_size: int) -> int:
        """Most elements that adjacent units may have together to share a bucket; 0 gives each unit its own.

        Units share buckets only if that costs little memory: not if parameters are sharded, and only up to SHARED_NUMEL if
        gradients are. If gradients are whole, buckets grow with the number of ranks, as Megatron-Core's do
        (`DistributedDataParallelConfig.bucket_size`).
        """
        if self.sharding.parameters:
            return 0
        per_rank = 0 if self.sharding.gradients else SHARED_NUMEL_PER_RANK
        return min(max(SHARED_NUMEL, per_rank * data_parallel_size), MOST_SHARED_NUMEL, self.reduce_bucket_size)

    @property
    def delays_update(self) -> bool:
        """Whether an offloaded update runs concurrently with the next step."""
        return self.delayed_param_update > 0

    @property
    def overlaps_update(self) -> bool:
        """Whether an offloaded update goes on during the next forward, which waits for each unit's new weights before the unit.

        All of O is then away, and the update has its home to itself. Whole parameters must be allowed to arrive late.
        """
        is_all_away = (
            self.offload_optimizer != "none" and self.placement == "static" and self.offload_optimizer_ratio == 1
        )
        may_arrive_late = self.sharding.parameters or self.overlap_param_gather
        is_apart = self.sharding.gradients and self.offload_param != "nvme"
        return self.overlap_comm and is_all_away and is_apart and may_arrive_late and not self.delays_update

    @property
    def idle(self) -> dict[str, str]:
        """By name, the fields that have no effect beside the others, whatever their own values, and what they are for."""
        optimizer, param, is_placed = self.offload_optimizer, self.offload_param, self.placement == "auto"
        limits = ("gather_limits", "param_persistence_threshold", "model_persistence_threshold")
        on_nvme = "--offload-optimizer nvme and --offload-param nvme"
        on_nvme += "; activation checkpoints have --checkpoint-nvme-path"
        uses = (
            (self.stage == 3, "--zero-stage 3", limits),
            (self.stage < 3, "--zero-stage 0 to 2", ("reduce_bucket_size",)),
            (is_placed, "--placement auto", ("gpu_margin_mem_ratio",)),
            (optimizer != "none", "--offload-optimizer cpu and nvme", ("offload_optimizer_ratio",)),
            (is_placed or optimizer != "none", "--offload-optimizer cpu and nvme", ("sub_group_size",)),
            (is_placed or {optimizer, param} != {"none"}, "--offload-optimizer and --offload-param", ("pin_memory",)),
            (
                optimizer == "nvme",
                "--offload-optimizer nvme",
                ("optimizer_buffer_count", "pipeline_read", "pipeline_write"),
            ),
            (param == "nvme", "--offload-param nvme", ("param_buffer_count",)),
            ("nvme" in (optimizer, param), on_nvme, ("nvme_path", "aio")),
        )
        return {name: f"it is for {use}" for is_there, use, names in uses if not is_there for name in names}

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 < self.gradient_predivide_factor < math.inf:
            raise ValueError(
                f"gradient_predivide_factor must be a positive number, got {self.gradient_predivide_factor}."
            )
        if self.shard_size < 0 or self.shard_size == 1 or (self.shard_size and self.stage == 0):
            raise ValueError(
                f"--zero-shard-size {self.shard_size} (mics_shard_size) must be 0 (all data-parallel ranks) or at least 2, and "
                f"needs --zero-stage 1 or more, got stage {self.stage}. To shard nothing, use stage 0 without it."
            )
        self._check_overlap_param_gather()
        self._check_homes()
        self._check_delayed_update()
        self._check_placement()
        for name in ("optimizer_buffer_count", "param_buffer_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"zero.{name} must be at least 1, got {getattr(self, name)}.")

    def _check_overlap_param_gather(self) -> None:
        reasons = {0: "every rank updates all weights, and gathers none", 3: "units are always gathered ahead"}
        if self.overlap_param_gather and self.stage in reasons:
            raise ValueError(
                f"--overlap-param-gather (zero.overlap_param_gather) is for --zero-stage 1 and 2, got {self.stage}, where "
                f"{reasons[self.stage]}. Drop it."
            )
        if self.overlap_param_gather and self.delayed_param_update:
            raise ValueError(
                f"--overlap-param-gather and --delayed-param-update {self.delayed_param_update} exclude each other: the weights "
                "of a delayed update travel in the next step(). Drop one of them."
            )

    def _check_homes(self) -> None:
        for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
            home, flag = getattr(self, name), flag_of(name)
            if home != "none" and self.stage < least:
                raise ValueError(
                    f"{flag} {home} needs --zero-stage {least}{' or more' if least < 3 else ''}, got {self.stage}: every rank "
                    "would have to hold all of it."
                )
            if home == "nvme" and not self.nvme_path:
                raise ValueError(f"{flag} nvme needs --nvme-path, a directory on the drive to swap to.")
        if not 0 <= self.offload_optimizer_ratio <= 1:
            raise ValueError(f"--offload-optimizer-ratio must lie in [0, 1], got {self.offload_optimizer_ratio}.")
        if self.offload_optimizer_ratio < 1 and (self.offload_optimizer == "none" or self.placement == "auto"):
            raise ValueError(
                f"--offload-optimizer-ratio {self.offload_optimizer_ratio} is the share that --offload-optimizer cpu or nvme "
                "offloads, which is not given; or --placement auto decides it. Drop the ratio."
            )

    def _check_delayed_update(self) -> None:
        if self.delayed_param_update < 0 or (self.delayed_param_update and self.offload_optimizer == "none"):
            raise ValueError(
                f"--delayed-param-update {self.delayed_param_update} must be 0 or more, and needs --offload-optimizer cpu or "
                "nvme: it hides the host's update behind the device's next step."
            )
        if self.delayed_param_update and (self.offload_optimizer_ratio < 1 or self.placement == "auto"):
            raise ValueError(
                f"--delayed-param-update {self.delayed_param_update} needs all of the update on the host, and "
                "--offload-optimizer-ratio below 1 or --placement auto leaves a part on the device. Drop one of them."
            )

    def _check_placement(self) -> None:
        if self.placement == "auto" and (self.stage < 3 or not self.overlap_comm):
            raise ValueError(
                f"--placement auto needs --zero-stage 3 and overlap_comm, got stage {self.stage} and {self.overlap_comm}: it "
                "decides which gathered parameters stay."
            )
        if self.placement == "auto" and "nvme" in (self.offload_optimizer, self.offload_param):
            raise ValueError(
                "--placement auto places states between host memory and the device: drop --offload-... nvme."
            )
        if not 0 <= self.gpu_margin_mem_ratio <= 1:
            raise ValueError(f"--gpu-margin-mem-ratio must lie in [0, 1], got {self.gpu_margin_mem_ratio}.")
