"""New weights that travel while the next forward goes on: the same bits, waited for where they are read and no earlier."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero import mpu, utils, zero
from megazero.comm import Work
from megazero.engine import Engine
from megazero.zero.config import ZeroConfig
from megazero.zero.parameter import ArrivingParameter
from tests.ranks import run_ranks
from tests.zero.models import MODELS, STEPS, Toy, compare, full_grad, make_engine, one_step, token_batches, train
from tests.zero.test_external import Reading
from tests.zero.test_traffic import own_count

ON = {"overlap_param_gather": True}


class HeldGather:
    """A gather that begins when it is waited for, so that whoever reads before finds what was there."""

    def __init__(self, start: Callable[[], Work], name: str, log: list[str]) -> None:
        self.start, self.name, self.log = start, name, log
        self.work: Work | None = None

    def wait(self) -> None:
        if self.work is None:
            self.log.append(f"{self.name} arrives")
            self.work = self.start()
        self.work.wait()


def hold_gathers(engine: Engine) -> list[str]:
    """Has every gather of the engine wait for its reader; returns the log of their starts and arrivals."""
    log: list[str] = []
    gather = engine.channel.all_gather_

    def held(buffer: Tensor, name: str = "") -> Work:
        log.append(f"{name} starts")
        return HeldGather(lambda: gather(buffer, name), name, log)

    engine.channel.all_gather_ = held
    return log


def fresh(make: Callable[[], nn.Module], stage: int, is_on: bool, **options: Any) -> Engine:
    """An engine of the same weights; with the setting on its gathers are held."""
    torch.manual_seed(0)
    settings = {**options.pop("zero", {}), **(ON if is_on else {})}
    engine = make_engine(make(), stage, zero=settings, **options)
    if is_on:
        hold_gathers(engine)
    return engine


def my_batches(steps: int) -> list[Tensor]:
    batches = token_batches(steps, 1, mpu.get_data_parallel_world_size())
    return [step[0, mpu.get_data_parallel_rank()] for step in batches]


def parity_case(names: list[str], options: dict, model_parallel_size: int = 1) -> None:
    mpu.initialize_model_parallel(model_parallel_size)
    mpu.model_parallel_cuda_manual_seed(1)
    micro = options.pop("micro", 1)
    batches = token_batches(STEPS, micro, mpu.get_data_parallel_world_size())
    for name in names:
        for stage in (1, 2):
            traces = []
            for is_on in (False, True):
                engine = fresh(MODELS[name], stage, is_on, gradient_accumulation_steps=micro, **options)
                traces.append(dict(train(engine, batches)))
                engine.destroy()
            compare(traces[1], traces[0], f"{name}, stage {stage}", bitwise=True)


FEW = ["tied head, unused parameter", "our checkpointing", "block used twice, reentrant", "frozen layers"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_gradients_and_weights_are_those_without_it_bit_for_bit(world_size):
    run_ranks(world_size, parity_case, list(MODELS) if world_size == 2 else FEW, {"clip_grad": 0.5})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "zero": {"grad_dtype": "compute"}, "micro": 3},
        {"optimizer": "adamw, not fused", "micro": 2},
        {"optimizer": "CPUAdam", "dtype": torch.bfloat16, "zero": {"offload_optimizer": "cpu", "sub_group_size": 64}},
    ],
    ids=["bf16", "fp16, accumulated", "not fused, accumulated", "offloaded"],
)
def test_that_holds_in_every_dtype_with_accumulation_and_offload(options):
    run_ranks(2, parity_case, ["tied head, unused parameter", "frozen layers"], {"clip_grad": 0.5, **options})


def without_units_case() -> None:
    mpu.initialize_model_parallel(1)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(mpu.get_data_parallel_rank()))
    for stage in (1, 2):
        weights = []
        for is_on in (False, True):
            engine = fresh(lambda: nn.Linear(4, 4), stage, is_on)
            for _ in range(3):
                engine.backward(engine(x).square().mean())
                engine.step()
            weights.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
            engine.destroy()
        compare(weights[1], weights[0], f"stage {stage}", bitwise=True)


def test_that_holds_for_a_model_without_units():
    run_ranks(2, without_units_case)


def test_that_holds_on_nvme(tmp_path):
    nvme = {"offload_optimizer": "nvme", "nvme_path": str(tmp_path), "sub_group_size": 64}
    run_ranks(2, parity_case, ["our checkpointing"], {"dtype": torch.bfloat16, "zero": nvme})


def test_that_holds_in_sets_of_ranks_and_beside_tensor_parallelism():
    run_ranks(4, parity_case, ["tied head, unused parameter"], {"zero": {"shard_size": 2}})
    run_ranks(4, parity_case, ["tied head, unused parameter"], {"dtype": torch.bfloat16}, 2)


def order_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage, is_on in ((1, True), (2, True), (2, False)):
        torch.manual_seed(0)
        engine = make_engine(Toy(), stage, zero=ON if is_on else {})
        log = hold_gathers(engine)
        for index, block in enumerate(engine.module.blocks):
            block.norm.register_forward_pre_hook(lambda *_, i=index, log=log: log.append(f"block {i} runs"))
            block.down.register_forward_hook(lambda *_, i=index, log=log: log.append(f"block {i} has run"))
        batches = my_batches(2)
        one_step(engine, batches[0])
        log.append("step() has returned")
        one_step(engine, batches[1])
        names, blocks = ["root", "blocks.0", "blocks.1", "blocks.2"], range(3)
        starts, arrivals = [f"{name} starts" for name in names], [f"{name} arrives" for name in names]
        forward = [event for i in blocks for event in (f"block {i} runs", f"block {i} has run")]
        waiting = [e for i in blocks for e in (f"blocks.{i} arrives", f"block {i} runs", f"block {i} has run")]
        if is_on:
            want = [*forward, *starts, "step() has returned", "root arrives", *waiting, *starts]
        else:
            update = [*starts[::-1], *arrivals[::-1]]
            want = [*forward, *update, "step() has returned", *forward, *update]
        assert log == want
        engine.destroy()


def test_gathers_are_under_way_when_step_returns_and_each_unit_waits_right_before_its_forward():
    run_ranks(2, order_case)


def traffic_case() -> None:
    mpu.initialize_model_parallel(1)
    for stage in (1, 2):
        counts = []
        for is_on in (False, True):
            engine = make_engine(Toy(), stage, zero=ON if is_on else {})
            for batch in my_batches(3):
                one_step(engine, batch)
            engine.optimizer.finish()
            counts.append(own_count(engine))
            engine.destroy()
        assert counts[0] == counts[1] and counts[1]["all_gather"][1] > 0


def test_what_is_sent_does_not_change():
    run_ranks(3, traffic_case)


# What else reads weights: everybody gets the new ones.


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def row(engine: Engine) -> Tensor:
    return torch.ones(1, 5, dtype=engine.module.blocks[1].up.weight.dtype)


def evaluated(engine: Engine) -> Tensor:
    with torch.no_grad():
        return engine.module(my_batches(1)[0])


def called_past_its_hooks(engine: Engine) -> Tensor:
    return engine.module.blocks[1].forward(row(engine))


def written(engine: Engine) -> Tensor:
    with torch.no_grad():
        engine.module.blocks[1].up.weight.mul_(0.5)
    one_step(engine, my_batches(1)[0])
    return engine.module.blocks[1].up.weight


def written_by_modifier(engine: Engine) -> Tensor:
    weight = engine.module.blocks[1].up.weight
    with zero.GatheredParameters(weight, modifier_rank=0):
        weight.data[0] = 3.0
    one_step(engine, my_batches(1)[0])
    return weight


def set_by_access(engine: Engine) -> Tensor:
    weight = engine.module.blocks[1].up.weight
    utils.safe_set_full_fp32_param(weight, utils.safe_get_full_fp32_param(weight) + 1)
    one_step(engine, my_batches(1)[0])
    return weight


def unfrozen(engine: Engine) -> Tensor:
    engine.module.blocks[2].down.bias.requires_grad_(False)
    one_step(engine, my_batches(1)[0])
    engine.module.blocks[2].down.bias.requires_grad_(True)
    one_step(engine, my_batches(1)[0])
    return engine.module.blocks[2].down.bias


def a_part_alone(engine: Engine) -> Tensor:
    """The other units run in no forward between two steps."""
    engine.backward(engine.module.blocks[1](engine.module.embedding(my_batches(1)[0])).square().mean())
    engine.step()
    return engine(my_batches(1)[0])


def after_an_error(engine: Engine) -> Tensor:
    handle = engine.module.blocks[1].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine(my_batches(1)[0])
    handle.remove()
    return one_step(engine, my_batches(1)[0])


def an_old_graph(engine: Engine) -> Tensor:
    """Its gradients would be of the new weights, so that it is refused, as without the setting; a new one is not."""
    loss = engine(my_batches(1)[0])
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)
    engine.zero_grad()
    engine.backward(engine(my_batches(1)[0]))
    return full_grad(engine, "blocks.0.up.weight")


READERS: dict[str, Callable[[Engine], Any]] = {
    "detach": lambda e: e.module.blocks[1].up.weight.detach(),
    "data": lambda e: e.module.blocks[1].up.weight.data,
    "a list of parameters": lambda e: torch.cat([p.reshape(-1) for p in e.module.blocks[1].parameters()]),
    "foreach": lambda e: torch._foreach_norm([*e.module.parameters()]),
    "numbers": lambda e: torch.tensor(e.module.blocks[1].up.weight.tolist()),
    "nested": lambda e: torch.einsum("ij,kj->ik", [e.module.blocks[1].up.weight] * 2),
    "the module's state": lambda e: e.module.state_dict()["blocks.1.up.weight"],
    "the engine's state": lambda e: e.state_dict()["blocks.1.up.weight"],
    "a copy of the model": lambda e: copy.deepcopy(e.module)(my_batches(1)[0]),
    "a copy of a parameter": lambda e: copy.deepcopy(e.module.blocks[1].up.weight),
    "a pickled model": lambda e: saved(e.module.blocks)[1].up.weight,
    "the master weights": lambda e: utils.safe_get_full_fp32_param(e.module.blocks[1].up.weight),
    "the model without gradients": evaluated,
    "a forward without hooks": called_past_its_hooks,
    "a compiled function": lambda e: torch.compile(F.linear, backend="eager")(row(e), e.module.blocks[1].up.weight),
    "functional_call": lambda e: torch.func.functional_call(
        e.module, dict(e.module.named_parameters()), (my_batches(1)[0],)
    ),
    "written in place": written,
    "GatheredParameters": written_by_modifier,
    "safe_set": set_by_access,
    "unfreezing": unfrozen,
    "a part alone": a_part_alone,
    "an error in the forward": after_an_error,
    "an old graph": an_old_graph,
    "destroy": lambda e: (e.destroy(), e.module(my_batches(1)[0]))[1],
}


def readers_case(stage: int, dtype: torch.dtype | None) -> None:
    mpu.initialize_model_parallel(1)
    for what, read in READERS.items():
        found = []
        for is_on in (False, True):
            engine = fresh(Toy, stage, is_on, dtype=dtype)
            one_step(engine, my_batches(1)[0])
            is_arriving = [isinstance(p, ArrivingParameter) for p in engine.module.parameters()]
            assert all(is_arriving) if is_on else not any(is_arriving)
            value = read(engine)
            found.append(
                [tensor.detach().clone() for tensor in (value if isinstance(value, list | tuple) else [value])]
            )
            if what != "destroy":
                found[-1].append(one_step(engine, my_batches(1)[0]))
                engine.destroy()
            assert not any(isinstance(p, ArrivingParameter) for p in engine.module.parameters())
        assert len(found[0]) == len(found[1])
        assert all(torch.equal(off, on) for off, on in zip(*found, strict=True)), f"{what}, stage {stage}"


@pytest.mark.parametrize(("stage", "dtype"), [(1, None), (2, torch.bfloat16)])
def test_whatever_reads_or_writes_a_parameter_finds_the_new_values(stage, dtype):
    run_ranks(2, readers_case, stage, dtype)


def external_case() -> None:
    mpu.initialize_model_parallel(1)
    for reader, owner in ((0, 3), (2, 0)):
        traces = []
        for is_on in (False, True):
            engine = fresh(lambda r=reader, o=owner: Reading(r, o), 2, is_on)
            traces.append(dict(train(engine, token_batches(3, 1, 2))))
            engine.destroy()
        compare(traces[1], traces[0], f"unit {reader} reads unit {owner}", bitwise=True)


def test_a_unit_that_reads_a_parameter_of_a_later_one_finds_the_new_values():
    run_ranks(2, external_case)


def questions_case() -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(Toy(), 2, zero=ON)
    log = hold_gathers(engine)
    one_step(engine, my_batches(1)[0])
    log.clear()
    for name, parameter in engine.module.named_parameters():
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.grad is None, name
        assert (parameter.dtype, parameter.ndim, parameter.numel()) == (
            torch.float32,
            len(parameter.shape),
            parameter.shape.numel(),
        )
    assert not log
    assert "ArrivingParameter" not in repr(engine.module.blocks[2].down.bias)
    assert log == ["blocks.2 arrives"]
    engine.optimizer.finish()  # as who has kept memory from before the step has to
    assert sorted(log) == ["blocks.0 arrives", "blocks.1 arrives", "blocks.2 arrives", "root arrives"]
    engine.destroy()


def test_questions_about_a_parameter_do_not_wait_for_it():
    run_ranks(2, questions_case)


def between_steps_case(folder: str) -> None:
    """Saving and evaluating between steps, and what is resumed."""
    mpu.initialize_model_parallel(1)
    batches = my_batches(4)
    results = []
    for is_on in (False, True):
        directory = f"{folder}/{is_on}"
        first = fresh(Toy, 2, is_on, dtype=torch.bfloat16)
        found = []
        for batch in batches[:2]:
            found.append(one_step(first, batch))
            first.save_checkpoint(directory)
            first.eval()
            with torch.no_grad():
                found.append(first(batches[3]))
            first.train()
        first.destroy()
        second = fresh(Toy, 1, is_on, dtype=torch.bfloat16)
        one_step(second, batches[3])  # what it loads takes the place of weights that are under way
        second.load_checkpoint(directory)
        found += [one_step(second, batch) for batch in batches[2:]]
        found += [value.float() for value in second.state_dict().values()]
        results.append(found)
        second.destroy()
    assert all(torch.equal(off, on) for off, on in zip(*results, strict=True))


def test_saving_evaluating_and_resuming_between_steps(tmp_path):
    run_ranks(2, between_steps_case, str(tmp_path))


def failure_case(folder: str) -> None:
    mpu.initialize_model_parallel(1)
    engine = make_engine(Toy(), 1, zero=ON)
    gather = engine.channel.all_gather_

    class Failing:
        def wait(self) -> None:
            raise RuntimeError("the link is down")

    engine.channel.all_gather_ = lambda buffer, name="": Failing() if name == "blocks.1" else gather(buffer, name)
    batch = my_batches(1)[0]
    one_step(engine, batch)
    for _ in range(2):  # also when it is asked again
        with pytest.raises(
            RuntimeError, match=r"step 2, unit 'blocks.1': waiting for its parameters failed.* .the link is down"
        ):
            engine(batch)
    with pytest.raises(RuntimeError, match="the link is down"):
        engine.save_checkpoint(folder)
    with pytest.raises(RuntimeError, match="the link is down"):
        engine.module.blocks[1].up.weight.sum()


def test_weights_that_do_not_come_are_an_error_for_all_who_want_them(tmp_path):
    run_ranks(2, failure_case, str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"stage": 0}, "for --zero-stage 1 and 2, got 0, where every rank updates all weights"),
        ({"stage": 3}, "for --zero-stage 1 and 2, got 3, where units are always gathered ahead"),
        ({"stage": 2, "offload_optimizer": "cpu", "delayed_param_update": 4}, "--delayed-param-update 4 exclude each"),
    ],
)
def test_where_nothing_is_gathered_after_an_update_it_is_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        ZeroConfig(**settings, **ON)
