"""Column- and row-parallel linear layers against nn.Linear: outputs, gradients of input, weight and bias."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from megazero import comm, mpu
from megazero.model.state_dict import merge_full
from megazero.mpu.layers import parallel_columns
from tests.mpu.values import load, shared
from tests.ranks import run_ranks

S, B, IN, OUT = 5, 2, 12, 24  # IN and OUT are multiples of 1 to 4 ranks, OUT of 3 x 1, 2 and 4 ranks too


def merged_grads(layer):
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return merge_full(grads, layer.partitions, layer.group)


def run_and_compare(layer, x, part, weight, bias, tolerance=1e-5):
    """`part(full, layer)` is what this rank has of the full output; every rank sends the gradient of its own part."""
    got, extra = layer(x) if layer.skip_bias_add else (layer(x), None)
    x_plain = x.detach().clone().requires_grad_()
    w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    has_bias = layer.bias is not None
    y = F.linear(x_plain, w, b if has_bias and not layer.skip_bias_add else None)
    assert got.dtype == y.dtype
    assert_close(got, part(y, layer), atol=tolerance, rtol=tolerance)
    if layer.skip_bias_add:
        assert extra is layer.bias
    upstream = shared(*y.shape, seed=9).to(y.dtype)
    y.backward(upstream)
    got.backward(part(upstream, layer))
    assert_close(x.grad, x_plain.grad, atol=tolerance, rtol=tolerance)
    grads = merged_grads(layer)
    assert_close(grads["weight"], w.grad, atol=tolerance, rtol=tolerance)
    if has_bias and not layer.skip_bias_add:
        assert_close(grads["bias"], b.grad, atol=tolerance, rtol=tolerance)


def column_case():
    group = dist.group.WORLD
    weight, bias = shared(OUT, IN, seed=1), shared(OUT, seed=2)
    forms = itertools.product((1, 3), (True, False), (True, False), (True, False), (None, False, True))
    for stride, gather, has_bias, skip, overlap in forms:
        if OUT % (stride * group.size()):
            continue
        layer = mpu.ColumnParallelLinear(
            IN,
            OUT,
            bias=has_bias,
            gather_output=gather,
            stride=stride,
            skip_bias_add=skip,
            group=group,
            overlap_backward=overlap,
        )
        assert (layer.bias is not None) == has_bias
        load(layer, weight, bias)
        run_and_compare(layer, shared(S, B, IN).requires_grad_(), whole if gather else own_columns, weight, bias)


def whole(y, layer):
    return y


def own_columns(y, layer):
    """This rank's part of an output [s, b, o] of a column-parallel layer."""
    cut = mpu.Partition(2, layer.partitions["weight"].stride, full_size=OUT)
    return cut.slice(y, layer.group.rank(), layer.group.size())


def row_case():
    group = dist.group.WORLD
    weight, bias = shared(OUT, IN, seed=1), shared(OUT, seed=2)
    for stride in (1, 3):
        if IN % (stride * group.size()):
            continue
        for has_bias, skip in ((True, False), (False, False), (True, True)):
            layer = mpu.RowParallelLinear(IN, OUT, bias=has_bias, stride=stride, skip_bias_add=skip, group=group)
            assert (layer.bias is not None) == has_bias
            load(layer, weight, bias)
            run_and_compare(layer, shared(S, B, IN).requires_grad_(), whole, weight, bias)
    layer = mpu.RowParallelLinear(IN, OUT, input_is_parallel=True, group=group)
    load(layer, weight, bias)
    own = shared(S, B, IN).chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    got = layer(own)
    assert_close(got, F.linear(shared(S, B, IN), weight, bias), atol=1e-5, rtol=1e-5)
    got.backward(shared(S, B, OUT, seed=9))
    want = (shared(S, B, OUT, seed=9) @ weight).chunk(group.size(), -1)[group.rank()]
    assert_close(own.grad, want, atol=1e-5, rtol=1e-5)
    assert not hasattr(layer.bias, "model_parallel") and not hasattr(layer.bias, "tensor_model_parallel")
    for weight in (layer.weight, copy.deepcopy(layer).weight):
        assert weight.model_parallel and weight.tensor_model_parallel
        assert (weight.partition_dim, weight.partition_stride) == (1, 1)


def qkv_case():
    """stride 3: this rank's output is [q_r | k_r | v_r], its part of each of the three stacked products."""
    group = dist.group.WORLD
    weight, bias = shared(OUT, IN, seed=1), shared(OUT, seed=2)
    layer = mpu.ColumnParallelLinear(IN, OUT, stride=3, gather_output=False, group=group)
    load(layer, weight, bias)
    x = shared(S, B, IN)
    want = [m.chunk(group.size(), -1)[group.rank()] for m in F.linear(x, weight, bias).chunk(3, -1)]
    assert_close(layer(x), torch.cat(want, -1), atol=1e-5, rtol=1e-5)


def dtype_case():
    group = dist.group.WORLD
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        weight, bias = shared(OUT, IN, seed=1).to(dtype), shared(OUT, seed=2).to(dtype)
        tolerance = 1e-6 if dtype == torch.float64 else 0.1  # sums of 12 products of size 1, rounded to 8 or 11 bits
        for layer in (
            mpu.ColumnParallelLinear(IN, OUT, group=group, dtype=dtype),
            mpu.ColumnParallelLinear(IN, OUT, group=group, dtype=dtype, overlap_backward=True),
            mpu.RowParallelLinear(IN, OUT, group=group, dtype=dtype),
        ):
            load(layer, weight, bias)
            run_and_compare(layer, shared(S, B, IN).to(dtype).requires_grad_(), whole, weight, bias, tolerance)


def all_cases():
    column_case()
    row_case()
    dtype_case()
    if dist.get_world_size() != 3:
        qkv_case()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layers_equal_linear(world_size):
    run_ranks(world_size, all_cases)


def autocast_case():
    """As nn.Linear under autocast: bf16 products and outputs, fp32 gradients of fp32 parameters and input."""
    group = dist.group.WORLD
    weight, bias = shared(OUT, IN, seed=1), shared(OUT, seed=2)
    results = {}
    for name in ("plain", "overlap off", "overlap on", "row"):
        x = shared(S, B, IN).requires_grad_()
        if name == "row":
            layer = mpu.RowParallelLinear(IN, OUT, group=group)
        else:
            layer = mpu.ColumnParallelLinear(IN, OUT, group=group, overlap_backward=name == "overlap on")
        load(layer, weight, bias)
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w, b) if name == "plain" else layer(x)
        assert y.dtype == torch.bfloat16, name
        y.float().square().sum().backward()
        grads = {"weight": w.grad, "bias": b.grad} if name == "plain" else merged_grads(layer)
        results[name] = [y.detach(), x.grad, grads["weight"], grads["bias"]]
        assert all(g.dtype == torch.float32 for g in results[name][1:]), name
    for name, got in results.items():
        for a, b in zip(got, results["plain"], strict=True):
            atol = 0.02 * b.abs().max().item()  # sums of up to 24 products, each rounded to 8 bits
            assert_close(a, b, atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    assert all(torch.equal(a, b) for a, b in zip(results["overlap on"], results["overlap off"], strict=True))
    with torch.autocast("cpu", torch.bfloat16):  # autocast leaves fp64 alone
        layer = mpu.ColumnParallelLinear(IN, OUT, group=group, dtype=torch.float64, overlap_backward=True)
        assert layer(shared(S, B, IN).double()).dtype == torch.float64


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers_under_autocast_equal_linear_under_autocast(world_size):
    run_ranks(world_size, autocast_case)


def overlap_case():
    """One node or two: the same numbers to the last bit, whichever of input, weight and bias need a gradient."""
    group = dist.group.WORLD
    everything = [(shape, (1, 1, 1)) for shape in ((S, B, IN), (7, IN), (IN,), (0, IN))]
    parts = [((S, B, IN), needs) for needs in ((0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 0, 1))]
    for shape, needs in everything + parts:
        found = []
        for overlap in (False, True):
            layer = mpu.ColumnParallelLinear(IN, OUT, gather_output=False, group=group, overlap_backward=overlap)
            load(layer, shared(OUT, IN, seed=1), shared(OUT, seed=2))
            x = shared(*shape).requires_grad_(bool(needs[0]))
            layer.weight.requires_grad_(bool(needs[1]))
            layer.bias.requires_grad_(bool(needs[2]))
            y = layer(x)
            assert graph_has(y, "_ColumnLinear") == overlap
            (y.sum() + y.square().sum()).backward()  # sum(): an expanded, not contiguous gradient
            found.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
        for a, b in zip(*found, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def together_case():
    """Two layers of one x equal each by itself, in one node where communication is overlapped or of slices of the sequence."""
    group = dist.group.WORLD
    ways = ({"overlap_backward": False}, {"overlap_backward": True}, {"sequence_parallel": True})
    for way, has_bias, frozen in itertools.product(ways, (True, False), (None, 0, 1)):
        x, twin = (shared(S, B, IN).requires_grad_() for _ in range(2))
        more = {"gather_output": False, "group": group, "bias": has_bias, **way}
        layers = [mpu.ColumnParallelLinear(IN, OUT, **more), mpu.ColumnParallelLinear(IN, 2 * OUT, stride=2, **more)]
        if frozen is not None:
            layers[frozen].requires_grad_(False)
        together, alone = parallel_columns(x, *layers), [layer(twin) for layer in layers]
        assert (together[0].grad_fn is together[1].grad_fn) == (group.size() > 1 and way != ways[0])
        found = []
        for ys in (together, alone):
            sum(y.square().sum() for y in ys).backward()
            found.append([*ys, *(p.grad for layer in layers for p in layer.parameters())])
            [layer.zero_grad() for layer in layers]
        assert_close(*found, rtol=1e-5, atol=1e-5)
        assert_close(x.grad, twin.grad, rtol=1e-5, atol=1e-4)


def twice_case():
    """One node: its gradients may be kept with a graph, and a second derivative raises, though that of sum() is a constant."""
    layer = mpu.ColumnParallelLinear(IN, OUT, gather_output=False, group=dist.group.WORLD, overlap_backward=True)
    x = shared(S, IN).requires_grad_()
    for first, second in ((x, layer.weight), (layer.weight, x)):
        (grad,) = torch.autograd.grad(layer(x).sum(), first, create_graph=True)
        with pytest.raises(RuntimeError, match="layer with overlap_backward .* is differentiated a second time"):
            torch.autograd.grad(grad.sum(), second)


def graph_has(y, kind):
    nodes, seen = [y.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node is not None:
            seen.append(type(node).__name__)
            nodes.extend(child for child, _ in node.next_functions)
    return any(kind in name for name in seen)


def order_case():
    """The all-reduce of x's gradient is started before, and waited for after, the weight's gradient is computed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    events = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in function.name():
                events.append("mm")
            return function(*args, **(kwargs or {}))

    class Handle:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            self.work.wait()

    real = comm.start_all_reduce

    def watched(buffer, group):
        events.append("start")
        return Handle(real(buffer, group))

    layer = mpu.ColumnParallelLinear(IN, OUT, gather_output=False, group=dist.group.WORLD, overlap_backward=True)
    y = layer(shared(S, IN).requires_grad_())
    comm.start_all_reduce = watched
    try:
        with Watch():
            y.sum().backward()
    finally:
        comm.start_all_reduce = real
    assert events == ["mm", "start", "mm", "wait"], events


def overlap_cases():
    twice_case()
    overlap_case()
    together_case()
    order_case()


@pytest.mark.parametrize("world_size", [2, 3])
def test_overlapped_backward_is_bitwise_equal_to_the_plain_one(world_size):
    run_ranks(world_size, overlap_cases)


def uneven_case():
    group = dist.group.WORLD
    cases = (
        (lambda: mpu.ColumnParallelLinear(4, 7, group=group), "output_size=7 .*2 model-parallel ranks.*multiple of 2"),
        (lambda: mpu.ColumnParallelLinear(4, 8, stride=3, group=group), "output_size=8 in 3 stacked .*multiple of 6"),
        (lambda: mpu.RowParallelLinear(5, 4, group=group), "input_size=5 .*--model-parallel-size"),
    )
    for build, message in cases:
        with pytest.raises(ValueError, match=message):
            build()
    with pytest.raises(ValueError, match=r"RowParallelLinear\(8, 6, .*\) takes \[..., 8\], got \[2, 4\]"):
        mpu.RowParallelLinear(8, 6, group=group)(torch.zeros(2, 4))


def test_sizes_that_cannot_be_cut_are_named():
    run_ranks(2, uneven_case)


@pytest.mark.parametrize(
    "kind", [mpu.ColumnParallelLinear, mpu.RowParallelLinear, mpu.VocabParallelEmbedding, mpu.ParallelEmbedding]
)
def test_layers_use_the_model_parallel_group_by_default(one_rank, kind):
    layer = kind(3, 4)
    assert layer.group is mpu.get_model_parallel_group()
    assert "3, 4" in repr(layer) and "ranks=1" in repr(layer)
