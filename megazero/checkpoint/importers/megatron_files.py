"""What a checkpoint of Megatron-LM holds, in whichever of its formats; and our names for its parameters."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from megazero.checkpoint.importers.foreign import Read
from megazero.checkpoint.importers.megatron_optimizer import MegatronOptimizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Wrappers and levels that our names do not have, and words that later versions use for the same things.
_LEVELS = re.compile(r"^(module\.)*(language_model\.)?(embedding\.)?")
_LATER_WORDS = (
    ("encoder.", "transformer."),
    ("decoder.", "transformer."),
    # Transformer Engine has a norm in the layer behind it.
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".post_attention_layernorm."),
    (".self_attention.", ".attention."),
    (".linear_qkv.", ".query_key_value."),
    (".linear_proj.", ".dense."),
    (".linear_fc1.", ".dense_h_to_4h."),
    (".linear_fc2.", ".dense_4h_to_h."),
    (".pre_mlp_layernorm.", ".post_attention_layernorm."),
    ("_norm.", "_layernorm."),
)


@dataclass(frozen=True)
class MegatronFiles:
    """A checkpoint whose tensors are read later. Lists are by rank, of those that layers were cut over.

    Attributes:
        shards: by our names, tensors with the shapes of the parameters that the rank holds.
        states: by our names, what reads a parameter's "master" weights and, with an optimizer, "exp_avg" and "exp_avg_sq".
        common: what is saved beside them, alike for all ranks: "args", "iteration", "checkpoint_version", ...
    """

    shards: Sequence[Mapping[str, Tensor]]
    states: Sequence[Mapping[str, Mapping[str, Read]]]
    common: Mapping[str, Any]
    optimizer: MegatronOptimizer | None


def optimizer_or_none(folder: Path, saved: Mapping[str, Any], read: Callable[[], T]) -> T | None:
    """What `read` gives; None if there is no optimizer in what was `saved`, or none of a known form. The log says which.

    Args:
        read: raises a ValueError, KeyError, TypeError, AttributeError or IndexError if its form is not known.
    """
    if folder.name == "release" or "optimizer" not in saved:
        logger.info("%s: weights only, it has no state of an optimizer", folder)
        return None
    try:
        return read()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        logger.warning(
            "%s: weights only, the optimizer would start anew: its state is in no known form (%r)", folder, error
        )
        return None


def our_name(name: str) -> str:
    """Our name of a parameter of any release."""
    name = _LEVELS.sub("", name)
    for later, ours in _LATER_WORDS:
        name = name.replace(later, ours)
    return name
