"""A run of FSDP2 that torch.distributed.checkpoint has saved goes on in the engine as it would have gone on in FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import megazero
from megazero.checkpoint.__main__ import main
from megazero.checkpoint.importers.dcp import read_dcp
from tests.checkpoint.importers.test_real_deepspeed import Net
from tests.checkpoint.importers.torch_dist_files import write_torch_dist
from tests.ranks import run_ranks
from tests.zero.models import one_step

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train_in_fsdp(folder: str) -> dict[str, Any]:
    """Three steps, which are saved in each way that torch has, and two more, whose losses and weights are returned."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one = fully_shard(torch.nn.Linear(1, 1, bias=False), mesh=mesh)
    one(torch.ones(1)).backward()
    summed = one.weight.grad.full_tensor().item()  # on gloo torch 2.8 adds the ranks' gradients, and later ones average
    torch.manual_seed(1)
    model = fully_shard(Net(), mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **SETTINGS)
    losses = []
    for step in range(5):
        if step == 3:
            weights, states = get_state_dict(model, optimizer)
            flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
            save = {
                "named": {"app": {"model": weights, "optim": states}, "step": 3, "ema": {"gain": torch.ones(1)}},
                "flat": {**weights, "optimizer": flat},
                "numbered": {"model": weights, "optimizer": optimizer.state_dict()},
                "apart/pytorch_model_fsdp_0": {"model": weights},
                "apart/optimizer_0": {"optimizer": states},
            }
            for name, state in save.items():
                dcp.save(state, checkpoint_id=f"{folder}/{name}")
        loss = model(tokens(step))
        (loss / summed).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"losses": losses[3:], "weights": {name: value.tolist() for name, value in full.items()}}


def go_on_in_engine(folder: str, stage: int, with_optimizer: bool) -> dict[str, Any]:
    torch.manual_seed(2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": SETTINGS},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = megazero.initialize(model=Net(), config=config)
    engine.load_checkpoint(folder, load_optimizer_states=with_optimizer)
    losses = [one_step(engine, tokens(step)).item() for step in (3, 4)]
    weights = {name: value.tolist() for name, value in engine.module_state_dict().items()}
    return {"losses": losses, "weights": weights, "steps": engine.global_steps}


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    first, _ = run_ranks(2, train_in_fsdp, str(folder))
    return folder, first


@pytest.mark.parametrize(("form", "stage"), [("named", 0), ("named", 3), ("flat", 2), ("apart", 1)])
def test_a_run_of_fsdp2_goes_on_to_round_off(fsdp, tmp_path, form, stage):
    folder, want = fsdp
    assert main(["import", "--from", "dcp", str(folder / form), str(tmp_path)]) == 0
    got, _ = run_ranks(2, go_on_in_engine, str(tmp_path), stage, True)
    assert got["steps"] == 5
    assert_close(got["losses"], want["losses"])
    assert_close(got["weights"], want["weights"])


@pytest.mark.parametrize("form", ["numbered", "apart/pytorch_model_fsdp_0"])
def test_weights_alone_are_imported_where_states_have_no_names(fsdp, tmp_path, caplog, form):
    folder, want = fsdp
    assert main(["import", "--from", "dcp", str(folder / form), str(tmp_path)]) == 0
    assert ("get_optimizer_state_dict" in caplog.text) == (form == "numbered")
    got, _ = run_ranks(2, go_on_in_engine, str(tmp_path), 3, False)
    assert_close(got["losses"][0], want["losses"][0])
    assert abs(got["losses"][1] - want["losses"][1]) > 1e-4  # its moments are other ones


def test_what_has_no_states_is_frozen_a_buffer_or_another_name(fsdp, caplog):
    folder, _ = fsdp
    found = read_dcp(folder / "named")
    kinds = {name: tensor.kind for name, tensor in found.tensors.items() if tensor.kind != "trained"}
    assert kinds == {"frozen.weight": "frozen", "frozen.bias": "frozen", "scale": "frozen", "count": "buffer"}
    assert found.aliases == {"head.weight": "embed.weight"} and found.optimizer_counters == {"step": 3.0}
    assert found.optimizer_type == "AdamW"
    assert "left out, as they are not in the model 'app.model.': ema.gain" in caplog.text


ADAM = ("exp_avg", "exp_avg_sq")


def saved(folder: Path, states: dict[str, Any], step: float = 2.0, others: tuple[str, ...] = ()) -> Path:
    """A folder with the weights a and b, and these states of theirs, behind other tensors."""
    weights = {f"model.{name}": (torch.randn(3, 2), {}) for name in "ab"}
    steps = {f"optim.state.{name}.step": (torch.tensor(s), {}) for name, s in zip("ab", (2.0, step), strict=True)}
    moments = {f"optim.state.{name}": (torch.randn(shape), {}) for name, shape in states.items()}
    rest = {name: (torch.randn(3, 2), {}) for name in others}
    write_torch_dist(folder, {**rest, **weights, **steps, **moments}, {})
    return folder


@pytest.mark.parametrize(
    ("states", "step", "message"),
    [
        ({f"{name}.{key}": (3, 2) for name in "ab" for key in ADAM}, 4.0, "between 2 and 4 steps"),
        ({"a.exp_avg": (3, 2), "b.row": (3,)}, 2.0, "row of b has not the parameter's shape"),
    ],
)
def test_states_that_no_checkpoint_can_hold_are_left_out_with_the_reason(tmp_path, caplog, states, step, message):
    found = read_dcp(saved(tmp_path, states, step))
    assert found.optimizer_counters is None and {tensor.kind for tensor in found.tensors.values()} == {"frozen"}
    assert "weights only" in caplog.text and message in caplog.text


def test_states_of_an_unknown_optimizer_are_kept_and_told(tmp_path, caplog):
    found = read_dcp(saved(tmp_path, {"a.exp_avg": (3, 2), "b.exp_avg": (3, 2)}))
    assert found.optimizer_type is None and "does not say which optimizer has the states exp_avg" in caplog.text


@pytest.mark.parametrize("optimizer", ["optim", "optimizer", "app.optimizer_0"])
def test_states_without_a_step_are_kept(tmp_path, optimizer):
    names = "a", f"{optimizer}.state.a.momentum_buffer"
    momentum = {name: (torch.randn(3), {}) for name in names}
    write_torch_dist(tmp_path, momentum, {})
    found = read_dcp(tmp_path)
    assert found.optimizer_counters == {} and found.tensors["a"].kind == "trained"


def test_the_model_is_the_one_with_all_that_have_states(tmp_path, caplog):
    states = {f"{name}.{key}": (3, 2) for name in "ab" for key in ADAM}
    found = read_dcp(saved(tmp_path, states, others=("ema.a", "other.b", "optim.param_groups.a.lr")))
    assert found.tensors.keys() == {"a", "b"} and {tensor.kind for tensor in found.tensors.values()} == {"trained"}
    assert "left out, as they are not in the model 'model.': ema.a, other.b\n" in caplog.text


@pytest.mark.parametrize(
    ("names", "own"), [(("app.model.a", "app.model.b"), {"a", "b"}), (("model.a", "b"), {"model.a", "b"})]
)
def test_weights_alone_lose_what_precedes_all_of_them(tmp_path, caplog, names, own):
    values = torch.zeros(3, 2), torch.zeros(3, 2).T  # no further name of the first: it has another shape
    write_torch_dist(tmp_path, {name: (value, {}) for name, value in zip(names, values, strict=True)}, {})
    found = read_dcp(tmp_path)
    assert found.tensors.keys() == own and found.optimizer_type is None and not caplog.text


def test_states_without_their_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has states of the optimizer for other\.c and others, and no weights"):
        read_dcp(saved(tmp_path, {"other.c.exp_avg": (3, 2)}))


def test_a_folder_of_several_checkpoints_is_refused(tmp_path):
    for step in (10, 20):
        saved(tmp_path / f"step-{step}", {})
    with pytest.raises(
        ValueError, match=r"holds several checkpoints with a model\.a: step-10, step-20. Give one of them"
    ):
        read_dcp(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    assert main(["import", "--from", "dcp", str(tmp_path), str(tmp_path / "out")]) == 2
    assert f"{tmp_path} has neither .metadata nor" in capsys.readouterr().err
    write_torch_dist(tmp_path, {}, {"app": {"model": {}}})
    assert main(["import", "--from", "dcp", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds no tensor of a model" in capsys.readouterr().err
    assert main(["import", "--from", "dcp", "--tag", "x", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "--tag: a directory of dcp holds one model" in capsys.readouterr().err
