"""Scripts written for Megatron-LM's layers and mpu: `initialize` finds what a model-parallel rank holds a part of."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import megazero
from megazero.deepspeed.engine import DeepSpeedEngine
from megazero.deepspeed.mpu import declare_cuts, parallel_groups
from megazero.utils import safe_get_full_grad
from tests.ranks import run_ranks
from tests.zero.models import full_grad

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
}


def their_mpu() -> SimpleNamespace:
    """Megatron-LM's mpu of 2020 for a world of one model-parallel group: nothing but its four functions."""
    ranks = list(range(dist.get_world_size()))
    model, data = dist.new_group(ranks), [dist.new_group([rank]) for rank in ranks][dist.get_rank()]
    return SimpleNamespace(
        get_model_parallel_group=lambda: model,
        get_data_parallel_group=lambda: data,
        get_model_parallel_rank=lambda: dist.get_rank(model),
        get_data_parallel_world_size=lambda: 1,
    )


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Mlp(nn.Module):
    """Column- then row-parallel, of the tree of 2020 (`style` "sizes"), of v1.1.5 ("dims"), or unmarked."""

    def __init__(self, style: str) -> None:
        super().__init__()
        size, rank = dist.get_world_size(), dist.get_rank()
        full = [torch.randn(16, 8) * 0.3, torch.randn(8, 16) * 0.3]
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Module(), nn.Module()
        self.up.weight = nn.Parameter(full[0].chunk(size, 0)[rank].clone())
        self.up.bias = nn.Parameter(torch.zeros(16 // size))
        self.down.weight = nn.Parameter(full[1].chunk(size, 1)[rank].clone())
        self.down.bias = nn.Parameter(torch.zeros(8))
        cut = [(self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)] if style != "unmarked" else []
        for parameter, dim in cut:
            parameter.model_parallel = True
            if style == "dims":
                parameter.partition_dim, parameter.partition_stride = dim, 1
        if style == "sizes":
            self.up.output_size_per_partition, self.down.input_size_per_partition = 16 // size, 16 // size

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(Copy.apply(self.norm(x)), self.up.weight, self.up.bias))
        return x + Reduce.apply(F.linear(h, self.down.weight)) + self.down.bias


def train(engine, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), engine.get_global_grad_norm()]
    return losses


def engine_of(style: str, stage: int):
    torch.manual_seed(0)
    zero = {"zero_optimization": {"stage": stage}}
    return megazero.initialize(model=Mlp(style), config={**CONFIG, **zero}, mpu=their_mpu())[0]


def saved_run(folder, style: str, stage: int) -> list[float]:
    engine = engine_of(style, stage)
    before = train(engine, 0, 2)
    engine.save_checkpoint(str(folder))
    return before + train(engine, 2, 2)


def resumed_run(folder, style: str, stage: int) -> list[float]:
    engine = engine_of(style, stage)
    engine.load_checkpoint(str(folder))
    return train(engine, 2, 2)


@pytest.mark.parametrize(("style", "stage"), [("sizes", 2), ("dims", 3)])
def test_layers_of_the_callers_own_train_and_resume_at_any_model_parallel_size(style, stage, tmp_path):
    alone = run_ranks(1, saved_run, tmp_path / "alone", style, stage)[0]
    for cut in run_ranks(2, saved_run, tmp_path / "cut", style, stage):
        torch.testing.assert_close(cut, alone)
    for size, folder in ((2, "cut"), (1, "cut"), (2, "alone")):
        for resumed in run_ranks(size, resumed_run, tmp_path / folder, style, stage):
            torch.testing.assert_close(resumed, alone[4:])


def unmarked(is_sharded: bool) -> str:
    mpu = their_mpu()
    torch.manual_seed(0)
    with megazero.zero.Init(mpu=mpu, enabled=is_sharded):
        model = Mlp("unmarked")
    zero = {"zero_optimization": {"stage": 3 if is_sharded else 1}}
    with pytest.raises(megazero.DeepSpeedConfigError) as error:
        megazero.initialize(model=model, config={**CONFIG, **zero}, mpu=mpu)
    return str(error.value)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "by zero.Init"])
def test_parts_that_nothing_marks_are_refused_because_all_but_one_would_be_lost(is_sharded):
    for message in run_ranks(2, unmarked, is_sharded):
        assert message.startswith("down.weight, up.weight: not the same on the 2 model-parallel ranks")


def with_a_buffer(persistent: bool) -> str | None:
    mpu = their_mpu()
    model = Mlp("dims")
    model.register_buffer("first_row", torch.tensor(dist.get_rank()), persistent)
    try:
        megazero.initialize(model=model, config=CONFIG, mpu=mpu)
    except megazero.DeepSpeedConfigError as error:
        return str(error)
    return None


def test_a_buffer_of_a_ranks_own_is_refused_if_it_would_be_saved():
    for message in run_ranks(2, with_a_buffer, True):
        assert message.startswith("first_row: not the same on the 2 model-parallel ranks")
        assert "persistent=False" in message
    assert run_ranks(2, with_a_buffer, False) == [None, None]


class HeadBias(Mlp):
    """T5's in CPM-2 and PPT: an embedding of the distance with a column for each of this rank's heads, drawn from one seed."""

    def __init__(self) -> None:
        super().__init__("dims")
        self.heads = 4 // dist.get_world_size()
        self.bias = nn.Embedding(3, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, 2)) * torch.arange(1.0, 5.0)[:, None]  # [b, heads, 2]
        mine = Copy.apply(heads).chunk(dist.get_world_size(), 1)[dist.get_rank()]
        out = Reduce.apply((mine * self.bias.weight.sum(0)[:, None]).sum((1, 2)))
        return super().forward(x) + out[:, None]


def unmarked_alike(stage: int, is_marked: bool, fp16: bool) -> list[float] | str:
    torch.manual_seed(0)
    model = HeadBias()
    if is_marked:
        with torch.no_grad():  # what one rank of 4 heads has
            model.bias.weight.copy_(
                torch.arange(-6.0, 6.0).div(10).view(3, 4).chunk(dist.get_world_size(), 1)[dist.get_rank()]
            )
        model.bias.weight.model_parallel, model.bias.weight.partition_dim = True, 1
    config = {
        **CONFIG,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": fp16, "auto_cast": True, "hysteresis": 1},
    }
    config["fp16"]["initial_scale_power"] = 12  # overflows first
    engine, *_ = megazero.initialize(model=model, config=config, mpu=their_mpu())
    try:
        return train(engine, 0, 20 if fp16 else 3)
    except megazero.DeepSpeedConfigError as error:
        return str(error)


@pytest.mark.parametrize(("stage", "fp16"), [(1, False), (3, False), (2, True)])
def test_parts_that_nothing_marks_are_refused_by_their_gradients_where_they_start_alike(stage, fp16):
    for message in run_ranks(2, unmarked_alike, stage, False, fp16):
        assert message.startswith(
            "bias.weight: not marked as parts of larger parameters, but their gradients are not the"
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_that_are_marked_train_as_the_whole(stage):
    (alone,) = run_ranks(1, unmarked_alike, stage, True, False)
    for cut in run_ranks(2, unmarked_alike, stage, True, False):
        assert cut == pytest.approx(alone, rel=1e-5)


def with_newer_names() -> int:
    old = their_mpu()
    mpu = SimpleNamespace(
        get_tensor_model_parallel_group=old.get_model_parallel_group,
        get_data_parallel_group=old.get_data_parallel_group,
    )
    megazero.checkpointing.configure(mpu)
    megazero.checkpointing.model_parallel_cuda_manual_seed(1)
    return parallel_groups(mpu).model_parallel_size


def test_an_mpu_of_megatron_core_is_read_too():
    assert run_ranks(2, with_newer_names) == [2, 2]


def ungrouped() -> str:
    with pytest.raises(megazero.DeepSpeedConfigError) as error:
        parallel_groups(SimpleNamespace(get_model_parallel_group=their_mpu().get_model_parallel_group))
    return str(error.value)


def test_an_mpu_without_groups_is_refused():
    (message,) = run_ranks(1, ungrouped)
    assert "get_data_parallel_group" in message and message.endswith("and get_data_parallel_group().")


def seeded() -> tuple[int, int]:
    megazero.checkpointing.configure(their_mpu())
    megazero.checkpointing.model_parallel_cuda_manual_seed(1234)
    tracker = megazero.checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        return torch.initial_seed(), torch.default_generator.initial_seed()


def test_random_streams_follow_the_mpu_that_checkpointing_was_given():
    assert run_ranks(2, seeded) == [(1234 + 2718 + rank,) * 2 for rank in range(2)]


def guessed() -> tuple[int, int, str]:
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.tensor_model_parallel = True
    declare_cuts(layer, parallel_groups(their_mpu()))
    (name, cut), *_ = layer.partitions.items()
    return cut.dim, cut.full_size, name


def test_a_mark_without_a_dimension_is_taken_for_rows():
    assert run_ranks(2, guessed) == [(0, 6, "weight")] * 2


def test_a_loss_that_is_nan_is_told_from_gradients_that_overflow(one_rank, caplog):
    config = {**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
    engine, *_ = megazero.initialize(model=nn.Linear(4, 4), config=config)
    for factor, is_told in ((float("nan"), True), (1.0, False)):
        caplog.clear()
        engine.backward(engine(torch.ones(2, 4).half()).float().sum() * factor)
        with pytest.raises(TypeError, match="takes lr_kwargs"):
            engine.step(lambda: None)  # a step that is refused may come again
        engine.step()
        assert not engine.was_step_applied()
        assert ("rank 0: the loss itself was not finite (nan)" in caplog.text) == is_told
        engine.backward(engine(torch.ones(2, 4).half()).float().sum() * float("nan"))
        engine.zero_grad()  # nothing of what is discarded is told of the next step


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
    return generator, nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def train_adversaries(generator, discriminator, ways, batches) -> None:
    """A GAN's loop, as scripts have it: `ways` are backward and step of either; losses go through the plain modules."""
    backward_g, step_g, backward_d, step_d = ways
    for real, noise in batches:
        discriminator.zero_grad()
        fake = generator(noise)
        backward_d(F.softplus(-discriminator(real)).mean())
        backward_d(F.softplus(discriminator(fake.detach())).mean())
        step_d()
        generator.zero_grad()
        backward_g(F.softplus(-discriminator(fake)).mean())  # reaches the discriminator, too
        step_g()


def gan_case(stage: int) -> None:
    mine, size = dist.get_rank(), dist.get_world_size()
    batches = [(torch.randn(4 * size, 5) + 1, torch.randn(4 * size, 3)) for _ in range(3)]
    plain, ours = adversaries(), adversaries()
    sgd = [torch.optim.SGD(model.parameters(), 0.5) for model in (*plain, *ours)]
    train_adversaries(*plain, (Tensor.backward, sgd[0].step, Tensor.backward, sgd[1].step), batches)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engines = [
        megazero.initialize(model=model, optimizer=optimizer, config=config)[0]
        for model, optimizer in zip(ours, sgd[2:], strict=True)
    ]
    ways = [way for engine in engines for way in (engine.backward, engine.step)]
    train_adversaries(*ours, ways, [[part.chunk(size)[mine] for part in batch] for batch in batches])
    for model, engine in zip(plain, engines, strict=True):
        torch.testing.assert_close(engine.module_state_dict(), dict(model.state_dict()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_generators_loss_leaves_nothing_in_the_discriminators_engine(stage):
    run_ranks(2, gan_case, stage)


def penalized(discriminator, x: Tensor) -> Tensor:
    """A discriminator's loss with StyleGAN's R1 penalty on the gradient of its output, whose own backward goes through that."""
    x = x.clone().requires_grad_()
    score = discriminator(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return F.softplus(-score).mean() + gradient.square().sum(1).mean()


def plain_and_engine(stage: int) -> tuple[nn.Module, torch.optim.Optimizer, DeepSpeedEngine]:
    """A discriminator with its optimizer, and the engine of an equal one."""
    plain, ours = adversaries()[1], adversaries()[1]
    step = torch.optim.SGD(plain.parameters(), 0.5)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine = megazero.initialize(model=ours, optimizer=torch.optim.SGD(ours.parameters(), 0.5), config=config)[0]
    return plain, step, engine


def penalty_case(stage: int) -> None:
    plain, step, engine = plain_and_engine(stage)
    for _ in range(2):
        batch = torch.randn(4 * dist.get_world_size(), 5)
        step.zero_grad()
        penalized(plain, batch).backward()
        step.step()
        engine.backward(penalized(engine, batch.chunk(dist.get_world_size())[dist.get_rank()]))
        engine.step()
    torch.testing.assert_close(engine.module_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_penalty_on_gradients_trains_as_in_plain_torch(stage):
    run_ranks(2, penalty_case, stage)


class ModelEma:
    """timm's: names of a module that has a `.module` begin with it."""

    def __init__(self, model: nn.Module) -> None:
        self.ema = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model) -> None:
        prefix, state = "module." if hasattr(model, "module") else "", model.state_dict()
        for name, average in self.ema.state_dict().items():
            average.copy_(0.9 * average + 0.1 * state[prefix + name])


def average_case(stage: int) -> None:
    plain, step, engine = plain_and_engine(stage)
    averages = [ModelEma(plain), ModelEma(plain)]  # the engine's module begins with the same values
    for _ in range(3):
        batch = torch.randn(4 * dist.get_world_size(), 5)
        step.zero_grad()
        plain(batch).square().mean().backward()
        step.step()
        averages[0].update(plain)
        engine.backward(engine(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean())
        engine.step()
        averages[1].update(engine.module)
    torch.testing.assert_close(averages[1].ema.state_dict(), averages[0].ema.state_dict())
    assert list(engine.state_dict()) == [name for name, _ in engine.named_parameters()] == list(plain.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_timms_moving_average_reads_the_engines_module(stage):
    run_ranks(2, average_case, stage)


class OwnExpert(nn.Module):
    """Computes with a layer that each rank has for itself, in a list, so that the model does not have it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(4, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.own[0](torch.tanh(self.shared(x)))


def own_expert_case(stage: int) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 4), OwnExpert(), nn.Linear(4, 2))
    experts = [nn.Linear(4, 4) for _ in range(2)]
    model, own = copy.deepcopy(plain), copy.deepcopy(experts[dist.get_rank()])
    model[1].own = [own]
    sgd, *theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, own, plain, *experts))
    config = {**CONFIG, "gradient_clipping": 0, "zero_optimization": {"stage": stage}}
    engine = megazero.initialize(model=model, optimizer=sgd, config=config)[0]
    for _ in range(3):
        batches = torch.randn(2, 3, 4)
        for batch, expert in zip(batches, experts, strict=True):
            plain[1].own = [expert]
            plain(batch).square().mean().backward()
        for p in plain.parameters():
            p.grad /= 2
        engine.backward(engine(batches[dist.get_rank()]).square().mean())
        engine.step()
        for each in theirs:
            each.step()
            each.zero_grad()
    torch.testing.assert_close(engine.module_state_dict(), dict(plain.state_dict()))
    torch.testing.assert_close(own.state_dict(), experts[dist.get_rank()].state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layer_that_each_rank_has_for_itself_trains_outside_of_the_model(stage):
    run_ranks(2, own_expert_case, stage)


class Twice(nn.Module):
    """Units between parameters of the root; it returns what lies between, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)) for _ in range(2))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1)) -> tuple[Tensor, list[Tensor]]:
        between = [self.first(x)]
        for index in order:
            between.append(self.blocks[index](between[-1]))
        return self.last(between[-1].tanh()) * self.scale, between


def through_an_old_graph(model, backward, x: Tensor) -> list[Tensor]:
    """Another's gradient through a graph whose backward is over, and whose weights have been released."""
    x = x.clone().requires_grad_()
    y, (h, *_) = model(x)
    backward(y.sum(), retain_graph=True)
    return [*torch.autograd.grad(y.square().sum(), [x, h], retain_graph=True), *torch.autograd.grad(h.sum(), x)]


def penalty_before_the_loss(model, backward, x: Tensor) -> list[Tensor]:
    """As of WGAN-GP: between a penalty's graph and its backward lies another backward, and an evaluation."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    backward(model(x)[0].square().sum())
    with torch.no_grad():
        y = model(x)[0]
    backward(gradient.square().sum())
    return [gradient, y]


def after_a_backward_that_failed(model, backward, x: Tensor) -> list[Tensor]:
    y = model(x)[0].sum()
    y.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        backward(y)
    noise = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(noise)[0].sum(), noise)
    if not isinstance(model, nn.Module):  # plain torch adds it to .grad; an engine has its own backward's alone
        model.zero_grad()
        model(x)[0].sum().backward()
    backward(model(x)[0].square().sum())
    return [gradient]


def older_of_two_graphs(model, backward, x: Tensor) -> list[Tensor]:
    """Backward of a graph from before the last backward, when a unit has run since."""
    h = model(x, (0, 0))[1]
    y = model(x, (0,))[0]
    backward(y.sum(), retain_graph=True)
    z = model.blocks[0](h[2])
    backward(h[1].square().sum(), retain_graph=True)
    return [z]


def second_use_without_loss(model, backward, x: Tensor) -> list[Tensor]:
    """A unit runs first on what needs no gradient, then on its own output, of which the loss knows nothing."""
    h = model.blocks[0](x)
    model.blocks[0](h)
    backward(h.square().sum())
    return [h]


def graph_of_a_part(model, backward, x: Tensor) -> list[Tensor]:
    """Another's gradient through a part that has run alone, outside of the model, before the last backward."""
    x = x.clone().requires_grad_()
    y = model.first(x)
    backward(model(x)[0].sum())
    return list(torch.autograd.grad(y.square().sum(), x))


def parameter_read_by_the_script(model, backward, x: Tensor) -> list[Tensor]:
    """Two losses that the script computes from a parameter of the root, and then their backwards."""
    losses = [(model(x)[0] * model.scale).square().sum() for _ in range(2)]
    for loss in losses:
        backward(loss)
    return losses


def term_of_a_unit_that_does_not_run(model, backward, x: Tensor) -> list[Tensor]:
    """Its backward does not need the parameters' values, and nothing else reaches the unit."""
    parameters = list(model.blocks[1].parameters())
    loss = model(x, (0,))[0].sum()
    with megazero.zero.GatheredParameters(parameters):
        loss = loss + sum(parameter.sum() for parameter in parameters)
    backward(loss)
    return [loss]


LOOPS = [through_an_old_graph, penalty_before_the_loss, after_a_backward_that_failed, older_of_two_graphs]
LOOPS += [second_use_without_loss, graph_of_a_part, parameter_read_by_the_script, term_of_a_unit_that_does_not_run]


def loop_case(stage: int) -> None:
    size, mine = dist.get_world_size(), dist.get_rank()
    for loop in LOOPS:
        plain, ours = Twice(), Twice()
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
        engine = megazero.initialize(model=ours, optimizer=torch.optim.SGD(ours.parameters(), 0.1), config=config)[0]
        step = torch.optim.SGD(plain.parameters(), 0.1)
        for seed in range(2):
            x = torch.randn(2 * size, 5, generator=torch.Generator().manual_seed(seed)).chunk(size)[mine]
            torch.testing.assert_close(loop(engine, engine.backward, x), loop(plain, Tensor.backward, x))
            for name, parameter in plain.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
                parameter.grad = grad / size
                torch.testing.assert_close(full_grad(engine, name), parameter.grad, msg=f"{loop.__name__}, {name}")
            step.step()
            step.zero_grad()
            engine.step()
        torch.testing.assert_close(engine.module_state_dict(), dict(plain.state_dict()))
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unusual_loops_train_as_in_plain_torch(stage):
    run_ranks(2, loop_case, stage)


def old_graph_case(stage: int) -> None:
    model = Twice()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine = megazero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)[0]
    losses = [engine(torch.ones(2, 5))[0].sum() for _ in range(2)]
    engine.backward(losses[0])
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(losses[1])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_of_a_graph_from_before_the_update_fails_as_in_plain_torch(stage):
    run_ranks(2, old_graph_case, stage)


def test_transforms_of_torch_func_say_what_to_do_where_parameters_are_sharded(one_rank):
    plain, ours, x = Twice(), Twice(), torch.ones(2, 5)
    engine, *_ = megazero.initialize(model=ours, config={**CONFIG, "zero_optimization": {"stage": 3}})
    for transform in (torch.func.vmap, torch.func.jacrev):
        with pytest.raises(RuntimeError, match=r"A transform of torch.func.*Use torch.autograd"):
            transform(lambda x: engine(x)[0])(x)
        with megazero.zero.GatheredParameters(list(ours.parameters())):
            model = copy.deepcopy(ours)
        found, wanted = (transform(lambda x, m=m: m(x)[0])(x) for m in (model, plain))
        torch.testing.assert_close(found, wanted)


def test_what_another_backward_leaves_is_told_once_and_not_trained_with(one_rank, caplog):
    engine, *_ = megazero.initialize(model=nn.Linear(3, 1, bias=False), config=CONFIG)
    for _ in range(2):
        engine(torch.full((1, 3), 9.0)).sum().backward()
    engine.backward(engine(torch.ones(1, 3)).sum())
    assert torch.equal(full_grad(engine, "weight"), torch.ones(1, 3))
    assert caplog.text.count("a backward that is not this engine's") == 1 and "has reached weight" in caplog.text


def hugging_face_case(folder) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def built():
        with megazero.zero.Init():
            return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=1, n_head=2))

    def engine_of_it(model: nn.Module):
        return megazero.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": 3}})[0]

    def train_once(engine) -> None:
        ids = torch.arange(16).view(2, 8) % 11
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    model = built()
    with (
        pytest.raises(
            RuntimeError, match=r"got data of another shape.*Resize \(as resize_token_embeddings does\) before"
        ),
        megazero.zero.GatheredParameters(list(model.parameters()), modifier_rank=0),
    ):
        model.resize_token_embeddings(13)
    engine = engine_of_it(built())
    train_once(engine)
    state = engine.module_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=dict(state))  # which it takes tied names out of
    dist.barrier()
    with megazero.zero.Init():
        loaded = engine_of_it(GPT2LMHeadModel.from_pretrained(folder))
    assert all(torch.equal(value, state[name]) for name, value in loaded.module_state_dict().items())
    engine.destroy()
    engine.module.resize_token_embeddings(13)
    engine = engine_of_it(engine.module)
    train_once(engine)
    assert engine.module_state_dict()["lm_head.weight"].shape == (13, 12)


def test_a_hugging_face_model_is_saved_and_resized_as_the_documents_say(tmp_path):
    pytest.importorskip("transformers")
    run_ranks(2, hugging_face_case, tmp_path)


def adapters_case(folder) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    def engine_of(adapted):
        torch.manual_seed(5)
        with megazero.zero.Init():
            model = adapted(GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=1, n_head=2)))
        trained = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        return megazero.initialize(model=model, optimizer=trained, config=config)[0]

    lora = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    engine = engine_of(lambda model: get_peft_model(model, lora))
    before = engine.module_state_dict()
    ids = torch.arange(16).view(2, 8) % 11
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    state = engine.module_state_dict()
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    assert {name.split(".")[-2] for name in changed} == {"default"}  # of adapters and of the copy of ln_f
    with megazero.zero.GatheredParameters([p for p in engine.module.parameters() if p.requires_grad]):
        if dist.get_rank() == 0:
            engine.module.save_pretrained(folder, state_dict=dict(state))
    dist.barrier()
    loaded = engine_of(lambda model: PeftModel.from_pretrained(model, folder, is_trainable=True))
    assert all(torch.equal(value, state[name]) for name, value in loaded.module_state_dict().items())


def test_adapters_are_added_saved_and_loaded_as_the_documents_say(tmp_path):
    pytest.importorskip("peft")
    run_ranks(2, adapters_case, tmp_path)


def sharpness_case(stage: int) -> None:
    plain, step, engine = plain_and_engine(stage)
    parameters, mine = list(plain.parameters()), list(engine.module.parameters())
    for _ in range(3):
        batch = torch.randn(4 * dist.get_world_size(), 5)
        part = batch.chunk(dist.get_world_size())[dist.get_rank()]
        moves = torch.autograd.grad(plain(batch).square().mean(), parameters)
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves, alpha=0.3)
        step.zero_grad()
        plain(batch).square().mean().backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)
        step.step()

        engine.backward(engine(part).square().mean())
        moves = [safe_get_full_grad(p) for p in mine]
        engine.zero_grad()
        with torch.no_grad(), megazero.zero.GatheredParameters(mine, modifier_rank=0):
            before = [p.clone() for p in mine]
            torch._foreach_add_(mine, moves, alpha=0.3)
        engine.backward(engine(part).square().mean())
        with torch.no_grad(), megazero.zero.GatheredParameters(mine, modifier_rank=0):
            torch._foreach_copy_(mine, before)
        engine.step()
    torch.testing.assert_close(engine.module_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_at_other_weights_than_those_that_it_updates_trains_as_in_plain_torch(stage):
    run_ranks(2, sharpness_case, stage)
