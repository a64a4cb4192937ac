"""Every name of Megatron-LM's mpu is there."""

import subprocess
import sys

import pytest

from megazero import mpu

MEGATRON = """initialize_model_parallel model_parallel_is_initialized destroy_model_parallel get_model_parallel_rank
get_data_parallel_rank get_model_parallel_group get_data_parallel_group get_model_parallel_world_size
get_data_parallel_world_size get_model_parallel_src_rank ColumnParallelLinear RowParallelLinear VocabParallelEmbedding
ParallelEmbedding copy_to_model_parallel_region gather_from_model_parallel_region reduce_from_model_parallel_region
scatter_to_model_parallel_region vocab_parallel_cross_entropy broadcast_data clip_grad_norm checkpoint
partition_activations_in_checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed GPT2ParallelTransformer
BertParallelSelfAttention BertParallelTransformerLayer LayerNorm scatter_to_sequence_parallel_region
gather_from_sequence_parallel_region reduce_scatter_to_sequence_parallel_region divide split_tensor_along_last_dim
is_unitialized""".split()


@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_name_is_exported(name):
    assert name in mpu.__all__ and callable(getattr(mpu, name))


def test_all_names_exist_and_others_do_not():
    assert all(hasattr(mpu, name) for name in mpu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mpu.nothing


def test_importing_mpu_does_not_import_higher_levels():
    code = "import sys, megazero.mpu; print([m for m in sys.modules if m.startswith('megazero.') and 'mpu' not in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "model" not in found and "activation_checkpointing" not in found


@pytest.mark.parametrize("name", ["copy_to", "gather_from", "reduce_from", "scatter_to"])
def test_the_regions_have_the_names_of_megatrons_v2_too(name):
    assert getattr(mpu, f"{name}_tensor_model_parallel_region") is getattr(mpu, f"{name}_model_parallel_region")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("is_pipeline_first_stage", "pipeline parallelism is not built"),
        ("get_pipeline_model_parallel_rank", "pipeline parallelism is not built"),
        ("set_tensor_model_parallel_attributes", "parameter.tensor_model_parallel, parameter.partition_dim"),
        ("set_model_parallel_world_size", "a checkpoint loads at any model-parallel size"),
        ("init_checkpointed_activations_memory_buffer", "contiguous_checkpointing=True"),
    ],
)
def test_what_is_not_here_says_what_to_do(name, advice):
    assert not hasattr(mpu, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*{advice}"):
        getattr(mpu, name)
