"""`configure`, the JSON section and the job's flags: defaults < JSON < arguments, and what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch

import megazero
from megazero import activation_checkpointing as checkpointing
from megazero import mpu
from megazero.activation_checkpointing import ActivationCheckpointer, CheckpointSettings
from megazero.arguments import load_config

ALL = {
    "partition_activations": True,
    "number_checkpoints": 4,
    "contiguous_memory_optimization": True,
    "cpu_checkpointing": True,
    "profile": True,
    "synchronize_checkpoint_boundary": True,
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(checkpointing, "default", ActivationCheckpointer())


def configured(*args, **kwargs):
    checkpointing.configure(None, *args, **kwargs)
    return checkpointing.default.settings


def test_deepspeeds_names_are_there():
    for name in """configure is_configured checkpoint reset get_cuda_rng_tracker model_parallel_cuda_manual_seed
    partition_activations_in_checkpoint set_num_layers non_reentrant_checkpoint""".split():
        assert callable(getattr(megazero.checkpointing, name))
    assert megazero.checkpointing.get_cuda_rng_tracker() is mpu.get_cuda_rng_tracker()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = checkpointing.nothing


def test_it_is_configured_when_it_was():
    assert not checkpointing.is_configured()
    checkpointing.configure(None)
    assert checkpointing.is_configured()


def test_each_call_starts_from_the_defaults_then_the_file_then_the_arguments(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 1, "activation_checkpointing": ALL}))
    assert configured(str(file)) == CheckpointSettings(True, True, 4, True, True, True)
    assert configured({"activation_checkpointing": ALL}, num_checkpoints=7, profile=False) == CheckpointSettings(
        True, True, 7, True, True, False
    )
    assert configured(partition_activations=True) == CheckpointSettings(partition_activations=True)
    assert configured(partition_activation=True) == CheckpointSettings(partition_activations=True), "the tutorial's"
    assert configured({"activation_checkpointing": {"profile": "auto"}}) == configured({}) == CheckpointSettings()


def test_later_settings():
    configured(partition_activations=True)
    checkpointing.set_num_layers(5)
    assert checkpointing.default.settings == CheckpointSettings(partition_activations=True, num_checkpoints=5)
    checkpointing.partition_activations_in_checkpoint(False)
    assert not checkpointing.default.settings.partition_activations


@pytest.mark.parametrize(
    "section, message",
    [
        (
            {"contiguous_memory_optimization": True, "number_checkpoints": 2},
            "partition_activations makes, which is off",
        ),
        ({"contiguous_memory_optimization": True, "partition_activations": True}, "must know for how many"),
        ({"number_checkpoints": 0}, "activation_checkpointing.number_checkpoints must be at least 1, got 0"),
        ({"number_checkpoints": "4"}, 'number_checkpoints must be an integer, got "4"'),
        ({"profile": 1}, "profile must be true or false, got 1"),
        (
            {"partitioned_activations": True},
            "Unknown key .*partitioned_activations. Did you mean 'partition_activations'",
        ),
        ([], "must be an object"),
    ],
)
def test_what_cannot_be_is_refused_in_both_of_deepspeeds_ways(section, message):
    section = section or [1]
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match=message):
            configured({"activation_checkpointing": section})
    assert not checkpointing.is_configured()


def test_another_mpu_names_the_group(one_rank):
    asked = []

    class Other:
        def get_model_parallel_group(self):
            asked.append(True)
            return mpu.get_model_parallel_group()

    checkpointing.configure(Other(), partition_activations=True)
    assert checkpointing.checkpoint(int, 3) == 3 and asked


def test_another_mpu_names_the_rank_that_seeds_the_model_parallel_stream(one_rank):
    def drawn(seed, *args):
        seed(1, *args)
        with checkpointing.get_cuda_rng_tracker().fork():
            return torch.rand(1)

    with_pipelines = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: SimpleNamespace(rank=lambda: 3),
        get_model_parallel_group=lambda: SimpleNamespace(rank=lambda: 5),
    )
    for other, rank in ((None, 0), (with_pipelines, 3)):
        checkpointing.configure(other)
        own = drawn(checkpointing.model_parallel_cuda_manual_seed)
        assert own == drawn(mpu.model_parallel_cuda_manual_seed, rank)


@pytest.mark.parametrize("spelling", ["contiguous", "contigious"])
def test_the_jobs_flags(spelling):
    flags = f"""--checkpoint-activations --checkpoint-num-layers 2 --deepspeed-activation-checkpointing --num-layers 5
    --partition-activations --{spelling}-checkpointing --checkpoint-in-cpu --synchronize-each-layer --profile-backward"""
    assert load_config(flags.split()).checkpoint_settings() == CheckpointSettings(True, True, 3, True, True, True)
    flags = f"--recompute selective --num-layers 5 --partition-activations --{spelling}-checkpointing"
    assert load_config(flags.split()).checkpoint_settings().num_checkpoints == 5, "one for each block"
    assert load_config([]).checkpoint_settings() == CheckpointSettings()
    with pytest.raises(ValueError, match="--partition-activations"):
        load_config([f"--{spelling}-checkpointing"])
    with pytest.raises(ValueError, match="num_checkpoints must be at least 1, got 0 .--num-checkpoints"):
        load_config(["--num-checkpoints", "0"])


def test_too_few_checkpoints_are_refused_before_training():
    flags = "--partition-activations --contiguous-checkpointing --num-layers 5 --num-checkpoints".split()
    for mode, calls in (("--checkpoint-activations", 5), ("--recompute selective", 5)):
        assert load_config([*flags, "5", *mode.split()]).checkpoint_settings().num_checkpoints == 5
        with pytest.raises(ValueError, match=f"--num-checkpoints 4 .* --num-layers 5, 1 in a call, make {calls} "):
            load_config([*flags, "4", *mode.split()])
    together = "--checkpoint-activations --checkpoint-num-layers 2".split()
    assert load_config([*flags, "3", *together]).checkpoint_settings().num_checkpoints == 3
    with pytest.raises(ValueError, match="--num-checkpoints 2 .* 2 in a call, make 3 "):
        load_config([*flags, "2", *together])


def test_contiguous_storage_is_refused_where_each_block_may_keep_something_else():
    flags = "--partition-activations --contiguous-checkpointing --recompute auto --recompute-budget-gb 1"
    with pytest.raises(ValueError, match="--recompute auto decides .* --contiguous-checkpointing has room"):
        load_config(flags.split())


def test_how_to_keep_what_is_never_kept_is_warned_of(caplog):
    load_config(["--partition-activations", "--profile-backward"])
    assert "(partition_activations, profile) has no effect; it needs --checkpoint-activations" in caplog.text
    caplog.clear()
    load_config(["--partition-activations", "--profile-backward", "--checkpoint-activations"])
    load_config([])
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("how", ["v0", "v1.1.5", "tutorial"])
def test_the_tutorials_calls(one_rank, tmp_path, how):
    """DeepSpeed's Megatron-LM tutorial and its two example trees, as they stand there, with the library under its name."""
    deepspeed, num_layers = megazero, 3
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 1, "activation_checkpointing": {**ALL, "number_checkpoints": 9}}))
    if how == "v0":
        deepspeed.checkpointing.configure(mpu, deepspeed_config=str(file), num_checkpoints=num_layers)
        want = CheckpointSettings(True, True, 3, True, True, True)
    elif how == "tutorial":
        deepspeed.checkpointing.configure(mpu, deepspeed_config=str(file), partition_activation=True)
        want = CheckpointSettings(True, True, 9, True, True, True)
    else:
        deepspeed.checkpointing.configure(
            mpu,
            partition_activations=True,
            contiguous_checkpointing=True,
            num_checkpoints=num_layers,
            checkpoint_in_cpu=True,
            synchronize=False,
            profile=False,
        )
        want = CheckpointSettings(True, True, 3, True)
    assert deepspeed.checkpointing.is_configured() and deepspeed.checkpointing.default.settings == want
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(1)
    x = torch.ones(4, requires_grad=True)

    def custom_forward(x):
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x * 2)

    y = x
    for _ in range(num_layers):
        y = deepspeed.checkpointing.checkpoint(custom_forward, y)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()), "the same elements were dropped, and y is 0 or 4^3"
    left = deepspeed.checkpointing.checkpoint(custom_forward, x)
    deepspeed.checkpointing.reset()
    assert not deepspeed.checkpointing.default.storage._arenas and left.requires_grad


def test_the_jobs_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 4, "activation_checkpointing": ALL}))
    config = load_config(["--deepspeed_config", str(file)])
    assert config.checkpoint_settings() == CheckpointSettings(True, True, 4, True, True, True)


def test_a_rank_in_place_of_the_mpu_is_refused():
    with pytest.raises(
        megazero.DeepSpeedConfigError, match=r"configure\(mpu_=0\): it says which ranks .* megazero.mpu, or None"
    ):
        checkpointing.configure(mpu_=0, partition_activations=True)
    assert not checkpointing.is_configured()
