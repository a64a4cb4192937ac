"""Translates other systems' placement policies: where the shards of parameters, gradients and optimizer states are kept."""

from __future__ import annotations

from typing import Any

from megazero.logging import ALIKE, get_logger

logger = get_logger(__name__)

POLICIES = ("cuda", "cpu", "auto")


def offload_sections(
    policy: str, *, stage: int, margin_ratio: float, margin_name: str = "gpu_margin_mem_ratio", what: str
) -> dict[str, Any]:
    """The offloading part of a `zero_optimization` section.

    Args:
        policy: "cuda": everything stays on the device that the model computes on. "cpu": optimizer states and reduced gradients
            are kept in host memory and updated there; at stage 3, parameter shards are kept there too. "auto": the same as
            "cpu", except that at stage 3 one traced iteration decides what stays on the device.
        stage: the ZeRO stage.
        margin_ratio: share of the device's free memory that "auto" may give to optimizer states.
        margin_name, what: the caller's names for that share and for the policy, for messages.

    Raises:
        ValueError: the ratio is not in [0, 1].
    """
    if not 0 <= margin_ratio <= 1:
        raise ValueError(f"{margin_name} must lie between 0 and 1, got {margin_ratio}.")
    if margin_ratio and policy != "auto":
        logger.warning('%s %g has no effect: it is for %s "auto"', margin_name, margin_ratio, what, extra=ALIKE)
    if policy == "cuda":
        return {}
    if stage < 3:
        logger.info(
            "%s: parameters stay whole on the device, since they are not sharded; the rest is on the host", what
        )
        return {"offload_optimizer": {"device": "cpu"}}
    homes: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return homes if policy == "cpu" else {**homes, "placement": "auto", "gpu_margin_mem_ratio": margin_ratio}
