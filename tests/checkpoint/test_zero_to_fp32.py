"""zero_to_fp32: as a function, and as the script that lies beside a checkpoint and runs there without this package."""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megazero import mpu
from megazero.checkpoint import zero_to_fp32
from megazero.checkpoint.format import index_bytes
from megazero.checkpoint.zero_to_fp32 import main
from megazero.engine import Engine, weight_decay_groups
from megazero.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tests.bad_disks import largest_file
from tests.checkpoint.checkpoints import make, tensors
from tests.checkpoint.test_any_to_any import Net, make_engine, train
from tests.ranks import run_ranks

PARAMETERS = 13 * 12 + 2 * (36 * 12 + 36 + 36 * 12 + 12 + 24) + 3 * 12 * 12 - 12 * 12 + 3 * 12


def save_case(directory: str, size: int, stage: int) -> dict[str, list]:
    engine = make_engine(size, stage, torch.bfloat16)
    train(engine, 1)
    engine.save_checkpoint(directory)
    return {name: value.tolist() for name, value in engine.module_state_dict().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, list]]:
    """A bf16 checkpoint of stage 3 on 2 ranks, and the weights that the model computes with."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, save_case, str(folder), 1, 3)[0]


def run_script(folder: Path, *arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess:
    """`./zero_to_fp32.py` in its directory; -I: neither the working directory nor PYTHONPATH leads to this package."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    environment.pop("PYTHONPATH", None)
    code = (
        "import runpy, sys; sys.modules['megazero'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-I", "-c", code, "zero_to_fp32.py", *arguments]
    kept = {"stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(command, cwd=folder, env=environment, text=True, timeout=120, **kept)


def check(state: dict[str, torch.Tensor], weights: dict[str, list], tied: bool = True) -> None:
    assert set(state) == set(weights) - (set() if tied else {"tied.weight"})
    for name, value in state.items():
        assert value.dtype == (torch.int64 if name == "seen" else torch.float32), name
        want = torch.tensor(weights[name])
        assert torch.equal(
            value[: len(want)].to(torch.bfloat16).float() if name != "seen" else value, want[: len(value)]
        ), name


def test_the_functions_give_fp32_weights_under_every_name(saved):
    folder, weights = saved
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    check(state, weights)
    assert state["tied.weight"] is state["out.weight"] and state["embedding.weight"].shape == (13, 12)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in state.values() if v.is_floating_point()), (
        "fp32, not bf16"
    )
    without = get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step1", exclude_frozen_parameters=True)
    assert set(state) - set(without) == {"frozen.weight", "frozen.bias"}


def test_a_model_gets_the_weights(saved, one_rank):
    folder, _ = saved
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    model = nn.ModuleDict({"frozen": nn.Linear(12, 12), "other": nn.Linear(2, 2)})
    assert load_state_dict_from_zero_checkpoint(model, folder) is model
    assert torch.equal(model["frozen"].weight, state["frozen.weight"])
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding.weight: .*\[13, 12\].*\[16, 12\]"):
        load_state_dict_from_zero_checkpoint(Net(), folder)  # which pads its vocabulary: that is not in the checkpoint


def test_the_script_runs_in_its_directory_and_writes_the_file_of_the_tutorial(saved):
    folder, weights = saved
    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    done = run_script(folder, ".", "pytorch_model.bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Processing zero checkpoint at global_step1",
        "Detected checkpoint of type zero stage 3, world_size: 2",
        f"Saving fp32 state dict to pytorch_model.bin (total_numel={PARAMETERS})",
    ]
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    check(state, weights)
    assert state["tied.weight"].data_ptr() == state["out.weight"].data_ptr()
    sizes = {name: value.untyped_storage().nbytes() for name, value in state.items()}
    assert sizes == {name: value.nbytes for name, value in state.items()}, "every tensor has memory of its own"
    assert sorted(p.name for p in folder.iterdir() if p.name[0] != ".") == [
        *("global_step1", "latest", "pytorch_model.bin", "zero_to_fp32.py")
    ]


def test_the_script_goes_on_where_what_it_says_cannot_be_written(saved, tmp_path):
    with open("/dev/full", "w") as full:
        done = run_script(saved[0], ".", str(tmp_path / "w.bin"), stdout=full)
    assert (done.returncode, done.stderr) == (0, "")
    check(torch.load(tmp_path / "w.bin", weights_only=True), saved[1])


def test_the_module_is_the_command_too(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["zero_to_fp32", str(saved[0]), str(tmp_path / "weights.bin")])
    monkeypatch.delitem(sys.modules, "megazero.utils.zero_to_fp32")  # imported already, which runpy warns of
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("megazero.utils.zero_to_fp32", run_name="__main__")
    check(torch.load(tmp_path / "weights.bin"), saved[1])


def test_the_script_writes_safetensors_in_one_file_and_in_shards(saved, tmp_path):
    folder, weights = saved
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "model.safetensors")
    check(load_file(tmp_path / "model.safetensors"), weights, tied=False)
    done = run_script(folder, ".", str(tmp_path / "shards"), "--safe_serialization", "--max_shard_size", "2KB")
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    state = {name: value for file in files for name, value in load_file(tmp_path / "shards" / file).items()}
    check(state, weights, tied=False)
    assert index["weight_map"] == {name: file for file in files for name in load_file(tmp_path / "shards" / file)}


def test_a_directory_gets_one_bin_file(saved, tmp_path):
    folder, weights = saved
    # by the names that DeepSpeed gives its arguments
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir=folder, output_dir=tmp_path / "out", max_shard_size=None)
    check(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), weights)
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "many", max_shard_size="1KiB")
    index = json.loads((tmp_path / "many" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"]["tied.weight"] == index["weight_map"]["out.weight"]


def test_a_conversion_replaces_an_earlier_one_of_another_number_of_files(saved, tmp_path):
    folder, weights = saved
    out = tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(folder, out, max_shard_size="1KiB", safe_serialization=True)
    assert len([*out.glob("model-*.safetensors")]) > 1
    convert_zero_checkpoint_to_fp32_state_dict(folder, out, max_shard_size=None, safe_serialization=True)
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
    convert_zero_checkpoint_to_fp32_state_dict(folder, out, max_shard_size="2KiB", safe_serialization=True)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = {*index["weight_map"].values(), "model.safetensors.index.json"}
    assert {file.name for file in out.iterdir()} == names and len(names) > 2
    with pytest.raises(ValueError, match="is read before the pytorch_model.bin"):
        convert_zero_checkpoint_to_fp32_state_dict(folder, out)


def constant(folder: Path, value: float, count: int) -> None:
    """A checkpoint of `count` parameters, all of that value."""
    values = {f"p{i}": {"master": torch.full((256,), value)} for i in range(count)}
    make(folder, 1, 1, values, optimizer=None, aliases={})


def dies_at_the_second(call):
    calls = []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        call(*arguments)

    return dying


@pytest.mark.parametrize("missing", [1, 500], ids=["for the last byte", "for some of it"])
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(saved, tmp_path, capsys, missing):
    main([str(saved[0]), str(tmp_path / "whole.bin")])
    with largest_file((tmp_path / "whole.bin").stat().st_size - missing):
        assert main([str(saved[0]), str(tmp_path / "w.bin")]) == 2
    assert re.fullmatch(r"error: .*could not write .*w\.bin: File too large\n", capsys.readouterr().err)
    assert os.listdir(tmp_path) == ["whole.bin"]


def test_a_full_disk_is_told_with_the_index_that_does_not_fit(tmp_path, capsys):
    constant(tmp_path / "many", 1.0, 100)
    arguments = [str(tmp_path / "many"), str(tmp_path / "out"), "--safe_serialization", "--max_shard_size", "1KB"]
    with largest_file(4096):
        assert main(arguments) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(r"error: .*could not write .*model\.safetensors\.index\.json: File too large\n", told)
    assert not os.listdir(tmp_path / "out")


def test_all_that_is_written_is_synced(saved, tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def sync(descriptor):
        found = os.fstat(descriptor)
        synced.add((found.st_ino, found.st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path / "out", max_shard_size="1KiB")
    files = {(file.stat().st_ino, file.stat().st_size) for file in (tmp_path / "out").iterdir()}
    assert len(files) > 2 and files <= synced


def test_a_conversion_succeeds_where_nothing_can_be_removed_while_it_is_mapped(saved, tmp_path, mapped_files_stay):
    convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path / "w.bin")
    assert os.listdir(tmp_path) == ["w.bin"]
    check(torch.load(tmp_path / "w.bin", weights_only=True), saved[1])


def test_what_is_mapped_is_not_removed_which_would_end_the_conversion_on_a_mount_that_keeps_no_bytes(
    saved, tmp_path, monkeypatch
):
    there, save = [], torch.save

    def recorded(state, file):
        there.append(Path(file.name).with_name("tensors").exists())
        save(state, file)

    monkeypatch.setattr(torch, "save", recorded)
    convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path / "out", max_shard_size="1KiB")
    assert all(there) and len(there) > 2 and "tensors" not in os.listdir(tmp_path / "out")


def test_a_conversion_that_dies_never_leaves_an_index_of_two_checkpoints(tmp_path, monkeypatch):
    out, replace = tmp_path / "out", os.replace

    def convert(value: float) -> None:
        constant(tmp_path / str(value), value, 3)
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / str(value), out, "1KiB", safe_serialization=True)

    convert(1.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zero_to_fp32, "_write_file", dies_at_the_second(zero_to_fp32._write_file))
        convert(2.0)
    files = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert [load_file(out / file)[name][0].item() for name, file in files.items()] == [1.0] * 3
    move = dies_at_the_second(replace)
    monkeypatch.setattr(os, "replace", lambda old, new: (move if Path(new).parent == out else replace)(old, new))
    with pytest.raises(KeyboardInterrupt):
        convert(3.0)
    assert [file.name for file in out.iterdir()] == ["model-00001-of-00003.safetensors"], "and no index"


def test_conversions_that_run_at_once_keep_apart(tmp_path, monkeypatch):
    """In containers on one folder they may have the same process id, as here."""
    output, write = tmp_path / "model.safetensors", zero_to_fp32.write_tensors
    for value in (1.0, 2.0):
        constant(tmp_path / str(value), value, 1)

    def write_with_another(path, tensors):
        written = write(path, tensors)
        monkeypatch.setattr(zero_to_fp32, "write_tensors", write)
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "2.0", output)
        return written

    monkeypatch.setattr(zero_to_fp32, "write_tensors", write_with_another)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "1.0", output)
    assert load_file(output)["p0"][0] == 1.0
    assert {path.name for path in tmp_path.iterdir()} == {"1.0", "2.0", "model.safetensors"}


def test_a_bin_file_may_have_more_tensors_than_a_process_may_have_files(tmp_path):
    constant(tmp_path / "saved", 1.0, 100)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limit[1]))
    try:
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "model.bin")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(torch.load(tmp_path / "model.bin", weights_only=True)) == 100


def test_tensor_parallel_parts_are_merged_bit_for_bit(tmp_path):
    make(tmp_path, model_parallel_size=2, data_parallel_size=2)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    want = {name: states.get("master", states.get("constant")) for name, states in tensors().items()}
    assert state.keys() == {*want, "head"} and state["head"] is state["words"]
    assert all(torch.equal(state[name], want[name].float() if name == "frozen" else want[name]) for name in want)


def test_of_the_sizes_in_the_index_only_the_tensor_parallel_one_is_needed(tmp_path, capsys):
    path = make(tmp_path / "saved", 2, 2).path / "index.json"
    index = json.loads(path.read_bytes())
    del index["data_parallel_size"], index["zero_stage"]
    path.write_bytes(index_bytes(index))
    assert main([str(tmp_path / "saved"), str(tmp_path / "model.safetensors")]) == 0
    assert "zero stage None, world_size: 4" in capsys.readouterr().out


@pytest.mark.parametrize(("key", "status"), [("zero_stage", 0), ("format", 2)])
def test_what_a_checkpoint_says_does_not_command_the_terminal(tmp_path, capsys, key, status):
    path = make(tmp_path / "saved", 1, 1).path / "index.json"
    path.write_bytes(index_bytes({**json.loads(path.read_bytes()), key: "\x1b[2J"}))
    assert main([str(tmp_path / "saved"), str(tmp_path / "model.safetensors")]) == status
    said = "".join(capsys.readouterr())
    assert r"\x1b[2J" in said and "\x1b" not in said


def test_errors_name_what_is_missing(saved, tmp_path, capsys):
    folder, _ = saved
    with pytest.raises(ValueError, match="no file `latest`"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="global_step7"):
        get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step7")
    assert main([str(folder), str(tmp_path / "out.bin"), "--tag", "global_step7"]) == 2
    assert capsys.readouterr().err.startswith("error: No checkpoint at")
    assert main([str(folder), str(tmp_path / "out"), "--max_shard_size", "many"]) == 2
    assert "many" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_a_16_bit_buffer_is_given_in_fp32_and_others_as_they_are(one_rank, tmp_path, dtype):
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.tensor([1.0, 2.0]).to(dtype))
    engine = Engine(model, mpu.get_groups(), torch.optim.AdamW, *weight_decay_groups(model, 0.1), dtype=torch.bfloat16)
    engine.save_checkpoint(str(tmp_path))
    mean = get_fp32_state_dict_from_zero_checkpoint(tmp_path)["mean"]
    assert mean.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype) and mean.tolist() == [1, 2]
