"""Setups of jobs whose model and ZeRO configuration are given."""

from __future__ import annotations

import torch

from megazero.arguments import COMPONENTS, build
from megazero.config import Config
from megazero.model import GPT2Config
from megazero.plan import Setup
from megazero.zero.config import ZeroConfig


def setup_of(
    model: GPT2Config,
    zero: ZeroConfig,
    ranks: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    micro_batches: int | None = None,
    model_parallel_size: int = 1,
    device_type: str = "cuda",
) -> Setup:
    """The setup of sequences of the model's full length, on nodes of at most 8 ranks.

    Args:
        batch: sequences of a micro-batch.
        micro_batches: of a step, by a global batch that is set; None: one, and no global batch is set.
    """
    steps = None if micro_batches is None else micro_batches * batch * ranks // model_parallel_size
    values = {
        "seq_length": model.max_position_embeddings,
        "batch_size": batch,
        "global_batch_size": steps,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "model_parallel_size": model_parallel_size,
    }
    own = {GPT2Config: model, ZeroConfig: zero}
    config = Config(*(own.get(component) or build([component], values)[0] for component in COMPONENTS))
    return Setup.of(config, ranks, 8, device_type)
