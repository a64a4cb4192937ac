"""`diff`: what differs between two checkpoints and how much, and nothing else."""

from __future__ import annotations

import re

import pytest
import torch

from megazero.checkpoint.commands.diff import compare
from tests.checkpoint.checkpoints import CLIENT_STATE, TAG, make, run, tensors


def diff(capsys, *arguments) -> tuple[int, list[str]]:
    return run(capsys, "diff", *arguments)


def test_diff_of_equal_checkpoints_whatever_ranks_wrote_them(saved, tmp_path, capsys):
    make(tmp_path / "other", 4, 1)
    status, lines = diff(capsys, saved, tmp_path / "other")
    assert status == 0
    assert lines == [f"A  {saved / TAG}", f"B  {tmp_path / 'other' / TAG}", "", "equal: 17 tensors, value for value"]


def test_diff_says_how_much_values_differ(saved, tmp_path, capsys):
    values = tensors()
    values["words"]["master"][3, 2] += 0.5
    values["words"]["master"][4, 2] -= 0.25
    values["norm"]["exp_avg"][1] = float("nan")
    values["count"]["constant"] += 3
    reader = make(tmp_path / "other", 1, 1, values)
    found = compare(make(tmp_path / "same"), reader)
    by_name = {difference.what: difference for difference in found.values}
    assert by_name.keys() == {"weights of words", "exp_avg of norm", "weights of count"}
    words = by_name["weights of words"]
    assert (words.count, words.numel) == (2, 65) and words.max_abs == pytest.approx(0.5)
    assert words.relative == pytest.approx(0.5 / float(tensors()["words"]["master"].abs().max()))
    assert by_name["exp_avg of norm"].count == 1
    assert by_name["exp_avg of norm"].max_abs != by_name["exp_avg of norm"].max_abs
    assert (by_name["weights of count"].max_abs, by_name["weights of count"].relative) == (3, 3 / 2**40)
    status, lines = diff(capsys, "--weights-only", saved, tmp_path / "other")
    assert status == 1 and lines[-1] == "different: values of 2 of 7 tensors differ"
    assert [line.split() for line in lines[3:6]] == [
        ["VALUES", "DIFFERENT", "OF", "MAX", "ABS", "RELATIVE"],
        ["weights", "of", "words", "2", "65", "0.5", f"{words.relative:.3g}"],
        ["weights", "of", "count", "1", "1", "3", f"{3 / 2**40:.3g}"],
    ]


def test_nan_is_like_nan(tmp_path):
    values = {"a": {"master": torch.tensor([float("nan"), 1.0])}}
    a, b = (
        make(tmp_path / "a", 1, 1, values),
        make(tmp_path / "b", 1, 1, {"a": {"master": torch.tensor([-float("nan"), 1.0])}}),
    )
    assert compare(a, b).is_equal


def test_diff_of_other_parameters_shapes_dtypes_and_settings(saved, tmp_path, capsys):
    values = tensors()
    del values["norm"], values["qkv_bias"]["exp_avg"]
    values["new"] = {"master": torch.zeros(2)}
    values["frozen"] = {"constant": values["frozen"]["constant"].float()}
    values["count"] = {"constant": torch.zeros(3)}
    make(tmp_path / "other", 2, 1, values, global_steps=7, loss_scaler=None, zero_stage=3)
    status, lines = diff(capsys, saved, tmp_path / "other")
    text = "\n".join(re.sub(r" {2,}", "  ", line) for line in lines)
    assert status == 1
    for expected in (
        "only in A: norm",
        "only in B: new",
        "only in A: exp_avg of 1 parameters",
        "weights of frozen  BF16 [5, 2]  F32 [5, 2]",
        "weights of count  I64 []  F32 [3]",
        "global_steps  6  7",
        "loss_scaler.scale  1.0",
        "different: not all is in both; 2 have other shapes or dtypes; 2 settings differ",
    ):
        assert expected in text
    assert "zero_stage" not in text and "VALUES" not in text


def test_diff_sees_the_tensors_of_the_client_state(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b", client={**CLIENT_STATE, "ema": torch.ones(4)})
    ((what, in_a, in_b),) = compare(a, b).settings
    assert what == "client_state.ema" and in_a != in_b and in_a.startswith("tensor float32 [4]")


def test_diff_lists_the_largest_differences_and_all_on_request(tmp_path, capsys):
    values = {f"p{i}": {"master": torch.ones(3)} for i in range(25)}
    others = {f"p{i}": {"master": torch.ones(3) + i} for i in range(25)}
    make(tmp_path / "a", 1, 1, values), make(tmp_path / "b", 1, 1, others)
    _, lines = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert lines[4].split() == ["weights", "of", "p24", "3", "3", "24", "24"]
    assert lines[23].startswith("weights of p5 ") and lines[24].startswith("... and 4 more")
    _, lines = diff(capsys, tmp_path / "a", tmp_path / "b", "--all")
    assert lines[27].startswith("weights of p1 ") and lines[29] == "different: values of 24 of 25 tensors differ"
