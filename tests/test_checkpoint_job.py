"""The job's checkpoints as its user meets them: saved in the background, damaged, of two jobs; and the scripts that read them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate_gpt2
import generate_samples
import pretrain_gpt2
from megazero import inference, job_checkpoints
from megazero.arguments import load_config
from megazero.checkpoint.__main__ import main as checkpoint_command
from megazero.checkpoint.commands import samples
from megazero.checkpoint.config import CheckpointConfig
from megazero.checkpoint.folder import CheckpointFolder
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.vocabulary import saved_tokenizer
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.tokenizer import build_tokenizer
from megazero.inference import load_model
from megazero.job_checkpoints import refuse_to_replace, refuse_unwritable
from megazero.model.config import GPT2Config
from megazero.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.checkpoints import flip
from tests.ranks import run_script
from tests.tiny import ROOT, TINY_MODEL, logged, make_texts, make_vocabulary, run_job

SIZES = ["--model-parallel-size", "1", "--data-parallel-size", "1"]
FLAGS = [*TINY_MODEL, "--train-iters", "12", "--log-interval", "4", "--save-interval", "4", "--hidden-dropout", "0.1"]


def job(corpus: list[str], save: Path, *more: str, ranks: int = 2) -> subprocess.CompletedProcess:
    same = save / ".." / save.name  # by another name
    return run_job([*FLAGS, *corpus, "--save", str(save), "--load", str(same), "--zero-stage", "2", *more], ranks)


def files(save: Path, tag: str = "global_step12") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (save / tag).glob("rank_*.safetensors")}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """Checkpoints 4, 8 and 12 of an uninterrupted run on two ranks."""
    save = tmp_path_factory.mktemp("whole")
    (save / "job.log").touch()  # as `tee` leaves one
    done = job(corpus, save)
    assert done.returncode == 0, done.stdout
    return save


def test_a_run_that_was_rewound_goes_on_from_there_bit_for_bit(corpus, whole, tmp_path, capsys):
    save = tmp_path / "save"
    shutil.copytree(whole, save)
    before = files(save)
    assert checkpoint_command(["rewind", str(save), "--tag", "global_step4"]) == 0
    refuse_to_replace(CheckpointConfig(load=f"{save}/global_step4", save=str(save)))  # what it replaces was given up
    done = job(corpus, save)
    assert done.returncode == 0 and "continuing after iteration 4," in done.stdout, done.stdout
    assert files(save) == before and (save / "latest").read_text() == "global_step12"
    (save / "latest").unlink()  # so the newest counts
    refuse_to_replace(CheckpointConfig(load=f"{save}/global_step12", save=str(save)))


def test_saving_in_the_background_writes_the_same_bytes_and_the_end_waits(corpus, whole, tmp_path):
    done = job(corpus, tmp_path, "--async-save")
    assert done.returncode == 0 and "is being written; training waited" in done.stdout, done.stdout
    assert (tmp_path / "latest").read_text() == "global_step12"
    for tag in ("global_step4", "global_step8", "global_step12"):
        assert files(tmp_path, tag) == files(whole, tag)


RECORDED = """
import pretrain_gpt2, torch
from megazero.entry import run_script

get_batch = pretrain_gpt2.get_batch

def recorded(iterator, job):
    tokens, targets = get_batch(iterator, job)
    with open(f"{job.config.checkpoint.save}/fed{torch.distributed.get_rank()}", "a") as file:
        for row in torch.cat([tokens, targets[:, -1:]], dim=1).tolist():
            print(job.iteration + 1, repr(job.tokenizer.decode(row)), file=file)
    return tokens, targets

pretrain_gpt2.get_batch = recorded
run_script(pretrain_gpt2.check, pretrain_gpt2.main)
"""


RAMP = ["--rampup-batch-size", "2", "2", "8"]
SPANS = [(1, 2, 4), (3, 7, 4), (12, 12, 12)]  # before the checkpoint, around it, the last


@pytest.mark.parametrize(
    ("mp", "more", "spans"),
    [
        (1, [], SPANS),
        (1, RAMP, SPANS),
        (
            1,
            [*RAMP, "--phase-transition-iterations", "9", "5"],
            [(1, 3, 5), (2, 5, 4), (6, 7, 8), (9, 9, 8), (10, 12, 12)],
        ),
        (2, ["--reset-position-ids"], SPANS),
    ],
)
def test_the_samples_of_iterations_are_what_the_ranks_were_fed(corpus, tmp_path, capsys, mp, more, spans):
    (tmp_path / "job.py").write_text(RECORDED)
    save, (_, path, *vocabulary) = tmp_path / "save", corpus
    for suffix in (".bin", ".idx"):
        shutil.copy(path + suffix, tmp_path / f"other{suffix}")
    blend = ["--train-data", "0.3", str(tmp_path / "other"), "0.7", path, *vocabulary]
    batch = ["--batch-size", "1", "--global-batch-size", "4", "--model-parallel-size", str(mp)]
    arguments = [*FLAGS, *blend, "--save", str(save), "--load", str(save), *batch, *more]
    for _ in range(3 if "--phase-transition-iterations" in more else 1):
        done = run_script(2, str(tmp_path / "job.py"), arguments)
        assert done.returncode == 0, done.stdout
    fed = [(save / f"fed{rank}").read_text().splitlines() for rank in range(2 // mp)]
    for first, last, tag in spans:
        command = ["samples", str(save), "--tag", f"global_step{tag}", "--iterations", f"{first}-{last}"]
        assert checkpoint_command(command) == 0
        iterations = range(first, last + 1)
        expected = [line for i in iterations for of in fed for line in of if int(line.split(None, 1)[0]) == i]
        shown = re.split(r"^--- iteration (\d+), sample .*\n", capsys.readouterr().out, flags=re.MULTILINE)[1:]
        assert expected == [f"{i} {text[:-1]!r}" for i, text in zip(shown[::2], shown[1::2], strict=True)]
    end = 5 if "--phase-transition-iterations" in more else 12
    command = ["samples", str(save), "--tag", f"global_step{spans[0][2]}", "--iterations"]
    assert checkpoint_command([*command, str(end + 1)]) == 2
    assert f"or its phase, ends before iteration {end + 1}, with" in capsys.readouterr().err
    command.append("1")
    for data in (blend[2:5:2], ["0.4", blend[2], "0.6", path]):  # the same corpora, without or with other weights
        assert checkpoint_command([*command, "--train-data", *data]) == 2
        assert "are not those of the run of" in capsys.readouterr().err


def test_a_sample_is_shown_with_its_documents_also_of_data_that_has_moved(corpus, whole, tmp_path, capsys, monkeypatch):
    command = ["samples", str(whole), "--iterations", "3", "--max-tokens", "9"]
    assert checkpoint_command(command) == 0
    shown, (_, path, _, vocabulary, *_) = capsys.readouterr().out, corpus
    heading = re.match(r"--- iteration 3, sample 8: documents (\d+), .* of (.*), 33 tokens, the first 9\n", shown)
    assert heading[2] == path
    document = IndexedDataset(path).get(int(heading[1])).tolist()
    text = shown[heading.end() : shown.index("--- iteration 3, sample 9")].strip()
    assert text in build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary).decode(document)
    shutil.copytree(Path(path).parent, tmp_path / "moved", ignore=shutil.ignore_patterns("cache"))
    moved = ["--train-data", str(tmp_path / "moved" / "tiny"), "--tokenizer-path", str(tmp_path / "moved" / "vocab")]
    client = client_state(Reader(whole))
    client["config"]["data"].update(train_data=["gone"], valid_data=["gone"], tokenizer_path="gone", split="8,0,1")
    monkeypatch.setattr(samples, "client_state", lambda reader: client)
    client["corpora"] = [f"0-178 of {IndexedDataset(path).fingerprint}"]
    elsewhere = [*command, *moved[:2], "--data-cache-path", str(tmp_path / "cache")]
    assert checkpoint_command(elsewhere) == 0, "the vocabulary is in the checkpoint"
    del client["tokenizer_files"]  # as in checkpoints of before
    client["tokenizer"]["tokenizer_path"] = "gone"
    assert checkpoint_command(command) == 2
    assert "gone: there is no such file" in (error := capsys.readouterr().err) and "--train-data and --tok" in error
    assert checkpoint_command([*elsewhere, *moved[2:]]) == 0
    assert any((tmp_path / "cache").iterdir()) and not (tmp_path / "moved" / "cache").exists()
    client["corpora"] = ["0-178 of another"]
    assert checkpoint_command([*command, *moved]) == 2
    assert "are not those of the run of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer_files": {"other.json": np.zeros(1, np.uint8)}},
        {"tokenizer_files": {"vocab.json": 1}},
        {"tokenizer": {"other": 1}, "tokenizer_files": {}},
    ],
)
def test_a_recorded_vocabulary_that_is_none_is_told_with_its_checkpoint(whole, changed):
    with pytest.raises(CheckpointError, match=f"{whole} has recorded a vocabulary that is none: .*Error"):
        saved_tokenizer({**client_state(Reader(whole)), **changed}, whole)


@pytest.mark.parametrize(
    ("iterations", "changed", "message"),
    [
        ("0", {}, "--iterations 0: give the first and the last iteration, as in 510-512, or one"),
        ("9-8", {}, "--iterations 9-8: give"),
        ("12-13", {}, "the run of .*/global_step12, or its phase, ends before iteration 13, with 48 samples"),
        (
            "9",
            {"phase": (9, 36)},
            "is of the phase of its run that began after iteration 9. Name a checkpoint of an earlier",
        ),
        ("12", {"consumed_samples": 40}, "had another global batch before. Name the checkpoint from which it went on"),
    ],
)
def test_iterations_that_are_none_of_the_run_are_refused(whole, capsys, monkeypatch, iterations, changed, message):
    client = {**client_state(Reader(whole)), **changed}
    monkeypatch.setattr(samples, "client_state", lambda reader: client)
    assert checkpoint_command(["samples", str(whole), "--iterations", iterations]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_iterations_of_a_phase_are_counted_from_its_own_first_batch(whole):
    """Before it, the run's batch may have been another."""
    client = {**client_state(Reader(whole)), "phase": (8, 20), "consumed_samples": 20 + 4 * 4}
    for iteration in (9, 12, 13):
        first = 4 * (iteration - 9)
        assert samples.samples_of(client, iteration, Reader(whole)) == range(first, first + 4)


@pytest.mark.parametrize(("saved", "corpora"), [((3, 12), None), ((8, 30), ["of the phase"])])
def test_a_phase_that_begins_forgets_the_order_of_the_one_before_and_one_that_goes_on_keeps_its_own(saved, corpora):
    training = SimpleNamespace(phase_begun=lambda iteration: 8)
    job = SimpleNamespace(config=SimpleNamespace(training=training), iteration=8, consumed_samples=32)
    job.corpora = job.shuffled_epochs = ["of the phase"]
    job_checkpoints._enter_phase(job, saved)
    assert (job.phase, job.corpora, job.shuffled_epochs) == ((8, 30) if corpora else (8, 32), corpora, corpora)


def test_a_phase_that_takes_another_number_of_epochs_is_warned_of_with_its_own_samples(caplog):
    job = SimpleNamespace(corpora=None, shuffled_epochs=[[1]], phase_samples=12, train_samples=48)
    job_checkpoints.warn_of_other_data(job, ["0-8 of a"], [[2]])
    assert "the run, or this phase of it, is now 12 samples long" in caplog.text


FULL_DISK = """
import runpy, sys
from megazero.checkpoint import saver

write, failures, most, spared = saver.write_rank_file, [], int(sys.argv.pop(1)), sys.argv.pop(1).split(",")

def write_if_there_is_room(aside, rank, snapshot):
    if rank == 1 and len(failures) < most and not any(f".global_step{step}." in str(aside) for step in spared):
        failures.append(aside)
        raise OSError(28, "No space left on device")
    return write(aside, rank, snapshot)

saver.write_rank_file = write_if_there_is_room
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
"""


def test_a_save_after_one_that_failed_in_the_background_is_made_and_training_waits_for_it(corpus, whole, tmp_path):
    (tmp_path / "job.py").write_text(FULL_DISK)
    flags = [*FLAGS, *corpus, "--zero-stage", "2", "--async-save"]
    for failures, status, latest in ((1, 0, 12), (2, 1, 4)):
        save = tmp_path / f"save{failures}"
        done = run_script(
            2, str(tmp_path / "job.py"), [str(failures), "4", *flags, "--save", str(save), "--load", str(save)]
        )
        assert done.returncode == status and "global_step8 was not saved: " in done.stdout, done.stdout
        assert "training waits for this one" in done.stdout and "Traceback" not in done.stdout, done.stdout
        assert (save / "latest").read_text() == f"global_step{latest}"
    assert files(tmp_path / "save1") == files(whole)


def test_the_last_save_is_made_again_if_it_failed_in_the_background(corpus, whole, tmp_path):
    (tmp_path / "job.py").write_text(FULL_DISK)
    flags = [*FLAGS, *corpus, "--zero-stage", "2", "--async-save", "--save", str(tmp_path)]
    done = run_script(2, str(tmp_path / "job.py"), ["1", "4,8", *flags])
    assert done.returncode == 0 and "global_step12 was not saved: " in done.stdout, done.stdout
    assert files(tmp_path) == files(whole)


KILLED = """
import os, runpy, signal
from megazero import entry
from megazero.checkpoint import saver

write, entry.WAIT_S = saver.write_rank_file, 0.0
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # torchrun's may come before the other rank has said why it ends

def write_or_die(aside, rank, snapshot):
    if rank == 1 and ".global_step12." in str(aside):
        os.kill(os.getpid(), 9)
    return write(aside, rank, snapshot)

saver.write_rank_file = write_or_die
runpy.run_path("pretrain_gpt2.py", run_name="__main__")
"""


def test_a_rank_that_is_killed_in_the_last_save_is_not_waited_for_by_one_more(corpus, tmp_path):
    (tmp_path / "job.py").write_text(KILLED)
    save = tmp_path / "save"
    flags = [*FLAGS, *corpus, "--zero-stage", "2", "--async-save", "--save", str(save)]
    done = run_script(2, str(tmp_path / "job.py"), flags)
    assert done.returncode == -9 and "training waits for this one" not in done.stdout, done.stdout
    assert "error: lost the connection to a rank at 127.0.0.1" in done.stdout, done.stdout
    assert (save / "latest").read_text() == "global_step8"


def test_a_run_branches_from_one_checkpoint_and_goes_on_as_the_run_did(corpus, whole, tmp_path):
    one = ["--load", f"{whole}/global_step8/", "--zero-stage", "2"]
    done = run_job([*FLAGS, *corpus, *one, "--save", str(tmp_path)], 2)
    assert done.returncode == 0 and f"loaded {whole}/global_step8: continuing after iteration 8," in done.stdout, (
        done.stdout
    )
    assert files(tmp_path) == files(whole)
    again = run_job([*FLAGS, *corpus, *one, "--save", str(tmp_path)], 2)  # as a job that is started again
    assert again.returncode == 1 and f"To continue it, give --load {tmp_path}; else another" in again.stdout, (
        again.stdout
    )
    refuse_to_replace(CheckpointConfig(load=f"{whole}/global_step12", save=str(whole)))  # the newest
    with pytest.raises(ValueError, match="--save .*/global_step12 is one checkpoint: name the directory above it"):
        refuse_to_replace(CheckpointConfig(load=f"{whole}/global_step12", save=f"{whole}/global_step12"))


@pytest.mark.parametrize("base", ["", "/global_step8"])
def test_one_command_begins_with_pretrained_weights_and_goes_on_with_its_own_run(corpus, whole, tmp_path, base):
    once, again = tmp_path / "once", tmp_path / "again"
    begin = [*FLAGS, *corpus, "--zero-stage", "2", "--load", f"{whole}{base}", "--finetune", "--save", str(once)]
    assert run_job(begin, 2).returncode == 0
    for exits, said in ((["--exit-interval", "4"], "iteration 0, 0 samples"), ([], "iteration 4, 16 samples")):
        done = job(corpus, again, "--pretrained-checkpoint", f"{whole}{base}", *exits)
        assert done.returncode == 0 and f"continuing after {said}" in done.stdout, done.stdout
        assert done.stdout.count("starting from the weights in") == bool(exits)
    assert files(again) == files(once) != files(whole)
    other = job(corpus, tmp_path / "other", "--pretrained-checkpoint", str(whole), "--num-layers", "3", ranks=1)
    assert other.returncode == 1 and "that is another model. Give --num-layers 2" in other.stdout, other.stdout


@pytest.mark.parametrize(
    "load",
    [[], ["--load", "elsewhere"], ["--load", "{save}", "--finetune"], ["--load", "{save}/global_step8"]],
)
def test_a_run_that_does_not_continue_what_save_holds_is_refused_and_replaces_nothing(corpus, whole, load):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    done = run_job([*FLAGS, *corpus, "--save", str(whole), *(flag.format(save=whole) for flag in load)], 1)
    assert done.returncode == 1 and "(the newest is global_step12)" in done.stdout, done.stdout
    how = f"--load {whole}" + " without --finetune" * ("--finetune" in load)
    assert f"give {how}; else another --save" in done.stdout and "Traceback" not in done.stdout
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_a_save_that_cannot_be_written_is_refused_before_the_ranks_start(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    refuse_unwritable(CheckpointConfig(save=str(tmp_path / "not" / "yet")))
    with pytest.raises(OSError, match=f"--save .*/x cannot be written: {tmp_path}/file: it is no folder"):
        refuse_unwritable(CheckpointConfig(save=str(tmp_path / "file" / "x")))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
        with pytest.raises(OSError, match=f"cannot be written: {tmp_path}: its file system is read-only"):
            refuse_unwritable(CheckpointConfig(save=str(tmp_path / "x")))
    monkeypatch.setattr("sys.argv", ["pretrain_gpt2.py", *FLAGS, "--train-data", "x", "--save", str(tmp_path / "new")])
    with pytest.raises(OSError, match=f"--save .*/new cannot be written: {tmp_path}: you may not write in it"):
        pretrain_gpt2.check(1)


def test_weights_to_start_over_from_need_data_before_the_ranks_start(corpus, tmp_path, monkeypatch):
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "index.json").touch()
    for load in (tmp_path / "global_step3", tmp_path):
        monkeypatch.setattr("sys.argv", ["pretrain_gpt2.py", *FLAGS, *corpus[2:], "--load", str(load)])
        pretrain_gpt2.check(1)  # what it continues may be over
    monkeypatch.setattr("sys.argv", [*sys.argv, "--finetune"])
    with pytest.raises(ValueError, match="The training split is empty: give --train-data"):
        pretrain_gpt2.check(1)


def test_the_type_of_the_tokenizer_is_that_of_the_checkpoint_unless_flags_name_another(whole, monkeypatch):
    monkeypatch.setattr(pretrain_gpt2, "job_tokenizer", lambda _: SimpleNamespace(name="HuggingFaceTokenizer"))
    monkeypatch.setattr("sys.argv", ["pretrain_gpt2.py", *TINY_MODEL, "--load", str(whole)])
    config, _ = pretrain_gpt2.check(1)
    assert config.data.tokenizer_type == "HuggingFaceTokenizer"


UNCHECKED = """
import pretrain_gpt2
from megazero.entry import run_script

pretrain_gpt2.refuse_to_replace = lambda flags: None  # a script of the user's own may not ask
run_script(pretrain_gpt2.check, pretrain_gpt2.main)
"""


def test_a_script_without_checks_of_its_own_does_not_replace_another_runs_checkpoints(corpus, whole, tmp_path):
    (tmp_path / "job.py").write_text(UNCHECKED)
    before = {tag: files(whole, tag) for tag in ("global_step4", "global_step12")}
    done = run_script(2, str(tmp_path / "job.py"), [*FLAGS, *corpus, "--save", str(whole), "--seed", "5"])
    assert done.returncode == 1 and "(the newest is global_step12)" in done.stdout, done.stdout
    assert "error: --save" in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert {tag: files(whole, tag) for tag in before} == before


def test_a_damaged_checkpoint_ends_the_job_with_one_line_and_fallback_takes_the_one_before(corpus, whole, tmp_path):
    subprocess.run(["cp", "-r", f"{whole}/.", str(tmp_path)], check=True)
    os.utime(tmp_path / "global_step4" / "index.json")  # of a copy, whose last file is that of any checkpoint
    flip(tmp_path / "global_step12" / "rank_00001.safetensors", -1000)
    (tmp_path / "latest").write_text("../global_step12")
    done = job(corpus, tmp_path, ranks=1)
    assert done.returncode != 0 and "latest should hold the name" in done.stdout and "Traceback" not in done.stdout
    (tmp_path / "latest").write_text("global_step12")
    done = job(corpus, tmp_path)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert done.returncode != 0 and "Traceback" not in done.stdout
    assert any("rank_00001.safetensors is damaged" in line and "(read for" in line for line in errors), done.stdout
    (tmp_path / "latest").unlink()
    done = job(corpus, tmp_path, ranks=1)
    assert "has no file `latest`. In it there are global_step12, global_step8, global_step4. Choose" in done.stdout
    done = job(corpus, tmp_path, "--load-fallback")
    assert done.returncode == 0 and "continuing after iteration 8" in done.stdout, done.stdout
    assert done.stdout.count("has no file `latest`. Taking the newest checkpoint that is there, global_step12.") == 1
    assert files(tmp_path) == files(whole), "steps 9 to 12 again, bit for bit"


@pytest.mark.parametrize("latest", [b"global_step999", b"\xff/.."])
def test_a_run_that_is_over_ends_well_by_another_checkpoint_than_latest_names(corpus, whole, tmp_path, latest):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "latest").write_bytes(latest)
    done = job(corpus, tmp_path, "--load-fallback", ranks=1)
    assert done.returncode == 0 and "nothing to train" in done.stdout, done.stdout
    assert re.search(rf"checkpoint +{tmp_path}/global_step12\n", done.stdout), done.stdout


def test_a_job_whose_first_save_died_before_latest_was_written_goes_on_from_it(corpus, whole, tmp_path):
    shutil.copytree(whole / "global_step4", tmp_path / "global_step4")
    done = job(corpus, tmp_path)
    assert done.returncode == 0 and "continuing after iteration 4" in done.stdout, done.stdout
    assert "has no file `latest`. Taking the newest checkpoint that is there, global_step4." in done.stdout
    assert files(tmp_path) == files(whole)


def test_a_second_job_on_the_directory_is_refused_before_it_trains(corpus, tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.claim()
    done = job(corpus, tmp_path, ranks=1)
    folder.release()
    assert done.returncode != 0, done.stdout
    assert "another job (process" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    assert not (tmp_path / "latest").exists()


def test_a_load_that_points_beside_the_checkpoints_is_no_new_run(corpus, whole, tmp_path):
    (tmp_path / "config.json").touch()  # as Hugging Face's models have one
    for wrong, words in (
        (
            whole / "global_step0",
            f"no such checkpoint. In {whole} there are global_step12, global_step8, global_step4. `python -m "
            "megazero.checkpoint import` makes one of another system's",  # DeepSpeed's have the same names
        ),
        (whole / "latest", "is a file"),
        ("/dev/null", "is a file"),
        (tmp_path, "holds other files, but no checkpoint of this job"),
    ):
        done = run_job([*FLAGS, *corpus, "--load", str(wrong)], 1)
        assert done.returncode != 0 and words in done.stdout and "Traceback" not in done.stdout, done.stdout


def test_a_scripts_own_state_is_not_taken_for_the_jobs(caplog):
    client = {"iteration": 3, "consumed_samples": 12, "config": {"lr": 0.1}}
    for in_phase in (0, 12):
        assert not caplog.text, "a phase that begins reads its data from the first sample on"
        job_checkpoints._say_what_changed(SimpleNamespace(consumed_samples=12, consumed_in_phase=in_phase), client)
    assert "the checkpoint was imported: the samples after its 12 are" in caplog.text


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({}, []),
        ({"make_model": "a.make"}, ["not as in the run that saved the checkpoint: make_model a.make -> mup.make"]),
    ],
)
def test_another_function_that_makes_the_model_is_said(corpus, caplog, saved, said):
    caplog.set_level("INFO")
    config = load_config([*TINY_MODEL, *corpus])
    job = SimpleNamespace(
        config=config, groups=SimpleNamespace(data_parallel_size=1), corpora=None, consumed_in_phase=4
    )
    job.made_by, job.iteration = "mup.make", 4
    job_checkpoints._say_what_changed(job, {"train_samples": 8, "config": asdict(config), **saved})
    assert caplog.messages == said


def test_a_flag_that_makes_another_model_is_named_as_it_is_given(monkeypatch):
    monkeypatch.setattr("megazero.model.config.UNSEEN_IN_SHAPES", ("compile",))  # as if it did
    saved = GPT2Config()
    job = SimpleNamespace(config=SimpleNamespace(model=replace(saved, compile=True)))
    with pytest.raises(ValueError, match=r"with --compile False, now True: .* Give --no-compile\."):
        job_checkpoints._refuse_other_model(job, Path("saved"), {"model": asdict(saved)})


@pytest.mark.parametrize("finetune", [True, False])
@pytest.mark.parametrize("more", [{}, {"train_samples": 8}])
def test_another_dropout_than_that_of_weights_from_elsewhere_is_said(caplog, finetune, more):
    caplog.set_level("INFO")
    client = {"model": asdict(replace(GPT2Config(), hidden_dropout=0.0)), **more}
    config = SimpleNamespace(model=GPT2Config(swiglu=True), checkpoint=SimpleNamespace(finetune=finetune))
    with pytest.raises(ValueError, match=r"with --swiglu False, now True: .* --no-swiglu --hidden-dropout 0\.0\."):
        job_checkpoints._refuse_other_model(SimpleNamespace(config=config), Path("saved"), client)
    config.model = replace(config.model, hidden_dropout=0.2)
    with pytest.raises(ValueError, match=r"Give --no-swiglu\. To change"):  # the dropout is what was asked for
        job_checkpoints._refuse_other_model(SimpleNamespace(config=config), Path("saved"), client)
    assert not caplog.messages
    config.model = GPT2Config()
    job_checkpoints._refuse_other_model(SimpleNamespace(config=config), Path("saved"), client)
    said = ["not as in the run that saved the checkpoint: --hidden-dropout 0.0 -> 0.1"]
    assert caplog.messages == ([] if more and not finetune else said), "once: the job says it of its own checkpoints"


def test_a_prompt_that_fills_all_positions_is_refused_before_the_model_is_loaded(whole, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["generate_samples.py", "--load", str(whole), "--prompt", "short", "far too long " * 99]
    )
    with pytest.raises(
        ValueError, match=r"'far too long .*\.\.\. has \d+ tokens, and the model 32 positions .* to 31,"
    ):
        generate_samples.check(1)
    monkeypatch.setattr("sys.argv", ["generate_samples.py", "--load", str(whole), "--prompt", "short"])
    request = generate_samples.check(1)
    assert len(request.prompts[0]) + request.new_tokens[0] == 32, (
        "what is asked for by default is cut to the room there is"
    )


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(whole, tmp_path, monkeypatch):
    output = tmp_path / "no_folder" / "out"
    monkeypatch.setattr("sys.argv", ["generate_samples.py", "--load", str(whole), "--output", str(output)])
    with pytest.raises(OSError, match=f"--output {output} cannot be written: No such file"):
        generate_samples.check(1)


def test_a_checkpoint_of_another_vocabulary_is_neither_continued_nor_used(whole, tmp_path, monkeypatch):
    other = make_vocabulary(tmp_path, make_texts(30), size=290)
    flags = ["--load", str(whole), "--tokenizer-path", str(other)]
    monkeypatch.setattr("sys.argv", ["generate_samples.py", "--prompt", "the", *flags])
    with pytest.raises(ValueError, match="global_step12 was trained with another vocabulary"):
        generate_samples.check(1)
    config = SimpleNamespace(checkpoint=CheckpointConfig(load=str(whole)))
    job = SimpleNamespace(tokenizer=build_tokenizer("GPT2BPETokenizer", tokenizer_path=other), config=config)
    with pytest.raises(ValueError, match="global_step12 was trained with another vocabulary"):
        job_checkpoints._prepare_to_continue(job, Reader(whole))


@pytest.mark.parametrize(
    ("content", "is_told"), [(None, True), (b"other", True), (b"of a script", True), (b"own", False)]
)
def test_weights_from_elsewhere_that_do_not_have_the_jobs_vocabulary_are_told(monkeypatch, caplog, content, is_told):
    files = {} if content is None else {"tokenizer.model": np.frombuffer(content, np.uint8)}
    client = {"tokenizer": {"tokenizer_type": "SentencePieceTokenizer"}, "tokenizer_files": files}
    if content == b"of a script":
        client = {"tokenizer_files": ["tokenizer.model"]}
    monkeypatch.setattr(job_checkpoints, "client_state", lambda _: client)
    monkeypatch.setattr(job_checkpoints, "_refuse_other_model", lambda *_: None)
    config = SimpleNamespace(checkpoint=SimpleNamespace(finetune=True))
    job = SimpleNamespace(tokenizer=SimpleNamespace(contents={"tokenizer.model": b"own"}), config=config)
    job_checkpoints._prepare_to_continue(job, SimpleNamespace(path="theirs"))
    assert ("theirs does not say which vocabulary it was trained with: make sure" in caplog.text) == is_told


def test_a_checkpoint_that_moved_has_its_vocabulary_with_it(corpus, tmp_path, monkeypatch):
    shutil.copytree(corpus[3], tmp_path / "vocab")
    job = [*TINY_MODEL, *corpus[:2], *corpus[4:]]
    told = ["--tokenizer-path", str(tmp_path / "vocab"), "--save", str(tmp_path / "save")]
    done = run_job([*job, *told, "--train-iters", "1"], 1)
    assert done.returncode == 0, done.stdout
    shutil.rmtree(tmp_path / "vocab")
    (tmp_path / "save").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert checkpoint_command(["reshape", "moved/global_step1", "again", *SIZES]) == 0
    assert checkpoint_command(["export", "--to", "huggingface", "again", "exported"]) == 0
    assert checkpoint_command(["import", "--from", "huggingface", "exported", "imported"]) == 0
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=corpus[3])
    for folder, load in (("moved", "."), ("moved/global_step1", "."), (".", "again/global_step1"), (".", "imported")):
        monkeypatch.chdir(tmp_path / folder)
        found = inference.open_checkpoint(inference.InferenceConfig(load=load)).tokenizer
        assert found.contents == tokenizer.contents and found.sha256 == tokenizer.sha256
    done = run_job(
        [*job, "--load", str(tmp_path / "moved"), "--save", str(tmp_path / "moved"), "--train-iters", "2"], 1
    )
    assert done.returncode == 0 and "continuing after iteration 1," in done.stdout, done.stdout
    done = run_job([*job, "--load", str(tmp_path / "imported"), "--finetune", "--train-iters", "1"], 1)
    assert done.returncode == 0 and "make sure that it is yours" not in done.stdout, done.stdout
    with pytest.raises(FileNotFoundError, match="--from huggingface exported OUT"):
        inference.open_checkpoint(inference.InferenceConfig(load="exported"))


def test_the_vocabulary_is_that_of_a_checkpoint_that_the_job_may_go_back_to(corpus, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    flip(tmp_path / "global_step12" / "rank_00000.safetensors", -1)  # of the vocabulary
    (tmp_path / "global_step8" / "rank_00000.safetensors").unlink()
    load = [*TINY_MODEL, *corpus[:2], "--load", str(tmp_path)]
    with pytest.raises(CheckpointError, match="damaged"):
        job_checkpoints.job_tokenizer(load_config(load))
    wanted = build_tokenizer("GPT2BPETokenizer", tokenizer_path=corpus[3]).contents
    assert job_checkpoints.job_tokenizer(load_config([*load, *corpus[2:4]])).contents == wanted, "as the flags say"
    assert job_checkpoints.job_tokenizer(load_config([*load, "--load-fallback"])).contents == wanted
    one = [*load[:-1], str(tmp_path / "global_step4")]
    assert job_checkpoints.job_tokenizer(load_config(one)).contents == wanted, "of the one that is named"
    with pytest.raises(ValueError, match="--tokenizer-type SentencePieceTokenizer needs"):
        job_checkpoints.job_tokenizer(
            load_config([*load, "--load-fallback", *"--tokenizer-type SentencePieceTokenizer".split()])
        )
    (tmp_path / "latest").write_text("global_step16")
    with pytest.raises(FileNotFoundError, match="No checkpoint at .*16, beside which there are global_step12"):
        job_checkpoints.job_tokenizer(load_config(load))
    (tmp_path / "latest").unlink()
    with pytest.raises(ValueError, match="has no file `latest`. In it there are global_step12, global_step8"):
        job_checkpoints.job_tokenizer(load_config(load))
    with pytest.raises(ValueError, match="--finetune: there is no checkpoint in --load .*none to take the weights"):
        job_checkpoints.job_tokenizer(load_config([*load[:-1], str(tmp_path / "none"), "--finetune"]))
    flip(tmp_path / "global_step4" / "index.json", 100)
    with pytest.raises(CheckpointError, match=r"step12/.* is damaged.* No other checkpoint in .* is whole either"):
        job_checkpoints.job_tokenizer(load_config([*load, "--load-fallback"]))
    flip(tmp_path / "global_step4" / "index.json", 100)
    for path in (tmp_path / "global_step8", tmp_path / "global_step12"):
        path.rename(tmp_path.with_name(f"no_{path.name}"))  # as if the job had died in its first save
    assert job_checkpoints.job_tokenizer(load_config(load)).contents == wanted


def test_continuations_are_computed_in_batches_and_a_long_prompt_cuts_no_other(whole, monkeypatch, caplog):
    caplog.set_level("INFO")
    flags = "--num-samples 5 --out-seq-length 20 --batch-size 2 --prompt".split()
    prompts = ["the ranks", "the " * 20, "of a group"]
    monkeypatch.setattr("sys.argv", ["generate_samples.py", "--load", str(whole), *flags, *prompts])
    request = generate_samples.check(1)
    assert request.new_tokens == [20] * 5 + [32 - len(request.prompts[5])] * 5 + [20] * 5
    drawn = []

    def generate(model, prompts, new_tokens, *, seed, vocab_size, **_):
        assert vocab_size == request.trained.tokenizer.vocab_size
        drawn.append((len(prompts), new_tokens, seed))
        return [[7] * new_tokens for _ in prompts]

    monkeypatch.setattr(generate_samples, "generate", generate)
    monkeypatch.setattr(generate_samples, "load_model", lambda *_: (None, None))
    generate_samples.main(request)
    assert (
        caplog.messages[-1]
        == "5 continuations stopped before --out-seq-length 20, at the end of the model's 32 positions"
    )
    assert [rows for rows, _, _ in drawn] == [2, 2, 1] * 3
    assert [tokens for _, tokens, _ in drawn[::3]] == [20, 32 - len(request.prompts[5]), 20]
    first = drawn.copy()
    generate_samples.main(request)
    assert drawn == first * 2, "the same seed gives the same samples"
    sampling = replace(request.sampling, seed=request.sampling.seed + request.sampling.batch_size)
    generate_samples.main(replace(request, sampling=sampling))
    assert len({seed for _, _, seed in drawn}) == 2 * len(first), "batches, or two seeds, would draw the same samples"
    caplog.clear()
    stop = generate_samples.continuation(request.trained.tokenizer, request.prompts[5], [7])
    generate_samples.main(replace(request, sampling=replace(sampling, stop=[stop])))
    assert "positions" not in caplog.text, "each has ended itself"


def test_json_lines_of_prompts_become_lines_with_tokens_and_their_probabilities(
    own_world, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(inference, "leave_out_cudnn_attention", lambda: None)
    prompts = ["the ranks\nof a group", "", "each rank keeps"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    model = []

    def load_once(*given):
        model[:] = model or load_model(*given)
        return model

    def samples(name, *flags):
        given = ["--load", str(whole), "--sample-input-file", str(tmp_path / "in.jsonl"), "--out-seq-length", "12"]
        monkeypatch.setattr("sys.argv", ["generate_samples.py", *given, "--output", str(tmp_path / name), *flags])
        monkeypatch.setattr(generate_samples, "load_model", load_once)
        request = generate_samples.check(1)
        generate_samples.main(request)
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()], request.trained.tokenizer

    free, tokenizer = samples("free", "--temperature", "0")
    assert [sample["prompt"] for sample in free] == prompts
    for sample in free:
        before, own = tokenizer.encode(sample["prompt"]) or [tokenizer.eod], sample["tokens"]
        logits = model[0](torch.tensor([before + own]))[0, len(before) - 1 : -1, : tokenizer.vocab_size]
        of_own = logits.log_softmax(-1).gather(1, torch.tensor(own)[:, None])[:, 0]
        assert sample["text"] == tokenizer.decode(own)
        assert sample["log_probs"] == pytest.approx(of_own.tolist(), rel=1e-4)

    stop = free[0]["text"][9:12]
    for sample, longer in zip(samples("stopped", "--temperature", "0", "--stop", "never", stop)[0], free, strict=True):
        text, rest, own = *longer["text"].partition(stop)[:2], sample["tokens"]
        assert sample["text"] == text and own == longer["tokens"][: len(own)] and len(sample["log_probs"]) == len(own)
        if rest:
            assert stop in tokenizer.decode(own) and stop not in tokenizer.decode(own[:-1])
    assert len(samples("stopped", "--stop", "never")[0]) == 6, "appended"


@pytest.mark.parametrize(
    "text, found",
    [
        ("", "0 tokens and 0 words"),
        ('{"text": ""}', "0 tokens and 0 words"),
        ("t", "1 token and 1 word"),
        ("\n \n\n", r"\d+ tokens and 0 words"),
    ],
)
def test_a_text_too_short_to_evaluate_is_refused_before_the_model_is_loaded(whole, tmp_path, monkeypatch, text, found):
    (tmp_path / "short").write_text(text)
    monkeypatch.setattr("sys.argv", ["evaluate_gpt2.py", "--load", str(whole), "--valid-data", str(tmp_path / "short")])
    with pytest.raises(ValueError, match=f"--valid-data .*short has {found}; the first token is not predicted"):
        evaluate_gpt2.main(evaluate_gpt2.check(1))


@pytest.mark.parametrize(
    ("task", "line", "expected"),
    [
        ("lambada", {"text": "the ranks of a group"}, r"last words +\d of 2\n.*accuracy +[01]\."),
        (
            "hellaswag",
            {"ctx": "the ranks", "endings": ["of a", "group"], "label": 1},
            r"questions +2\n.*accuracy +[01]\.",
        ),
    ],
)
def test_json_lines_are_the_data_of_tasks_that_ask_questions(whole, tmp_path, task, line, expected):
    (tmp_path / "lines").write_text(f"{json.dumps(line)}\n" * 2)
    flags = [
        "--load",
        str(whole),
        "--valid-data",
        str(tmp_path / "lines"),
        "--task",
        task,
        "--model-parallel-size",
        "2",
    ]
    done = run_script(2, "evaluate_gpt2.py", [*flags, "--output", str(tmp_path / "results")])
    assert done.returncode == 0 and re.search(expected, done.stdout, re.DOTALL), done.stdout
    (result,) = map(json.loads, (tmp_path / "results").read_text().splitlines())
    assert result["total"] == 2 and f"{result['accuracy']:.4f}" in done.stdout


def test_tokens_have_the_perplexity_of_their_text(own_world, corpus, whole, tmp_path, monkeypatch):
    text, tokenizer = "".join(make_texts(9)), build_tokenizer("GPT2BPETokenizer", tokenizer_path=corpus[3])
    ids = tokenizer.encode(text)
    (tmp_path / "text").write_text(text)
    for name, last in (("ids", ids[-1]), ("wrong", tokenizer.vocab_size)):
        with IndexedDatasetWriter(tmp_path / f"{name}_text_document", "uint16") as writer:
            writer.add_document(ids[:50])
            writer.add_document([*ids[50:-1], last])

    def checked(data, *more):
        given = ["--load", str(whole), "--overlapping-eval", "8", "--valid-data", str(tmp_path / data), *more]
        monkeypatch.setattr("sys.argv", ["evaluate_gpt2.py", *given])
        return evaluate_gpt2.check(1)

    with pytest.raises(ValueError, match="wrong_text_document.bin holds token ids from .* to 300, but"):
        evaluate_gpt2.main(checked("wrong"))
    with pytest.raises(ValueError, match="--valid-data .*ids names tokens, and --task lambada needs the text"):
        checked("ids", "--task", "lambada")
    with pytest.raises(OSError, match="--output .*no_folder/results cannot be written: No such file"):
        checked("ids", "--output", str(tmp_path / "no_folder" / "results"))
    monkeypatch.setattr(inference, "leave_out_cudnn_attention", lambda: None)
    results = tmp_path / "results.jsonl"
    evaluate_gpt2.main(checked("text", f"own={tmp_path}/ids_text_document.bin", "--output", str(results)))
    of_text, of_tokens = map(json.loads, results.read_text().splitlines())
    same = {"checkpoint": str(whole), "tag": "global_step12", "task": "perplexity", "tokens": len(ids) - 1}
    for found, name in ((of_text, ""), (of_tokens, "own")):
        assert found.items() >= {**same, "set": name, "loss": of_text["loss"]}.items()
        assert found["ppl"] == math.exp(found["loss"])
    assert of_text["words"] == len(text.split()) and of_text["adjusted_ppl"] > 1
    assert of_tokens["words"] is of_tokens["adjusted_ppl"] is None


def test_documents_in_json_lines_have_the_perplexity_of_their_training_tokens(
    own_world, corpus, whole, tmp_path, monkeypatch
):
    texts, tokenizer = make_texts(9), build_tokenizer("GPT2BPETokenizer", tokenizer_path=corpus[3])
    (tmp_path / "lines").write_text("".join(json.dumps({"body": text}) + "\n" for text in ["", *texts]))
    with IndexedDatasetWriter(tmp_path / "ids", "uint16") as writer:
        for text in texts:
            writer.add_document([*tokenizer.encode(text), tokenizer.eod])
    sets, results = [str(tmp_path / name) for name in ("lines", "ids")], tmp_path / "results.jsonl"
    given = ["--load", str(whole), "--text-key", "body", "--output", str(results), "--valid-data", *sets]
    monkeypatch.setattr("sys.argv", ["evaluate_gpt2.py", *given])
    monkeypatch.setattr(inference, "leave_out_cudnn_attention", lambda: None)
    evaluate_gpt2.main(evaluate_gpt2.check(1))
    of_lines, of_tokens = map(json.loads, results.read_text().splitlines())
    assert all(of_lines[name] == of_tokens[name] for name in ("tokens", "loss", "ppl"))
    assert of_lines["words"] == sum(len(text.split()) for text in texts)


def test_json_lines_are_not_scored_as_text(whole, tmp_path, monkeypatch):
    given = ["evaluate_gpt2.py", "--load", str(whole), "--valid-data", str(tmp_path / "lines"), "--task", "wikitext"]
    monkeypatch.setattr("sys.argv", given)
    (tmp_path / "lines").write_text('\n{"text": "the ranks of a group"}\n')
    with pytest.raises(ValueError, match="--valid-data .*lines holds JSON lines, whose keys and escapes would count"):
        evaluate_gpt2.check(1)
    (tmp_path / "lines").write_text("{the ranks} of a group\n")
    evaluate_gpt2.check(1)


def test_a_stride_follows_a_short_window_and_one_that_does_not_fit_is_refused_before_the_model_is_loaded(
    whole, tmp_path, monkeypatch
):
    (tmp_path / "text").write_text("the ranks of a group")
    given = ["evaluate_gpt2.py", "--load", str(whole), "--valid-data", str(tmp_path / "text"), "--seq-length", "16"]
    monkeypatch.setattr("sys.argv", given)
    assert evaluate_gpt2.check(1)[1].stride(16) == 16
    monkeypatch.setattr("sys.argv", [*given, "--overlapping-eval", "17"])
    with pytest.raises(ValueError, match="--overlapping-eval 17 must be between 1 and --seq-length 16"):
        evaluate_gpt2.check(1)


@pytest.mark.parametrize("flag, precision", [("--tf32", "high"), ("--no-tf32", "highest")])
def test_a_model_in_use_rounds_to_tf32_where_it_is_asked_to(own_world, whole, monkeypatch, caplog, flag, precision):
    monkeypatch.setattr("sys.argv", ["generate_samples.py", "--load", str(whole), "--prompt", "the", flag])
    request = generate_samples.check(1)
    try:
        load_model(request.config, request.trained)
        assert torch.get_float32_matmul_precision() == precision
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "it would compile a graph for each token"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(True)
    said = flag == "--tf32" and not torch.cuda.is_available()
    assert ("--tf32 has no effect: the ranks compute on cpu" in caplog.text) == said


def test_the_pages_lines_read_two_models_and_leave_random_streams_alone(own_world, whole, monkeypatch):
    monkeypatch.setattr(inference, "leave_out_cudnn_attention", lambda: None)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    names, before = {}, torch.get_rng_state()
    exec(compile(re.sub(r"checkpoints/run\d", str(whole), code), "docs/training.md", "exec"), names)
    tokens, losses = names["tokens"], names["losses"]
    assert losses.shape == (1, tokens.numel() - 1) and len(names["widths"]) == 3, "with logits and bits"
    of_logits = torch.nn.functional.cross_entropy(names["logits"][0, :-1], tokens[0, 1:], reduction="none")
    torch.testing.assert_close(of_logits[None], losses)
    first = names["model"](torch.tensor([names["text"][:-1]]), targets=torch.tensor([names["text"][1:]]))
    assert names["bits"] * math.log(2) == pytest.approx(first.sum().item())
    assert torch.equal(names["other"](tokens[:, :-1], targets=tokens[:, 1:]), losses)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_pages_lines_read_tensors_and_tokens(corpus, whole):
    names: dict = {}
    for page, heading in (("checkpoints.md", "## Plain weights"), ("data.md", "## The order of samples")):
        section = (ROOT / "docs" / page).read_text().split(heading)[1]
        code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
        code = code.replace("checkpoints/run1", str(whole)).replace("data/webtext", corpus[1])
        exec(compile(code, page, "exec"), names)
    assert names["weight"].dtype == torch.float32 and {"master", "exp_avg", "exp_avg_sq"} == {*names["entry"].states}
    assert names["batch"].shape == (4, 1025)


TEACHER = """
import pretrain_gpt2, sys, torch
from megazero.entry import run_script
from megazero.inference import InferenceConfig, open_checkpoint, read_model
from megazero.training import pretrain

read_in, directory, teachers = sys.argv.pop(1), sys.argv.pop(1), []

def read(where, groups, dtype):
    if where == read_in and not teachers:
        teachers.append(read_model(open_checkpoint(InferenceConfig(load=directory)), groups, dtype))

def make_model(config, groups, device, dtype):
    read("make_model", groups, dtype)
    return pretrain_gpt2.make_model(config, groups, device, dtype)

def forward_step(job, iterator):
    read("forward_step", job.groups, torch.float32)
    tokens, targets = pretrain_gpt2.get_batch(iterator, job)
    with torch.no_grad():
        job.own_scalars["teacher"] = float(teachers[0](tokens, targets=targets).mean())
    loss = job.engine(tokens, targets=targets).mean()
    job.own_scalars["student"] = float(loss)
    return loss

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, make_model, forward_step))
"""


@pytest.mark.parametrize("read_in", ["make_model", "forward_step"])
@pytest.mark.parametrize("flags", ["--zero-stage 3", "--zero-stage 2 --model-parallel-size 2"])
def test_a_teacher_is_read_in_a_job_and_does_not_learn(corpus, whole, tmp_path, read_in, flags):
    (tmp_path / "script.py").write_text(TEACHER)
    save = tmp_path / "save"
    given = [read_in, str(whole), *TINY_MODEL, *corpus, *flags.split(), "--load", str(whole), "--finetune"]
    given += ["--train-iters", "3", "--log-interval", "1", "--save", str(save), "--no-tensorboard"]
    done = run_script(2, str(tmp_path / "script.py"), given)
    assert done.returncode == 0, done.stdout
    first, *others = logged(save)
    assert first["teacher"] == pytest.approx(first["student"])
    assert all(abs(line["teacher"] - line["student"]) > 0.01 for line in others)


def test_the_pages_lines_give_a_trained_model_more_positions(corpus, whole, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    page = (ROOT / "docs" / "checkpoints.md").read_text().split("## Change a trained model")[1]
    flags = [*TINY_MODEL, *corpus, "--max-position-embeddings", "64", "--seq-length", "64", "--train-iters", "1"]
    refused = run_job([*flags, "--load", str(whole)], 1)
    assert "To change a trained model, see docs/checkpoints.md" in refused.stdout, refused.stdout
    monkeypatch.chdir(tmp_path)
    checkpoint_command(["export", "--to", "huggingface", str(whole), "exported"])
    exec(compile(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], "docs/checkpoints.md", "exec"), {})
    checkpoint_command(["import", "--from", "huggingface", "longer", "checkpoints/longer"])
    flags.remove("--tokenizer-path")
    flags.remove(corpus[3])  # the data are those of the vocabulary that came along
    done = run_job([*flags, "--load", str(tmp_path / "checkpoints/longer"), "--finetune"], 1)
    assert done.returncode == 0, done.stdout
    weight, longer = (Reader(path).read_weight("position_embeddings.weight") for path in (whole, "checkpoints/longer"))
    assert torch.equal(longer, torch.cat([weight, weight]))
    found = inference.open_checkpoint(inference.InferenceConfig(load="checkpoints/longer")).tokenizer
    assert found.encode("the ranks") == build_tokenizer("GPT2BPETokenizer", tokenizer_path=corpus[3]).encode(
        "the ranks"
    )


def test_the_jobs_checkpoint_becomes_a_file_of_weights(whole, tmp_path):
    command = [sys.executable, "zero_to_fp32.py", ".", str(tmp_path / "pytorch_model.bin")]
    done = subprocess.run(command, cwd=whole, capture_output=True, text=True, check=True)
    assert "zero stage 2, world_size: 2" in done.stdout
    state = get_fp32_state_dict_from_zero_checkpoint(whole)
    assert all(value.numel() for value in state.values())
