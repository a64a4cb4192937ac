"""zero.Init, GatheredParameters and external parameters: construction that is never whole, and access to what is sharded."""

from __future__ import annotations

import gc
import io
import pickle
import weakref
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megazero import mpu, zero
from megazero.nvme import AioConfig
from megazero.zero import build
from megazero.zero.registry import bucket_of
from tests.ranks import run_ranks
from tests.zero.models import SHARING, Block, Toy, make_engine, one_step, run, token_batches, train
from tests.zero.test_memory import live_bytes


def values_case() -> None:
    groups = mpu.initialize_model_parallel(1)
    torch.manual_seed(3)
    plain = Toy()
    after = torch.rand(1)
    torch.manual_seed(3 if groups.data_parallel_rank == 0 else 4)  # rank 0 decides
    with zero.Init():
        sharded = Toy()
    assert all(p.shape == (0,) and isinstance(p, nn.Parameter) for p in sharded.parameters())
    if groups.data_parallel_rank == 0:
        assert torch.equal(torch.rand(1), after), "the generator is where an unsharded construction leaves it"
    names = dict(plain.named_parameters())
    for name, p in sharded.named_parameters():
        assert p.ds_shape == names[name].shape and p.ds_numel == names[name].numel()
        assert p.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE and p.ds_tensor.ndim == 1
        with zero.GatheredParameters(p):
            assert torch.equal(p, names[name]) and not hasattr(p, "ds_id")
        assert p.shape == (0,)
    outside = nn.Linear(2, 2)
    assert outside.weight.shape == (2, 2) and type(outside.weight) is nn.Parameter


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_equal_an_unsharded_construction_with_the_seed_of_rank_0(world_size):
    run_ranks(world_size, values_case)


def other_models_case() -> None:
    mpu.initialize_model_parallel(1)
    is_second = torch.distributed.get_rank() == 1
    for lengths, widths, said in (
        ((1, 2), (3, 3), r"Linear 1 \(weight: \[3, 3\], bias: \[3\]\), another to the end of the context\."),
        ((2, 1), (3, 3), r"Linear 1 \(weight: \[3, 3\], bias: \[3\]\), another to the end of the context\."),
        (
            (1, 1),
            (3, 4),
            r"Linear 0 \(weight: \[3, 3\], bias: \[3\]\), another to Linear 0 \(weight: \[4, 4\], bias: \[4\]\)\.",
        ),
    ):
        with pytest.raises(ValueError, match=f"different models: one has come to {said}"), zero.Init():
            width = widths[is_second]
            _ = nn.Sequential(*(nn.Linear(width, width) for _ in range(lengths[is_second])))  # kept until the end


def test_ranks_that_construct_other_models_are_refused_before_any_waits():
    run_ranks(2, other_models_case)


def training_case(stage: int) -> None:
    mpu.initialize_model_parallel(1)
    want = run(Toy, 0)
    torch.manual_seed(0)
    with zero.Init():
        model = Toy()
    engine = make_engine(model, stage)
    got = dict(train(engine, token_batches(3, 1, mpu.get_data_parallel_world_size())))
    assert all(torch.equal(got[key], value) for key, value in want.items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_built_under_init_trains_as_one_built_whole_bit_for_bit(stage):
    run_ranks(2, training_case, stage)


class Probe(nn.Linear):
    peak = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        Probe.peak = max(Probe.peak, live_bytes())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Probe(64, 64, bias=False), Probe(64, 64, bias=False)


def construction_case() -> None:
    mpu.initialize_model_parallel(1)
    context = zero.Init()  # its channel's buffers are not the model's
    gc.collect()
    gc.freeze()  # what is there already need not be looked at again and again
    before = live_bytes()

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Pair() for _ in range(16))

    Probe.peak = 0
    with context:
        model = Measured()
    one = 64 * 64 * 4
    world_size = mpu.get_data_parallel_world_size()
    assert Probe.peak - before <= 32 * one / world_size + 2 * one + 4096, "P/N plus a parent and its direct children"
    engine = make_engine(model, 3)
    held = engine.memory()
    assert held["P"] == 32 * one // world_size and held["O"] == 0, "fp32 master weights are the shards of P"


@pytest.mark.parametrize("world_size", [2, 4])
def test_construction_holds_at_most_a_share_and_a_parent_with_its_direct_children(world_size):
    run_ranks(world_size, construction_case)


class Applies(nn.Module):
    """Initialises everything at the end of its constructor: its children through .data, what is deeper in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.head.weight.data.normal_(0, 0.02)
        self.apply(self._write)
        for p in self.blocks.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    @staticmethod
    @torch.no_grad()
    def _write(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            module.bias.copy_(torch.rand(module.bias.shape))


def hugging_face() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=2))


def hugging_face_bert() -> nn.Module:
    """Whose base class zeroes `weight[padding_idx]` of an embedding when the whole model is built."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=11, max_position_embeddings=8, pad_token_id=3, **sizes))


class Views(nn.Module):
    """Initialises what is sharded already through `data` and other views, under autograd and without."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.tokens = nn.Sequential(nn.Embedding(6, 5))
        first, second = self.blocks
        first.up.weight.data.normal_(0, 0.02)
        first.up.weight.data[2] = 3.0
        first.norm.bias.data += 1
        first.down.weight.data.copy_(second.down.weight.data).mul_(2)
        second.up.weight.detach().t()[1:3, ::2].fill_(first.up.weight.data.abs().max().item())
        nn.init.orthogonal_(second.down.weight)
        second.down.bias.data = torch.zeros_like(second.down.bias) + 7.0
        with torch.no_grad():
            self.tokens[0].weight[3].zero_()
            for row in second.up.weight.chunk(3)[1].unbind():
                row.uniform_(-1, 1)
            low, high = first.up.bias.view(-1, 5).split(2)
            torch.add(high, 1.0, out=high)
            low[0], kept = 5.0, high.clone()
        self.kept = nn.Parameter(kept + first.up.bias.data.sum())


BUILDERS = {
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 8),
    "lstm": lambda: nn.LSTM(4, 4),
    "applies": Applies,
    "views": Views,
    "hugging face": hugging_face,
    "hugging face's bert": hugging_face_bert,
}


def written_case(kinds: list[str]) -> None:
    mpu.initialize_model_parallel(1)
    rank = mpu.get_data_parallel_rank()
    for kind in kinds:
        torch.manual_seed(3)
        plain = BUILDERS[kind]()
        after = torch.rand(1)
        torch.manual_seed(3 + rank)  # rank 0 decides
        with zero.Init():
            model = BUILDERS[kind]()
        assert rank or torch.equal(torch.rand(1), after), kind
        want = dict(plain.named_parameters())
        assert [name for name, _ in model.named_parameters()] == list(want)
        for name, p in model.named_parameters():
            assert p.shape == (0,) and p.ds_shape == want[name].shape
            with zero.GatheredParameters(p):
                assert torch.equal(p, want[name]), (kind, name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_constructors_may_write_what_they_attached(world_size):
    run_ranks(world_size, written_case, [kind for kind in BUILDERS if not kind.startswith("hugging face")])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hugging_face_model_equals_an_unsharded_construction(world_size):
    pytest.importorskip("transformers")
    run_ranks(world_size, written_case, ["hugging face", "hugging face's bert"])


def unwritable_case() -> None:
    mpu.initialize_model_parallel(1)
    with zero.Init():
        model = nn.Sequential(Block(5))
        weight = model[0].up.weight
        for touch in (
            lambda: weight.data.numpy(),
            lambda: weight[0].untyped_storage(),
            lambda: weight.data.t_(),
            lambda: nn.Parameter(weight.data),
            lambda: setattr(weight.data, "data", torch.ones(15, 5)),
            lambda: setattr(weight, "data", model[0].down.weight.data.t()),
            lambda: pickle.dumps(weight.data),
        ):
            with pytest.raises(RuntimeError, match=r"weight.* p.normal_\(\), .*nothing that keeps their memory"):
                touch()
        view = weight.data
        assert repr(view) == "ReleasedView(ReleasedParameter(weight, shape=(15, 5)))"
        with torch.no_grad(), pytest.raises(RuntimeError, match="another shape"):
            weight.t_()
        for dtype in (torch.half, torch.double):
            with pytest.raises(RuntimeError, match="another shape or dtype"):  # it would round, and stay what it is
                model.to(dtype)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            weight.normal_()
        with pytest.raises(RuntimeError, match="sharded"):  # autograd would keep what is released
            weight.sum()
        with torch.no_grad():
            assert weight.fill_(2.0) is weight and weight.size(1) == 5
            weight[0] = 0.0
            total = weight.sum()
            model[0].down.bias.copy_(model[0].norm.weight)  # both sharded
    with zero.GatheredParameters([weight, model[0].down.bias]):
        assert (weight[1:] == 2.0).all() and (weight[0] == 0.0).all() and weight.sum() == total
        assert (model[0].down.bias == 1.0).all()
        assert (view[1:] == 2.0).all()
    for late in (weight, view):
        with pytest.raises(RuntimeError, match="sharded"), torch.no_grad():
            late.fill_(3.0)


def test_what_init_cannot_write_raises_with_the_fix():
    run_ranks(2, unwritable_case)


def nesting_case() -> None:
    mpu.initialize_model_parallel(1)
    with zero.Init():
        with zero.Init(), zero.Init(enabled=False):
            inner = nn.Linear(3, 2)

        class Late(nn.Module):  # a class defined inside, with a parameter of its own after its child
            def __init__(self) -> None:
                super().__init__()
                self.child = nn.Linear(2, 2)
                self.scale = nn.Parameter(torch.full((3,), 2.0))

        late = Late()
        outer = nn.Linear(2, 2)
    for module in (inner, late, outer):
        assert all(hasattr(p, "ds_id") for p in module.parameters())
    with zero.GatheredParameters(late.scale):
        assert late.scale.tolist() == [2.0, 2.0, 2.0]
    with zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        half = nn.Linear(3, 2)
    assert half.weight.dtype == torch.bfloat16
    with zero.Init(enabled=False):
        whole = nn.Linear(3, 2)
    assert whole.weight.shape == (2, 3)
    existing = nn.Linear(3, 2)
    keep = existing.weight.detach().clone()
    zero.Init(module=existing)
    assert existing.weight.shape == (0,)
    with zero.GatheredParameters(existing.parameters()):
        assert torch.equal(existing.weight, keep) or mpu.get_data_parallel_rank() != 0
    with pytest.raises(ValueError, match="remote_device='nvme'"):
        zero.Init(remote_device="nvme")
    with pytest.raises(ValueError, match="remote_device='disk'.* must be None, 'none', 'cpu' or 'nvme'"):
        zero.Init(remote_device="disk")
    with pytest.raises(TypeError, match=r"dtype='bf16'.*torch\.bfloat16"):
        zero.Init(dtype="bf16")
    with pytest.raises(TypeError, match=r"first argument is a module.*config_dict_or_path="):
        zero.Init({"bf16": {"enabled": True}})
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    for wrong, message in (
        (both, "both enabled"),
        ({"bf16": {"enabled": "yes"}}, r"bf16\.enabled must be .* got 'yes'"),
    ):
        with pytest.raises(ValueError, match=message):
            zero.Init(config_dict_or_path=wrong)
    tied = nn.Module()
    with zero.Init():
        tied.a, tied.b = nn.Linear(2, 2), nn.Linear(2, 2)
        tied.b.weight = tied.a.weight
    assert tied.b.weight is tied.a.weight and tied.a.weight.shape == (0,)


def test_nested_disabled_and_late_constructions():
    run_ranks(2, nesting_case)


def refusals_case(stage3: bool) -> None:
    mpu.initialize_model_parallel(1)
    with zero.Init():
        model = nn.Sequential(Block(5), Block(5))
    engine = make_engine(model, 3) if stage3 else None
    weight = model[0].up.weight
    for touch in (
        lambda: nn.init.normal_(weight),
        lambda: nn.init.xavier_uniform_(weight),
        lambda: weight.data.normal_(),
        lambda: F.linear(torch.ones(1, 5), weight),
        lambda: weight.sum(),
        lambda: torch.cat([weight, weight]),
        lambda: weight.detach(),
        lambda: model.state_dict(),
        lambda: model.half(),
    ):
        with pytest.raises(
            RuntimeError, match=r"'?(up\.)?(0\.)?.*weight.* is sharded .*GatheredParameters\(params, modifier_rank=0\)"
        ):
            touch()
    moved = model.to(torch.device("cpu")).float().cpu().type(torch.float32)
    assert moved is model and weight.shape == (0,), "what is there already stays"
    assert "weight" in repr(weight) and weight.dtype == torch.float32 and weight.numel() == 0
    assert torch.is_floating_point(weight) and not torch.is_complex(weight) and weight.itemsize == 4
    assert weight.is_cpu and weight.get_device() == -1 and not (weight.is_mps or weight.retains_grad)
    assert f"{weight}" == repr(weight) and "ds_shape" in dir(weight), "as a debugger and the completion of names ask"
    assert "torch.FloatTensor" in repr(nn.ParameterDict({"weight": weight}))
    names = [name for name, p in model.named_parameters() if p.dim() >= 2]
    assert names == ["0.up.weight", "0.down.weight", "1.up.weight", "1.down.weight"], (
        "as scripts choose what has weight decay"
    )
    assert all(p.ndim == p.ndimension() == p.dim() for p in model.parameters())
    assert engine is None or all(v.numel() for v in engine.state_dict().values())


@pytest.mark.parametrize("stage3", [False, True], ids=["before the engine", "after"])
def test_touching_a_sharded_parameter_raises_with_the_fix(stage3):
    run_ranks(2, refusals_case, stage3)


def configured_case(folder: str) -> None:
    """What a configuration says: where shards rest. And torch is what it was, inside of the context too."""
    mpu.initialize_model_parallel(1)
    names = ("empty", "zeros", "ones", "tensor", "full")
    before = [nn.Module.__init__, nn.Linear.__init__, nn.Parameter.__new__, *(getattr(torch, name) for name in names)]
    offload = {"offload_param": {"device": "nvme", "nvme_path": folder}}
    aio = {"block_size": 1 << 16, "queue_depth": 2, "intra_op_parallelism": 3, "single_submit": False}
    sections = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, **offload}, "aio": aio}
    with zero.Init(config_dict_or_path=sections):
        model = nn.Linear(6, 5)
        after = [nn.Module.__init__, nn.Linear.__init__, nn.Parameter.__new__, *(getattr(torch, n) for n in names)]
        assert after == before and all(a is b for a, b in zip(after, before, strict=True)), "nothing is patched"
        assert torch.ones(2).dtype == torch.float32 and vars(nn.Parameter(torch.ones(2))) == {}
    shard = bucket_of(model.weight).weights.shard
    assert shard.home.swap._requests._aio == AioConfig(block_size=1 << 16, queue_depth=2, thread_count=3)
    assert not shard.home.pin, "unless the configuration says so"
    offload["offload_param"]["pin_memory"] = True
    for remote_device in (None, "nvme"):
        with zero.Init(remote_device=remote_device, config_dict_or_path=sections):
            pinned = nn.Linear(6, 5)
        assert bucket_of(pinned.weight).weights.shard.home.pin
    assert shard.resident is None and model.weight.dtype == torch.float32 and not model.weight.ds_persist
    with zero.Init():
        later = nn.Linear(6, 5, device="meta")
        assert later.weight.shape == (5, 6), "what has no values waits"
        later.weight = nn.Parameter(torch.full((5, 6), 3.0))
        later.bias = nn.Parameter(torch.zeros(5))
    assert later.weight.shape == (0,)
    with zero.GatheredParameters(later.weight):
        assert (later.weight == 3.0).all()


def test_init_obeys_a_configuration_and_patches_nothing(tmp_path):
    run_ranks(2, configured_case, str(tmp_path))


def loading_case() -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    state = {name: torch.full_like(value, 0.5) for name, value in Toy().state_dict().items()}
    engine = make_engine(Toy(), 3)
    with zero.Init():
        built = Toy()
    for load in (
        lambda: built.load_state_dict(state),
        lambda: engine.module.load_state_dict(state),
        lambda: engine.module.blocks[1].load_state_dict(Block(5).state_dict()),
    ):
        with pytest.raises(RuntimeError, match=r"load_state_dict: parameter '\S+' is sharded .*load_module_state_dict"):
            load()
    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if mpu.get_data_parallel_rank() == 0:
            engine.module.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())
    engine.destroy()
    engine.module.load_state_dict(state)
    make_engine(built, 3).destroy()
    gc.collect()
    assert not any(module._load_state_dict_pre_hooks for module in built.modules())


def test_loading_into_a_sharded_model_says_how():
    run_ranks(2, loading_case)


def nested_case(stage: int) -> None:
    """Contexts around blocks that share a bucket, each with changes of another rank."""
    mpu.initialize_model_parallel(1)
    rank = mpu.get_data_parallel_rank()
    torch.manual_seed(0)
    engine = make_engine(Toy(), stage, zero=SHARING)
    first, second = engine.module.blocks[0].up.weight, engine.module.blocks[1].up.weight
    with torch.no_grad(), zero.GatheredParameters(first, modifier_rank=0):
        first.fill_(rank + 2.0)
        with zero.GatheredParameters(second, modifier_rank=1):
            second.fill_(rank + 4.0)
    state = engine.state_dict()
    assert (state["blocks.0.up.weight"] == 2.0).all() and (state["blocks.1.up.weight"] == 5.0).all()
    assert (first == 2.0).all() and (second == 5.0).all()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_contexts_within_each_other_keep_the_changes_of_blocks_that_share_a_bucket(stage):
    run_ranks(2, nested_case, stage)


def gathered_case(dtype: torch.dtype, stage: int) -> None:
    mpu.initialize_model_parallel(1)
    rank = mpu.get_data_parallel_rank()
    torch.manual_seed(0)
    engine = make_engine(Toy(), stage, dtype=dtype, optimizer="sgd", decay=0.0)
    model = engine.module
    weight = model.blocks[1].up.weight
    with zero.GatheredParameters([weight, model.norm.weight], modifier_rank=1), torch.no_grad():
        weight.fill_(rank + 2.0)
        model.norm.weight.mul_(0.5 if rank == 1 else 7.0)
    state = engine.state_dict()
    assert (state["blocks.1.up.weight"] == 3.0).all() and (state["norm.weight"] == 0.5).all()
    engine.backward(engine(token_batches(1, 1, 2)[0, 0, rank]))
    for bucket in engine.buckets:
        if bucket.is_trainable:
            bucket.gradient.owned.resident.zero_()
    engine.step()  # by nothing: what was written must be in the master weights too
    assert (engine.state_dict()["blocks.1.up.weight"] == 3.0).all()
    for change in (lambda: weight.data.add_(1), lambda: weight.add_(1)):
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"blocks.1.up.weight changed .* modifier_rank=0"), torch.no_grad():
                with zero.GatheredParameters(weight):
                    if rank == 0:
                        change()
            assert (engine.state_dict()["blocks.1.up.weight"] == 3.0).all(), "the change is undone"
    if stage == 3:
        with pytest.raises(RuntimeError, match="enclosing context"), zero.GatheredParameters(weight):
            with zero.GatheredParameters(model.blocks[1].parameters()):
                pass
        with pytest.raises(ArithmeticError), zero.GatheredParameters(weight, modifier_rank=0):
            raise ArithmeticError
        assert weight.shape == (0,)
        last = engine.buckets[0].weights  # of the last unit
        last.gather = lambda: bytearray(1 << 60)
        with pytest.raises(MemoryError), zero.GatheredParameters(model.parameters()):
            pass
        del last.gather
        assert weight.shape == (0,), "what had come is in the way of another try"
        with zero.GatheredParameters(weight):
            assert weight.shape == (15, 5)
    plain = nn.Linear(2, 2)
    with zero.GatheredParameters(p for p in plain.parameters()), torch.no_grad():
        plain.weight.fill_(1.0)
    with zero.GatheredParameters(plain.weight, enabled=False):
        pass
    bias = nn.Linear(2, 2, bias=False).bias
    with zero.GatheredParameters([weight, bias, torch.ones(2)]), zero.GatheredParameters(bias):
        assert weight.shape == (15, 5)
    for names, kind in (
        (dict(plain.named_parameters()), "str"),
        (plain.named_parameters(), "tuple"),
        (plain, "Linear"),
    ):
        with pytest.raises(TypeError, match=rf"found a {kind} among the parameters.*values\(\) of a dict"):
            zero.GatheredParameters(names)
    with pytest.raises(ValueError, match="modifier_rank=5"):
        zero.GatheredParameters(weight, modifier_rank=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_keep_one_ranks_changes_and_refuse_unasked_ones(dtype, stage):
    run_ranks(2, gathered_case, dtype, stage)


def assigned_case(stage: int) -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    engine = make_engine(Toy(), stage, dtype=torch.bfloat16)
    weight = engine.module.blocks[1].up.weight
    with zero.GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.full_like(weight, 3.0)
    assert (engine.state_dict()["blocks.1.up.weight"] == 3.0).all()
    dict(train(engine, token_batches(1, 1, 2)))
    assert (engine.state_dict()["blocks.1.up.weight"] - 3.0).abs().max() < 0.1, "the master weights have it too"
    rank = mpu.get_data_parallel_rank()
    is_wrong = pytest.raises(RuntimeError, match=r"blocks.1.up.weight got data of another shape .* new nn.Parameter")
    with is_wrong if rank == 1 else nullcontext(), zero.GatheredParameters(weight, modifier_rank=0):
        if rank == 1:
            weight.data = torch.zeros(3, 3)
    dict(train(engine, token_batches(1, 1, 2)))


def swapped_case(stage: int) -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))  # a bucket each
    before = [layer.weight.detach().clone() for layer in model]
    engine = make_engine(model, stage)
    a, b, c = (layer.weight for layer in model)
    with zero.GatheredParameters([a, b, c], modifier_rank=0):
        a.data, b.data, c.data = b.data, a.data, c.data.t()
    after = list(engine.state_dict().values())
    assert all(map(torch.equal, after, [before[1], before[0], before[2].t()]))


@pytest.mark.parametrize("stage", [1, 3])
def test_data_of_parameters_may_be_swapped_and_transposed_inside_gathered_parameters(stage):
    run_ranks(2, swapped_case, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_data_that_is_assigned_inside_gathered_parameters_is_kept_or_refused(stage):
    run_ranks(2, assigned_case, stage)


@pytest.mark.parametrize("fails", [True, False])
def test_what_was_read_stays_valid_after_a_context_that_undoes_its_changes(one_rank, fails):
    with zero.Init():
        layer = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="own error" if fails else "changed inside"):
        with zero.GatheredParameters(layer.weight):
            read, before = layer.weight.detach(), layer.weight.detach().clone()
            layer.weight.data.fill_(7.0)
            if fails:
                raise RuntimeError("own error")
    nbytes = read.untyped_storage().nbytes()
    assert nbytes, "else to read it would end the process"
    assert (read == 7.0).all()
    with zero.GatheredParameters(layer.weight):
        assert torch.equal(layer.weight, before)


def lonely_case() -> None:
    mpu.initialize_model_parallel(1, timeout_s=5.0)
    torch.manual_seed(0)
    engine = make_engine(Toy(), 3)
    if mpu.get_data_parallel_rank() == 0:
        with (
            pytest.raises(RuntimeError, match="GatheredParameters"),
            zero.GatheredParameters(engine.module.norm.weight),
        ):
            pass
    torch.distributed.barrier()


def test_gathered_parameters_on_some_ranks_only_is_reported():
    run_ranks(2, lonely_case)


def any_order_case(stage: int) -> None:
    mpu.initialize_model_parallel(1)
    rank = mpu.get_data_parallel_rank()
    with zero.Init(enabled=stage == 3):
        model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def fill(values: list[float], writers: tuple[int, ...]) -> None:
        weights = [layer.weight for layer in model]
        with zero.GatheredParameters(weights[::-1] if rank else weights, modifier_rank=0), torch.no_grad():
            for weight, value in zip(weights, values if rank in writers else [], strict=False):
                weight.fill_(value)

    fill([1.0, 2.0], writers=(0, 1))  # without an engine, where units have no names of their own
    engine = make_engine(model, stage)
    assert [float(weight.mean()) for weight in engine.state_dict().values()] == [1.0, 2.0]
    fill([3.0, 4.0], writers=(0,))
    assert [float(weight.mean()) for weight in engine.state_dict().values()] == [3.0, 4.0]
    names = ["0", "1"] if stage == 3 else ["0.weight", "1.weight"]
    here, there = (", ".join(names[:count]) for count in (1 + rank, 2 - rank))
    told = (
        f"GatheredParameters of {here} was called on rank {rank}, but GatheredParameters of {there} on rank {1 - rank}"
    )
    with pytest.raises(RuntimeError, match=told):
        zero.GatheredParameters([layer.weight for layer in model][: 1 + rank], modifier_rank=0).__enter__()


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_may_be_given_in_another_order_on_every_rank_but_not_others(stage):
    run_ranks(2, any_order_case, stage)


def several_models_case(stage: int) -> None:
    mpu.initialize_model_parallel(1, timeout_s=10.0)
    rank, models = mpu.get_data_parallel_rank(), []
    for _ in range(2):  # units and parameters of both have the same names
        with zero.Init(enabled=stage == 3):
            models.append(nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(10)))

    def fill(value: float) -> None:
        weights = [model[0].weight for model in models]
        with zero.GatheredParameters(weights[::-1] if rank else weights, modifier_rank=0), torch.no_grad():
            for k, weight in enumerate(weights):
                weight.fill_(value + k)

    fill(1.0)
    engines = [make_engine(model, stage) for model in models]
    assert [float(engine.state_dict()["0.weight"].mean()) for engine in engines] == [1.0, 2.0]
    fill(3.0)
    assert [float(engine.state_dict()["0.weight"].mean()) for engine in engines] == [3.0, 4.0]
    weights = [layer.weight for layer in models[0]]
    with pytest.raises(
        RuntimeError, match=r"and 1 more \(digest \w+\) was called on rank \d, but .* \(digest \w+\) on rank"
    ):
        zero.GatheredParameters(weights[: 8 + rank] + weights[9 + rank :], modifier_rank=0).__enter__()


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_of_several_models_may_be_given_in_any_order_and_of_many_none_may_differ(stage):
    run_ranks(2, several_models_case, stage)


class Wrapped(nn.Module):
    """A linear layer's parameters in another module, beside trained ones, as LoRA does it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.down, self.up = nn.Parameter(torch.ones(2, 16)), nn.Parameter(torch.zeros(16, 2))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + x @ self.down.t() @ self.up.t()


def moved_case() -> None:
    mpu.initialize_model_parallel(1)
    torch.manual_seed(0)
    plain = nn.Linear(16, 16)
    torch.manual_seed(0)
    with zero.Init():
        layer = nn.Linear(16, 16)
    model = nn.Sequential(Wrapped(layer))
    kept = weakref.ref(bucket_of(model[0].weight))
    del layer
    gc.collect()
    with zero.GatheredParameters(model.parameters()):
        assert torch.equal(model[0].weight, plain.weight), "the parameter's new module keeps its shard"
    engine = make_engine(model, 3)
    gc.collect()
    assert kept() is None, "an engine has its own buckets"
    x = torch.ones(1, 16)
    torch.testing.assert_close(engine(x), plain(x))
    engine.destroy()
    with zero.Init():
        layer = nn.Linear(16, 16)
    kept = weakref.ref(bucket_of(layer.weight))
    del layer
    gc.collect()
    assert kept() is None, "a bucket dies with its parameters"


def test_a_parameter_may_move_to_another_module_before_an_engine_takes_it():
    run_ranks(2, moved_case)


def saved_whole_case() -> None:
    mpu.initialize_model_parallel(1)
    with zero.Init():
        model = Toy()
    file = io.BytesIO()
    with zero.GatheredParameters(list(model.parameters())):
        torch.save(model, file)
        want = {name: p.detach().clone() for name, p in model.named_parameters()}
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    for name, p in plain.named_parameters():
        assert torch.equal(p, want[name]) and bucket_of(p) is None
    engine = make_engine(plain, 3)
    one_step(engine, token_batches(1, 1, 1)[0, 0, 0])


class InCycle(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_forward_hook(self.look)

    def look(self, *_) -> None:
        pass


class DropsTemplate(nn.Module):
    """Makes a module only for its shape, which the garbage collector finds sooner on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(*InCycle().weight.shape)
        if mpu.get_data_parallel_rank() == 1:
            gc.collect()
        self.scale = nn.Parameter(torch.full((25,), float(mpu.get_data_parallel_rank())))


def dropped_case() -> None:
    mpu.initialize_model_parallel(1, timeout_s=10.0)
    gc.disable()
    with zero.Init():
        model = DropsTemplate()
    with zero.GatheredParameters(model.scale):
        assert not model.scale.any(), "rank 0's values"


def test_modules_that_a_constructor_drops_are_no_ranks_business():
    run_ranks(2, dropped_case)


def test_a_model_without_an_engine_can_be_saved_whole():
    run_ranks(2, saved_whole_case)


def test_bucket_records_die_with_the_model(one_rank):
    engine = make_engine(Toy(), 0)
    weight = engine.module.norm.weight
    assert bucket_of(weight) is engine.buckets[-1]
    engine.destroy()
    assert bucket_of(weight) is None and type(weight) is nn.Parameter


def test_an_engine_takes_what_one_that_could_not_be_made_has_left_of_a_module(one_rank, monkeypatch):
    with zero.Init():
        model = Toy()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))  # so that the parameters of a module go to two buckets
    with monkeypatch.context() as patch, pytest.raises(MemoryError):  # when its weight has gone, and its bias has not
        patch.setattr(build, "_sum_of_bits", Mock(side_effect=MemoryError))
        make_engine(model, 3)
    one_step(make_engine(model, 3), torch.tensor([[1, 2, 3]]))
