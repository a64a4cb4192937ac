"""Norm and clipping of gradients of which each model-parallel rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megazero import comm
from megazero.comm import ProcessGroup
from megazero.mpu.groups import group_or_default
from megazero.mpu.partition import is_marked, partitions


def clip_grad_norm(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: ProcessGroup | None = None,
) -> float:
    """Scales gradients in place so that the norm over all of them is at most `max_norm`. Returns the norm before.

    Shards count on every rank of `group`, replicated parameters once. The norm is that of the full parameters, the same on
    every rank. Gradients are expected to be averaged over data-parallel ranks already. One message and one wait for the device
    in all.

    Args:
        parameters: a module, or parameters. Sharded are those with `tensor_model_parallel = True` or `model_parallel = True`, and
            of a module also those in `partitions`. Give the module where you can: a copied parameter loses these attributes.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm, fp32; `inf` for the largest absolute value.
        group: the model-parallel group by default.

    Raises:
        ValueError: `norm_type` is not positive, or `max_norm` negative or NaN.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"clip_grad_norm: norm_type={norm_type} must be positive (2, or inf for the largest value).")
    if not max_norm >= 0.0:  # gradients would be multiplied with it
        raise ValueError(f"clip_grad_norm: max_norm={max_norm} must be a norm, 0 or more.")
    group = group_or_default(group)
    all_parameters, is_sharded = _split(parameters)
    with_grad = [(p, p.grad) for p in all_parameters if p.grad is not None]
    # Norms of norms: p-norms may be taken in stages. The last stage, over the ranks, is the gathered vector's.
    norms = [_norm(grad, norm_type) for p, grad in with_grad if id(p) in is_sharded or group.rank() == 0]
    device = with_grad[0][1].device if with_grad else comm.local_device()
    own = _norm(torch.stack([n.to(device) for n in norms]), norm_type) if norms else torch.zeros((), device=device)
    total = _norm(torch.stack(comm.all_gathered(own.float(), group)), norm_type)
    torch.nn.utils.clip_grads_with_norm_(all_parameters, max_norm, total)
    return total.item()


def _split(parameters: nn.Module | Tensor | Iterable[Tensor]) -> tuple[list[Tensor], set[int]]:
    """All parameters, and the ids of the sharded ones."""
    declared: set[int] = set()
    if isinstance(parameters, nn.Module):
        # A tied one may be sharded by one name only.
        by_name = dict(parameters.named_parameters(remove_duplicate=False))
        declared = {id(by_name[name]) for name in partitions(parameters)}
        parameters = parameters.parameters()
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return tensors, declared | {id(p) for p in tensors if is_marked(p)}


def _norm(x: Tensor, norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(x, norm_type, dtype=torch.promote_types(x.dtype, torch.float32))
