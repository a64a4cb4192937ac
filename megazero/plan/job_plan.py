"""What one job needs of its ranks and nodes, as one object: states, activations, host memory, disk, traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megazero.activation_checkpointing import CheckpointSettings
from megazero.config import Config
from megazero.model.config import GPT2Config
from megazero.plan.activations import Activations, Shape, plan_activations
from megazero.plan.moments import muon_working, step_moments
from megazero.plan.states import gpt2_buckets
from megazero.plan.traffic import Traffic, plan_traffic
from megazero.zero.bucket_bytes import BucketBytes, StateSettings
from megazero.zero.homes import FP32_BYTES
from megazero.zero.memory import MemoryPlan, memory_of_buckets

# On a GPU: CUDA context, kernels, cuBLAS and NCCL buffers. 1.37 GB of an H200 with torch 2.11.
RUNTIME_BYTES = 14 * 10**8


@dataclass(frozen=True)
class Setup:
    """A job's settings on a number of ranks.

    Attributes:
        config: all settings of the job.
        shape, states: what activations and model states depend on, from the settings and the ranks.
    """

    config: Config
    ranks_per_node: int
    shape: Shape
    states: StateSettings

    @classmethod
    def of(
        cls, config: Config, world_size: int, ranks_per_node: int, device_type: str, states_per_element: int = 2
    ) -> Setup:
        """The setup of a job with `config` on `world_size` ranks.

        Args:
            states_per_element: as in `StateSettings`.

        Raises:
            ValueError: the configuration does not fit so many ranks, or contradicts itself.
        """
        config.check_world(world_size)
        tensor_parallel = config.parallel.model_parallel_size
        data_parallel = world_size // tensor_parallel
        zero = config.zero
        if zero.placement == "auto":
            # What finds no room rests on the host; without a device there is nothing to place.
            home = "none" if device_type == "cpu" else "cpu"
            zero = replace(zero, placement="static", offload_optimizer=home, offload_param=home)
        return cls(
            config,
            min(ranks_per_node, world_size),
            Shape(
                config.training.batch_size,
                config.data.seq_length,
                tensor_parallel,
                config.precision.dtype,
                device_type,
            ),
            StateSettings(
                zero,
                data_parallel,
                device_type,
                states_per_element,
                recomputed_together=config.model.recomputed_together,
                micro_batches=config.accumulation_steps(data_parallel),
            ),
        )

    def changed(self, **values: Any) -> Setup:
        """The setup of the same job with other values of some of its configuration's fields, by name.

        Raises:
            ValueError: the job would refuse them.
        """
        # whether new weights arrive late is decided anew: it is a matter of the stage
        config = self.config.with_values(**{"overlap_param_gather": False, **values})
        states = self.states
        return Setup.of(config, self.world_size, self.ranks_per_node, states.device_type, states.states_per_element)

    @property
    def model(self) -> GPT2Config:
        """The model that is trained."""
        return self.config.model

    @property
    def data_parallel_size(self) -> int:
        """Ranks that divide the states among them."""
        return self.states.data_parallel_size

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.data_parallel_size * self.shape.model_parallel_size


@dataclass(frozen=True)
class JobPlan:
    """What each rank and each node of a job holds, in bytes.

    Attributes:
        moments: on the accelerator, at each moment of a step that can be its peak.
        certain: the largest of these without activations.
    """

    setup: Setup
    states: MemoryPlan
    activations: Activations
    traffic: Traffic
    moments: dict[str, int]
    certain: int

    @property
    def runtime(self) -> int:
        """What a GPU holds besides all tensors; nothing on a CPU."""
        return RUNTIME_BYTES if self.setup.shape.device_type == "cuda" else 0

    @property
    def device(self) -> int:
        """The most that a rank's accelerator holds."""
        return max(self.moments.values()) + self.runtime

    @property
    def device_states(self) -> int:
        """The same without activations: what no smaller batch can reduce."""
        return self.certain + self.runtime

    @property
    def host(self) -> int:
        """Host memory of a rank: offloaded states, activation checkpoints, and a checkpoint on its way to the disk."""
        return self.states.host + self.activations.kept_on_host + self.being_saved

    @property
    def being_saved(self) -> int:
        """Host memory of a rank while --async-save writes: its part of the fp32 weights and the optimizer's states."""
        if not self.setup.config.checkpoint.async_save:
            return 0
        settings = self.setup.states
        per_element = FP32_BYTES * (1 + settings.states_per_element)
        return self.states.numel * per_element // settings.data_parallel_size

    @property
    def disk(self) -> int:
        """Disk space of a rank: states and activation checkpoints."""
        return self.states.disk + self.activations.kept_on_disk

    def per_node(self, bytes_per_rank: int) -> int:
        """Bytes of all the ranks on a node."""
        return bytes_per_rank * self.setup.ranks_per_node


def plan_job(setup: Setup) -> JobPlan:
    """The plan of a job. Allocates and communicates nothing.

    Raises:
        ValueError: the model does not split over the ranks, or has no `vocab_size`.
    """
    shape, settings, uses_muon = setup.shape, setup.states, setup.config.optimizer.uses_muon
    ranks = shape.model_parallel_size, settings.data_parallel_size
    buckets = gpt2_buckets(setup.model, *ranks, shape.dtype, settings.zero, uses_muon)
    needs = BucketBytes.of_all(buckets, settings)
    states = memory_of_buckets(buckets, settings)
    work = plan_activations(setup.model, shape, setup.config.checkpoint_settings())
    traffic = plan_traffic(setup.model, shape, needs, settings)
    update = muon_working(setup.model) if uses_muon else 0
    moments, certain = (
        step_moments(needs, settings, states, each, setup.model.num_layers, update) for each in (work, Activations())
    )
    return JobPlan(setup, states, work, traffic, moments, max(certain.values()))


def activation_modes(setup: Setup) -> dict[str, Activations]:
    """The job's activations with nothing recomputed, and with each flag that reduces them; by flag."""
    plain = CheckpointSettings()
    full = replace(setup.model, checkpoint_activations=False, recompute="full", recompute_budget_gb=None)
    modes = {
        "none": (replace(full, recompute="none", checkpoint_num_layers=1), plain),
        "--recompute selective": (replace(full, recompute="selective", checkpoint_num_layers=1), plain),
        "--checkpoint-activations": (full, plain),
    }
    if setup.shape.model_parallel_size > 1:
        modes["... --partition-activations"] = (full, CheckpointSettings(partition_activations=True))
    if setup.shape.device_type == "cuda":
        modes["... --checkpoint-in-cpu"] = (full, CheckpointSettings(checkpoint_in_cpu=True))
    return {name: plan_activations(config, setup.shape, settings) for name, (config, settings) in modes.items()}
