"""The first Megatron's transformer classes against plain torch statements of what they compute."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from megazero import mpu
from megazero.model.config import GPT2Config
from megazero.model.megatron import (
    BertParallelSelfAttention,
    BertParallelTransformerLayer,
    GPT2ParallelTransformer,
)
from megazero.model.state_dict import merge_full
from tests.model.plain_gpt2 import PlainBlock, load_same
from tests.ranks import run_ranks

B, S, H, HEADS = 2, 5, 12, 4


class PlainBertLayer(nn.Module):
    """Post-LN: norm(x + attention(x)), then norm(x + mlp(x)), on [b, s, h]."""

    def __init__(self, h, f, activation, epsilon):
        super().__init__()
        self.attention = nn.ModuleDict({"query_key_value": nn.Linear(h, 3 * h)})
        self.self_output = nn.ModuleDict({"dense": nn.Linear(h, h), "layernorm": nn.LayerNorm(h, eps=epsilon)})
        self.intermediate = nn.Linear(h, f)
        self.output = nn.ModuleDict({"dense": nn.Linear(f, h), "layernorm": nn.LayerNorm(h, eps=epsilon)})
        self.activation = activation

    def attend(self, x, additive_mask):
        q, k, v = (y.view(B, S, HEADS, -1).transpose(1, 2) for y in self.attention["query_key_value"](x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(H // HEADS) + additive_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, H)

    def forward(self, x, additive_mask):
        x = self.self_output["layernorm"](x + self.self_output["dense"](self.attend(x, additive_mask)))
        y = self.output["dense"](self.activation(self.intermediate(x)))
        return self.output["layernorm"](x + y)


def assert_same(got, want, x, model, plain):
    """Outputs, gradients of the input and of every weight."""
    assert_close(got, want, atol=1e-5, rtol=1e-5)
    weight = torch.rand(want.shape, generator=torch.Generator().manual_seed(4))
    (want * weight).sum().backward()
    want_x, x.grad = x.grad, None
    (got * weight).sum().backward()  # torch.autograd.grad cannot pass a checkpointed function
    assert_close(x.grad, want_x, atol=1e-5, rtol=1e-5)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    merged = merge_full(gradients, mpu.partitions(model), mpu.get_model_parallel_group())
    assert_close(merged, {name: p.grad for name, p in plain.named_parameters()}, atol=1e-5, rtol=1e-5)


def hidden_states():
    return torch.randn(B, S, H, generator=torch.Generator().manual_seed(3)).requires_grad_()


def bert_case(is_bool):
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    model = BertParallelTransformerLayer(H, 20, HEADS, 0.5, 0.5, F.relu, 1e-12).eval()
    plain = PlainBertLayer(H, 20, F.relu, 1e-12)
    load_same(model, plain)
    may_read = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)[:, None, None]  # [b, 1, 1, s]
    additive = torch.zeros(may_read.shape).masked_fill(~may_read, -10000.0)
    x = hidden_states()
    assert_same(model(x, may_read if is_bool else additive), plain(x, additive), x, model, plain)

    assert_close(model(x, None), plain(x, 0.0), atol=1e-5, rtol=1e-5)
    whole = BertParallelSelfAttention(H, HEADS, 0.5).eval()  # gathers its heads
    whole.load_state_dict(model.attention.state_dict())
    want = plain.attend(x, additive)
    assert_close(whole(x, additive), want, atol=1e-5, rtol=1e-5)

    mpu.model_parallel_cuda_manual_seed(1)
    stream = torch.get_rng_state()
    assert not torch.allclose(whole.train()(x, additive), want)
    is_shared = mpu.get_model_parallel_world_size() > 1
    assert torch.equal(torch.get_rng_state(), stream) == is_shared, (
        "ranks drop other weights, from streams of their own"
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_bool", [False, True])
def test_bert_layer_equals_plain_torch(world_size, is_bool):
    run_ranks(world_size, bert_case, is_bool)


def gpt2_case(is_checkpointed):
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    plain = nn.Module()
    plain.layers = nn.ModuleList(PlainBlock(GPT2Config(hidden_size=H, num_attention_heads=HEADS)) for _ in range(3))
    plain.final_layernorm = nn.LayerNorm(H)
    model = GPT2ParallelTransformer(3, H, HEADS, 0.0, 0.0, is_checkpointed, checkpoint_num_layers=2)
    load_same(model, plain)
    mask = torch.ones(1, 1, S, S).tril()  # ones and zeros, as the first Megatron has it
    mask[0, 0, 3:, :2] = 0
    x = hidden_states()
    want = x
    for layer in plain.layers:
        want = layer(want, mask.bool())
    assert_same(model(x, mask), plain.final_layernorm(want), x, model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_gpt2_transformer_equals_plain_torch(world_size, is_checkpointed):
    run_ranks(world_size, gpt2_case, is_checkpointed)


def test_output_weights_are_scaled_down_by_depth_unless_it_is_said(one_rank):
    deviations = []
    for is_scaled in (True, False):
        model = GPT2ParallelTransformer(2, H, HEADS, 0.0, 0.0, False, use_scaled_init_for_output_weights=is_scaled)
        deviations.append([p.std().item() for n, p in model.named_parameters() if n.endswith("dense_4h_to_h.weight")])
    assert deviations == [[pytest.approx(0.01, rel=0.2)] * 2, [pytest.approx(0.02, rel=0.2)] * 2]


def test_what_the_first_megatron_is_told_is_what_the_blocks_do(one_rank):
    model = GPT2ParallelTransformer(3, H, HEADS, 0.1, 0.2, True, 2, layernorm_epsilon=0.3, init_method_std=0.4)
    for block in model.layers:
        assert (block.attention.dropout, block.hidden_dropout, block.input_layernorm.eps) == (0.1, 0.2, 0.3)
        assert block.attention.query_key_value.weight.std().item() == pytest.approx(0.4, rel=0.2)
    assert [run for _, run in model._runs()] == [True, True], "two blocks together, then one"


def test_layers_of_groups_that_are_forgotten_keep_working(one_rank):
    layer, attention = (
        BertParallelTransformerLayer(H, 20, HEADS, 0.0, 0.0, F.relu, 1e-12),
        BertParallelSelfAttention(H, HEADS, 0.0),
    )
    x = hidden_states()
    want = layer(x, None), attention(x, None)
    mpu.destroy_model_parallel()
    assert_close((layer(x, None), attention(x, None)), want)


def test_mpu_hands_out_the_classes():
    assert mpu.GPT2ParallelTransformer is GPT2ParallelTransformer
    assert mpu.BertParallelSelfAttention is BertParallelSelfAttention
    assert mpu.BertParallelTransformerLayer is BertParallelTransformerLayer
