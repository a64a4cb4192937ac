"""The JSON configuration: every level is checked, old forms are understood, and what the engine is told follows."""

from __future__ import annotations

import base64
import json
import logging
import math
import sys
from collections import UserDict, UserList
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from megazero.arguments import load_config
from megazero.job import build_schedule
from megazero.json_config import DeepSpeedConfigError, JsonConfig, load_json_config
from megazero.json_config.config import ZERO, ZERO_FIELDS
from megazero.json_config.old_forms import DISABLED_ONLY
from megazero.json_config.schema import IF_GIVEN, OBEYED, default_of, every_key, show
from megazero.json_config.sections import CHECKPOINTING, CHECKPOINTING_FIELDS
from megazero.json_source import parse_json, strip_comments
from megazero.nvme import PAGE
from megazero.zero.config import ZeroConfig
from megazero.zero.residency import GatherLimits
from tests.optim.test_schedules import PARAMS, TORCHS, stepped

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "scripts/configs").iterdir())


def load(world_size: int = 1, *, auto=None, model_parallel_size: int = 1, **document) -> JsonConfig:
    document.setdefault("train_micro_batch_size_per_gpu", 1)
    return load_json_config(document, world_size=world_size, model_parallel_size=model_parallel_size, auto=auto)


def zero(**section) -> JsonConfig:
    return load_json_config({"train_batch_size": 1, "zero_optimization": section})


def refused(message: str, **document) -> None:
    with pytest.raises(DeepSpeedConfigError, match=message):
        load(**document)


# Sources


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_load(path, caplog):
    config = load_json_config(path, world_size=4, auto={"train_micro_batch_size_per_gpu": 3})
    assert not caplog.records
    if path.suffix == ".config":
        assert config.train_batch_size == 12 and config.compute_dtype == "fp32"
        if path.stem[-1].isdigit():
            own = {"gather_limits": GatherLimits(), "param_persistence_threshold": 0, "sub_group_size": 0}
            own["reduce_bucket_size"] = ZeroConfig().reduce_bucket_size
            assert replace(config.zero, **own) == ZeroConfig(stage=int(path.stem[-1]))
        else:
            home = {"ds_zero_offload": ("cpu", "none"), "ds_zero_infinity": ("nvme", "nvme")}[path.stem]
            assert (config.zero.offload_optimizer, config.zero.offload_param) == home
    else:
        assert config.train_micro_batch_size_per_gpu == 4 and config.fp16.enabled and config.zero.stage == 2
        assert config.optimizer.params == {"lr": 1.5e-4, "weight_decay": 0.01}


def test_there_are_shipped_files():
    assert [path.name for path in SHIPPED] == [
        "ds_zero2_config.json",
        "ds_zero_infinity.config",
        "ds_zero_offload.config",
        *(f"ds_zero_stage_{k}.config" for k in (1, 2, 3)),
    ]


def test_dict_path_and_base64_are_one_configuration(tmp_path):
    document = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    text = base64.urlsafe_b64encode(json.dumps(document).encode()).decode()
    from_dict, *others = (load_json_config(source, world_size=2) for source in (document, path, str(path), text))
    assert all(other == from_dict for other in others) and from_dict.zero.stage == 2


@pytest.mark.parametrize("source", ["no/such/file.json", "abcdefgh", "ds_config", "", 7, None])
def test_a_source_that_is_nothing_is_quoted(source):
    with pytest.raises(DeepSpeedConfigError, match=f"'{source}' is neither|got (int|NoneType)"):
        load_json_config(source, world_size=1)


def test_comments_and_trailing_commas_pass_and_strings_stay():
    text = """{ // one
      "a": "http://x # not, a comment /* neither */ ,]", # two
      /* three
         lines */ "b": [1, 2, ], "c\\"//": {"d": 1.5e8, /* last */ }, // end
    }"""
    assert parse_json(text, "x") == {
        "a": "http://x # not, a comment /* neither */ ,]",
        "b": [1, 2],
        'c"//': {"d": 1.5e8},
    }
    assert [len(line) for line in strip_comments(text).splitlines()] == [len(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "text, message",
    [
        ('{\n "a": 1\n "b": 2}', r"x, line 3, column 2: .* '\"b\": 2}' is not JSON.*comma is missing"),
        ('{"a": 1, "b": {"c": 1, "c": 2, "d": 0, "d": 1}}', "x: keys are given twice in one object: c, d"),
        ("[1]", "x must hold a JSON object, got list"),
        ('{"a": NaN}', "NaN is not a number"),
        (" ", "x is empty: write a JSON object"),
        ("// nothing\n", "x is empty: write a JSON object"),
        ('{\n "a": 1\n', "x ends too early: .* Is a } or a ] missing"),
        ('{"a": [1,\n\n', "x ends too early: "),
        ('{"a": "1\u20282"\n "b": 2}', r"x, line 2, column 2: .* '\"b\": 2}' is not JSON"),
        ("{'a': 1}", r"x, line 1, column 2: .* trailing commas dropped\.$"),
        ('{"a": /* never closed', "x, line 1"),
        pytest.param('{"a": ' * 10**5 + "1" + "}" * 10**5, "x nests objects or lists deeper than Python", id="nested"),
        pytest.param('{"a": ' + "1" * 5000 + "}", "x: Exceeds the limit", id="digits"),
        pytest.param('{"a": "' + '\\"' * 300_000, "x, line 1", id="quotes, searched once"),
        pytest.param('{"a": ' + "/* " * 300_000, "x, line 1", id="comments, searched once"),
    ],
)
def test_what_is_not_json_is_located(text, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        parse_json(text, "x")


def test_values_in_types_that_no_file_gives_are_those_of_a_file(tmp_path):
    adam = {"type": "Adam", "params": {"lr": 0.5, "betas": [0.5, 0.75]}}
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    plain = {"train_batch_size": 4, "bf16": {"enabled": True}, "gradient_clipping": 0.5, "optimizer": adam}
    plain["zero_optimization"] = {"stage": 3, "offload_optimizer": offload}
    own_lists = {"lr": np.float32(0.5), "betas": UserList([0.5, 0.75])}  # as omegaconf's configurations have
    arrays = {"lr": torch.tensor(0.5), "betas": np.array([0.5, 0.75])}
    for params in (own_lists, arrays):
        own = {
            "train_batch_size": np.int64(4),
            "bf16": {"enabled": np.bool_(True)},
            "gradient_clipping": np.float32(0.5),
            "optimizer": UserDict({"type": "Adam", "params": params}),
            "zero_optimization": {
                "stage": np.int8(3),
                "offload_optimizer": MappingProxyType({**offload, "nvme_path": tmp_path}),
            },
        }
        read = load_json_config(MappingProxyType(own))
        assert read == load_json_config(plain) and json.dumps(read.optimizer.params) == json.dumps(adam["params"])


def test_the_source_is_not_changed_and_not_shared():
    document = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}
    before = json.dumps(document)
    load_json_config(document, world_size=1).optimizer.params["lr"] = 7
    assert json.dumps(document) == before


def test_every_error_is_a_value_error_and_an_assertion_error():
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind):
            load(no_such_key=1)


# Names


@pytest.mark.parametrize(
    "document, message",
    [
        ({"gradient_cliping": 1.0}, "Unknown key gradient_cliping. Did you mean 'gradient_clipping'"),
        ({"max_grad_norm": 1.0}, "Unknown key max_grad_norm. Known: .* If it is none of DeepSpeed's, drop it"),
        ({"fp16": {"loss_scale_windw": 5}}, "Unknown key fp16.loss_scale_windw. Did you mean 'loss_scale_window'"),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "Unknown key zero_optimization.offload_param.devise. Did you mean 'device'",
        ),
        (
            {"activation_checkpointing": {"partitioned_activations": True}},
            "activation_checkpointing.partitioned_activations. Did you mean 'partition_activations'",
        ),
        ({"aio": {"xyz": 1}}, "Unknown key aio.xyz. Known: block_size"),
        ({"aio": {3: 1}}, "Unknown key aio.3. Known: block_size"),
        ({"allgather_partitions": True}, "Unknown key .* It is a key of zero_optimization: put it there, or drop it.$"),
        ({"zero_optimization.stage": 3}, "Unknown key .* It is a key of zero_optimization: put it there, or drop it.$"),
        ({"bf16": {"loss_scale": 0}}, "Unknown key bf16.loss_scale. It is a key of fp16: put it there, or drop it.$"),
        ({"fp16": {"gradient_clipping": 1}}, "Unknown key .* It is a key of the top level: put it there"),
        ({"bf16": {"device": "cpu"}}, "Unknown key bf16.device. Known: "),
        ({"optimizer": {"params": {"lr": 0.1}}}, "optimizer.type is missing"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler: there is no .*Did you mean 'WarmupLR'"),
        ({"optimizer": {"type": "Adam", "params": {"rl": 0.1}}}, "optimizer: Adam has no parameter 'rl'"),
    ],
)
def test_unknown_keys_are_refused_at_every_level(document, message):
    refused(message, **document)


@pytest.mark.parametrize("name", ["persitence", "persitance"])
def test_the_tutorials_misspellings_are_understood_with_one_warning(name, caplog):
    config = zero(stage=3, **{f"stage3_param_{name}_threshold": 1e4})
    assert config.zero_optimization.param_persistence_threshold == 10_000
    assert len(caplog.records) == 1 and "stage3_param_persistence_threshold" in caplog.text


def test_the_offload_tutorials_comm_overlap_is_overlap_comm(caplog):
    assert not zero(stage=2, comm_overlap=False).zero_optimization.overlap_comm
    assert "comm_overlap is an old or misspelled name, read as overlap_comm" in caplog.text


def test_the_stage3_prefix_may_be_left_out(caplog):
    names = ["prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"]
    with_prefix = zero(stage=3, **{f"stage3_{name}": 7 for name in names}).zero_optimization
    without = zero(stage=3, **dict.fromkeys(names, 7)).zero_optimization
    assert with_prefix == without and with_prefix.max_live_parameters == 7 and not caplog.records


@pytest.mark.parametrize(
    "section",
    [
        {"stage3_max_live_parameters": 1, "max_live_parameters": 1},
        {"stage3_gather_16bit_weights_on_model_save": True, "stage3_gather_fp16_weights_on_model_save": True},
        {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        {"cpu_offload": False, "offload_optimizer": None},
        {"cpu_offload_param": True, "offload_param": {}},
        {"cpu_offload_param": True, "cpu_offload_params": True},
        {"cpu_offload_use_pin_memory": True, "offload_param": {}},
        {"find_unused_parameters": True, "ignore_unused_parameters": False},
    ],
    ids=lambda section: " ".join(section),
)
def test_two_names_of_one_key_together_are_refused(section):
    with pytest.raises(DeepSpeedConfigError, match="given together|two names of one key"):
        zero(stage=3, **section)


def test_old_forms_become_new_ones(caplog, monkeypatch):
    new = zero(stage=3, offload_optimizer={"device": "cpu", "pin_memory": False}, offload_param={"device": "cpu"})
    old = zero(stage=3, cpu_offload=True, cpu_offload_params=True, cpu_offload_use_pin_memory=False).zero_optimization
    assert old.offload_optimizer == new.zero_optimization.offload_optimizer
    assert old.offload_param.device == "cpu" and not old.offload_param.pin_memory
    assert load(zero_optimization=True).zero.stage == 1 and load(zero_optimization=False).zero.stage == 0
    assert load(bfloat16={"enabled": True}).bf16.enabled
    assert load(fp32_allreduce=True).zero.reduce_dtype == "fp32" and load(fp32_allreduce=False).zero == ZeroConfig()
    assert load(aio={"thread_count": 2}).aio.intra_op_parallelism == 2
    assert zero(find_unused_parameters=False).zero_optimization.ignore_unused_parameters
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    zero(stage=3, cpu_offload=True)
    assert not caplog.records, "all ranks say the same, and the first is enough, also in a script's own log"


@pytest.mark.parametrize("given, said", [({"gradient_clipping": 0.5}, "0.5"), ({}, "its default")])
def test_max_grad_norm_is_dropped_with_a_warning(given, said, caplog):
    config = load(optimizer={"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 2.0}}, **given)
    assert config.optimizer.params == {"lr": 0.1} and config.gradient_clipping == given.get("gradient_clipping", 1.0)
    assert f"max_grad_norm 2.0 is dropped: gradients are clipped as gradient_clipping says ({said})" in caplog.text


def test_adam_w_mode_beside_params_is_read_as_one_of_them(caplog):
    """BEiT's script writes such a file, and those that came from it."""
    config = load(optimizer={"type": "Adam", "adam_w_mode": False, "params": {"lr": 0.1}})
    assert config.optimizer.params == {"lr": 0.1, "adam_w_mode": False}
    assert "optimizer.adam_w_mode is read as optimizer.params.adam_w_mode" in caplog.text
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.params\.adam_w_mode are given together"):
        load(optimizer={"type": "Adam", "adam_w_mode": True, "params": {"adam_w_mode": True}})


# Values


@pytest.mark.parametrize(
    "document, message",
    [
        ({"train_batch_size": True}, "train_batch_size must be an integer, got true"),
        ({"train_batch_size": "8"}, r'train_batch_size must be an integer, got "8" \(a string\)'),
        ({"steps_per_print": 1.5}, "steps_per_print must be an integer, got 1.5"),
        ({"gradient_clipping": True}, "gradient_clipping must be a finite number, got true"),
        ({"gradient_clipping": -1}, "gradient_clipping must be at least 0, got -1"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor must be greater than 0"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage must be an integer"),
        ({"zero_optimization": 2}, r'zero_optimization must be an object such as {"stage": \.\.\.}, got 2'),
        ({"fp16": True}, r'fp16 must be an object such as {"enabled": \.\.\.}, got true'),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size must be at least 0, got -1"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "offload_param must be an object"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, 'must be one of none, cpu, nvme, got "gpu"'),
        ({"wall_clock_breakdown": 1}, "wall_clock_breakdown must be true or false, got 1"),
        ({"checkpoint": {"tag_validation": "foo"}}, "checkpoint.tag_validation must be one of WARN, IGNORE, FAIL"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op must be one of mean, sum"),
        ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params must be an object, got a list"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale must be a finite number"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale must be at least 0"),
        ({"fp16": {"loss_scale": float("inf")}}, "fp16.loss_scale must be a finite number"),
        ({"fp16": {"loss_scale": float("nan")}}, "fp16.loss_scale must be a finite number"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window must be greater than 0"),
        ({"fp16": {"enabled": True, "min_loss_scale": -1}}, "fp16.min_loss_scale must be greater than 0"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis must be greater than 0"),
        ({"fp16": {"initial_scale_power": 128}}, "fp16.initial_scale_power 128"),
    ],
    ids=str,
)
def test_bad_values_name_the_key(document, message):
    refused(message, **document)


def test_an_integer_beyond_every_float_is_no_number():
    refused("gradient_clipping must be a finite number, got 1000", gradient_clipping=10**400)
    refused("train_batch_size must be an integer, got 1000", train_batch_size=10**400)


def test_a_batch_number_that_is_null_counts_as_absent():
    config = load(train_batch_size=None, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=None)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (3, 1)
    refused("gradient_clipping must be a finite number, got null", gradient_clipping=None)


def test_integral_floats_are_integers():
    assert zero(reduce_bucket_size=0).zero_optimization.reduce_bucket_size == 0  # as in Hugging Face's examples
    config = zero(reduce_bucket_size=5e8, stage=2.0)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000 and type(config.zero_optimization.stage) is int


def test_the_scale_is_checked_where_it_is_used():
    load(fp16={"loss_scale_window": 0})
    load(fp16={"enabled": True, "loss_scale": 8, "loss_scale_window": 0, "min_loss_scale": 0})


def test_a_scale_that_begins_below_its_minimum_is_an_error_of_the_section():
    with pytest.raises(
        DeepSpeedConfigError, match=r"^fp16: --min-scale 4 .* is above the loss scale of the first step"
    ):
        _ = load(fp16={"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}).precision


def test_auto_in_a_section_is_the_default():
    config = load(zero_optimization={"stage": 2, "reduce_bucket_size": "auto"}, fp16={"enabled": "auto"})
    assert config.zero_optimization.reduce_bucket_size == 500_000_000 and not config.fp16.enabled


def test_auto_is_what_the_caller_says():
    optimizer = {"type": "Adam", "params": {"lr": "auto"}}
    auto = {"train_micro_batch_size_per_gpu": 4, "optimizer.params.lr": 0.5, "fp16.enabled": True}
    config = load(train_micro_batch_size_per_gpu="auto", optimizer=optimizer, fp16={"enabled": "auto"}, auto=auto)
    assert config.train_batch_size == 4 and config.optimizer.params["lr"] == 0.5 and config.fp16.enabled
    assert load(train_micro_batch_size_per_gpu=2, auto=auto).train_batch_size == 2


@pytest.mark.parametrize(
    "document, named",
    [
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, None),
        ({"gradient_clipping": "auto"}, None),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": 1e-8}}}, "optimizer.params.lr"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps",
        ),
        ({"fp16": "auto"}, None),
        (
            {
                "gradient_clipping": "auto",
                "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto"}},
            },
            "gradient_clipping, optimizer.params.lr, optimizer.params.weight_decay",
        ),
    ],
)
def test_auto_that_nothing_decides_is_refused_by_the_names_of_all_keys(document, named):
    refused(f'Nothing here decides what "auto" is for {named or ", ".join(document)}. Give values', **document)


# Batches


@pytest.mark.parametrize("auto", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_batch_number_that_is_auto_follows_from_the_others(auto):
    numbers = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    config = load_json_config({**numbers, auto: "auto"}, world_size=2)
    assert {name: getattr(config, name) for name in numbers} == numbers and auto not in config.given
    refused(f'Nothing here decides what "auto" is for {", ".join(numbers)}', **dict.fromkeys(numbers, "auto"))


@pytest.mark.parametrize(
    "total, micro, steps, resolved",
    [
        (32, 16, 1, (32, 16, 1)),
        (32, 8, 2, (32, 8, 2)),
        (32, 8, None, (32, 8, 2)),
        (32, None, 2, (32, 8, 2)),
        (None, 8, 2, (32, 8, 2)),
        (32, None, None, (32, 16, 1)),
        (None, 8, None, (16, 8, 1)),
    ],
)
def test_missing_batch_numbers_follow(total, micro, steps, resolved):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    document = {name: value for name, value in zip(names, (total, micro, steps), strict=True) if value is not None}
    config = load_json_config(document, world_size=2)
    assert tuple(getattr(config, name) for name in names) == resolved
    assert config.given == set(document)


@pytest.mark.parametrize(
    "total, micro, steps",
    [(33, 17, 2), (32, 18, 1), (33, 8, None), (33, None, None), (32, None, 3), (2, 4, None), (0, 1, 1), (-2, -1, 1)],
)
def test_batches_that_do_not_fit_show_the_arithmetic(total, micro, steps):
    document = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    document = {name: value for name, value in document.items() if value is not None}
    message = (
        rf"train_batch_size {total} must be train_micro_batch_size_per_gpu .* x gradient_accumulation_steps .* x "
        r"data-parallel size 2 \(world size 4 / model-parallel size 2\) = "
    )
    with pytest.raises(AssertionError, match=message):
        load_json_config(document, world_size=4, model_parallel_size=2)


@pytest.mark.parametrize("document", [{}, {"gradient_accumulation_steps": 4}])
def test_a_batch_size_is_needed(document):
    with pytest.raises(AssertionError, match="Either train_batch_size or train_micro_batch_size_per_gpu needs to be"):
        load_json_config(document, world_size=1)


def test_model_parallel_ranks_share_a_batch():
    config = load(world_size=16, model_parallel_size=4, train_micro_batch_size_per_gpu=3)
    assert config.data_parallel_size == 4 and config.train_batch_size == 12
    with pytest.raises(DeepSpeedConfigError, match="world size 6 is not a multiple of the model-parallel size 4"):
        load(world_size=6, model_parallel_size=4)


# What the engine is told


def test_infinity_between_progress_lines_is_none_as_hugging_faces_accelerate_writes_it(tmp_path):
    assert load(steps_per_print=math.inf).steps_per_print is None
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 8, "steps_per_print": Infinity}')
    assert load_json_config(str(file)).steps_per_print is None
    file.write_text('{"train_batch_size": 8, "gradient_clipping": Infinity}')
    with pytest.raises(DeepSpeedConfigError, match="gradient_clipping must be a finite number, got inf"):
        load_json_config(str(file))


def test_defaults():
    config = load()
    assert config.zero == ZeroConfig(overlap_comm=True) and config.precision.dtype.itemsize == 4
    assert config.gradient_clipping == 1.0 and config.steps_per_print is None
    assert config.optimizer is None and config.scheduler is None
    assert config.checkpoint.tag_validation == "WARN"
    assert load(checkpoint={"tag_validation": "fail"}).checkpoint.tag_validation == "FAIL"


def test_the_dynamic_scale():
    section = {
        "enabled": True,
        "initial_scale_power": 4,
        "loss_scale_window": 7,
        "hysteresis": 3,
        "min_loss_scale": 0.5,
    }
    precision = load(fp16={**section, "consecutive_hysteresis": True}).precision
    assert precision.fp16 and precision.loss_scale is None and precision.initial_loss_scale == 16.0
    assert (precision.loss_scale_window, precision.hysteresis, precision.min_scale) == (7, 3, 0.5)
    assert precision.consecutive_hysteresis
    assert load(fp16={"enabled": True}).precision.initial_loss_scale == 2.0**16


def test_the_static_scale_and_bf16():
    assert load(fp16={"enabled": True, "loss_scale": 4096}).precision.loss_scale == 4096.0
    assert load(bf16={"enabled": True}, fp16={"enabled": False, "loss_scale": 8}).precision.bf16


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_gradient_dtypes(compute):
    halves = {compute: {"enabled": True}}
    assert load(**halves).zero.grad_dtype == "fp32"
    for dtype, told in (("fp32", "fp32"), (compute.upper(), "compute")):
        assert load(**halves, communication_data_type=dtype).zero.reduce_dtype == told
        assert load(**halves, data_types={"grad_accum_dtype": dtype}).zero.grad_dtype == told
    other = "bf16" if compute == "fp16" else "fp16"
    refused(f'communication_data_type "{other}" is neither', **halves, communication_data_type=other)
    refused(f'data_types.grad_accum_dtype "{other}"', **halves, data_types={"grad_accum_dtype": other})
    assert load(**halves, data_types={"param_dtype": compute.upper()}).compute_dtype == compute
    for wrong in (other, "fp32"):
        refused(
            f'data_types.param_dtype "{wrong}" is not the dtype of the parameters, which is {compute} by',
            **halves,
            data_types={"param_dtype": wrong},
        )


def test_reduction_settings_reach_the_engine():
    config = load(prescale_gradients=True, gradient_predivide_factor=2, zero_optimization={"overlap_comm": False})
    assert config.zero == ZeroConfig(prescale_gradients=True, gradient_predivide_factor=2.0, overlap_comm=False)


def test_summed_gradients():
    refused("not possible with zero_optimization.stage 3", gradient_allreduce_op="SUM", zero_optimization={"stage": 3})
    for given in ("Mean", "sum"):
        config = load(gradient_allreduce_op=given, zero_optimization={"stage": 2})
        assert config.gradient_allreduce_op == given.lower()


def test_auto_is_a_value_where_it_is_one_of_the_choices():
    config = zero(stage=3, placement="auto", gpu_margin_mem_ratio=0.5)
    assert (config.zero.placement, config.zero.gpu_margin_mem_ratio) == ("auto", 0.5)


def test_new_weights_may_travel_during_the_forward(tmp_path):
    assert zero(stage=2, overlap_param_gather=True).zero == ZeroConfig(stage=2, overlap_param_gather=True)
    with pytest.raises(ValueError, match=r"--overlap-param-gather \(zero.overlap_param_gather\) .* got 3"):
        zero(stage=3, overlap_param_gather=True)
    config = with_flags(
        tmp_path, in_zero(stage=1, overlap_param_gather=True), "--zero-stage 3 --no-overlap-param-gather"
    )
    assert config.zero == ZeroConfig(stage=3)


def test_a_part_of_the_optimizers_states_is_offloaded():
    section = {"device": "cpu", "ratio": 0.25}
    assert all(zero(stage=stage, offload_optimizer=section).zero.offload_optimizer_ratio == 0.25 for stage in (1, 2, 3))
    assert zero(stage=3, offload_optimizer={"ratio": 0.25}).zero.offload_optimizer_ratio == 1.0, "nothing is offloaded"


def test_offload_objects_have_deepspeeds_defaults():
    assert zero(stage=3, offload_param=None).zero_optimization.offload_param is None
    param = zero(stage=3, offload_param={}).zero_optimization.offload_param
    assert (param.device, param.buffer_count, param.buffer_size, param.max_in_cpu) == ("none", 5, 10**8, 10**9)
    optimizer = zero(stage=1, offload_optimizer={"pipeline_write": True}).zero_optimization.offload_optimizer
    assert optimizer.pipeline and optimizer.pin_memory and optimizer.buffer_count == 4


@pytest.mark.parametrize(
    "section, message",
    [
        ({"stage": 2, "mics_shard_size": 1}, r"\(mics_shard_size\) must be 0 .* or at least 2"),
        ({"offload_optimizer": {"device": "cpu"}}, "needs zero_optimization.stage 1 or more, got stage 0"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.nvme_path"),
        ({"stage": 3, "offload_optimizer": {"ratio": 2}}, r"ratio must lie in \[0, 1\], got 2.0"),
    ],
)
def test_sets_and_offload_that_cannot_be(section, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        zero(**section)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_no_stage_shards_stay_and_the_file_is_told_so(stage, caplog):
    """As DeepSpeed-Chat's files have it, at stage 2."""
    param = {"device": "nvme", "nvme_path": "x", "pin_memory": False}
    offload = {"offload_optimizer": {"device": "cpu"}} if stage else {}
    config = zero(stage=stage, offload_param=param, **offload)
    assert config.zero == zero(stage=stage, **offload).zero
    assert f"offload_param is without effect at stage {stage}" in caplog.text
    assert (
        f"without effect: {', '.join(f'zero_optimization.offload_param.{key}' for key in param)}" in config.describe()
    )
    caplog.clear()
    assert zero(stage=3, offload_param=param).zero.offload_param == "nvme" and not caplog.records


def test_requests_of_no_whole_pages_are_refused_by_their_own_section():
    with pytest.raises(DeepSpeedConfigError, match=f"^aio.block_size=1000 must be a multiple of {PAGE}"):
        _ = load(aio={"block_size": 1000}).zero


@pytest.mark.parametrize(
    "section, idle",
    [
        ({"stage": 2, "stage3_max_live_parameters": 1e9, "stage3_param_persistence_threshold": 1e5}, 2),
        ({"stage": 2, "stage3_prefetch_bucket_size": 0, "stage3_gather_16bit_weights_on_model_save": True}, 2),
        ({"stage": 3, "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": True}, 0),
        ({"stage": 3, "reduce_bucket_size": 5e8, "gpu_margin_mem_ratio": 0.5, "sub_group_size": 1e9}, 3),
        ({"stage": 3, "gpu_margin_mem_ratio": 0.5, "sub_group_size": 1e9, "placement": "auto"}, 0),
        ({"stage": 2, "reduce_bucket_size": 5e8, "sub_group_size": 1e9, "offload_optimizer": {"device": "cpu"}}, 0),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "buffer_count": 7, "pipeline_read": False}}, 2),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "nvme_path": "x", "pin_memory": True, "ratio": 1.0}}, 1),
        ({"stage": 2, "offload_optimizer": {"pipeline_write": True, "pin_memory": True, "ratio": 1.0}}, 3),
        ({"stage": 3, "offload_param": {"device": "cpu", "buffer_count": 7, "nvme_path": "x", "pin_memory": True}}, 2),
    ],
    ids=str,
)
def test_keys_that_have_no_effect_beside_the_others_are_listed(section, idle):
    assert len(zero(**section).idle) == idle and (" without effect: " in zero(**section).describe()) == (idle > 0)


def test_nothing_of_nvme_has_an_effect_without_it_and_all_has_with_it(tmp_path):
    home = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 7, "pin_memory": True}
    document = {"aio": {"queue_depth": 32, "block_size": 1 << 16, "intra_op_parallelism": 2, "overlap_events": True}}
    assert len(load(**document).idle) == 4
    for name, more in ("offload_param", {}), ("offload_optimizer", {"pipeline_read": False, "pipeline_write": False}):
        config = load(**document, zero_optimization={"stage": 3, name: {**home, **more}})
        assert config.idle == set() and "without effect" not in config.describe()


def test_every_key_of_zero_and_of_checkpointing_that_is_obeyed_sets_a_field():
    homes, of_both = ("offload_optimizer", "offload_param"), ("nvme_path", "pin_memory")
    elsewhere = {f"{ZERO}.{home}.{key}" for home in homes for key in of_both}
    elsewhere |= {f"{ZERO}.stage3_gather_16bit_weights_on_model_save"}
    read = elsewhere | ZERO_FIELDS.keys() | {f"{CHECKPOINTING}.{key}" for key in CHECKPOINTING_FIELDS}
    obeyed = {path for path, f in every_key(JsonConfig) if f.metadata["effect"] in (OBEYED, IF_GIVEN)}
    idle = {path for path in obeyed if path.startswith((f"{ZERO}.", "aio.", f"{CHECKPOINTING}."))} - read
    assert not idle, "ZERO_FIELDS (json_config/config.py) or CHECKPOINTING_FIELDS (sections.py) has a key's field"


def test_what_always_happens_is_accepted_and_its_contrary_warned_of(caplog):
    load(zero_optimization={"stage": 2, "contiguous_gradients": True, "reduce_scatter": True})
    assert not caplog.records
    load(zero_optimization={"stage": 2, "contiguous_gradients": False})
    assert "zero_optimization.contiguous_gradients false changes nothing" in caplog.text


@pytest.mark.parametrize("name", sorted(DISABLED_ONLY))
def test_subsystems_that_do_not_exist_are_refused_unless_disabled(name):
    load(**{name: {"enabled": False, "anything": 1}})
    load(**{name: {"enabled": "auto", "anything": "auto"}})
    load(**{name: {"deep": False, "inner": {"enabled": False, "anything": 1}}})  # as scripts write what they leave off
    load(**{name: {}})
    refused(f"{name} asks for something that does not exist here: ", **{name: {"enabled": True}})


def test_subsystems_that_only_the_gpt2_job_has_are_refused_with_what_a_script_can_do():
    metrics = ("log the loss, engine.get_lr()", ("tensorboard", "csv_monitor", "wandb", "comet"))
    data = ("give a loader that orders the data", ("curriculum_learning", "data_efficiency"))
    for message, names in (metrics, data, ("FlopCounterMode counts", ("flops_profiler",))):
        for name in names:
            refused(message, **{name: {"enabled": True}})


def test_settings_that_cannot_be_are_refused_unless_off():
    load(zero_optimization={"zero_quantized_weights": False, "zero_hpz_partition_size": 1}, sparse_gradients=False)
    refused("zero_quantized_weights true is not possible here", zero_optimization={"zero_quantized_weights": True})
    refused("zenflow {'a': 1} is not possible", zero_optimization={"zenflow": {"a": 1}})
    refused("sparse_gradients true is not possible here: gradients are dense", sparse_gradients=True)
    load(sequence_parallel_size=1, graph_harvesting=False)
    refused("sequence_parallel_size 2 is not possible here: sequences are cut over", sequence_parallel_size=2)
    for given in (["b"], 2):  # of whatever type: to be told of the right one would not help
        refused("keep_in_fp32_modules .* is not possible here: every", data_types={"keep_in_fp32_modules": given})
    load(data_types={"keep_in_fp32_modules": "auto"})


def test_describe_says_what_is_in_force():
    config = load(
        world_size=2,
        train_micro_batch_size_per_gpu=3,
        zero_optimization={"stage": 3, "stage3_max_live_parameters": 5, "allgather_bucket_size": 7},
        optimizer={"type": "Adam", "params": {"lr": 0.25}},
    )
    text = config.describe()
    assert (
        "train_batch_size 6 = train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 1 x data-parallel size 2"
        in text
    )
    assert "zero_optimization: stage=3, overlap_comm=true" in text and "'lr': 0.25" in text
    assert "fp16: enabled=false" in text and "gradient_clipping=1.0" in text
    assert "given, but without effect: zero_optimization.allgather_bucket_size" in text
    assert "stage3_max_live_parameters=5" in text or "max_live_parameters=5" in text


# The tutorial's own files


def test_v115_stage2_file(caplog):
    document = """{
      "train_batch_size": 2048, "gradient_accumulation_steps": 1, "steps_per_print": 1,
      "zero_optimization": {"stage": 2, "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000, "overlap_comm": true},
      "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "max_grad_norm": 1.0, "betas": [0.9, 0.95]}},
      "gradient_clipping": 1.0,
      "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
      "wall_clock_breakdown": true, "zero_allow_untested_optimizer": false
    }"""
    config = load_json_config(parse_json(document, "x"), world_size=8)
    assert config.train_micro_batch_size_per_gpu == 256 and config.optimizer.params["betas"] == [0.9, 0.95]
    assert len(caplog.records) == 1


def test_v115_release_file_parses():
    config = zero(
        stage=3,
        stage3_max_live_parameters=1e9,
        stage3_max_reuse_distance=1e8,
        stage3_prefetch_bucket_size=5e7,
        stage3_param_persitence_threshold=1e5,
        cpu_offload=True,
        cpu_offload_params=True,
        cpu_offload_use_pin_memory=True,
        overlap_comm=True,
        reduce_bucket_size=90000000,
        sub_group_size=4e8,
    ).zero_optimization
    assert config.offload_optimizer.device == config.offload_param.device == "cpu"
    assert config.max_reuse_distance == 10**8


# Under flags


def with_flags(folder: Path, document: dict, flags: str):
    path = folder / "ds.config"
    path.write_text(json.dumps(document))
    return load_config(["--deepspeed_config", str(path), *flags.split()])


def in_zero(**section) -> dict:
    return {"zero_optimization": section}


@pytest.mark.parametrize(
    "document, flags, message",
    [
        (in_zero(stage=7), "--zero-stage 2", "zero_optimization.stage must be 0, 1, 2 or 3, got 7"),
        (in_zero(stage="two"), "--zero-stage 2", 'stage must be an integer, got "two"'),
        (in_zero(stgae=2), "--zero-stage 2", "Unknown key zero_optimization.stgae. Did you mean 'stage'"),
        (in_zero(stage=3, placement="best"), "--placement static", "placement must be one of static, auto"),
        (
            in_zero(stage=1, offload_optimizer={"device": "gpu"}),
            "--offload-optimizer cpu",
            "offload_optimizer.device must be one of none, cpu, nvme",
        ),
        (
            in_zero(stage=3, offload_param={"device": "cpu", "pin_memory": 1}),
            "--no-use-pin-memory",
            "offload_param.pin_memory must be true or false, got 1",
        ),
        (
            {"train_micro_batch_size_per_gpu": "8"},
            "--batch-size 2",
            "train_micro_batch_size_per_gpu must be an integer",
        ),
        (
            {"gradient_accumulation_steps": 1.5},
            "--batch-size 2 --global-batch-size 4",
            "gradient_accumulation_steps must be an integer, got 1.5",
        ),
        ({"bf16": {"enabled": "yes"}}, "--bf16", "bf16.enabled must be true or false"),
        ({"scheduler": {"type": "WarmupRL"}}, "--warmup 0.1", "'WarmupRL'. Did you mean 'WarmupLR'"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_step": 5}}},
            "--warmup 0.1",
            "WarmupLR has no parameter 'warmup_step'",
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "--min-lr 0", "WarmupDecayLR needs the parameter 'total_num_steps'"),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, "--min-lr 0", "the GPT-2 job gives it none"),
    ],
    ids=str,
)
def test_a_key_that_a_flag_overrides_is_checked_all_the_same(tmp_path, document, flags, message):
    with pytest.raises(DeepSpeedConfigError, match=message) as error:
        with_flags(tmp_path, document, flags)
    assert str(error.value).startswith("--deepspeed_config ")


def test_auto_and_what_only_fits_with_the_flag_pass(tmp_path):
    offload = {"device": "auto", "pin_memory": "auto"}
    document = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": "auto"},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": "auto"}},
        **in_zero(stage="auto", offload_param=offload, offload_optimizer={"device": "cpu"}),
    }
    config = with_flags(tmp_path, document, "--zero-stage 3 --offload-param cpu --batch-size 2 --lr 0.5 --fp16")
    assert (config.zero.stage, config.zero.offload_param, config.zero.offload_optimizer) == (3, "cpu", "cpu")
    assert config.training.batch_size == 2 and config.deepspeed.scheduler.params["cycle_max_lr"] == 0.5


SCALED = {name: params for name, params in PARAMS.items() if name != "LRRangeTest"}  # which tries rates of its own


@pytest.mark.parametrize("kind", [*SCALED, *(name for name, *_ in TORCHS)])
def test_the_flag_is_the_peak_of_every_schedule_that_the_file_may_name(tmp_path, kind):
    params = {**SCALED, **{name: params for name, params, _ in TORCHS}}[kind]
    config = with_flags(tmp_path, {"scheduler": {"type": kind, "params": params}}, "--lr 2.5")
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.0)
    schedule = build_schedule(config, optimizer)
    assert max(optimizer.param_groups[0]["lr"], *stepped(schedule, 19)) == pytest.approx(2.5)


# Documentation


def documented(path: str, f) -> str:
    """The row of docs/configuration.md for a key."""
    default = default_of(f)
    text = "the largest integer" if default == sys.maxsize else "" if path in REQUIRED else f"`{show(default)}`"
    return f"| `{path}` | {kind_of(path, f)} | {text} | {f.metadata['effect']} | {f.metadata['note']} |"


REQUIRED = {"optimizer.type", "scheduler.type"}


def kind_of(path: str, f) -> str:
    names = {"bool": "bool", "int": "integer", "float": "number", "str": "string"}
    names |= {"dict[str, Any]": "object", "list[str]": "list"}
    return names[str(f.type).removesuffix(" | None")]


def rows() -> list[str]:
    return [documented(path, f) for path, f in every_key(JsonConfig)]


def test_the_documentation_has_every_key_as_it_is():
    text = (ROOT / "docs/configuration.md").read_text()
    missing = [row for row in rows() if row not in text]
    assert not missing, "docs/configuration.md lacks:\n" + "\n".join(missing)
    assert len(rows()) == sum(line.startswith("| `") and line.count("|") == 6 for line in text.splitlines())


@pytest.mark.parametrize("name", sorted(DISABLED_ONLY))
def test_the_documentation_names_the_subsystems_that_do_not_exist(name):
    assert f"`{name}`" in (ROOT / "docs/configuration.md").read_text()


# ZeroConfig by itself


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"stage": 4}, "--zero-stage must be one of 0, 1, 2, 3, got 4"),
        ({"stage": True}, "--zero-stage must be one of 0, 1, 2, 3, got True"),
        ({"grad_dtype": "fp16"}, "--grad-dtype must be one of fp32, compute"),
        ({"reduce_dtype": "bf16"}, "--reduce-dtype"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be a positive number"),
        ({"offload_param": "cpu", "stage": 2}, "--offload-param cpu needs --zero-stage 3, got 2"),
        ({"offload_optimizer": "nvme", "stage": 1}, "--offload-optimizer nvme needs --nvme-path"),
        ({"offload_optimizer": "disk"}, "must be one of none, cpu, nvme, got 'disk'"),
    ],
)
def test_zero_config_checks_itself(settings, message):
    with pytest.raises(ValueError, match=message):
        ZeroConfig(**settings)


def test_zero_flags():
    from megazero.arguments import load_components

    (config,) = load_components([ZeroConfig], "", ["--zero-stage", "2", "--grad-dtype", "compute"])
    assert config == ZeroConfig(stage=2, grad_dtype="compute")
