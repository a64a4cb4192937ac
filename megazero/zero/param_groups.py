"""The optimizer's parameter groups: which parameters have weight decay, and which are matrices that Muon trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megazero.logging import ALIKE, get_logger
from megazero.zero.units import shape_of

logger = get_logger(__name__)


def weight_decay_groups(
    model: nn.Module, weight_decay: float, use_muon: bool = False
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Megatron's two parameter groups: matrices and embeddings decay, biases and normalization weights do not.

    Args:
        use_muon: adds a third group with the matrices of hidden layers, for `Muon`.

    Returns:
        Each parameter's group index, by name, and the settings of each group.
    """
    group_of = {name: int(len(shape_of(p)) < 2) for name, p in model.named_parameters()}
    settings: list[dict[str, Any]] = [{"weight_decay": weight_decay}, {"weight_decay": 0.0}]
    if use_muon:
        group_of.update(dict.fromkeys(hidden_matrices(model), 2))
        settings.append({"weight_decay": weight_decay, "use_muon": True})
    return group_of, settings


def warn_of_left_out(model: nn.Module, group_of: Mapping[str, int]) -> None:
    """Warns of parameters that require a gradient and are in no group."""
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and name not in group_of]
    if left_out:
        logger.warning(
            "%d parameters require a gradient but are in no group, and are not trained: %s",
            len(left_out),
            left_out,
            extra=ALIKE,
        )


def matrices_of(group_of: Mapping[str, int], group_settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the parameters that Muon updates, given groups as `weight_decay_groups` returns them."""
    return {name for name, group in group_of.items() if group_settings[group].get("use_muon")}


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon is for: 2-D parameters inside a ModuleList or Sequential, except embeddings.

    A parameter's own `use_muon` attribute, which DeepSpeed reads too, takes precedence.
    """
    inside: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            inside.update(module.parameters())
    for module in model.modules():
        if hasattr(module, "num_embeddings"):
            inside.difference_update(module.parameters())
    matrices = {name: p for name, p in model.named_parameters() if len(shape_of(p)) == 2}
    return {name for name, p in matrices.items() if getattr(p, "use_muon", p in inside)}
