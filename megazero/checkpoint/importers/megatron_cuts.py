"""How Megatron-LM's GPT-2 is cut over model-parallel ranks, and the joining of those that DeepSpeed saved.

Files do not say how a layer was cut, only Megatron-LM's names do. A parameter under another name is refused, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from megazero.checkpoint.importers.foreign import ForeignTensor, Read
from megazero.mpu.partition import Partition

_CUT_BY_ROWS = re.compile(
    r"(^|.*\.)((word_embeddings|query_key_value|dense_h_to_4h)\.weight|(query_key_value|dense_h_to_4h)\.bias)"
)
_CUT_BY_COLUMNS = re.compile(r"(^|.*\.)(dense|dense_4h_to_h)\.weight")
_WHOLE = re.compile(r".*(layernorm\.(weight|bias)|(position|tokentype)_embeddings\.weight|\.dense(_4h_to_h)?\.bias)")
_STACKED = re.compile(r".*query_key_value\.(weight|bias)")


def merge_model_parallel(ranks: Sequence[dict[str, ForeignTensor]], version: float) -> dict[str, ForeignTensor]:
    """The whole tensors of a Megatron-LM GPT-2, from those of each model-parallel rank.

    Args:
        ranks: the tensors of each rank, in order.
        version: Megatron-LM's `checkpoint_version`. In version 0 a rank's query_key_value is its query rows, then its key rows,
            then its value rows, and so is the joined one; in later ones the rows of a head lie together.

    Raises:
        ValueError: a parameter has a name that does not say how it was cut, or the ranks do not fit together.
    """
    merged = {}
    for name, first in ranks[0].items():
        parts = [rank.get(name) for rank in ranks]
        tensors = [part for part in parts if part is not None and _form(part) == _form(first)]
        dim = cut_dimension(name, len(ranks))
        if len(tensors) != len(ranks):
            raise ValueError(
                f"{name!r} is missing, or of another shape or kind, in the files of a model-parallel rank."
            )
        if dim is None:
            merged[name] = first
            continue
        stack = 3 if version < 1 and _STACKED.fullmatch(name) else 1
        cut = Partition(dim, stack, full_size=first.shape[dim] * len(ranks))
        states = {state: partial(_join, [t.states[state] for t in tensors], cut) for state in first.states}
        merged[name] = replace(first, shape=cut.full_shape(first.shape), states=states)
    return merged


def _form(tensor: ForeignTensor) -> tuple[Any, ...]:
    return tensor.kind, tensor.shape, tensor.states.keys()


def cut_dimension(name: str, ranks: int) -> int | None:
    """Along which dimension a parameter was cut over so many ranks; None if each of them has all of it.

    Raises:
        ValueError: its name does not say.
    """
    for pattern, dimension in ((_CUT_BY_ROWS, 0), (_CUT_BY_COLUMNS, 1), (_WHOLE, None)):
        if pattern.fullmatch(name):
            return dimension
    raise ValueError(
        f"the checkpoint is cut over {ranks} model-parallel ranks, and its files do not say how {name!r} was cut: only the "
        "parameters of Megatron-LM's GPT-2 are known by name. Merge the ranks where the model's code is, and save with "
        "model-parallel size 1."
    )


def _join(parts: Sequence[Read], cut: Partition) -> Tensor:
    return cut.merge([part() for part in parts])
