"""GPT-2 trained by the engine over model x data ranks against plain single-process torch: losses, gradients, updated weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero import comm, mpu
from megazero.engine import Engine, weight_decay_groups
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.state_dict import merge_full, slice_full
from megazero.zero.config import ZeroConfig
from tests.model.plain_gpt2 import PlainGPT2, decay_groups, random_tokens, randomize
from tests.ranks import run_ranks
from tests.zero.models import full_grad

STEPS, MICRO, BATCH, LENGTH, CLIP, DECAY = 3, 2, 2, 9, 0.7, 0.1
CONFIG = GPT2Config(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    vocab_size=131,  # padded to 136 or more, differently for every model-parallel size
    make_vocab_size_divisible_by=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.5),
    # The bias of the keys cancels in the softmax: its gradient is rounding alone, which a small eps would blow up to a full step.
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3),
    "adamw, fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True),
}


def batches(data_parallel_size: int, length: int = LENGTH) -> torch.Tensor:
    """[steps, micro-batches, data-parallel ranks, b, s + 1] token ids."""
    count = STEPS * MICRO * data_parallel_size * BATCH
    return random_tokens(count, length + 1, 131).view(STEPS, MICRO, data_parallel_size, BATCH, length + 1)


def plain_training(data_parallel_size: int, optimizer: str, config: GPT2Config):
    """Mean losses of every rank, gradient norms, last gradients and final weights, by torch alone, on the CPU."""
    model = PlainGPT2(config)
    randomize(model)
    opt = OPTIMIZERS[optimizer](decay_groups(model, DECAY))
    losses, norms, gradients = [], [], {}
    for step in batches(data_parallel_size, config.max_position_embeddings):
        opt.zero_grad()
        for micro in step:
            of_ranks = [model.loss(text[:, :-1], text[:, 1:]).mean() for text in micro]
            losses.append([loss.item() for loss in of_ranks])
            (sum(of_ranks) / data_parallel_size / MICRO).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        opt.step()
    return losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()}


def engine_case(model_parallel_size: int, optimizer: str, options: dict, stage: int = 0) -> None:
    """Trains where this process computes."""
    groups = mpu.initialize_model_parallel(model_parallel_size)
    mpu.model_parallel_cuda_manual_seed(1)
    rank, size = groups.data_parallel_rank, groups.data_parallel_size
    config, device = GPT2Config(**{**vars(CONFIG), **options}), comm.local_device()
    losses, norms, gradients, weights = plain_training(size, optimizer, config)
    start = PlainGPT2(config)
    randomize(start)
    model = GPT2Model(config, device=device)
    model.load_state_dict(slice_full(start.state_dict(), model, groups.model_parallel_rank, model_parallel_size))
    cuts = mpu.partitions(model)
    engine = Engine(
        model,
        groups,
        OPTIMIZERS[optimizer],
        *weight_decay_groups(model, DECAY),
        clip_grad=CLIP,
        gradient_accumulation_steps=MICRO,
        zero=ZeroConfig(stage=stage),
    )
    got_losses, got_norms, got_gradients = [], [], {}
    for step in batches(size, config.max_position_embeddings):
        for micro in step:
            text = micro[rank].to(device)
            loss = engine(text[:, :-1], targets=text[:, 1:]).mean()
            got_losses.append(loss.item())
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                got_gradients = {name: full_grad(engine, name).cpu() for name in gradients}
            engine.step()
        got_norms.append(engine.get_global_grad_norm())
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(got_losses), torch.tensor([row[rank] for row in losses]), **close)
    torch.testing.assert_close(torch.tensor(got_norms), torch.tensor(norms), **close)
    got_gradients = merge_full(got_gradients, cuts, groups.model)
    state = engine.module_state_dict()
    got_weights = merge_full({name: state[name] for name, _ in model.named_parameters()}, cuts, groups.model)
    for name in gradients:
        torch.testing.assert_close(
            got_gradients[name], gradients[name], **close, msg=lambda m, name=name: f"gradient of {name}: {m}"
        )
        torch.testing.assert_close(got_weights[name], weights[name], **close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("data_parallel_size", [1, 2])
@pytest.mark.parametrize("model_parallel_size", [1, 2, 4])
def test_training_equals_plain_torch(model_parallel_size, data_parallel_size, optimizer):
    run_ranks(model_parallel_size * data_parallel_size, engine_case, model_parallel_size, optimizer, {})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model_parallel_size", [1, 2])
def test_training_under_zero_equals_plain_torch(model_parallel_size, stage):
    run_ranks(2 * model_parallel_size, engine_case, model_parallel_size, "adamw", {}, stage)


def stages_case(model_parallel_size: int, options: dict) -> None:
    """One micro-batch, fp32: every stage computes the same numbers."""
    groups = mpu.initialize_model_parallel(model_parallel_size)
    traces = []
    for stage in range(4):
        mpu.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        model = GPT2Model(GPT2Config(**{**vars(CONFIG), **options}))
        zero = ZeroConfig(stage=stage)
        decay = weight_decay_groups(model, DECAY)
        engine = Engine(model, groups, OPTIMIZERS["adamw"], *decay, clip_grad=CLIP, zero=zero)
        trace = []
        for step in batches(groups.data_parallel_size):
            text = step[0][groups.data_parallel_rank]
            loss = engine(text[:, :-1], targets=text[:, 1:]).mean()
            engine.backward(loss)
            trace += [loss.detach(), *(full_grad(engine, name) for name, _ in model.named_parameters())]
            engine.step()
            trace.append(torch.tensor(engine.get_global_grad_norm()))
        traces.append(trace + list(engine.module_state_dict().values()))
    for stage, trace in enumerate(traces):
        assert all(torch.equal(a, b) for a, b in zip(trace, traces[0], strict=True)), f"stage {stage}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_stages_equal_stage_0_bit_for_bit_under_tensor_parallelism(world_size):
    run_ranks(world_size, stages_case, 2, {"checkpoint_activations": True})


@pytest.mark.parametrize(
    "options", [{"checkpoint_activations": True}, {"checkpoint_activations": True, "checkpoint_num_layers": 2}]
)
def test_training_with_recomputation_equals_plain_torch(options):
    run_ranks(4, engine_case, 2, "sgd", options)


def test_training_on_three_data_parallel_ranks_equals_plain_torch():
    run_ranks(3, engine_case, 1, "adamw", {})
