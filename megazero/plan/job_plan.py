"""What one job needs of its ranks and nodes, as one object: states, activations, host memory, disk, traffic."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.activation_checkpointing import CheckpointSettings
from megazero.config import Config
from megazero.model.config import GPT2Config
from megazero.plan.activations import Activations, Shape, plan_activations
from megazero.plan.moments import step_moments
from megazero.plan.states import gpt2_buckets
from megazero.plan.traffic import Traffic, plan_traffic
from megazero.zero.bucket_bytes import BucketBytes, StateSettings
from megazero.zero.memory import MemoryPlan, memory_of_buckets

RUNTIME_BYTES = 10**9  # of a GPU: CUDA context, kernels, cuBLAS and NCCL buffers, what the allocator cannot use


@dataclass(frozen=True)
class Setup:
    """A job, as far as its memory depends on it."""

    model: GPT2Config
    shape: Shape
    data_parallel_size: int
    ranks_per_node: int
    states: StateSettings
    checkpoints: CheckpointSettings
    pin_memory: bool = True
    persistence: int = 0  # elements of parameters that stay whole under stage 3

    @classmethod
    def of(cls, config: Config, world_size: int, ranks_per_node: int, device_type: str) -> Setup:
        """The setup of a job with `config` on `world_size` ranks.

        Raises:
            ValueError: the configuration does not fit so many ranks, or contradicts itself.
        """
        config.check_world(world_size)
        tensor_parallel = config.parallel.model_parallel_size
        data_parallel = world_size // tensor_parallel
        model, zero = config.model, config.zero
        is_placed = zero.placement == "auto" and device_type != "cpu"  # all rests on the host that finds no room
        return cls(
            model,
            Shape(
                config.training.batch_size, config.data.seq_length, tensor_parallel, config.precision.dtype, device_type
            ),
            data_parallel,
            min(ranks_per_node, world_size),
            StateSettings(
                zero.stage,
                zero.grad_dtype,
                zero.reduce_dtype,
                overlap=zero.overlap_comm,
                recomputed_together=model.checkpoint_num_layers if model.recompute_mode == "full" else 1,
                offload_optimizer="cpu" if is_placed else zero.offload_optimizer,
                offload_param="cpu" if is_placed else zero.offload_param,
                offload_optimizer_ratio=zero.offload_optimizer_ratio,
                sub_group_size=zero.sub_group_size,
                optimizer_buffer_count=zero.optimizer_buffer_count,
                param_buffer_count=zero.param_buffer_count,
                device_type=device_type,
                gather_limits=zero.gather_limits,
                micro_batches=config.accumulation_steps(data_parallel),
                delays_update=zero.delayed_param_update > 0,
            ),
            config.checkpoint_settings(),
            zero.pin_memory,
            zero.param_persistence_threshold,
        )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data_parallel_size * self.shape.model_parallel_size


@dataclass(frozen=True)
class JobPlan:
    """What each rank and each node of a job holds. Bytes.

    Attributes:
        moments: on the accelerator, at each moment of a step that can be its peak.
        certain: the same at the worst of them, without activations.
    """

    setup: Setup
    states: MemoryPlan
    activations: Activations
    traffic: Traffic
    moments: dict[str, int]
    certain: int

    @property
    def runtime(self) -> int:
        """What a GPU holds beside all tensors; nothing on a CPU."""
        return RUNTIME_BYTES if self.setup.shape.device_type == "cuda" else 0

    @property
    def device(self) -> int:
        """The most that a rank's accelerator holds."""
        return max(self.moments.values()) + self.runtime

    @property
    def device_states(self) -> int:
        """The same without activations: what no smaller batch saves."""
        return self.certain + self.runtime

    @property
    def host(self) -> int:
        """Host memory of a rank: offloaded states and activation checkpoints."""
        return self.states.host + self.activations.kept_on_host

    @property
    def disk(self) -> int:
        """Disk space of a rank: states and activation checkpoints."""
        return self.states.disk + self.activations.kept_on_disk

    def per_node(self, bytes_per_rank: int) -> int:
        """Of all the ranks of a node."""
        return bytes_per_rank * self.setup.ranks_per_node


def plan_job(setup: Setup) -> JobPlan:
    """The plan of a job. Allocates and communicates nothing.

    Raises:
        ValueError: the model does not split over the ranks, or has no `vocab_size`.
    """
    shape, settings = setup.shape, setup.states
    persistence = setup.persistence if settings.stage == 3 else 0
    buckets = gpt2_buckets(setup.model, shape.model_parallel_size, setup.data_parallel_size, shape.dtype, persistence)
    needs = BucketBytes.of_all(buckets, settings)
    states = memory_of_buckets(buckets, setup.data_parallel_size, settings)
    work = plan_activations(setup.model, shape, setup.checkpoints)
    traffic = plan_traffic(setup.model, shape, needs, settings, setup.data_parallel_size)
    moments, certain = (
        step_moments(needs, settings, states, each, setup.model.num_layers) for each in (work, Activations())
    )
    return JobPlan(setup, states, work, traffic, moments, max(certain.values()))
