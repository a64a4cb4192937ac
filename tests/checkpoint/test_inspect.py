"""The command line: what a person sees of good, damaged and different checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero import __version__
from megazero.checkpoint.__main__ import main
from megazero.checkpoint.commands.verify import verify
from megazero.checkpoint.config import CheckpointConfig
from megazero.checkpoint.format import CheckpointError, index_bytes
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor, write_foreign
from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.tensor_file import CheckedFile
from tests.checkpoint.checkpoints import TAG, flip, make, run


def test_ls_lists_the_checkpoints_of_a_directory(saved, capsys):
    make(saved, 1, 3, tag="global_step10", global_steps=10)
    (saved / ".global_step12.partial").mkdir()
    shutil.copytree(saved / TAG, saved / "what no tag can be ")
    (saved / TAG / "rank_00000.safetensors").unlink()
    status, lines = run(capsys, "ls", saved)
    assert status == 0
    columns = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert columns[0] == ["TAG", "STEPS", "SAVED", "MP x DP", "ZERO", "SIZE"]
    assert columns[1][0] == TAG and columns[1][-1] == "cannot be read"
    star, tag, steps, _, ranks, stage, size = columns[2]
    assert (star, tag, steps, ranks, stage) == ("*", "global_step10", "10", "1 x 3", "1") and size.endswith("kB")
    assert any(line.startswith(f"{TAG}: ") and "rank_00000" in line for line in lines)
    assert lines[-1] == ".global_step12.partial is being written, or its save has died"


def delete_in(monkeypatch, owner, name, path) -> None:
    """A job that saves there deletes the checkpoint at `path` as soon as `owner.name` is called; a glob still finds it."""
    original = getattr(owner, name)

    def call(*args):
        found = list(original(*args)) if name == "glob" else None
        shutil.rmtree(path, ignore_errors=True)
        return found or original(*args)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name"), [(Path, "glob"), (Reader, "__init__"), (CheckedFile, "check_size")], ids=["list", "open", "read"]
)
def test_a_checkpoint_that_its_job_deletes_meanwhile_is_not_listed(saved, capsys, monkeypatch, owner, name):
    make(saved, 1, 3, tag="global_step10", global_steps=10)
    delete_in(monkeypatch, owner, name, saved / TAG)
    status, lines = run(capsys, "ls", saved)
    assert not (saved / TAG).exists()
    assert status == 0 and len(lines) == 4 and lines[1].split()[:2] == ["*", "global_step10"], lines


def test_verify_of_a_checkpoint_that_its_job_deletes_meanwhile(saved, monkeypatch):
    delete_in(monkeypatch, CheckedFile, "found_size", saved / TAG)
    with pytest.raises(FileNotFoundError, match=f"{TAG} was deleted while it was read, as by a job with --keep-last"):
        verify(saved, TAG)


@pytest.mark.parametrize("arguments", [["--tag", TAG], []], ids=["--tag", "path"])
def test_ls_shows_what_is_in_a_checkpoint(saved, capsys, arguments):
    status, lines = run(capsys, "ls", saved if arguments else saved / TAG, *arguments)
    text = "\n".join(re.sub(r" {2,}", "  ", line) for line in lines)
    assert status == 0
    for expected in (
        "NAME  KIND  SHAPE  DTYPE  STATES",
        "words  trained  13 x 5  F32  master, exp_avg, exp_avg_sq",
        "frozen  frozen  5 x 2  BF16  constant",
        "count  buffer  scalar  I64  constant",
        "trained  5 tensors, 430 elements",
        "head  is tied to words",
        "ranks  2 x 2 (model x data parallel), ZeRO stage 1, cpu",
        "steps  6 (1 skipped)",
        "global_samples  48",
        "counters  step 5.0",
        "group 0  lr 0.05",
        "scale  1.0",
        "best  nan",
        "betas  [0.9, 0.95]",
        "args.lr  0.1",
        "ema  tensor float32 [4]",
    ):
        assert expected in text
    assert f"by megazero {__version__}, torch {torch.__version__}" in text


def test_a_checkpoint_whose_save_died_between_its_renames_is_found_by_its_own_path(saved, capsys):
    (saved / TAG).rename(saved / f".{TAG}.replaced")
    assert CheckpointConfig(load=str(saved / TAG)).loaded == (saved, TAG)
    assert run(capsys, "verify", saved / TAG)[0] == 0


@pytest.mark.parametrize("path", [".", "../../link"])
def test_a_checkpoint_is_the_same_by_any_path_to_it(saved, monkeypatch, path):
    (saved.parent / "link").symlink_to(saved / TAG)
    monkeypatch.chdir(saved / TAG)
    flags = CheckpointConfig(load=path, save="..")
    assert flags.loaded == (saved, TAG) and flags.is_saved_where_loaded


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_checkpoint_whose_folder_is_renamed_to_what_no_tag_may_be_is_told_why(saved, capsys, command):
    shutil.copytree(saved / TAG, saved / ".mine")
    assert main([command, str(saved / ".mine")]) == 2
    assert "becomes the name of its directory; '.mine' cannot" in capsys.readouterr().err


def test_a_directory_whose_name_leaves_no_room_for_another_one_aside_is_one_that_a_job_saves_in(tmp_path):
    longest = tmp_path / ("x" * 255)
    assert CheckpointConfig(load=str(longest)).loaded == (longest, None)


def test_ls_of_a_damaged_checkpoint_whose_save_died_between_its_renames(saved, capsys):
    (saved / TAG / "rank_00000.safetensors").unlink()
    (saved / TAG).rename(saved / f".{TAG}.replaced")
    status, lines = run(capsys, "ls", saved)
    assert status == 0 and lines[1].split()[:2] == ["*", TAG] and lines[1].endswith("cannot be read")


def test_a_script_s_own_checkpoint_does_not_say_which_samples_it_read(saved, capsys):
    assert main(["samples", str(saved), "--iterations", "1"]) == 2
    assert f"{TAG} was not saved by the training job, so it does not say which" in capsys.readouterr().err
    weight = ForeignTensor((3,), "frozen", {"constant": lambda: torch.ones(3)})
    own = write_foreign(ForeignCheckpoint({"weight": weight}, client_state={"train_samples": 4}), saved / "own")
    assert main(["samples", str(own), "--iterations", "1"]) == 2
    assert f"{own} was not saved by the training job" in capsys.readouterr().err


def test_verify_says_that_the_index_itself_is_damaged(saved, capsys):
    path = saved / TAG / "index.json"
    content = path.read_text()
    number = re.search(r'"bytes": (\d+)', content)[1]
    path.write_text(content.replace(number, str(int(number) + 1), 1))
    status, (what, problem, _) = run(capsys, "verify", saved)
    assert status == 1 and what == str(saved / TAG) and problem.startswith(f"  {path} is damaged: its checksum")


def test_verify_of_what_is_whole(saved, capsys):
    status, (line,) = run(capsys, "verify", saved)
    assert status == 0 and line.startswith(f"{saved / TAG}: 7 tensors in 4 files, ")
    assert line.endswith("all is as it was written")


def test_verify_sees_every_flipped_bit_and_names_what_it_is_in(saved):
    for name, entry in json.loads((saved / TAG / "index.json").read_text())["files"].items():
        path = saved / TAG / name
        for position in range(0, entry["bytes"], 97):
            flip(path, position)
            (problem,) = verify(saved, TAG).problems
            assert problem.startswith(f"{name}: bytes 0 to {entry['bytes']:,} are not what was written. In them: ")
            flip(path, position)
    assert not verify(saved, TAG).problems


def test_verify_names_the_tensors_of_a_damaged_block(tmp_path):
    values = {f"p{i}": {"master": torch.randn(300_000)} for i in range(4)}  # 1.2 MB each, in blocks of 1 MiB
    make(tmp_path, 1, 1, values)
    path = tmp_path / TAG / "rank_00000.safetensors"
    flip(path, (3 << 20) + 5)
    (problem,) = verify(tmp_path, TAG).problems
    assert problem == (
        "rank_00000.safetensors: bytes 3,145,728 to 4,194,304 are not what was written. In them: master of p2, master of p3"
    )


def test_a_damaged_tensor_of_the_client_state_is_said_once(tmp_path):
    reader = make(tmp_path)
    path = tmp_path / TAG / "rank_00000.safetensors"
    flip(path, -1)
    with pytest.raises(CheckpointError, match=f"^Checkpoint file {path} is damaged"):
        client_state(reader)


def test_verify_of_files_that_are_short_or_gone(saved, capsys):
    (saved / TAG / "rank_00001.safetensors").unlink()
    with open(saved / TAG / "rank_00002.safetensors", "r+b") as file:
        file.truncate(100)
    status, lines = run(capsys, "verify", saved / TAG)
    assert status == 1 and lines[0].startswith(str(saved / TAG))
    assert lines[1].startswith("  rank_00001.safetensors is missing. In it: master of ")
    assert re.match(r"  rank_00002.safetensors has 100 bytes where [\d,]+ were written. In it: master of ", lines[2])
    assert lines[3].startswith("2 problems: ")


def drop_piece(index):
    index["tensors"]["qkv"]["pieces"].pop()


def repeat_piece(index):
    index["tensors"]["qkv_bias"]["pieces"] *= 2


def shift_piece(index):
    index["tensors"]["norm"]["pieces"][0][4][1] += 10**6


def same_bytes(index):
    """One of two states of a piece lies where the other does."""
    offsets = index["tensors"]["norm"]["pieces"][0][4]
    offsets[1] = offsets[0]


def other_rank(index):
    index["tensors"]["norm"]["pieces"][0][0] = 1


def absurd_shape(index):
    index["tensors"]["frozen"]["shape"] = [10**12, 2]


def no_states(index):
    del index["tensors"]["norm"]["states"]


def no_weights(index):
    del index["tensors"]["norm"]["states"]["master"]


def no_kind(index):
    index["tensors"]["norm"]["kind"] = "Trained"


def aliases_of_nothing(index):
    index["aliases"] = ["head"]


def other_file(index):
    index["files"]["../secret"] = index["files"].pop("rank_00003.safetensors")


def unchecked_block(index):
    index["files"]["rank_00003.safetensors"]["crc32"].pop()


def fraction_of_a_byte(index):
    index["files"]["rank_00003.safetensors"]["bytes"] -= 0.5


def client_state_of_the_future(index):
    index["client_state"] = {"$": "hologram"}


def version_of_the_future(index):
    index["format_version"] = 3


@pytest.mark.parametrize(
    "change, expected",
    [
        (drop_piece, r"qkv: \d+ of its 252 elements are in no file"),
        (repeat_piece, "malformed at qkv_bias: .* overlaps another"),
        (shift_piece, "malformed at norm: .* outside of the parameter or its files"),
        (same_bytes, "of norm and .* of norm overlap in it"),
        (other_rank, "malformed at norm: .* outside of the parameter"),
        (absurd_shape, "malformed at frozen: .*larger than all files"),
        (no_states, "index.json is malformed.*'states'"),
        (no_weights, "malformed at norm: .*trained without master"),
        (no_kind, "malformed at norm: .*'Trained'"),
        (aliases_of_nothing, "index.json is malformed at aliases"),
        (other_file, "'../secret' is no name of a file"),
        (unchecked_block, "malformed at files: .*rank_00003.safetensors of .* bytes cannot have the checksums"),
        (fraction_of_a_byte, "malformed at files: .*rank_00003.safetensors of .* bytes cannot have the checksums"),
        (client_state_of_the_future, "the client state holds .* 'hologram'"),
        (version_of_the_future, "has format megazero, version 3; this version reads"),
    ],
)
def test_verify_of_an_index_that_is_wrong(saved, change, expected):
    path = saved / TAG / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_bytes(index_bytes(index))
    assert re.search(expected, "\n".join(verify(saved, TAG).problems))


@pytest.mark.parametrize("command", ["ls", "diff"])
@pytest.mark.parametrize("key", ["counters", "loss_scaler", "client_state"])
def test_settings_that_are_not_what_was_written_are_an_error_of_one_line(saved, capsys, command, key):
    path = saved / TAG / "index.json"
    path.write_bytes(index_bytes({**json.loads(path.read_text()), key: {"ema": {"$": "tensor"}}}))
    assert main([command, *[str(path.parent)] * (2 if command == "diff" else 1)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"error: {path} is malformed at its settings: KeyError") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["ls", "diff"])
def test_no_name_in_a_checkpoint_commands_the_terminal(saved, capsys, command):
    shutil.copytree(saved, other := saved.parent / "other")
    path = other / TAG / "index.json"
    path.write_bytes(index_bytes({**json.loads(path.read_text()), "client_state": {"a\x1b[2J\u202e": 1}}))
    main([command, str(path.parent)] + [str(saved)] * (command == "diff"))
    shown = capsys.readouterr().out
    assert "a\\x1b[2J\\u202e" in shown and "\x1b" not in shown, shown


SOURCES = ("deepspeed", "megatron", "huggingface", "dcp")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: COMMAND"),
        (["list"], "invalid choice"),
        (["ls", "{nowhere}"], "is no directory"),
        (["ls", "{empty}"], "no checkpoints in"),
        (["verify", "{empty}"], "no checkpoints in"),
        (["verify", "{saved}", "--tag", "global_step9"], f"choose with --tag among {TAG}"),
        (["verify", f"{{saved}}/{TAG}", "--tag", TAG], "is a checkpoint itself: drop --tag"),
        (["diff", "{saved}", "{nowhere}"], "is no directory"),
        (
            ["reshape", "{saved}", "{out}", "--model-parallel-size", "0", "--data-parallel-size", "1"],
            "must be 1 or more",
        ),
        (["reshape", "{saved}", "{out}", "--model-parallel-size", "5", "--data-parallel-size", "1"], "qkv of shape"),
        (
            ["reshape", "{saved}", "{saved}", "--model-parallel-size", "1", "--data-parallel-size", "1"],
            "exists already: choose another directory.",  # and not "delete this one": it is what is read
        ),
        (["export", "{saved}", "{out}", "--to", "huggingface"], "has no 'model'"),
        (["import", "{empty}", "{out}", "--from", "huggingface"], "config.json is missing"),
        (["import", "{empty}", "{out}", "--from", "huggingface", "--tag", "1"], "Drop it"),
        (["import", "{empty}", "{out}", "--from", "huggingface", "--vocab-size", "1"], "for --from megatron only"),
        (["import", "{empty}", "{out}", "--from", "megatron", "--tag", "new"], "the iteration as a number"),
        (["import", "{empty}", "{out}", "--from", "megatron", "--tag", "7"], "iter_0000007"),
        (["import", "{empty}", "{out}", "--from", "megatron"], "latest_checkpointed_iteration.txt is missing"),
        (["import", "{empty}", "{out}", "--from", "deepspeed"], "latest"),
        *((["import", "{nowhere}", "{out}", "--from", source], "is no directory") for source in SOURCES),
    ],
)
def test_an_error_is_one_line_and_status_2(saved, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    places = {name: tmp_path / name for name in ("saved", "empty", "nowhere", "out")}
    assert main([argument.format(**places) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "out").exists()


def test_rewind_makes_an_earlier_checkpoint_the_latest_if_it_is_whole(saved, capsys):
    make(saved, 1, 3, tag="global_step10", global_steps=10)
    assert run(capsys, "rewind", saved, "--tag", TAG) == (
        0,
        [f"{saved}: jobs continue from {TAG}, no longer from global_step10"],
    )
    assert (saved / "latest").read_text() == TAG and (saved / "global_step10" / "index.json").exists()
    assert main(["rewind", str(saved)]) == 2
    assert f"{TAG} is the latest already. Name an earlier one" in capsys.readouterr().err
    flip(saved / "global_step10" / "rank_00001.safetensors", -1)
    assert main(["rewind", str(saved / "global_step10")]) == 2
    assert "no job could continue from it: rank_00001.safetensors: bytes" in capsys.readouterr().err
    assert (saved / "latest").read_text() == TAG
    (saved / "latest").write_bytes(b"\xff\xfe")
    assert run(capsys, "rewind", saved, "--tag", TAG)[1] == [f"{saved}: jobs continue from {TAG}"]


def test_latest_that_names_nothing_is_said(saved, capsys):
    shutil.move(saved / TAG, saved / "mine")
    assert run(capsys, "ls", saved)[1][-1] == f"`latest` names {TAG}, which is not there"
    assert main(["verify", str(saved)]) == 2
    assert "choose with --tag among mine" in capsys.readouterr().err
    (saved / "latest").unlink()
    assert main(["verify", str(saved)]) == 2
    assert "no file `latest`" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="No checkpoint at .*nowhere: there is no such directory"):
        Reader(saved / "nowhere")
    for number in range(4):
        shutil.copytree(saved / "mine", saved / f"global_step{number}")
    with pytest.raises(
        FileNotFoundError, match=r"none, beside which there are global_step\d.*, .* and \d more\. Name one"
    ):
        Reader(saved, "none")
    with pytest.raises(FileNotFoundError, match="No checkpoint at .*, beside which there is none"):
        Reader(saved / "mine", "none")
    assert run(capsys, "verify", saved, "--tag", "mine")[0] == 0


def test_a_damaged_latest_is_said_below_the_checkpoints_of_which_to_choose_one(saved, capsys):
    (saved / "latest").write_bytes(b"\xff\xfe")
    status, lines = run(capsys, "ls", saved)
    assert status == 0 and any(line.split()[:1] == [TAG] for line in lines)
    assert any("latest should hold the name of a checkpoint directory" in line for line in lines)


def test_as_a_command_whose_reader_goes_away(saved):
    command = f"{sys.executable} -m megazero.checkpoint ls {saved / TAG} | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("NAME ")


def test_the_status_is_right_where_nobody_reads_what_is_said(saved):
    command = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", sys.executable, "-m", "megazero.checkpoint", "verify"]
    assert subprocess.run([*command, str(saved)]).returncode == 0
