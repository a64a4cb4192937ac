"""DeepSpeed's checkpoints give the parameters, moments and counters that were saved, bit for bit, whatever cut them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megazero.checkpoint.importers.deepspeed import read_deepspeed
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor, write_foreign
from megazero.checkpoint.importers.megatron_cuts import merge_model_parallel
from megazero.checkpoint.importers.torch_files import Record, load_torch_file
from megazero.optim.loss_scaler import LossScaler
from tests.checkpoint.importers import deepspeed_checkpoints
from tests.checkpoint.importers.deepspeed_checkpoints import (
    Saved,
    make_universal,
    small_model,
    states_of,
    values,
    write_checkpoint,
)

CUTS = [(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3, 4)]


def assert_holds(checkpoint: ForeignCheckpoint, saved: Saved) -> None:
    constants = {name: {"constant": value} for name, value in (saved.frozen | saved.buffers).items()}
    assert_close(values(checkpoint), saved.trained | constants, rtol=0, atol=0)
    for kind, names in (("trained", saved.trained), ("frozen", saved.frozen), ("buffer", saved.buffers)):
        assert {name for name, tensor in checkpoint.tensors.items() if tensor.kind == kind} == set(names)
    assert all(read().shape == t.shape for t in checkpoint.tensors.values() for read in t.states.values())
    assert checkpoint.aliases == saved.shared
    assert checkpoint.optimizer_counters == {"step": saved.steps}


@pytest.mark.parametrize(("stage", "world"), CUTS)
def test_every_cut_gives_what_was_saved(tmp_path, stage, world):
    saved = small_model()
    write_checkpoint(tmp_path, saved, stage, world)
    checkpoint = read_deepspeed(tmp_path)
    assert_holds(checkpoint, saved)
    assert (checkpoint.global_steps, checkpoint.skipped_steps, checkpoint.global_samples) == (4, 1, 8)
    assert checkpoint.optimizer_type == "AdamW" and checkpoint.lr_scheduler == {"last_batch_iteration": 3}
    assert [group["betas"] for group in checkpoint.optimizer_groups] == [(0.9, 0.95)] * 2


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options", [{"elastic": True}, {"gaps": True}, {"prefix": "bf16_"}, {"elastic": True, "gaps": True}]
)
def test_other_forms_of_stages_1_and_2(tmp_path, world, options):
    saved = small_model()
    write_checkpoint(tmp_path, saved, 2, world, **options)
    checkpoint = read_deepspeed(tmp_path)
    assert_holds(checkpoint, saved)
    assert (checkpoint.optimizer_groups is None) == options.get("elastic", False)


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 1), (3, 2)])
def test_a_universal_checkpoint_is_read_as_the_one_that_it_was_made_of(tmp_path, stage, world):
    saved = small_model()
    write_checkpoint(tmp_path, saved, stage, world)
    original = read_deepspeed(tmp_path)
    make_universal(tmp_path, saved, stage)
    checkpoint = read_deepspeed(tmp_path)
    assert_holds(checkpoint, saved)
    assert replace(checkpoint, tensors={}, client_state={}) == replace(original, tensors={}, client_state={})


@pytest.mark.parametrize("stage", [1, 3])
def test_of_a_universal_checkpoint_parameters_without_moments_have_their_weights(tmp_path, stage):
    saved = small_model()
    write_checkpoint(tmp_path, saved, stage, 2)
    make_universal(tmp_path, saved, stage)
    for path in (tmp_path / "global_step3" / "zero" / "gain").glob("*.pt"):
        if path.name != "fp32.pt":  # it has never had a gradient
            path.unlink()
    checkpoint = read_deepspeed(tmp_path)
    assert list(checkpoint.tensors["gain"].states) == ["master"]
    assert checkpoint.optimizer_counters == {"step": saved.steps}
    write_foreign(checkpoint, tmp_path / "out")


def test_a_universal_checkpoint_that_does_not_fit_together_is_refused(tmp_path):
    saved = small_model()
    write_checkpoint(tmp_path, saved, 2, 2)
    make_universal(tmp_path, saved, 2)
    weights = tmp_path / "global_step3" / "zero" / "embed.weight" / "fp32.pt"
    torch.save({"param": torch.rand(10, 5), "vocab_tensor": True}, weights)
    with pytest.raises(ValueError, match=r"embed.weight/fp32.pt has 50 elements where the model file says \[11, 5\]"):
        values(read_deepspeed(tmp_path))
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"embed.weight/fp32.pt"):
        values(read_deepspeed(tmp_path))
    write_checkpoint(tmp_path, saved, 2, 2, mp_rank=1, mp_world=2)
    with pytest.raises(ValueError, match="a universal checkpoint of 2 model-parallel ranks, which cannot be imported"):
        read_deepspeed(tmp_path)


def test_user_state_is_plain_data(tmp_path):
    write_checkpoint(tmp_path, small_model(), 1, 2)
    client = read_deepspeed(tmp_path).client_state
    assert set(client) == {"iteration", "args", "numpy_rng", "best", "torch_rng"}
    assert client["args"] == {"lr": 0.1, "folder": "data/text", "dtype": "torch.float16", "sizes": [1, 2]}
    assert np.array_equal(client["numpy_rng"][1], np.random.RandomState(1).get_state()[1])
    assert client["iteration"] == 30 and client["best"] == 0.5 and client["torch_rng"].dtype == torch.uint8


def test_a_dynamic_loss_scale_doubles_at_the_same_step_as_in_deepspeed(tmp_path):
    write_checkpoint(tmp_path, small_model(), 2, 1)
    state = read_deepspeed(tmp_path).loss_scaler
    scaler = LossScaler(dynamic=True, window=10)
    scaler.load_state_dict(state)
    cur_iter, last_overflow_iter, window, scale = 9, 4, 10, 4096.0  # what is in the file; the window is shorter
    assert state == {"scale": 4096.0, "hysteresis_left": 1, "clean_steps": 3}
    for _ in range(25):
        stable = cur_iter - last_overflow_iter - 1  # DeepSpeed's rule
        scale *= 2 if stable > 0 and stable % window == 0 else 1
        cur_iter += 1
        scaler.update(False)
        assert scaler.scale == scale
    path = tmp_path / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    edit(path, lambda content: vars(content["optimizer_state_dict"]["loss_scaler"]).pop("cur_iter"))
    assert read_deepspeed(tmp_path).loss_scaler is None
    write_checkpoint(tmp_path, small_model(), 2, 1, dynamic=False)
    assert read_deepspeed(tmp_path).loss_scaler is None


def test_a_tag_can_be_named_and_values_are_copies(tmp_path):
    saved, later = small_model(), small_model()
    write_checkpoint(tmp_path, saved, 1, 2, tag="early")
    later.steps = 5
    write_checkpoint(tmp_path, later, 3, 2, tag="late")
    assert_holds(read_deepspeed(tmp_path, "early"), saved)
    checkpoint = read_deepspeed(tmp_path)
    for _ in range(2):
        assert_holds(checkpoint, later)
        for tensor in checkpoint.tensors.values():
            for read in tensor.states.values():
                read().zero_()


def edit(path: Path, change) -> None:
    """Changes a file; records in it become dicts."""
    content = load_torch_file(path)
    change(content)
    torch.save(_without_records(content), path.with_suffix(".new"))  # the old file is mapped into memory
    path.with_suffix(".new").replace(path)


def _without_records(value):
    if isinstance(value, Record):
        return _without_records(vars(value))
    if isinstance(value, dict):
        return {key: _without_records(item) for key, item in value.items()}
    return [_without_records(item) for item in value] if type(value) is list else value


def test_older_model_files_are_read(tmp_path):
    """One dict of shapes, no list of shared parameters: those are seen from the storage."""
    saved = Saved(
        groups=[{"embed.weight": states_of(5, 3), "bias": states_of(4)}], shared={"head.weight": "embed.weight"}
    )
    write_checkpoint(tmp_path, saved, 2, 2)
    folder = tmp_path / "global_step3"

    def older(model):
        model["param_shapes"] = model["param_shapes"][0]
        del model["shared_params"]

    edit(folder / "mp_rank_00_model_states.pt", older)
    for path in folder.glob("*_optim_states.pt"):
        path.rename(folder / path.name.replace("_optim_states", "optim_states"))
    assert_holds(read_deepspeed(tmp_path), saved)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_missing_files_are_named(tmp_path, stage):
    with pytest.raises(FileNotFoundError, match="latest does not exist"):
        read_deepspeed(tmp_path)
    write_checkpoint(tmp_path, small_model(), stage, 3)
    folder = tmp_path / "global_step3"
    with pytest.raises(FileNotFoundError, match="no checkpoint with the tag 'other'"):
        read_deepspeed(tmp_path, "other")
    (tmp_path / "latest").write_bytes(b"\x80" * 5000)
    with pytest.raises(FileNotFoundError, match="no checkpoint with the tag .{62} in .*: name one that is there"):
        read_deepspeed(tmp_path)
    (tmp_path / "latest").write_text("global_step3")
    moved = tmp_path / "moved"
    for name in sorted(path.name for path in folder.iterdir()):
        shutil.move(folder / name, moved)
        with pytest.raises(FileNotFoundError, match=name.replace(".pt", "")):
            read_deepspeed(tmp_path)
        shutil.move(moved, folder / name)
    assert_holds(read_deepspeed(tmp_path), small_model())


@pytest.mark.parametrize("tag", ["../elsewhere", "..", "{elsewhere}"])
def test_latest_leads_to_no_other_directory(tmp_path, tag):
    write_checkpoint(elsewhere := tmp_path / "elsewhere", small_model(), 1, 1)
    (here := tmp_path / "here").mkdir()
    (here / "latest").write_text(tag.format(elsewhere=elsewhere))
    with pytest.raises(ValueError, match="A checkpoint's tag becomes the name of its directory"):
        read_deepspeed(here)


def test_files_of_two_saves_are_refused(tmp_path):
    write_checkpoint(tmp_path, small_model(), 2, 3)
    write_checkpoint(tmp_path, small_model(), 2, 2)
    with pytest.raises(ValueError, match=r"zero_pp_rank_2_mp_rank_00_optim_states\.pt.*cut into 2 partitions"):
        read_deepspeed(tmp_path)
    write_checkpoint(tmp_path, small_model(), 2, 2, tag="b", prefix="bf16_")
    write_checkpoint(tmp_path, small_model(), 2, 2, tag="b")
    with pytest.raises(ValueError, match="are of two saves"):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_wrong_sizes_are_refused(tmp_path, stage):
    write_checkpoint(tmp_path, small_model(), stage, 2)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    def shorten(content):
        content["optimizer_state_dict"][key][0] = content["optimizer_state_dict"][key][0][:-5]

    edit(tmp_path / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", shorten)
    with pytest.raises(ValueError, match=r"master.* elements where the parameters need"):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", ("param_shapes", 0)),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", ("ds_config", "optimizer")),
        ("zero_pp_rank_1_mp_rank_00_model_states.pt", ("frozen_param_fragments",)),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", ("optimizer_state_dict", "fp32_flat_groups")),
    ],
)
def test_values_of_other_types_are_refused(tmp_path, file, keys):
    write_checkpoint(tmp_path, small_model(), 3, 2)

    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = 3

    edit(tmp_path / "global_step3" / file, change)
    with pytest.raises(ValueError, match="global_step3 holds other values than DeepSpeed saves"):
        read_deepspeed(tmp_path)


def test_pipelines_are_refused(tmp_path):
    write_checkpoint(tmp_path, small_model(), 1, 1)
    (tmp_path / "global_step3" / "layer_03-model_states.pt").touch()
    with pytest.raises(ValueError, match="layer_03.*pipeline"):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize("name", ["word_embeddings.weight", "position_embeddings.weight"])
@pytest.mark.parametrize("other", [None, (2, 4)], ids=["missing", "shape"])
def test_model_parallel_ranks_that_do_not_fit_together_are_refused(name, other):
    ranks = [
        {name: ForeignTensor(shape, "trained", {"master": partial(torch.ones, shape)})} if shape else {}
        for shape in ((2, 3), other)
    ]
    with pytest.raises(ValueError, match=f"{name}' is missing, or of another shape or kind"):
        merge_model_parallel(ranks, 0)


@pytest.mark.parametrize("version", [None, 1.0, 2.0])
@pytest.mark.parametrize("stage", [1, 3])
def test_megatron_names_are_joined_over_model_parallel_ranks(tmp_path, stage, version):
    torch.manual_seed(0)
    block = "transformer.layers.0."
    cut = {  # name -> (whole shape, dimension)
        "word_embeddings.weight": ((6, 4), 0),
        f"{block}attention.query_key_value.weight": ((12, 4), 0),
        f"{block}attention.query_key_value.bias": ((12,), 0),
        f"{block}attention.dense.weight": ((4, 4), 1),
        f"{block}mlp.dense_h_to_4h.bias": ((16,), 0),
        f"{block}mlp.dense_4h_to_h.weight": ((4, 16), 1),
    }
    whole = {
        "position_embeddings.weight": (3, 4),
        f"{block}input_layernorm.weight": (4,),
        f"{block}mlp.dense_4h_to_h.bias": (4,),
    }
    saved = Saved(
        groups=[{name: states_of(*shape) for name, shape in (whole | {n: s for n, (s, _) in cut.items()}).items()}]
    )

    def part(name, value, rank):
        if name not in cut:
            return value
        # Query, key and value lie one below the other, each cut by itself.
        if "query_key_value" in name and version is None:
            return torch.cat([matrix.chunk(2)[rank] for matrix in value.chunk(3)])
        return value.chunk(2, cut[name][1])[rank].clone()

    for rank in range(2):
        own = {n: {state: part(n, v, rank) for state, v in states.items()} for n, states in saved.trained.items()}
        client = {} if version is None else {"checkpoint_version": version}
        write_checkpoint(tmp_path, Saved(groups=[own]), stage, 2, mp_rank=rank, mp_world=2, client=client)
    assert_holds(read_deepspeed(tmp_path), saved)
    shutil.rmtree(tmp_path / "global_step3")
    for rank in range(2):
        write_checkpoint(tmp_path, small_model(), stage, 2, mp_rank=rank, mp_world=2)
    with pytest.raises(ValueError, match=r"2 model-parallel ranks.*'embed\.weight' was cut"):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize(
    ("stage", "changed", "kind"),
    [(2, {}, "AdamW"), (3, {}, "AdamW"), (2, {"decoupled_weight_decay": False}, "Adam"), (3, {"other": True}, None)],
)
def test_an_optimizer_of_the_scripts_own_is_known_by_its_states(tmp_path, caplog, monkeypatch, stage, changed, kind):
    adam, config = deepspeed_checkpoints._adam, deepspeed_checkpoints._config

    def optimizer(states, steps):
        saved = adam(states, steps)
        for group in saved["param_groups"]:
            group |= changed
        if kind is None:
            saved["state"] = {
                number: {"step": s["step"], "momentum": s["exp_avg"]} for number, s in saved["state"].items()
            }
        return saved

    monkeypatch.setattr(deepspeed_checkpoints, "_adam", optimizer)
    monkeypatch.setattr(deepspeed_checkpoints, "_config", lambda stage: config(stage) | {"optimizer": None})
    write_checkpoint(tmp_path, small_model(), stage, 2)
    assert read_deepspeed(tmp_path).optimizer_type == kind
    message = f"they are imported as {kind}'s" if kind else "has the states momentum, and so no run can load them"
    assert message in caplog.text and "--no-load-optim" in caplog.text


def test_stage_0_is_a_plain_optimizer(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()

    def write(optimizer):
        buffers = [name for name, _ in model.named_buffers()]
        content = {
            "module": model.state_dict(),
            "buffer_names": buffers,
            "optimizer": optimizer.state_dict(),
            "param_shapes": None,
        }
        (tmp_path / "t").mkdir(exist_ok=True)
        torch.save({**content, "shared_params": None, "global_steps": 1}, tmp_path / "t" / "mp_rank_00_model_states.pt")

    write(optimizer)
    checkpoint = read_deepspeed(tmp_path, "t")
    state = {name: optimizer.state[p] for name, p in model.named_parameters()}
    want = {
        n: {"master": p, "exp_avg": state[n]["exp_avg"], "exp_avg_sq": state[n]["exp_avg_sq"]}
        for n, p in model.named_parameters()
    }
    assert_close(values(checkpoint), want | {n: {"constant": b} for n, b in model.named_buffers()})
    assert checkpoint.optimizer_counters == {"step": 1}
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim]} for dim in (2, 1)]
    write(torch.optim.AdamW(groups))
    assert read_deepspeed(tmp_path, "t").optimizer_counters is None
    assert "state is left out" in caplog.text
    first, *rest = model.parameters()
    for groups in ([{"params": [first]}, {"params": rest}], [*rest, first]):
        optimizer = torch.optim.AdamW(groups)
        optimizer.step()
        write(optimizer)
        assert read_deepspeed(tmp_path, "t").optimizer_counters is None, "it may be of other parameters"


@pytest.mark.parametrize(("alike", "tied"), [(False, False), (True, False), (True, True)])
def test_stage_0_says_that_it_takes_the_models_order_where_shapes_do_not_tell(tmp_path, caplog, alike, tied):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3 if alike else 2, bias=False))
    if tied:
        model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 1}
    (tmp_path / "t").mkdir()
    torch.save(content, tmp_path / "t" / "mp_rank_00_model_states.pt")
    checkpoint = read_deepspeed(tmp_path, "t")
    assert checkpoint.optimizer_counters == {"step": 1}
    assert checkpoint.aliases == ({"1.weight": "0.weight"} if tied else {})
    assert ("given to the parameters in the model's order" in caplog.text) == (alike and not tied)


def test_stage_0_says_that_all_parameters_get_the_steps_of_the_one_with_most(tmp_path, caplog):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["step"] += 2
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 3}
    (tmp_path / "t").mkdir()
    torch.save(content, tmp_path / "t" / "mp_rank_00_model_states.pt")
    assert read_deepspeed(tmp_path, "t").optimizer_counters == {"step": 3}
    assert "step is not the same for all parameters ([1.0, 3.0])" in caplog.text
