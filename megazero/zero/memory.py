"""What a rank will hold: the bytes of every model state, and what is added during a step. Arithmetic only.

It follows the layouts that the engine would make, so it needs shapes but no values. A model on the meta device is enough, of any
size and for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megazero import comm
from megazero.zero.bucket_bytes import (
    FIRST,
    BucketBytes,
    StateSettings,
    gathered_bytes,
    reducing_bytes,
    staging_bytes,
    updating_bytes,
)
from megazero.zero.config import ZeroConfig
from megazero.zero.units import ROOT, BucketPlan, plan_buckets, select_units, share_buckets


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each rank: the model's states (P, G, O), and what a step needs temporarily in addition.

    P and O stay; G is made by backward and freed by the update. P rests in `param_home`, O in `optimizer_home`. If O does not
    rest on the accelerator, the reduced gradient waits for the update in O's home.

    Excludes activations, module buffers, the torch optimizer's temporaries and step counters, the transport's staging buffers,
    and the gradient of one parameter that autograd hands over.

    Attributes:
        param_home, optimizer_home: "accelerator", "cpu" or "nvme".
    """

    stage: int
    data_parallel_size: int
    numel: int  # psi, the model's parameters; a tied one counts once
    parameters: int  # P: the weights that the model computes with
    gradients: int  # G on the accelerator
    master: int  # part of O: fp32 weights; 0 if P is fp32 and in the same memory, so that P is its own master
    moments: int  # part of O: the optimizer's state per element, which exists from the first step on
    padding: int  # the part of all these that holds no parameter; the mean over the ranks
    gathered: int  # most whole parameters at a time, if P is sharded: the root and, with overlap, two units
    reducing: int  # most whole gradients and reduction buffers at a time, in addition to G
    together: int  # most of both at a time: when the root's gradient becomes whole, units' parameters are gone
    updating: int  # in the update: a bucket's gradient in fp32, if G is not; or three buckets of Muon's directions
    param_home: str = "accelerator"
    optimizer_home: str = "accelerator"
    reduced: int = 0  # G next to O, away from the accelerator
    staging: int = 0  # host memory through which offloaded states pass
    kept: int = 0  # part of O that stays on the accelerator while the rest is offloaded
    kept_parameters: int = 0  # part of P that stays on the accelerator all the same: with its O, or whole

    @property
    def optimizer(self) -> int:
        """O: master weights and moments."""
        return self.master + self.moments

    def states_at(self, home: str) -> int:
        """Bytes of the states that rest in `home`: "accelerator", "cpu" or "nvme"."""
        return (
            (self.parameters - self.kept_parameters if self.param_home == home else 0)
            + (self.kept_parameters + self.gradients + self.kept if home == "accelerator" else 0)
            + (self.optimizer - self.kept + self.reduced if self.optimizer_home == home else 0)
        )

    @property
    def resident(self) -> int:
        """Bytes of the states on the accelerator, as the ZeRO paper counts them: P + G + O. They are held when backward ends."""
        return self.states_at("accelerator")

    @property
    def host(self) -> int:
        """Bytes of host memory: the states that rest there, and the buffers that states on the host or on nvme pass through."""
        return self.states_at("cpu") + self.staging

    @property
    def disk(self) -> int:
        """Bytes of the swap files on nvme."""
        return self.states_at("nvme")

    @property
    def at_rest(self) -> int:
        """Bytes that the accelerator holds between two steps, and while forward makes its activations."""
        return self.resident - self.gradients

    @property
    def transient(self) -> int:
        """Most bytes that a step adds. Gathered parameters are released before the update."""
        return max(self.together, self.updating)

    @property
    def peak(self) -> int:
        """Most bytes that the accelerator holds at any time during a step.

        A step of one micro-batch stays below that, because it makes its gradients one after another. A second micro-batch finds
        all of them present.
        """
        return self.resident + self.transient


def plan_memory(
    model: nn.Module,
    zero: ZeroConfig,
    *,
    data_parallel_size: int,
    dtype: torch.dtype | None,
    device_type: str | None = None,
    states_per_element: int = 2,
    recomputed_together: int = 1,
    micro_batches: int = 1,
    zero_units: Sequence[nn.Module | type[nn.Module]] | None = None,
    group_of: Mapping[str, int] | None = None,
    matrices: Collection[str] = (),
) -> MemoryPlan:
    """What each rank will hold when an `Engine` with these settings trains `model`. Does not communicate or allocate.

    The transient part is the most that the engine holds if units run once per forward, in their order, and every trained
    parameter of a unit gets a gradient.

    Args:
        model: one tensor-parallel rank's part of the model, on any device, including meta.
        zero, dtype, zero_units, group_of: as for `Engine`; by default every parameter that requires a gradient is trained.
        matrices: names of the parameters that Muon updates.
        device_type, states_per_element, recomputed_together, micro_batches: as in `StateSettings`; the default device is this
            process's.

    Raises:
        ValueError: a size is out of range.
    """
    settings = StateSettings(
        zero,
        data_parallel_size,
        device_type or comm.local_device().type,
        states_per_element,
        recomputed_together,
        micro_batches,
    )
    groups = dict.fromkeys((name for name, _ in model.named_parameters()), 0) if group_of is None else dict(group_of)
    units = select_units(model, zero_units)
    plans = plan_buckets(model, units, settings.num_shards, groups, zero, dtype, matrices=matrices)
    return memory_of_buckets(share_buckets(plans, zero.shared_numel(data_parallel_size)), settings)


def memory_of_buckets(plans: Sequence[BucketPlan], settings: StateSettings) -> MemoryPlan:
    """Like `plan_memory`, for buckets that have been laid out already for `settings.data_parallel_size` ranks."""
    needs = BucketBytes.of_all(plans, settings)
    gathered, (in_units, behind) = gathered_bytes(needs, settings), reducing_bytes(needs, settings)
    # The first unit stays for another micro-batch.
    stays = sum(need.whole_parameters for need in needs if need.plan.unit in (ROOT, FIRST))
    return MemoryPlan(
        settings.zero.stage,
        settings.data_parallel_size,
        numel=sum(plan.layout.param_numel for plan in plans),
        parameters=sum(need.parameters for need in needs),
        gradients=sum(need.gradients for need in needs),
        master=sum(need.master for need in needs),
        moments=sum(need.moments for need in needs),
        padding=round(sum(need.padding for need in needs)),
        gathered=gathered,
        reducing=max(in_units, behind),
        together=max(gathered + in_units, stays + behind),
        updating=updating_bytes(needs),
        param_home=settings.param_home,
        optimizer_home=settings.optimizer_home,
        reduced=sum(need.reduced for need in needs),
        kept=sum(
            need.master + need.moments for need in needs if need.settings.optimizer_home != settings.optimizer_home
        ),
        kept_parameters=sum(
            need.parameters if need.settings.param_home != settings.param_home else need.persistent for need in needs
        ),
        staging=staging_bytes(needs, settings) if plans else 0,
    )


def memory_rows(plan: MemoryPlan, measured: Mapping[str, int]) -> list[tuple[str, str]]:
    """Planned and measured bytes side by side, as (name, value) rows of a table.

    Args:
        measured: bytes under "P", "G", "O", "buffers" and "peak"; missing keys show as a dash. The rows of G and O note what is
            allocated later, as long as it does not exist.
    """
    late = f"  ({size(plan.moments)} of it from the first step on)" if plan.moments else ""
    planned = [
        (f"parameters (P){_at(plan.param_home)}", "P", plan.parameters, ""),
        (
            f"gradients (G){_at(plan.optimizer_home) if plan.reduced else ''}",
            "G",
            plan.gradients + plan.reduced,
            "  (from backward to the update)",
        ),
        (f"optimizer (O){_at(plan.optimizer_home)}", "O", plan.optimizer, late),
        ("buffers, at most", "buffers", plan.transient, ""),
        ("peak", "peak", plan.peak, ""),
    ]
    rows = [("bytes per rank", f"{'planned':>10}  {'measured':>10}")]
    for name, key, value, note in planned:
        is_there = key not in measured or measured[key] >= value
        found = size(measured[key]) if key in measured else "-"
        rows.append((name, f"{size(value):>10}  {found:>10}{'' if is_there else note}"))
    away = [("O on the accelerator", plan.kept), ("host memory", plan.host), ("nvme", plan.disk)]
    rows += [(name, f"{size(value):>10}") for name, value in away if value]
    return [*rows, ("padding, included", f"{size(plan.padding):>10}")]


def _at(home: str) -> str:
    return "" if home == "accelerator" else f" on {home}"


def size(nbytes: int) -> str:
    """A human-readable number of bytes, in powers of 1000 as in the ZeRO paper: "2.25 GB"."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= one:
            return f"{nbytes / one:.{2 if nbytes < 100 * one else 1}f} {unit}"
    return f"{nbytes} B"
