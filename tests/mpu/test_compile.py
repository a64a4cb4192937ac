"""torch.compile takes the parallel layers and losses as one graph, collectives included, and computes what eager computes."""

import torch
import torch.distributed as dist
from torch.testing import assert_close

from megazero import mpu
from megazero.mpu.chunked_loss import chunked_vocab_parallel_loss
from tests.mpu.values import shared
from tests.ranks import run_ranks


def compile_case():
    group = dist.group.WORLD
    torch.manual_seed(0)
    embedding = mpu.VocabParallelEmbedding(12, 8, group=group)
    column = mpu.ColumnParallelLinear(8, 16, gather_output=False, group=group, overlap_backward=True)
    row = mpu.RowParallelLinear(16, 8, input_is_parallel=True, group=group)
    gathered = mpu.ColumnParallelLinear(8, 12, stride=3, group=group)
    head = mpu.ColumnParallelLinear(8, 12, gather_output=False, group=group)

    def step(ids, targets):
        x = embedding(ids)
        x = x + row(torch.nn.functional.gelu(column(x)))
        loss = mpu.vocab_parallel_cross_entropy(head(x), targets, group, 11)
        chunked = chunked_vocab_parallel_loss(x, head.weight, targets, chunk_size=2, group=group, vocab_size=11)
        return loss, chunked, gathered(x)

    ids, targets = torch.arange(10).view(5, 2), torch.arange(10).flip(0).view(5, 2)
    layers = (embedding, column, row, gathered, head)
    parameters = [p for layer in layers for p in layer.parameters()]
    want = step(ids, targets)
    upstream = [shared(*each.shape, seed=seed) for seed, each in enumerate(want)]
    want_grads = torch.autograd.grad(want, parameters, upstream)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(ids, targets)
    assert_close(got, want)
    assert_close(torch.autograd.grad(got, parameters, upstream), want_grads)


def test_compiled_layers_and_losses_equal_eager_in_one_graph():
    run_ranks(2, compile_case)
