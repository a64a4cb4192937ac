"""Colossal-AI's shard strategies: which parameters travel in one collective.

In Colossal-AI, a strategy cuts tensors one by one, or the tensors of a module together. Here parameters always live in the flat
buckets of units, each cut evenly over all ranks, and a strategy chooses the units. No strategy sends a collective per tensor.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


class BucketTensorShardStrategy:
    """One gather per entry of the model's lists of layers (a transformer block): the fewest collectives."""

    def units(self, model: nn.Module) -> list[nn.Module] | None:
        """The modules that are gathered and released together, or None for the engine's own choice."""
        return None


class TensorShardStrategy(BucketTensorShardStrategy):
    """One gather per layer (its weight and bias): more, smaller collectives, and the least memory for gathered parameters."""

    def units(self, model: nn.Module) -> list[nn.Module] | None:
        """Modules that own parameters, except embeddings, those with tied weights, and those that hold a list of layers."""
        uses = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
        found: list[nn.Module] = []
        inside: set[nn.Module] = set()  # parts of a whole unit, such as an attention that reads its child's weights
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if (
                module in inside
                or module is model
                or not own
                or _holds_list(module)
                or hasattr(module, "num_embeddings")
            ):
                continue
            if all(uses[parameter] == 1 for parameter in module.parameters()):
                found.append(module)
                inside.update(module.modules())
        return found or None


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(part, (nn.ModuleList, nn.Sequential)) for part in module.modules())
