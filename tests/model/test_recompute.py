"""--recompute: what the flags mean, and what auto measures and decides."""

import copy

import pytest
import torch

from megazero import activation_checkpointing, mpu
from megazero.activation_checkpointing import ActivationCheckpointer, CheckpointSettings
from megazero.arguments import load_config
from megazero.model.config import BLOCK_MODES
from megazero.model.gpt2 import GPT2Model
from megazero.model.recompute import decide_recompute, measure_block, peak_bytes
from megazero.plan import Shape
from megazero.plan import block_bytes as planned_bytes
from tests.model.plain_gpt2 import random_tokens, randomize
from tests.model.test_activation_memory import A, B, H, S, block_bytes
from tests.model.test_gpt2 import LLAMA, VOCAB, small_config
from tests.ranks import run_ranks
from tests.zero.models import full_grad, make_engine


def auto_config(**options):
    sizes = {"num_layers": 4, "hidden_size": H, "num_attention_heads": A}
    sizes |= {"max_position_embeddings": S, "hidden_dropout": 0.1}
    return small_config(**{**sizes, "recompute": "auto", "recompute_budget_gb": 1.0, **options})


def auto_case(stage, sequence_parallel):
    """The costs are those of the formulas; every decision trains alike, with dropout, bit for bit; nothing else is touched."""
    groups = mpu.initialize_model_parallel(2)
    t, r = groups.model_parallel_size, groups.data_parallel_rank
    activation_checkpointing.configure(None, partition_activations=True)
    tokens, found = random_tokens(2 * groups.data_parallel_size, S + 1, VOCAB).view(-1, 2, S + 1)[r], []
    costs = None
    for planned in ("none", "less", "least"):
        torch.manual_seed(0)
        model = GPT2Model(auto_config(sequence_parallel=sequence_parallel))
        randomize(model)
        mpu.model_parallel_cuda_manual_seed(1)
        engine = make_engine(model, stage)
        with pytest.raises(RuntimeError, match="--recompute auto.*decide_recompute"):
            engine(tokens[:, :-1], targets=tokens[:, 1:])
        streams = torch.get_rng_state(), mpu.get_cuda_rng_tracker().get_states()
        budget = 10**9
        if planned != "none":
            assert costs is not None
            modes = ["full"] * 2 + ["none"] * 2 if planned == "less" else ["full"] * 3 + ["none"]
            budget = peak_bytes(modes, costs)
        transformer = model.transformer
        plan = decide_recompute(transformer, seq_length=S, micro_batch_size=B, budget_bytes=budget)
        costs = plan.costs
        for mode in BLOCK_MODES:
            want = block_bytes(t, sequence_parallel, mode, True, True, torch.float32)
            assert costs[mode].nbytes == want, (mode, costs[mode].nbytes, want)
        assert costs["none"].seconds == 0 and costs["selective"].seconds > 0 and costs["full"].seconds > 0
        assert transformer.recompute == plan.modes and peak_bytes(plan.modes, costs) <= budget
        assert plan.modes[-1] == "none" and (planned != "none" or plan.modes == ("none",) * 4)
        assert planned != "least" or plan.modes == ("full", "full", "full", "none"), "nothing else fits"
        assert f"of {budget / 1e9:.4g} GB" in str(plan)
        assert torch.equal(torch.get_rng_state(), streams[0]), "random streams are where they were"
        assert all(torch.equal(a, streams[1][k]) for k, a in mpu.get_cuda_rng_tracker().get_states().items())
        loss = engine(tokens[:, :-1], targets=tokens[:, 1:]).mean()
        engine.backward(loss)
        names = [name for name, _ in model.named_parameters()]
        found.append([loss.detach(), *(full_grad(engine, name) for name in names)])
        with pytest.raises(ValueError, match="--recompute-budget-gb .* 4 blocks need"):
            decide_recompute(transformer, seq_length=S, micro_batch_size=B, budget_bytes=costs["none"].nbytes)
        engine.destroy()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    activation_checkpointing.configure(None)


@pytest.mark.parametrize(("stage", "sequence_parallel"), [(3, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_auto_measures_the_formulas_bytes_and_trains_alike_within_its_budget(stage, sequence_parallel):
    run_ranks(4, auto_case, stage, sequence_parallel)


def test_a_mask_is_nobodys_activation(one_rank):
    """All blocks share it, and measuring leaves the block as it was."""
    mpu.model_parallel_cuda_manual_seed(1)
    model = GPT2Model(auto_config()).eval()
    block = model.transformer.layers[0]
    block.attention.recomputes_core = True
    mask = torch.ones(1, 1, S, S, dtype=torch.bool).tril()
    costs = measure_block(block, S, B, mask)
    assert costs["full"].nbytes == S * B * H * 4
    assert not block.training and block.attention.recomputes_core and all(p.grad is None for p in block.parameters())


def test_a_llamas_block_is_measured_as_the_planner_counts_it(one_rank):
    config = auto_config(**LLAMA, hidden_dropout=0.0)
    costs, shape = measure_block(GPT2Model(config).transformer.layers[0], S, B), Shape(B, S, 1, torch.float32, "cpu")
    assert costs["none"].nbytes == planned_bytes(config, shape)
    assert costs["selective"].nbytes == planned_bytes(config, shape, core=False)


def test_what_rests_on_a_drive_takes_no_memory(one_rank, tmp_path):
    mpu.model_parallel_cuda_manual_seed(1)
    model, costs = GPT2Model(auto_config()), []
    for path in (None, str(tmp_path)):
        model.transformer.use_checkpointer(ActivationCheckpointer(CheckpointSettings(checkpoint_nvme_path=path)))
        costs.append({mode: cost.nbytes for mode, cost in measure_block(model.transformer.layers[0], S, B).items()})
    x = S * B * H * 4  # bytes: of a block's input, and of each of q, k and v
    assert costs[1] == {"none": costs[0]["none"], "selective": costs[0]["selective"] - 3 * x, "full": 0}


def test_the_flags_say_one_thing():
    for flags, mode in (
        ("", "none"),
        ("--checkpoint-activations", "full"),
        ("--recompute full", "full"),
        ("--recompute full --checkpoint-activations", "full"),
        ("--recompute selective", "selective"),
        ("--recompute auto --recompute-budget-gb 0.5", "auto"),
    ):
        assert load_config(flags.split()).model.recompute_mode == mode
    for flags, message in (
        ("--recompute selective --checkpoint-activations", "is --recompute full, and --recompute selective was given"),
        ("--recompute none --checkpoint-activations", "--recompute none was given too"),
        ("--recompute auto", "--recompute is auto and --recompute-budget-gb is not given"),
        ("--recompute-budget-gb 2", "--recompute is not given and --recompute-budget-gb is 2"),
        ("--recompute-budget-gb 0", "--recompute is not given and --recompute-budget-gb is 0"),
        ("--recompute auto --recompute-budget-gb -1", "a number of GB above 0"),
        ("--recompute auto --recompute-budget-gb 1 --checkpoint-num-layers 2", "--checkpoint-num-layers 2"),
    ):
        with pytest.raises(ValueError, match=message):
            load_config(flags.split())
    with pytest.raises(ValueError, match="must be one of none, selective, full, auto"):
        small_config(recompute="some")


def test_two_models_in_one_process_keep_what_they_recompute_apart(one_rank):
    """Forwards of both, then backwards of both, with room for the calls of one model only; and of a copy."""
    mpu.model_parallel_cuda_manual_seed(1)
    settings = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2}
    activation_checkpointing.configure(None, **settings)
    for mode in ("full", "selective"):
        first = GPT2Model(small_config(recompute=mode))
        randomize(first)
        tokens = random_tokens(2, 10, VOCAB)
        first(tokens, targets=tokens).sum().backward()
        want = [p.grad.clone() for p in first.parameters()]
        first.zero_grad()
        own = ActivationCheckpointer(CheckpointSettings(**settings, profile=True))
        second = copy.deepcopy(first)
        with pytest.raises(
            RuntimeError, match=r"num_checkpoints=2 .*--num-checkpoints.* ActivationCheckpointer of its own"
        ):
            _ = first(tokens, targets=tokens), second(tokens, targets=tokens)
        second.transformer.use_checkpointer(own)
        third = copy.deepcopy(second)
        losses = [model(tokens, targets=tokens).sum() for model in (first, second, third)]
        assert third.transformer.blocks[0].attention.checkpointer is third.transformer.checkpointer is not own
        assert own.storage.kept_bytes == activation_checkpointing.default.storage.kept_bytes > 0
        for loss, model in zip(losses, (first, second, third), strict=True):
            loss.backward()
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
        assert own.storage.kept_bytes == 0 and "checkpoint backward" in own.timers.read_and_reset()
    activation_checkpointing.configure(None)


def test_modes_are_set_for_every_block(one_rank):
    transformer = GPT2Model(small_config(num_layers=3, checkpoint_num_layers=2)).transformer
    assert transformer.recompute == ("none",) * 3
    transformer.set_recompute(["full", "full", "selective"])
    assert [run for _, run in transformer._runs()] == [True, False], "two blocks together, then one"
    for modes in (["none"] * 2, ["none", "full", "half"]):
        with pytest.raises(ValueError, match="for each of 3 blocks"):
            transformer.set_recompute(modes)
