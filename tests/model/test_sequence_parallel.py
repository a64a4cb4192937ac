"""--sequence-parallel: the losses, gradients and traffic of the same model without it, and dropout that differs per slice."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megazero import activation_checkpointing, comm, mpu
from megazero.activation_checkpointing import CheckpointSettings, checkpointer
from megazero.arguments import load_config
from megazero.engine import Engine, weight_decay_groups
from megazero.model import block
from megazero.model.cache import KeyValueCache
from megazero.model.documents import document_positions
from megazero.model.gpt2 import GPT2Model
from megazero.mpu import sequence_mappings
from megazero.mpu.sequence_mappings import sequence_channel
from tests.model.plain_gpt2 import random_tokens, randomize
from tests.model.test_gpt2 import VOCAB, assert_same_gradients, same_model, small_config
from tests.ranks import run_ranks


def sliced_config(**options):
    return small_config(**{"max_position_embeddings": 12, "sequence_parallel": True, **options})


def equal_case(options):
    """Losses and gradients equal those of a plain GPT-2; replicated parameters' gradients are the same bits on every rank."""
    for more in options:
        model, plain, group = same_model(sliced_config(**more))
        tokens = random_tokens(3, 13, VOCAB)
        want = plain.loss(tokens[:, :-1], tokens[:, 1:])
        got = model(tokens[:, :-1], targets=tokens[:, 1:])
        assert_close(got, want, atol=1e-5, rtol=1e-5)
        weight = torch.rand(3, 12, generator=torch.Generator().manual_seed(2))  # so that no two tokens count alike
        (want * weight).sum().backward()
        (got * weight).sum().backward()
        assert_same_gradients(model, plain, group)
        cuts = mpu.partitions(model)
        for name, parameter in model.named_parameters():
            if name not in cuts:
                first, *others = comm.all_gathered(parameter.grad, group)
                assert all(torch.equal(first, other) for other in others), name
        with torch.no_grad():
            logits = mpu.gather_from_model_parallel_region(model(tokens[:, :12]), group)
            assert_close(logits[..., :VOCAB], plain(tokens[:, :12]), atol=1e-5, rtol=1e-5)
            index = torch.tensor([3, 0, 11])
            one = mpu.gather_from_model_parallel_region(model(tokens[:, :12], logit_index=index), group)
        assert_close(one[:, 0], logits[torch.arange(3), index], atol=1e-5, rtol=1e-5)
        mpu.destroy_model_parallel()


WAYS = [
    {},
    {"vocab_chunk_size": 30},
    {"sequence_chunk_size": 5},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"layernorm_epsilon": 0.5},
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_logits_and_gradients_equal_plain_gpt2(world_size):
    run_ranks(world_size, equal_case, WAYS)


def other_norm_case():
    mpu.initialize_model_parallel(2)
    block.build_layernorm = lambda config, **_: nn.RMSNorm(config.hidden_size)  # one parameter
    whole, sliced = GPT2Model(small_config(max_position_embeddings=12)), GPT2Model(sliced_config())
    randomize(whole)
    sliced.load_state_dict(whole.state_dict())
    tokens = random_tokens(3, 12, VOCAB)
    losses = [model(tokens, targets=tokens) for model in (sliced, whole)]
    assert_close(*losses, atol=1e-5, rtol=1e-5)
    for loss in losses:
        loss.mean().backward()
    for (name, mine), theirs in zip(sliced.named_parameters(), whole.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_a_norm_without_a_bias_equals_the_one_of_whole_sequences():
    run_ranks(2, other_norm_case)


def documents_case():
    model, _, group = same_model(sliced_config())
    whole = GPT2Model(small_config(max_position_embeddings=12))
    whole.load_state_dict(model.state_dict())
    tokens = random_tokens(3, 12, 7)
    positions, documents = document_positions(tokens, 5)
    found = []
    for one in (model, whole):
        loss = one(tokens, position_ids=positions, document_ids=documents, targets=tokens)
        loss.square().sum().backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters())])
    assert_close(*found, atol=1e-4, rtol=1e-5)


def test_positions_and_documents_of_each_row_equal_the_model_without():
    run_ranks(2, documents_case)


class Counter:
    """Elements that this rank sends for tensor parallelism: its all-reduces, counted here, and its channel's own count."""

    def __init__(self, group):
        self.group, self.reduced, self.real = group, [], (comm.all_reduced, comm.start_all_reduce)

        def all_reduce(x, group, *args):
            self.reduced.append(x.numel())
            return self.real[0](x, group, *args)

        def start_all_reduce(x, group, *args, **kwargs):
            self.reduced.append(x.numel())
            return self.real[1](x, group, *args, **kwargs)

        comm.all_reduced, comm.start_all_reduce = all_reduce, start_all_reduce

    def read(self):
        """In units of n - 1 / n elements of the buffer: an all-reduce sends it twice. And the numels of all-reduces."""
        traffic, t = sequence_channel(self.group).traffic, self.group.size()
        assert traffic["all_reduce"].collectives == 0
        found = {kind: traffic[kind].elements * t // (t - 1) for kind in ("all_gather", "reduce_scatter")}
        sequence_channel(self.group).reset_traffic()
        reduced, self.reduced[:] = list(self.reduced), []
        return found, reduced


def traffic_case():
    """A block sends as much as without, but for Megatron's second gather of a column-parallel layer's input, and 6 h."""
    groups = mpu.initialize_model_parallel(dist.get_world_size())
    s, b, h = 12, 3, 24
    counter = Counter(groups.model)
    for sequence_parallel, recompute in ((False, "none"), (True, "none"), (True, "full")):
        config = sliced_config(sequence_parallel=sequence_parallel, recompute=recompute, num_layers=1)
        model = GPT2Model(config).transformer
        x = torch.randn(s // (groups.model_parallel_size if sequence_parallel else 1), b, h, requires_grad=True)
        counter.read()
        y = model.run_blocks(x)
        forward = counter.read()
        y.sum().backward()
        backward = counter.read()
        none = {"all_gather": 0, "reduce_scatter": 0}
        n = s * b * h
        if not sequence_parallel:
            assert forward == (none, [n, n]) and backward == (none, [n, n])  # 2 x 2 n each way
        else:
            sent = {"all_gather": 2 * n, "reduce_scatter": 2 * n}  # as much
            again = sent if recompute == "full" else none
            assert forward == (sent, [])
            gathered = {kind: sent[kind] + again[kind] for kind in sent}
            gathered["all_gather"] += 2 * n  # what the two column-parallel layers gather again instead of keeping it
            assert backward == (gathered, [6 * h])


def test_a_block_sends_what_it_sends_without():
    run_ranks(2, traffic_case)


def dropout_case():
    """Slices drop other elements, each with the same probability, from the model-parallel stream; the default one stays."""
    groups = mpu.initialize_model_parallel(2)
    torch.manual_seed(0)
    model = GPT2Model(sliced_config(hidden_dropout=0.5, num_layers=1))
    randomize(model)
    mpu.model_parallel_cuda_manual_seed(11)
    before, dropped = torch.get_rng_state(), []
    real = torch.nn.functional.dropout

    def dropout(x, p, training):
        out = real(x, p, training)
        dropped.append(out == 0)
        return out

    torch.nn.functional.dropout = dropout
    tokens = random_tokens(2, 12, VOCAB)
    model(tokens, targets=tokens).mean().backward()
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the stream that all ranks share"
    assert len(dropped) == 3 and all(mask.shape == (6, 2, 24) for mask in dropped)
    for mask in dropped:
        mine, other = comm.all_gathered(mask, groups.model)
        assert 0.35 < mask.float().mean() < 0.65 and 0.35 < (mine == other).float().mean() < 0.65
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens, targets=tokens), model(tokens, targets=tokens))


def test_slices_drop_other_elements_from_their_own_stream():
    run_ranks(2, dropout_case)


def recomputed_dropout_case():
    found = []
    for recompute in ("none", "selective", "full"):
        mpu.initialize_model_parallel(2)
        torch.manual_seed(0)
        model = GPT2Model(sliced_config(hidden_dropout=0.3, attention_dropout=0.3, recompute=recompute))
        randomize(model)
        mpu.model_parallel_cuda_manual_seed(11)
        mpu.partition_activations_in_checkpoint(True)  # slices are cut already: this must not cut them
        tokens = random_tokens(2, 12, VOCAB)
        loss = model(tokens, targets=tokens).mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        mpu.destroy_model_parallel()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_recomputation_repeats_the_dropout_of_slices_bit_for_bit():
    run_ranks(2, recomputed_dropout_case)


def compiled_case():
    torch.compile = partial(torch.compile, backend="aot_eager")
    mpu.initialize_model_parallel(2)
    tokens, found = random_tokens(2, 12, VOCAB), []
    for is_compiled in (False, True):
        options = {"compile": is_compiled, "hidden_dropout": 0.3, "recompute": "selective"}
        model = GPT2Model(sliced_config(num_layers=1, **options))
        randomize(model)
        mpu.model_parallel_cuda_manual_seed(11)
        loss = model(tokens, targets=tokens)
        loss.mean().backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert_close(*found, atol=1e-6, rtol=1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"


def test_compiled_blocks_equal_eager_blocks():
    run_ranks(2, compiled_case, timeout_s=300.0)  # compiles many pieces


def refused_case():
    mpu.initialize_model_parallel(2)
    model = GPT2Model(sliced_config(max_position_embeddings=13))
    tokens = random_tokens(1, 13, VOCAB)
    with pytest.raises(
        ValueError, match="13 tokens .*--seq-length.* --model-parallel-size 2.*drop --sequence-parallel"
    ):
        model(tokens)
    cache = KeyValueCache(model.config, 1, 12, model_parallel_size=2)
    with pytest.raises(ValueError, match="sequence-parallel model cannot use a cache.*sequence_parallel=False"):
        model(tokens[:, :12], cache=cache)
    whole = GPT2Model(replace(model.config, sequence_parallel=False))
    whole.load_state_dict(model.state_dict())  # and the same weights do
    whole(tokens[:, :12], cache=cache)


def test_what_cannot_be_cut_is_refused_before_anything_is_sent():
    run_ranks(2, refused_case)
    flags = (
        "--sequence-parallel --model-parallel-size 2 --num-attention-heads 4 --hidden-size 8 --seq-length 13".split()
    )
    with pytest.raises(ValueError, match="13 tokens .*--model-parallel-size 2"):
        load_config([*flags, "--max-position-embeddings", "13"], 2).check_world(2)
    load_config([*flags, "--max-position-embeddings", "13", "--seq-length", "12"], 2).check_world(2)
    with pytest.raises(
        ValueError, match="--memory-centric-tiled-linear with --sequence-parallel needs --layernorm torch"
    ):
        small_config(sequence_parallel=True, memory_centric_tiled_linear=True, layernorm="apex")


def connected_case():
    """Replicas may come to their first forward at different times, and on NCCL a new channel needs the whole world."""
    groups = mpu.initialize_model_parallel(2)
    mpu.model_parallel_cuda_manual_seed(1)
    tokens = random_tokens(3, 13, VOCAB)
    own = activation_checkpointing.ActivationCheckpointer(CheckpointSettings(partition_activations=True))
    for more in ({}, {"sequence_parallel": False, "checkpoint_activations": True}):
        model = GPT2Model(sliced_config(**more))
        if more:
            model.transformer.use_checkpointer(own)
        sgd = partial(torch.optim.SGD, lr=0.1)
        engine = Engine(model, groups, sgd, *weight_decay_groups(model, 0.0))
        with pytest.MonkeyPatch.context() as patch:
            for module in (sequence_mappings, checkpointer):
                patch.delattr(module, "Channel")
            engine.backward(engine(tokens[:, :-1], targets=tokens[:, 1:]).mean())
        engine.step()
    for channel in (own._channel, sequence_channel(groups.model)):
        assert channel.traffic["all_gather"].collectives > 0


def test_the_first_forward_opens_no_channel():
    run_ranks(2, connected_case)
