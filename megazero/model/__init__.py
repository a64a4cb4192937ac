"""GPT-2 and its parts, on top of `megazero.mpu`."""

from megazero.model.block import Transformer, TransformerBlock
from megazero.model.cache import KeyValueCache
from megazero.model.config import GPT2Config
from megazero.model.documents import document_mask, document_positions
from megazero.model.generation import generate
from megazero.model.gpt2 import GPT2Model
from megazero.model.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface,
    to_huggingface,
)
from megazero.model.state_dict import merge_full, slice_full

__all__ = [
    "GPT2Config",
    "GPT2Model",
    "KeyValueCache",
    "Transformer",
    "TransformerBlock",
    "config_from_huggingface",
    "config_to_huggingface",
    "document_mask",
    "document_positions",
    "from_huggingface",
    "generate",
    "merge_full",
    "slice_full",
    "to_huggingface",
]
