"""Parameters that a module reads although another one owns them: found by the first read, or registered by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu, zero
from megazero.zero.external import external_parameters
from megazero.zero.parameter import ReleasedParameter
from tests.ranks import run_ranks
from tests.zero.models import Block, Output, Toy, call, compare, make_engine, my_batch, one_step, run, token_batches


class Reader(Block):
    """A block that uses a weight, by its shape first, and a bias of another one, which it is given."""

    other: Callable[[], Block]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.other().up.weight
        y = super().forward(x) + F.linear(F.linear(x, weight), weight.t()) / (weight.shape[0] * weight.numel())
        return y * (1 + self.other().down.bias.abs().sum())


class Reading(nn.Module):
    """Token ids -> loss; block `reader` reads two parameters of block `owner`, registered by hand or not."""

    def __init__(self, reader: int, owner: int, register: bool = False, way: str = "plain") -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList((Reader if index == reader else Block)(5) for index in range(4))
        self.way, other = way, self.blocks[owner]
        self.blocks[reader].other = lambda: other
        for parameter in (other.up.weight, other.down.bias) if register else ():
            zero.register_external_parameter(self.blocks[reader], parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = call(self.way, block, x)
        return x.square().mean()


def reading_case(reader: int, owner: int) -> None:
    mpu.initialize_model_parallel(1)
    for way in ("plain", "ours", "reentrant", "non-reentrant"):
        models: list[Reading] = []

        def build(models: list[Reading] = models, way: str = way, register: bool = False) -> Reading:
            models.append(Reading(reader, owner, register, way))
            return models[-1]

        want, got, by_hand = run(build, 0), run(build, 3), run(lambda build=build: build(register=True), 3)
        compare(got, want, way, bitwise=True)
        compare(by_hand, want, f"{way}, by hand", bitwise=True)
        found = {name: external_parameters(module) for name, module in models[1].named_modules()}
        assert [name for name, parameters in found.items() if parameters] == [f"blocks.{reader}"], way
        (weight,) = found[f"blocks.{reader}"]  # its whole unit is gathered, and so the bias is there
        assert weight is models[1].blocks[owner].up.weight, way


@pytest.mark.parametrize(("reader", "owner"), [(1, 0), (1, 2), (0, 3)])
def test_a_parameter_of_another_unit_is_found_where_it_is_read_and_weights_equal_stage_0_bit_for_bit(reader, owner):
    run_ranks(2, reading_case, reader, owner)


class Dangling(Block):
    """Returns its last bias instead of adding it (Megatron's skip_bias_add), and its norm's scale for several rows."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), {"bias": self.down.bias, "scales": [self.norm.weight.expand(2, 5)]}


class Container(Toy):
    """Uses the parameters that its blocks return, and returns one."""

    def __init__(self) -> None:
        super().__init__(block=Dangling)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x, own = block(x)
            x = x * own["scales"][0][1] + own["bias"]
        return (self.norm(x) @ self.embedding.weight.t()).square().mean()


def returned_case() -> None:
    mpu.initialize_model_parallel(1)
    compare(run(Container, 3), run(Container, 0), "returned", bitwise=True)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_and_views_of_them_that_units_return_get_the_gradients_of_stage_0_bit_for_bit(world):
    run_ranks(world, returned_case)


class Wrapping(Block):
    def forward(self, x: Tensor) -> Output:
        return Output(x, self.norm.weight.expand(2, 5))


def wrapped_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(nn.Sequential(Wrapping(), Block()), 3)
    with pytest.raises(RuntimeError, match=r"Unit '0' returns a parameter, or a view of one \(shape \(2, 5\)\).*clone"):
        engine(torch.ones(1, 5))


def test_a_view_within_an_object_is_refused_instead_of_crashing():
    run_ranks(1, wrapped_case)


class Viewing(Reading):
    """Returns a view of one block's weight, which it reads in several ways."""

    def __init__(self) -> None:
        super().__init__(1, 0)

    def forward(self, tokens: Tensor) -> Any:
        with zero.GatheredParameters(self.blocks[2].up.weight):
            penalty = self.blocks[2].up.weight.square().sum()
        return super().forward(tokens) + penalty, {"weight": self.blocks[3].up.weight.t()}


class Penalised(Viewing):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[0]


def viewing_case() -> None:
    mpu.initialize_model_parallel(1)
    compare(run(Penalised, 3), run(Penalised, 0), "penalised", bitwise=True)
    model = Viewing()
    want = model.blocks[3].up.weight.t().clone()
    with torch.no_grad():
        _, own = make_engine(model, 3)(token_batches(1, 1, 2)[0, 0, 0])
    assert torch.equal(own["weight"], want)


def test_reading_within_gathered_parameters_and_returning_from_the_model_what_a_unit_owns():
    run_ranks(2, viewing_case)


def root_case() -> None:
    mpu.initialize_model_parallel(1)
    model = Toy()
    engine = make_engine(model, 3)
    weight = model.embedding.weight
    zero.register_external_parameter(model.blocks[1], weight)
    seen: list[bool] = []
    model.blocks[2].register_forward_hook(lambda *_: seen.append(not isinstance(weight, ReleasedParameter)))
    one_step(engine, my_batch())
    assert seen == [True]


def test_the_root_stays_whole_where_a_unit_reads_it():
    run_ranks(2, root_case)


def outside_case() -> None:
    mpu.initialize_model_parallel(1)
    model = Reading(1, 0)
    engine = make_engine(model, 3)
    tokens = my_batch()
    bias = model.blocks[0].down.bias

    def refused(action: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError, match=r"blocks.\d.(down|norm).bias' is sharded"):
            action()

    refused(lambda: bias + 1)
    with torch.no_grad():
        engine(tokens)
        assert isinstance(bias, ReleasedParameter), "no backward comes to release it"
    one_step(engine, tokens)
    refused(lambda: bias + 1)

    def fail(_: object) -> None:
        raise KeyError("of the user")

    model.blocks[1].up.forward = fail
    with pytest.raises(KeyError, match="of the user"):
        engine(tokens)
    refused(lambda: model.blocks[3].norm.bias + 1)
    for write in (lambda _: model.blocks[3].norm.bias.zero_(), lambda _: model.blocks[3].norm.bias.data):
        model.blocks[1].up.forward = write
        with torch.no_grad():
            refused(lambda: engine(tokens))


def test_outside_of_a_forward_it_is_refused_and_so_is_writing_inside_of_one():
    run_ranks(2, outside_case)


def by_hand_case() -> None:
    mpu.initialize_model_parallel(1)
    model = Reading(1, 0)
    engine = make_engine(model, 3)
    tokens = my_batch()
    zero.register_external_parameter(model.blocks[1], model.blocks[0].down.bias)
    one_step(engine, tokens)
    for function in (zero.register_external_parameter, zero.unregister_external_parameter):
        with pytest.raises(RuntimeError, match="takes a module and a parameter"):
            function(model, torch.ones(2))
    zero.unregister_external_parameter(model.blocks[1], model.blocks[0].down.bias)
    with pytest.raises(RuntimeError, match="not registered"):
        zero.unregister_external_parameter(model.blocks[1], model.blocks[0].down.bias)


def test_registering_by_hand_after_the_engine_is_made():
    run_ranks(2, by_hand_case)
