"""Model (tensor) parallelism under Megatron-LM's names.

Layers, losses and gradients of a model that is cut over the ranks of one group:

    groups          which ranks share a model          mappings        how tensors enter and leave; slices: `sequence_mappings`
    partition       how a parameter is cut             layers          linear layers; embeddings in `embeddings`
    init            initial values                     cross_entropy   the loss of vocabulary-parallel logits
    random          random streams                     data, grads     broadcast of a batch; gradient norm

Five more of Megatron's names belong to higher levels of this library. They are looked up when first asked for, which is the one
exception to imports going one way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch.nn import LayerNorm

from megazero.missing_names import missing
from megazero.mpu.cross_entropy import vocab_parallel_cross_entropy
from megazero.mpu.data import broadcast_data
from megazero.mpu.embeddings import ParallelEmbedding, VocabParallelEmbedding
from megazero.mpu.grads import clip_grad_norm
from megazero.mpu.groups import (
    ParallelGroups,
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_src_rank,
    get_data_parallel_world_size,
    get_groups,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    initialize_model_parallel,
    is_unitialized,
    model_parallel_is_initialized,
)
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megazero.mpu.mappings import (
    copy_to_model_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megazero.mpu.partition import Partition, partitions
from megazero.mpu.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megazero.mpu.sequence_mappings import (
    copy_parameters_to_sequence_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megazero.mpu.utils import divide, split_tensor_along_last_dim

if TYPE_CHECKING:
    from megazero.activation_checkpointing import checkpoint, partition_activations_in_checkpoint
    from megazero.model.megatron import (
        BertParallelSelfAttention,
        BertParallelTransformerLayer,
        GPT2ParallelTransformer,
    )

_HOME_OF = {
    "checkpoint": "megazero.activation_checkpointing",
    "partition_activations_in_checkpoint": "megazero.activation_checkpointing",
    "GPT2ParallelTransformer": "megazero.model.megatron",
    "BertParallelSelfAttention": "megazero.model.megatron",
    "BertParallelTransformerLayer": "megazero.model.megatron",
}

# What Megatron-LM has and this has not, by a part of the name: what to do instead.
_ABSENT = {
    "pipeline": "pipeline parallelism is not built. Split layers over model-parallel ranks, or shard them by ZeRO stage 3",
    "set_model_parallel": "a checkpoint loads at any model-parallel size, so no tool has to pretend one",
    "tensor_model_parallel_attributes": (
        "set parameter.tensor_model_parallel, parameter.partition_dim and parameter.partition_stride, as mpu's layers do: "
        "initialize(mpu=) and mpu.clip_grad_norm read them"
    ),
    "set_tensor_model_parallel": "a checkpoint loads at any model-parallel size, so no tool has to pretend one",
    "checkpointed_activations_memory_buffer": (
        "megazero.checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=N) "
        "keeps what is checkpointed in one storage"
    ),
}

__all__ = [
    "BertParallelSelfAttention",
    "BertParallelTransformerLayer",
    "ColumnParallelLinear",
    "GPT2ParallelTransformer",
    "LayerNorm",
    "ParallelEmbedding",
    "ParallelGroups",
    "Partition",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "checkpoint",
    "clip_grad_norm",
    "copy_parameters_to_sequence_parallel_region",
    "copy_to_model_parallel_region",
    "copy_to_tensor_model_parallel_region",
    "destroy_model_parallel",
    "divide",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_groups",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_model_parallel",
    "is_unitialized",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "partition_activations_in_checkpoint",
    "partitions",
    "reduce_from_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise missing(__name__, name, next((advice for part, advice in _ABSENT.items() if part in name), None))
    return getattr(importlib.import_module(_HOME_OF[name]), name)
