"""Muon under an engine: every stage's bits, whole matrices however they are cut, shared work, traffic, memory and checkpoints."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megazero
from megazero import comm, mpu
from megazero.checkpoint.reader import Reader
from megazero.engine import Engine
from megazero.optim.muon import Muon, orthogonalized
from megazero.zero import orthogonal
from megazero.zero.config import ZeroConfig
from megazero.zero.memory import plan_memory
from megazero.zero.param_groups import hidden_matrices, weight_decay_groups
from tests.checkpoint.test_any_to_any import Net
from tests.ranks import run_ranks
from tests.zero.models import APART, MODELS, OPTIMIZERS, Wide, compare, make_engine, run, step, token_batches, train
from tests.zero.test_placement import FakeDevice, block_bytes
from tests.zero.test_stages import stages_case

NAMES = ["tied head, unused parameter", "frozen layers", "our checkpointing"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_stages_equal_stage_0_bit_for_bit(world_size):
    run_ranks(world_size, stages_case, NAMES, {"clip_grad": 0.5, "optimizer": "muon"}, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_stages_equal_stage_0_bit_for_bit_in_16_bits(dtype):
    run_ranks(2, stages_case, NAMES, {"dtype": dtype, "optimizer": "muon"}, True)


def sets_case() -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    want = run(MODELS[NAMES[0]], 0, optimizer="muon")
    for stage in (1, 2, 3):
        found = run(MODELS[NAMES[0]], stage, optimizer="muon", zero={"shard_size": 2})
        compare(found, want, f"stage {stage} in sets of 2", bitwise=False, atol=1e-4)


def test_ranks_in_sets_share_the_work_and_get_the_same_weights_to_round_off():
    run_ranks(4, sets_case)


# ---- against one process that steps matrices


def plain(size: int) -> dict[str, Tensor]:
    """The weights after three steps of Muon without an engine, which tests/optim holds against torch's."""
    torch.manual_seed(0)
    model = MODELS[NAMES[0]]()
    group_of, settings = weight_decay_groups(model, 0.1, use_muon=True)
    parameters = dict(model.named_parameters())
    groups = [
        {**each, "params": [parameters[name] for name, group in group_of.items() if group == index]}
        for index, each in enumerate(settings)
    ]
    optimizer = OPTIMIZERS["muon"](groups)
    for batches in token_batches(3, 1, size):
        model.zero_grad()
        for batch in batches[0]:
            (model(batch) / size).backward()
        model.unused.grad = torch.zeros_like(model.unused)  # an engine's gradient of what no loss reaches
        optimizer.step()
    return {name: value.detach() for name, value in parameters.items()}


def plain_case() -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    want = plain(mpu.get_data_parallel_world_size())
    for stage in (0, 3):
        found = run(MODELS[NAMES[0]], stage, optimizer="muon")
        for name, value in want.items():
            # In bf16 a last bit of the gradient may be one of 8.
            torch.testing.assert_close(
                found[f"weight {name}"], value, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_engine_equals_plain_muon_to_round_off(world_size):
    run_ranks(world_size, plain_case)


# ---- tensor parallelism


def net_engine(size: int, stage: int) -> Engine:
    mpu.initialize_model_parallel(size)
    mpu.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    model = Net()
    groups = weight_decay_groups(model, 0.0, use_muon=True)
    return Engine(
        model, mpu.get_groups(), lambda g: Muon(g, lr=0.1, nesterov=False), *groups, zero=ZeroConfig(stage=stage)
    )


def one_step(engine: Engine) -> None:
    engine.backward(engine(torch.arange(60).view(4, 15) % 13))  # all tokens, so that gradients have full rank
    engine.step()


def split_case(directory: str, size: int, stage: int) -> None:
    engine = net_engine(size, stage)
    engine.save_checkpoint(directory, tag=f"before-{size}-{stage}")
    one_step(engine)
    engine.save_checkpoint(directory, tag=f"after-{size}-{stage}")


@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (2, 2), (4, 2)])
def test_what_is_split_or_stacked_moves_as_the_whole_matrices_that_it_is_made_of(tmp_path, world_size, size):
    for stage in (0, 2):
        run_ranks(world_size, split_case, str(tmp_path), size, stage)
        before, after = (Reader(tmp_path, f"{when}-{size}-{stage}") for when in ("before", "after"))
        for name in sorted(hidden_matrices_of_net()):
            moved = (before.read(name, "master") - after.read(name, "master")) / 0.1
            buffer = after.read(name, "momentum_buffer")
            dim = int("down" in name)
            for part, direction in zip(moved.chunk(3, dim), buffer.chunk(3, dim), strict=True):
                whole = orthogonalized(direction).float() * max(1.0, part.size(0) / part.size(1)) ** 0.5
                torch.testing.assert_close(part, whole, rtol=0, atol=0.02, msg=lambda m, n=name: f"{n}: {m}")


def hidden_matrices_of_net() -> set[str]:
    return {f"blocks.{index}.{name}.weight" for index in (0, 1) for name in ("up", "down")}


# ---- frozen ones


def frozen_case() -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    batches, found = token_batches(2, 1, mpu.get_data_parallel_world_size()), []
    for freezes in (False, True):
        torch.manual_seed(0)
        engine = make_engine(Wide(), 2, optimizer="muon")
        matrices = hidden_matrices(engine.module)
        engine.backward(engine(batches[0, 0, mpu.get_data_parallel_rank()]))
        for name in matrices if freezes else ():
            engine.module.get_parameter(name).requires_grad_(False)
        engine.step()
        found.append({name: value.clone() for name, value in engine.module_state_dict().items()})
    compare(found[1], found[0], "frozen between backward and step", bitwise=True)
    list(train(engine, batches[1:]))
    moved = {name for name, value in engine.module_state_dict().items() if not torch.equal(value, found[1][name])}
    assert moved == found[1].keys() - matrices, "no matrix is left to train"
    name, other = "blocks.0.0.weight", "blocks.0.2.weight"
    engine.module.get_parameter(other).requires_grad_(True)
    before = engine.module_state_dict()
    list(train(engine, batches[1:]))
    after = engine.module_state_dict()
    assert torch.equal(after[name], before[name]) and not torch.equal(after[other], before[other]), (
        "one of a unit's two"
    )


def test_a_matrix_that_is_frozen_makes_the_step_whose_gradient_it_has_and_no_other():
    run_ranks(2, frozen_case)


def unfrozen_case(folder: str) -> None:
    mpu.initialize_model_parallel(1)
    batches = token_batches(4, 1, mpu.get_data_parallel_world_size())
    for stage in (0, 1, 3):

        def engine(stage=stage):
            torch.manual_seed(0)
            return make_engine(MODELS["frozen layers"](), stage, optimizer="muon")

        first, second = engine(), engine()
        list(train(first, batches[:1]))
        for one in (first, second):
            one.module.requires_grad_(True)
        list(train(first, batches[1:2]))
        for bucket in first.buckets:
            assert len(bucket.states) == (2 if "momentum_buffer" in bucket.states else 3), (
                "master and moments of one kind"
            )
        first.save_checkpoint(f"{folder}/{stage}")
        second.load_checkpoint(f"{folder}/{stage}")
        want, got = (dict(train(one, batches[2:])) for one in (first, second))
        compare(got, want, f"unfrozen and resumed, stage {stage}", bitwise=True)


def test_matrices_that_were_frozen_at_first_have_one_moment_and_a_checkpoint_that_loads(tmp_path):
    run_ranks(2, unfrozen_case, str(tmp_path))


# ---- work, traffic, memory


def work_case(stage: int) -> tuple[int, int]:
    """Matrices that this rank makes orthogonal in a step, and elements that it sends more than one of AdamW."""
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    sent, count = [], 0

    def counted(matrix: Tensor, steps: int) -> Tensor:
        nonlocal count
        count += 1
        return orthogonalized(matrix, steps)

    orthogonal.orthogonalized = counted
    for optimizer in ("adamw", "muon"):
        torch.manual_seed(0)
        engine = make_engine(Wide(), stage, optimizer=optimizer)
        engine.channel.reset_traffic()
        step(engine, 1)
        sent.append(sum(kind.elements for kind in engine.channel.traffic.values()))
        engine.destroy()
    return count, sent[1] - sent[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_share_the_matrices_out_and_send_two_elements_more_for_each_of_theirs(stage):
    found = run_ranks(2, work_case, stage)
    matrices = 4 * 2
    assert [count for count, _ in found] == [matrices / 2] * 2
    for _, more in found:
        assert more == pytest.approx(matrices * 67 * 149 * 2 / 2, rel=0.02), "padding"


def memory_case(stage: int) -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = Wide()
    matrices = hidden_matrices(model)
    engine = make_engine(model, stage, optimizer="muon", dtype=torch.bfloat16)
    list(train(engine, token_batches(2, 1, mpu.get_data_parallel_world_size())))
    plan = plan_memory(
        model,
        ZeroConfig(stage=stage, **APART),
        data_parallel_size=2,
        dtype=None,
        matrices=matrices,
        group_of=weight_decay_groups(model, 0.1, use_muon=True)[0],
    )
    counters = sum(v.nbytes for s in engine.optimizer.state.values() for v in s.values() if v.ndim == 0)
    assert engine.memory()["O"] - counters == plan.master + plan.moments
    ranks = 1 if stage == 0 else 2
    of_matrices = 4 * 2 * 67 * 149
    rest = sum(p.numel() for p in model.parameters()) if stage < 3 else None
    if rest is not None:
        assert plan.master + plan.moments == pytest.approx((12 * rest - 4 * of_matrices) / ranks, rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_matrices_have_one_moment_and_the_plan_knows_it(stage):
    run_ranks(2, memory_case, stage)


def placement_case() -> None:
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    batches, traces = token_batches(4, 1, mpu.get_data_parallel_world_size()), []
    for zero in ({}, {"placement": "auto"}):
        torch.manual_seed(0)
        device = FakeDevice(0)
        engine = make_engine(Wide(), 3, optimizer="muon", zero=zero, placement_meter=device if zero else None)
        if zero:
            device.model_bytes, device.total = engine.placement.model_bytes, 7 * block_bytes(engine)
        traces.append(dict(train(engine, batches)))
        engine.destroy()
    compare(traces[1], traces[0], "placed", bitwise=True)


def test_states_may_be_placed_by_plan():
    run_ranks(2, placement_case)


# ---- checkpoints


def resume_case(directory: str, stages: tuple[int, ...]) -> None:
    """Four steps at the first stage, against two that were saved there and two more at another stage."""
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1)
    batches = token_batches(4, 1, mpu.get_data_parallel_world_size())
    torch.manual_seed(0)
    engine = make_engine(MODELS[NAMES[1]](), stages[0], optimizer="muon")
    list(train(engine, batches[:2]))
    engine.save_checkpoint(directory, tag="two")
    want = dict(train(engine, batches[2:]))
    for stage in stages:
        engine = make_engine(MODELS[NAMES[1]](), stage, optimizer="muon")
        engine.load_checkpoint(directory, tag="two")
        for bucket in engine.buckets:
            keys = engine.optimizer.state_keys(bucket)
            assert not keys or ("exp_avg" in keys) != ("momentum_buffer" in keys), (bucket.name, keys)
        compare(dict(train(engine, batches[2:])), want, f"to stage {stage}", bitwise=True)


def test_a_checkpoint_has_the_states_of_each_parameter_and_goes_on_bit_for_bit_at_another_stage(tmp_path):
    run_ranks(2, resume_case, str(tmp_path), (0, 1, 3))
    entries = Reader(tmp_path, "two").tensors
    states = {name: set(entry.states) for name, entry in entries.items() if entry.kind == "trained"}
    matrices = {name for name in states if name.endswith((".up.weight", ".down.weight"))}
    assert matrices and {name for name in states if states[name] == {"master", "momentum_buffer"}} == matrices
    assert all(states[name] == {"master", "exp_avg", "exp_avg_sq"} for name in states.keys() - matrices)


@pytest.mark.parametrize(
    ("name", "now", "then"), [("blocks.0.2.weight", "AdamW", "Muon"), ("embedding.weight", "Muon", "AdamW")]
)
def test_a_checkpoint_in_which_a_parameter_was_the_others_is_refused(one_rank, tmp_path, name, now, then):
    engine = make_engine(Wide(), 2, optimizer="muon")
    list(train(engine, token_batches(1, 1, 1)))
    engine.save_checkpoint(tmp_path)
    model = Wide()
    model.get_parameter(name).use_muon = name not in hidden_matrices(model)
    engine = make_engine(model, 2, optimizer="muon")
    with pytest.raises(ValueError, match=f"{name} is {now}'s in .* state of {then}. .*use_muon.*no-load-optim"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    list(train(engine, token_batches(1, 1, 1)))


# ---- by initialize


def tune(engine) -> dict[str, Tensor]:
    for batches in token_batches(3, 1, 1):
        engine.backward(engine(batches[0, 0]))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("groups", ["none", "by weight decay"])
def test_a_configuration_with_muon_trains_as_an_optimizer_of_these_groups(one_rank, groups):
    """Matrices with `muon_lr`, the rest with `adam_lr`; a group's own settings win, as in DeepSpeed."""
    params = {"muon_lr": 0.05, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.2}
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 2}}
    found = []
    for by_file in (True, False):
        torch.manual_seed(0)
        model = MODELS[NAMES[0]]()
        names, halves = hidden_matrices(model), {}
        for name, p in model.named_parameters():
            decays = groups == "none" or p.dim() > 1
            halves.setdefault((decays, name in names), []).append(p)
        if by_file:
            given = [{"params": [p for (d, _), half in halves.items() if d for p in half]}]
            given += [{"params": half, "weight_decay": 0.0} for (decays, _), half in halves.items() if not decays]
            config["optimizer"] = {"type": "Muon", "params": params}
            arguments = {"model_parameters": given if groups != "none" else None}
        else:
            optimizer = Muon(
                [
                    {
                        "params": half,
                        "use_muon": is_matrix,
                        "lr": 0.05 if is_matrix else 0.01,
                        "weight_decay": 0.2 * decays,
                    }
                    for (decays, is_matrix), half in halves.items()
                ],
                momentum=0.9,
                betas=(0.9, 0.95),
                eps=1e-10,
            )
            config.pop("optimizer")
            arguments = {"optimizer": optimizer}
        engine, *_ = megazero.initialize(model=model, config=config, **arguments)
        found.append(tune(engine))
        engine.destroy()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_callers_muon_holds_nothing_of_an_engine_that_is_destroyed(one_rank):
    model = MODELS[NAMES[0]]()
    optimizer = Muon(model.parameters(), lr=0.1)
    engine, *rest = megazero.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})
    kept = weakref.ref(engine.buckets[0])
    tune(engine)
    engine.destroy()
    del engine, rest
    gc.collect()
    assert kept() is None and optimizer.orthogonalize is None


def test_momentum_is_told_of_matrices_and_betas_of_the_rest(one_rank):
    config = {"train_batch_size": 2, "optimizer": {"type": "Muon", "params": {"momentum": 0.8, "betas": [0.7, 0.9]}}}
    engine, *_ = megazero.initialize(model=MODELS[NAMES[0]](), config=config)
    momentum, betas = engine.get_mom()
    assert momentum == 0.8 and tuple(betas) == (0.7, 0.9)  # torch 2.8 keeps a list


# ---- what cannot be


@pytest.mark.parametrize(
    ("stage", "zero", "told"),
    [
        (2, {"grad_dtype": "compute"}, "fp32.*grad_accum_dtype"),
        (2, {"offload_optimizer": "nvme"}, "Muon with states on NVMe"),
        (2, {"offload_optimizer": "nvme", "delayed_param_update": 2}, "Muon"),
    ],
    ids=str,
)
def test_what_muon_cannot_do_is_refused(one_rank, tmp_path: Path, stage, zero, told):
    path = {"nvme_path": str(tmp_path)} if "offload_optimizer" in zero else {}
    with pytest.raises(ValueError, match=told):
        make_engine(Wide(), stage, optimizer="muon", dtype=torch.bfloat16, zero={**zero, **path})
    assert comm.world().size() == 1


def test_a_group_with_use_muon_has_matrices_only(one_rank):
    model = Wide()
    group_of = {name: 0 for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"matrices.*'blocks.\d.\d.bias' of shape \(\d+,\)"):
        Engine(model, mpu.get_groups(), OPTIMIZERS["muon"], group_of, [{"use_muon": True}])
