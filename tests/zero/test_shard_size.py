"""Hybrid sharding: sets of ranks that shard the states among them, each a copy of the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero import mpu, zero
from megazero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from megazero.zero.config import ZeroConfig
from megazero.zero.memory import plan_memory
from tests.ranks import run_ranks
from tests.zero.models import MODELS, Mlp, Toy, compare, full_grad, make_engine, run, token_batches, trained_names
from tests.zero.test_memory import counter_bytes
from tests.zero.test_stages import ONCE, TWICE

STAGES = (1, 2, 3)


def groups(model_parallel_size: int = 1) -> None:
    mpu.initialize_model_parallel(model_parallel_size)
    mpu.model_parallel_cuda_manual_seed(1)


def stages_case(names: list[str], options: dict) -> None:
    """All stages of sets of 2 give the same bits, and the numbers of a run without sets."""
    groups()
    shards = {**options.pop("zero", {}), "shard_size": 2}
    for name in names:
        flat = run(MODELS[name], 0, **options)
        want = run(MODELS[name], 1, zero=shards, **options)
        compare(want, flat, f"{name}, stage 1 beside no sets", bitwise=False)
        for stage in (2, 3):
            sets = run(MODELS[name], stage, zero=shards, **options)
            compare(sets, want, f"{name}, stage {stage}", bitwise=name not in TWICE and "micro" not in options)


@pytest.mark.parametrize("world_size, every", [(4, 4), (6, len(ONCE)), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_all_stages_in_sets_are_equal_bit_for_bit_and_equal_stage_0_to_round_off(world_size, every):
    run_ranks(world_size, stages_case, ONCE[::every], {"clip_grad": 0.5})


def test_all_stages_in_sets_equal_stage_0_where_a_block_is_used_twice_and_with_accumulation():
    run_ranks(4, stages_case, TWICE, {"clip_grad": 0.5})
    run_ranks(4, stages_case, ["frozen layers"], {"clip_grad": 0.5, "micro": 2})


@pytest.mark.parametrize("options", [{"param_persistence_threshold": 12}, {"prescale_gradients": True}], ids=str)
def test_whole_parameters_and_prescaled_gradients_in_sets(options):
    run_ranks(4, stages_case, ONCE[:1], {"zero": options})


def sets_hold_copies_case(dtype: torch.dtype | None, stage: int, options: dict) -> dict[str, np.ndarray]:
    """What a rank holds is what was planned, and the other set holds the same bits."""
    groups()
    config = {"shard_size": 2, **options}
    engine = make_engine(Mlp(), stage, dtype=dtype, zero=config)
    plan = plan_memory(Mlp(), ZeroConfig(stage, **config), data_parallel_size=4, dtype=dtype)
    for batch in token_batches(3, 1, 4)[:, 0]:
        engine.backward(engine(batch[dist.get_rank()]))
        engine.step()
    held = engine.memory()
    assert (held["P"], held["O"] - counter_bytes(engine)) == (plan.parameters, plan.optimizer)
    shards = [bucket.states["master"] for bucket in engine.buckets]
    for shard in shards:
        with shard.at_hand() as mine:
            parts = [torch.empty_like(mine) for _ in range(4)]
            dist.all_gather(parts, mine.contiguous())
            assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])
            assert not torch.equal(parts[0], parts[1])
    alone = plan_memory(Mlp(), ZeroConfig(stage, **config), data_parallel_size=2, dtype=dtype)
    assert (plan.parameters, plan.optimizer) == (alone.parameters, alone.optimizer)
    return arrays(engine.state_dict())


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """What a rank can hand over."""
    return {name: value.float().numpy() for name, value in tensors.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_holds_the_share_of_its_set_as_planned_and_sets_hold_the_same_bits(stage):
    run_ranks(4, sets_hold_copies_case, None, stage, {})
    run_ranks(4, sets_hold_copies_case, torch.bfloat16, stage, {"reduce_dtype": "compute"})


def test_sets_with_states_in_host_memory_and_in_files_hold_the_same_bits_as_on_the_device(tmp_path):
    want = run_ranks(4, sets_hold_copies_case, torch.bfloat16, 3, {})
    for homes in (
        {"offload_optimizer": "cpu", "offload_param": "cpu"},
        {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": str(tmp_path)},
    ):
        for got, expected in zip(run_ranks(4, offloaded_case, 3, homes), want, strict=True):
            assert all(np.array_equal(got[name], expected[name]) for name in expected)


def offloaded_case(stage: int, homes: dict) -> dict[str, np.ndarray]:
    groups()
    engine = make_engine(Mlp(), stage, dtype=torch.bfloat16, zero={"shard_size": 2, **homes}, optimizer="CPUAdam")
    for batch in token_batches(3, 1, 4)[:, 0]:
        engine.backward(engine(batch[dist.get_rank()]))
        engine.step()
    weights = arrays(engine.state_dict())
    engine.destroy()
    return weights


def access_case() -> None:
    groups()
    torch.manual_seed(0)
    engine = make_engine(Toy(), 3, zero={"shard_size": 2})
    engine.backward(engine(token_batches(1, 1, 4)[0, 0, dist.get_rank()]))
    full = {name: full_grad(engine, name) for name in trained_names(engine)}
    everyones = [None] * 4
    dist.all_gather_object(everyones, full)
    assert all(torch.equal(other[name], full[name]) for other in everyones for name in full), "the mean over all ranks"
    engine.step()
    weight = engine.module.blocks[0].up.weight
    with zero.GatheredParameters(weight, modifier_rank=3):  # of the second set
        weight.data.fill_(float(dist.get_rank()))
    with zero.GatheredParameters(weight):
        assert weight.eq(3.0).all()
    with pytest.raises(ValueError, match="modifier_rank=4.: the data-parallel group has ranks 0 to 3"):
        zero.GatheredParameters(weight, modifier_rank=4)


def test_gradients_and_gathered_parameters_are_of_all_sets():
    run_ranks(4, access_case)


def init_case(config: dict) -> int:
    groups()
    torch.manual_seed(dist.get_rank())  # rank 0's values count, also in the other set
    with zero.Init(config_dict_or_path=config):
        model = Mlp()
    held = model[0].weight.ds_tensor.numel()
    engine = make_engine(model, 3, zero={"shard_size": 2})
    weights = engine.state_dict()
    torch.manual_seed(0)
    assert all(torch.equal(weights[name], value) for name, value in Mlp().state_dict().items())
    return held


@pytest.mark.parametrize("size", [2, -1])
def test_a_model_is_built_over_the_set_that_the_configuration_names(size):
    held = run_ranks(4, init_case, {"zero_optimization": {"stage": 3, "mics_shard_size": size}})
    sets = [held[:2], held[2:]] if size == 2 else [held]
    assert [sum(each) for each in sets] == [256 * 128] * len(sets)


def wrong_case() -> None:
    groups()
    with pytest.raises(
        ValueError, match=r"--zero-shard-size 3 \(mics_shard_size\) does not divide the 4 data-parallel"
    ):
        make_engine(Toy(), 2, zero={"shard_size": 3})


def test_sets_that_do_not_divide_the_ranks_are_refused_before_any_collective():
    run_ranks(4, wrong_case)
    for wrong in ({"stage": 2, "shard_size": 1}, {"stage": 2, "shard_size": -1}, {"stage": 0, "shard_size": 2}):
        with pytest.raises(
            ValueError, match=r"--zero-shard-size .* must be 0 .* or at least 2, and needs --zero-stage 1"
        ):
            ZeroConfig(**wrong)


def full_states(engine) -> dict[str, torch.Tensor]:
    """Master weights and moments by parameter. Collective."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} of {name}"] = safe_get_full_optimizer_state(parameter, key)
    return found


def save_case(directory: str, shard_size: int, offload: dict) -> dict[str, np.ndarray]:
    groups()
    engine = make_engine(Mlp(), 3 if offload else 2, zero={"shard_size": shard_size, **offload}, dtype=torch.bfloat16)
    for batch in token_batches(2, 1, 4)[:, 0]:
        engine.backward(engine(batch[dist.get_rank()]))
        engine.step()
    engine.save_checkpoint(directory, tag="sets")
    return arrays(full_states(engine))


def load_case(directory: str, stage: int, shard_size: int) -> dict[str, np.ndarray]:
    groups()
    torch.manual_seed(3)
    engine = make_engine(Mlp(), stage, zero={"shard_size": shard_size}, dtype=torch.bfloat16)
    engine.load_checkpoint(directory, tag="sets")
    return arrays(full_states(engine))


@pytest.mark.parametrize(
    "home, saved",
    [("none", 2), ("nvme", 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in [("none", 0), ("nvme", 2)])],
)
def test_checkpoints_of_sets_load_without_sets_and_back_bit_for_bit(home, saved, tmp_path):
    offload = {} if home == "none" else {"offload_optimizer": home, "nvme_path": str(tmp_path)}
    want = run_ranks(4, save_case, str(tmp_path), saved, offload)[0]
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.safetensors")]
    assert sum(sizes) < 1.2 * sum(4 * value.size for value in want.values()) + 4 * 30_000, "each element once"
    for world_size, stage, shard_size in ((1, 0, 0), (4, 3, 2), (4, 1, 0), (6, 2, 3)):
        for got in run_ranks(world_size, load_case, str(tmp_path), stage, shard_size):
            assert all(np.array_equal(got[name], value) for name, value in want.items()), (
                world_size,
                stage,
                shard_size,
            )


def model_parallel_case(shard_size: int) -> float:
    groups(2)
    torch.manual_seed(0)
    engine = make_engine(TensorParallel(), 2, zero={"shard_size": shard_size})
    for batch in token_batches(2, 1, 4)[:, 0]:
        engine.backward(engine(batch[mpu.get_data_parallel_rank()]))
        engine.step()
    return engine.get_global_grad_norm()


class TensorParallel(nn.Module):
    """One matrix that is cut, and parameters that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(11, 6), mpu.ColumnParallelLinear(6, 10, gather_output=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.up(self.embedding(tokens)).square().mean()


def test_the_norm_counts_every_element_once_beside_tensor_parallelism():
    sets, flat = (run_ranks(8, model_parallel_case, shard_size) for shard_size in (2, 0))
    assert len(set(sets)) == 1 and sets[0] == pytest.approx(flat[0], rel=1e-6)
