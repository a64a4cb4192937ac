"""Megatron-LM's checkpoints, as its first release and its later ones write them: cut and ordered here without megazero's code."""

import argparse
import logging
import random
import sys
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megazero.checkpoint.__main__ import main
from megazero.checkpoint.importers.megatron import read_megatron
from megazero.checkpoint.reader import Reader
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from tests.checkpoint.importers.torch_dist_files import write_torch_dist
from tests.model.plain_gpt2 import PlainGPT2, random_tokens, randomize
from tests.tiny import TINY_MODEL, logged, run_job

CONFIG = GPT2Config(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    max_position_embeddings=11,
    vocab_size=131,
    make_vocab_size_divisible_by=8,
    attention_dropout=0.2,
    hidden_dropout=0.3,
    layernorm_epsilon=1e-6,
    init_method_std=0.01,
)
HEADS, HEAD_SIZE = 4, 6
COLUMN_PARALLEL = ("dense_h_to_4h.weight", "dense_h_to_4h.bias")
ROW_PARALLEL = ("attention.dense.weight", "dense_4h_to_h.weight")
KNOWN = {"vocab_size": 131, "num_attention_heads": 4}
# The beginnings of a layer's names, ours and megatron-core's, in the order in which it registers them: with modules of its own,
# and with those of Transformer Engine.
CORE_LAYER = (
    ("input_layernorm.", "input_layernorm."),
    ("attention.dense.", "self_attention.linear_proj."),
    ("attention.query_key_value.", "self_attention.linear_qkv."),
    ("post_attention_layernorm.", "pre_mlp_layernorm."),
    ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
)
TRANSFORMER_ENGINE_LAYER = (
    ("attention.dense.", "self_attention.linear_proj."),
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("attention.query_key_value.", "self_attention.linear_qkv."),
    ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
)


def args_of_v1(**changes):
    args = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "max_position_embeddings": 11,
        "make_vocab_size_divisible_by": 8,
        "attention_dropout": 0.2,
        "hidden_dropout": 0.3,
        "layernorm_epsilon": 1e-6,
        "init_method_std": 0.01,
        "params_dtype": torch.half,
        "padded_vocab_size": 144,
        "model_parallel_size": 2,
        "apply_residual_connection_post_layernorm": False,
        "bias_gelu_fusion": True,
        "openai_gelu": False,
    }
    return argparse.Namespace(**{**args, **changes})


def cut(name, full, rank, ranks, version):
    """What a rank of Megatron holds of a parameter or a moment."""
    if name == "word_embeddings.weight":
        rows = -(-len(full) // (8 * ranks)) * 8 * ranks
        padded = torch.cat([full, torch.full((rows - len(full), full.size(1)), 7.0, dtype=full.dtype)])  # never trained
        return padded.chunk(ranks)[rank].clone()
    if "query_key_value" in name:
        own = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        q, k, v = ([x.split(HEAD_SIZE)[head] for head in own] for x in full.chunk(3))  # lists of [d, ...]
        if version == 0:
            return torch.cat([*q, *k, *v])
        if version == 1:
            rows = [x[i] for head in zip(q, k, v, strict=True) for i in range(HEAD_SIZE) for x in head]
            return torch.stack(rows)
        return torch.cat([x for head in zip(q, k, v, strict=True) for x in head])
    if name.endswith(COLUMN_PARALLEL):
        return full.chunk(ranks)[rank].clone()
    if name.endswith(ROW_PARALLEL):
        return full.chunk(ranks, dim=1)[rank].clone()
    return full.clone()


def nested(weights, encoder="transformer", attention="attention"):
    """As later versions save the model."""
    embedding = {name: {"weight": weights[f"{name}.weight"]} for name in ("word_embeddings", "position_embeddings")}
    transformer = {
        name.removeprefix("transformer.").replace(".attention.", f".{attention}."): tensor
        for name, tensor in weights.items()
        if name.startswith("transformer.")
    }
    return {"language_model": {"embedding": embedding, encoder: transformer}}


def core_names(layer):
    """Our names and megatron-core's, in its order."""
    names = {f"{name}_embeddings.weight": f"embedding.{name}_embeddings.weight" for name in ("word", "position")}
    beginnings = [
        (f"transformer.layers.{i}.{ours}", f"decoder.layers.{i}.{theirs}") for i in range(2) for ours, theirs in layer
    ]
    beginnings.append(("transformer.final_layernorm.", "decoder.final_layernorm."))
    for ours, theirs in beginnings:
        names.update({ours + kind: theirs + kind for kind in ("weight", "bias")})
    return names


def parameter_groups(model):
    """Names in the order in which Megatron hands parameters to its optimizer."""
    decayed, others = [], []
    for prefix, module in model.named_modules():
        for name in module._parameters:
            is_other = isinstance(module, torch.nn.LayerNorm) or name == "bias"
            (others if is_other else decayed).append(f"{prefix}.{name}")
    return decayed, others


def trained(dtype, order=None):
    """A model after three steps of Adam: its fp32 weights by name, what the ranks save as weights, and Adam's state by name.

    `order` lists the names as the optimizer gets them, if that is not our order.
    """
    model = PlainGPT2(CONFIG)
    randomize(model)
    names = parameter_groups(model)
    if order is not None:
        names = tuple(sorted(group, key=order.index) for group in names)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[n] for n in group], "weight_decay": d}
        for group, d in zip(names, (0.1, 0.0), strict=True)
    ]
    adam = torch.optim.AdamW(groups, lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        adam.step()
    masters = {name: parameter.detach() for name, parameter in parameters.items()}
    return masters, {n: m.to(dtype) for n, m in masters.items()}, adam.state_dict(), names


def optimizer_of_rank(masters, adam, names, rank, ranks, version):
    """FP16_Optimizer's state, with apex's way to count steps."""
    order = [name for group in names for name in group]
    state = {
        i: {key: cut(order[i], value[key], rank, ranks, version) for key in ("exp_avg", "exp_avg_sq")}
        for i, value in adam["state"].items()
    }
    groups = [{**group, "step": 3, "bias_correction": True} for group in adam["param_groups"]]
    copies = [[cut(name, masters[name], rank, ranks, version).requires_grad_() for name in group] for group in names]
    scaler = sys.modules["fp16.loss_scaler"].DynamicLossScaler()
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 4096.0, 20, 12, 2
    return {
        **{"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False, "first_closure_call_this_step": True},
        **{"optimizer_state_dict": {"state": state, "param_groups": groups}, "fp32_from_fp16": copies},
    }


def later_form(optimizer, dtype):
    """The same as the releases after v1.1.5 save it (megatron/optimizer/optimizer.py of v2.0 and later)."""
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 7, "hysteresis_tracker": 2}
    return {
        "optimizer": optimizer["optimizer_state_dict"],
        "fp32_from_fp16_params": optimizer["fp32_from_fp16"],
        **({"grad_scaler": scaler} if dtype == torch.float16 else {}),
    }


@pytest.fixture(autouse=True)
def loss_scaler_class(monkeypatch):
    """The class that FP16_Optimizer saves an instance of, where pickle finds it."""
    module = types.ModuleType("fp16.loss_scaler")
    module.DynamicLossScaler = type("DynamicLossScaler", (), {"__module__": "fp16.loss_scaler"})
    monkeypatch.setitem(sys.modules, "fp16", types.ModuleType("fp16"))
    monkeypatch.setitem(sys.modules, "fp16.loss_scaler", module)


def save(directory, contents, folder="iter_0000012", tracker="12", **options):
    for rank, content in enumerate(contents):
        path = directory / folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(content, path, **options)
    (directory / "latest_checkpointed_iteration.txt").write_text(tracker)
    return directory


def rng():
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }


def rank_weights(weights, rank, ranks, version):
    return {name: cut(name, tensor, rank, ranks, version) for name, tensor in weights.items()}


def assert_state(checkpoint, state, wanted):
    assert checkpoint.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        found = checkpoint.tensors[name].states[state]()
        assert checkpoint.tensors[name].shape == tensor.shape and checkpoint.tensors[name].kind == "trained"
        assert found.dtype == torch.float32 and torch.equal(found, tensor.float()), name


def adam_state(adam, names, key):
    return {name: adam["state"][i][key] for i, name in enumerate(n for group in names for n in group)}


def assert_states(checkpoint, masters, adam, names):
    assert_state(checkpoint, "master", masters)
    for key in ("exp_avg", "exp_avg_sq"):
        assert_state(checkpoint, key, adam_state(adam, names, key))


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_release_with_its_fp16_optimizer(tmp_path, ranks, is_zip):
    masters, weights, adam, names = trained(torch.float16)
    contents = [
        {
            "iteration": 12,
            "model": rank_weights(weights, rank, ranks, 0),
            "optimizer": optimizer_of_rank(masters, adam, names, rank, ranks, 0),
            "lr_scheduler": {
                "start_lr": 1e-4,
                "warmup_iter": 1,
                "num_iters": 11,
                "decay_style": "cosine",
                "end_iter": 9,
            },
            **rng(),
        }
        for rank in range(ranks)
    ]
    save(tmp_path, contents, _use_new_zipfile_serialization=is_zip)
    before = torch.get_rng_state()
    checkpoint = read_megatron(tmp_path, **KNOWN)
    assert torch.equal(torch.get_rng_state(), before)
    assert_states(checkpoint, masters, adam, names)
    assert (checkpoint.global_steps, checkpoint.optimizer_type) == (12, "AdamW")
    assert checkpoint.optimizer_counters == {"step": 3.0}
    assert [group["weight_decay"] for group in checkpoint.optimizer_groups] == [0.1, 0.0]
    assert checkpoint.loss_scaler == {"scale": 4096.0, "hysteresis_left": 2, "clean_steps": 7}
    assert checkpoint.lr_scheduler == {"num_steps": 11}
    config = GPT2Config(**checkpoint.client_state["model"])
    assert config == GPT2Config(
        num_layers=2, hidden_size=24, num_attention_heads=4, max_position_embeddings=11, vocab_size=131
    )


def test_the_first_release_in_fp32(tmp_path):
    masters, weights, adam, names = trained(torch.float32)
    checkpoint = read_megatron(save(tmp_path, [{"iteration": 12, "model": weights, "optimizer": adam}]), **KNOWN)
    assert_states(checkpoint, masters, adam, names)
    assert checkpoint.optimizer_counters == {"step": 3.0} and checkpoint.loss_scaler is None


@pytest.mark.parametrize("version", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_later_versions_nest_the_model_and_order_queries_keys_and_values_otherwise(tmp_path, version, ranks):
    dtype = torch.bfloat16 if version == 3 else torch.float16
    masters, weights, adam, names = trained(dtype)
    optimizers = [optimizer_of_rank(masters, adam, names, rank, ranks, version) for rank in range(ranks)]
    words = ("encoder", "self_attention") if version == 3 else ("transformer", "attention")
    contents = [
        {
            "args": args_of_v1(consumed_train_samples=12 * 512),
            "checkpoint_version": version,
            "iteration": 12,
            "model": nested(rank_weights(weights, rank, ranks, version), *words),
            "optimizer": optimizers[rank] if version == 1 else later_form(optimizers[rank], dtype),
            "lr_scheduler": {"max_lr": 1e-4, "num_steps": 12 * 512, "decay_style": "cosine"},
        }
        for rank in range(ranks)
    ]
    checkpoint = read_megatron(save(tmp_path, contents), vocab_size=131)
    assert_states(checkpoint, masters, adam, names)
    assert checkpoint.optimizer_counters == {"step": 3.0}
    scale = {"scale": 4096.0, "hysteresis_left": 2, "clean_steps": 7}
    assert checkpoint.loss_scaler == (scale if dtype == torch.float16 else None)
    assert GPT2Config(**checkpoint.client_state.pop("model")) == CONFIG
    assert checkpoint.lr_scheduler == {"num_steps": 3}, "its own are samples"
    assert checkpoint.client_state == {"iteration": 12, "consumed_samples": 12 * 512}
    contents[0]["args"].dataloader_type = "cyclic"
    torch.save(contents[0], tmp_path / "iter_0000012/mp_rank_00/model_optim_rng.pt")
    assert read_megatron(tmp_path, vocab_size=131).client_state.keys() == {"model"}, "its samples come in another order"


@pytest.mark.parametrize("layer", [CORE_LAYER, TRANSFORMER_ENGINE_LAYER], ids=["own", "transformer-engine"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_megatron_core_has_flat_names_in_an_order_of_its_own(tmp_path, layer, ranks, dtype):
    theirs = core_names(layer)
    masters, weights, adam, names = trained(dtype, list(theirs))
    extra = {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
    contents = []
    for rank in range(ranks):
        own = rank_weights(weights, rank, ranks, 3)
        optimizer = later_form(optimizer_of_rank(masters, adam, names, rank, ranks, 3), dtype)
        contents.append(
            {
                "args": args_of_v1(),
                "checkpoint_version": 3.0,
                "iteration": 12,
                "model": {core: own[ours] for ours, core in theirs.items()} | extra,
                "optimizer": optimizer if dtype == torch.bfloat16 else optimizer["optimizer"],
            }
        )
    checkpoint = read_megatron(save(tmp_path, contents), vocab_size=131)
    assert_states(checkpoint, masters, adam, names)
    assert GPT2Config(**checkpoint.client_state["model"]) == CONFIG


CUT_BY_ROWS = (*COLUMN_PARALLEL, "query_key_value.weight", "query_key_value.bias", "word_embeddings.weight")


def save_torch_dist(directory, weights, masters, adam, names, ranks, optimizer):
    """What megatron-core saves of `ranks` in its format torch_dist: alike layers as one tensor, cut into a piece for each."""
    theirs = core_names(TRANSFORMER_ENGINE_LAYER)
    states = {"": weights}
    if optimizer != "buffers":
        moments = {key: adam_state(adam, names, key) for key in ("exp_avg", "exp_avg_sq")}
        copies = {"distributed": {"param": masters}, "plain": {"fp32_param": masters}, "fp32": {}}[optimizer]
        states |= {f"optimizer.state.{key}.": tensors for key, tensors in (moments | copies).items()}
    tensors = {}
    for state, values in states.items():
        stacks = {}
        for ours, core in theirs.items():
            stacks.setdefault(core.replace(".0.", ".").replace(".1.", "."), []).append(ours)
        for core, layers in stacks.items():
            full = torch.stack([cut(name, values[name], 0, 1, 3) for name in layers])
            cuts = {dim: ranks for dim, names in ((1, CUT_BY_ROWS), (2, ROW_PARALLEL)) if layers[0].endswith(names)}
            if ".layers." in core:
                tensors[state + core] = full, {0: 2, **cuts}
            else:
                tensors[state + core] = full[0], {dim - 1: count for dim, count in cuts.items()}
    if optimizer == "buffers":
        tensors["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param"] = torch.zeros(64), {0: 2}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in adam["param_groups"]]
    step = {float(state["step"]) for state in adam["state"].values()}.pop()
    saved = {"param_groups": groups, "state": {"common_step": torch.tensor(step)}}
    if optimizer == "distributed":
        saved = {"param_groups": [group | {"step": step} for group in groups]}
    folder = directory / "iter_0000012"
    write_torch_dist(folder, tensors, {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": None})
    common = {"args": args_of_v1(), "checkpoint_version": 3.0, "iteration": 12}
    common["optimizer"] = saved if optimizer == "fp32" else {"optimizer": saved}
    if optimizer == "buffers":
        common["optimizer"] = {"param_state_sharding_type": "dp_reshardable"}
    torch.save(common, folder / "common.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("12")
    return directory


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "optimizer"), [(torch.float32, "fp32"), (torch.bfloat16, "plain"), (torch.bfloat16, "distributed")]
)
def test_the_format_torch_dist_has_everything_in_full(tmp_path, ranks, dtype, optimizer):
    masters, weights, adam, names = trained(dtype)
    checkpoint = read_megatron(
        save_torch_dist(tmp_path, weights, masters, adam, names, ranks, optimizer), vocab_size=131
    )
    assert_states(checkpoint, masters, adam, names)
    assert GPT2Config(**checkpoint.client_state["model"]) == CONFIG
    assert checkpoint.global_steps == 12 and checkpoint.optimizer_type == "AdamW"
    assert checkpoint.optimizer_counters == {"step": float(adam["state"][0]["step"])}
    assert [group["lr"] for group in checkpoint.optimizer_groups] == [group["lr"] for group in adam["param_groups"]]
    torch.save({}, tmp_path / "iter_0000012" / "common.pt")
    alone = read_megatron(tmp_path, **KNOWN)
    assert alone.optimizer_counters is None and alone.global_steps == 0
    assert_state(alone, "master", weights)


def test_of_buffers_of_the_distributed_optimizer_the_weights_are_read_with_a_warning(tmp_path, caplog):
    masters, weights, adam, names = trained(torch.bfloat16)
    save_torch_dist(tmp_path, weights, masters, adam, names, 2, "buffers")
    with caplog.at_level(logging.WARNING):
        checkpoint = read_megatron(tmp_path, vocab_size=131)
    assert "weights only" in caplog.text and "--dist-ckpt-optim-fully-reshardable" in caplog.text
    assert checkpoint.optimizer_counters is None and checkpoint.global_steps == 12
    assert_state(checkpoint, "master", weights)


def test_an_optimizer_without_moments_is_no_distributed_one(tmp_path, caplog):
    """What megatron-core saves under fp16 if every step so far has overflowed."""
    masters, weights, adam, names = trained(torch.float16)
    folder = save_torch_dist(tmp_path, weights, masters, adam, names, 1, "buffers") / "iter_0000012"
    common = torch.load(folder / "common.pt", weights_only=False)
    groups = {"optimizer": {"param_groups": [{"lr": 1e-3}], "state": {}}, "grad_scaler": {}}
    torch.save(common | {"optimizer": groups}, folder / "common.pt")
    assert read_megatron(tmp_path, vocab_size=131).optimizer_counters is None
    assert "Adam's moments are not there" in caplog.text and "reshardable" not in caplog.text


@pytest.mark.parametrize("damage", [dict.clear, lambda saved: saved["optimizer"]["param_groups"][0].update(step=9.0)])
def test_an_optimizer_of_torch_dist_that_does_not_fit_is_left_out_with_a_warning(tmp_path, caplog, damage):
    masters, weights, adam, names = trained(torch.bfloat16)
    save_torch_dist(tmp_path, weights, masters, adam, names, 1, "distributed")
    path = tmp_path / "iter_0000012" / "common.pt"
    common = torch.load(path, weights_only=False)
    damage(common["optimizer"])
    torch.save(common, path)
    with caplog.at_level(logging.WARNING):
        checkpoint = read_megatron(tmp_path, vocab_size=131)
    assert "weights only, the optimizer would start anew" in caplog.text and checkpoint.optimizer_counters is None
    assert_state(checkpoint, "master", weights)


def test_the_imported_model_computes_what_megatron_had_trained(tmp_path):
    model = PlainGPT2(CONFIG)
    randomize(model)
    contents = [
        {"args": args_of_v1(), "checkpoint_version": 2.0, "model": nested(part)}
        for part in (rank_weights(model.state_dict(), rank, 2, 2) for rank in range(2))
    ]
    checkpoint = read_megatron(save(tmp_path, contents, "release", "release"), vocab_size=131)
    assert checkpoint.global_steps == 0 and checkpoint.optimizer_counters is None
    config = GPT2Config(**checkpoint.client_state["model"])
    ours = GPT2Model(config, group=dist.ProcessGroup(dist.HashStore(), 0, 1)).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter[: checkpoint.tensors[name].shape[0]] = checkpoint.tensors[name].states["master"]()
    tokens = random_tokens(2, 11, 131)
    assert_close(ours(tokens)[..., :131], model(tokens), atol=1e-5, rtol=1e-5)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two ranks of the first release, and its content."""
    masters, weights, adam, names = trained(torch.float16)
    contents = [
        {
            "iteration": 12,
            "model": rank_weights(weights, rank, 2, 0),
            "optimizer": optimizer_of_rank(masters, adam, names, rank, 2, 0),
        }
        for rank in range(2)
    ]
    return contents, weights


def test_what_is_read_is_no_view_of_the_file(saved, tmp_path):
    tensor = read_megatron(save(tmp_path, saved[0]), **KNOWN).tensors["transformer.final_layernorm.bias"]
    tensor.states["master"]().zero_()
    assert tensor.states["master"]().any()


def swap_groups(optimizer):
    optimizer["optimizer_state_dict"]["param_groups"].reverse()


def swap_copies_of_one_shape(optimizer):
    copies = optimizer["fp32_from_fp16"][1]
    copies[0], copies[1] = copies[1], copies[0]  # weight and bias of the first norm


def lose_a_moment(optimizer):
    del optimizer["optimizer_state_dict"]["state"][5]["exp_avg"]


@pytest.mark.parametrize("damage", [swap_groups, swap_copies_of_one_shape, lose_a_moment, dict.clear])
def test_an_optimizer_that_does_not_fit_is_left_out_with_a_warning(saved, tmp_path, caplog, damage):
    contents, weights = saved
    damage(contents[1]["optimizer"])
    with caplog.at_level(logging.WARNING):
        checkpoint = read_megatron(save(tmp_path, contents), **KNOWN)
    assert "weights only, the optimizer would start anew" in caplog.text
    assert checkpoint.optimizer_counters is None and checkpoint.optimizer_groups is None
    assert_state(checkpoint, "master", weights)
    assert {tuple(tensor.states) for tensor in checkpoint.tensors.values()} == {("master",)}


def test_an_iteration_can_be_chosen_and_the_tracker_is_checked(saved, tmp_path):
    save(tmp_path, saved[0], "iter_0000007", "12")
    assert read_megatron(tmp_path, 7, **KNOWN).global_steps == 12
    with pytest.raises(FileNotFoundError, match="iter_0000012 holds no checkpoint"):
        read_megatron(tmp_path, **KNOWN)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for content in (b"../7", b"\x80\xff"):
        tracker.write_bytes(content)
        with pytest.raises(ValueError, match="a number or 'release' is expected"):
            read_megatron(tmp_path, **KNOWN)
    tracker.unlink()
    with pytest.raises(FileNotFoundError, match="it names the latest checkpoint"):
        read_megatron(tmp_path, **KNOWN)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"Give --num-attention-heads \(1 if"),
        ({"num_attention_heads": 4}, "has 144 rows of word embeddings .* Give --vocab-size"),
        ({"num_attention_heads": 4, "vocab_size": 145}, "--vocab-size 145, but"),
        ({"num_attention_heads": 5, "vocab_size": 131}, "--hidden-size 24 is not divisible"),
    ],
)
def test_sizes_that_are_not_saved_are_asked_for(saved, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        read_megatron(save(tmp_path, saved[0]), **given)


def test_arguments_are_believed_and_checked(saved, tmp_path, caplog):
    contents, _ = saved
    for content in contents:
        content["args"] = args_of_v1(bias_gelu_fusion=False)
    save(tmp_path, contents)
    read_megatron(tmp_path, vocab_size=131)
    assert "without --bias-gelu-fusion, was trained with the exact GELU" in caplog.text
    with pytest.raises(ValueError, match="--num-attention-heads 2, but .* was trained with 4"):
        read_megatron(tmp_path, vocab_size=131, num_attention_heads=2)
    contents[0]["args"].apply_residual_connection_post_layernorm = True
    with pytest.raises(ValueError, match="apply-residual-connection-post-layernorm"):
        read_megatron(save(tmp_path, contents, "iter_0000013", "13"), vocab_size=131)


@pytest.mark.parametrize(
    "damage",
    [{"args": [1]}, {"args": args_of_v1(hidden_dropout="no")}, {"iteration": ()}, {"optimizer": torch.tensor(3)}],
)
def test_values_of_other_types_are_refused_in_either_format(saved, tmp_path, damage):
    contents, _ = saved
    contents[0].update(damage)
    masters, weights, adam, names = trained(torch.bfloat16)
    folder = save_torch_dist(tmp_path / "dist", weights, masters, adam, names, 1, "distributed") / "iter_0000012"
    torch.save(torch.load(folder / "common.pt", weights_only=False) | damage, folder / "common.pt")
    for directory in (save(tmp_path / "ranks", contents), folder.parent):
        with pytest.raises(ValueError, match="iter_0000012 holds other values than Megatron-LM saves"):
            read_megatron(directory, **KNOWN)


def test_norms_of_later_releases_have_other_names_and_their_epsilon_too(saved, tmp_path):
    contents, weights = saved
    args = args_of_v1(norm_epsilon=1e-3)
    del args.layernorm_epsilon
    for content in contents:
        del content["optimizer"]
        content["args"] = args
        content["model"] = {name.replace("_layernorm.", "_norm."): t for name, t in content["model"].items()}
    checkpoint = read_megatron(save(tmp_path, contents), vocab_size=131)
    assert_state(checkpoint, "master", weights)
    assert checkpoint.client_state["model"]["layernorm_epsilon"] == 1e-3


@pytest.mark.parametrize(
    "models", [{"use_legacy_models": False}, {"use_mcore_models": True}, {"use_legacy_models": True}, {}]
)
def test_only_models_before_megatron_core_read_openai_gelu(saved, tmp_path, caplog, models):
    contents, _ = saved
    for content in contents:
        content["args"] = args_of_v1(bias_gelu_fusion=False, openai_gelu=True, **models)
    read_megatron(save(tmp_path, contents), vocab_size=131)
    is_core = models in ({"use_legacy_models": False}, {"use_mcore_models": True})
    assert ("was trained with the exact GELU" in caplog.text) == is_core


@pytest.mark.parametrize(
    ("flag", "value"),
    [("apply_layernorm_1p", True), ("squared_relu", True), ("window_size", (2, 0)), ("softmax_type", "off-by-one")],
)
def test_what_no_shape_shows_and_this_model_does_not_compute_is_refused(saved, tmp_path, flag, value):
    contents, _ = saved
    contents[0]["args"] = args_of_v1(window_size=(-1, -1), softmax_type="vanilla")
    read_megatron(save(tmp_path / "as ours", contents), vocab_size=131)
    contents[0]["args"] = args_of_v1(**{flag: value})
    with pytest.raises(ValueError, match=f"trained with --{flag.replace('_', '-')}, which"):
        read_megatron(save(tmp_path, contents), vocab_size=131)


def test_heads_that_share_keys_are_no_missing_ranks(saved, tmp_path):
    contents, _ = saved
    contents[0]["args"] = args_of_v1(group_query_attention=True, num_query_groups=2)
    save(tmp_path, contents)
    drop_rank(tmp_path)  # so there are fewer rows of query_key_value than 3 x the hidden size
    with pytest.raises(ValueError, match="--group-query-attention and --num-query-groups 2: of Megatron-LM's"):
        read_megatron(tmp_path, vocab_size=131)


def drop_rank(directory):
    (directory / "iter_0000012" / "mp_rank_01").rename(directory / "elsewhere")


def make_pipeline(directory):
    for rank in range(2):
        folder = directory / "iter_0000012" / f"mp_rank_{rank:02d}"
        folder.rename(folder.with_name(f"{folder.name}_000"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_rank, "holds 1 model-parallel ranks, but rank 0 has 36 of 72 elements"),
        (make_pipeline, "pipeline-parallel"),
    ],
)
def test_missing_and_foreign_ranks_are_refused(saved, tmp_path, change, message):
    save(tmp_path, saved[0])
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_megatron(tmp_path, **KNOWN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.pop("transformer.layers.1.mlp.dense_4h_to_h.bias"),
            r"rank 1.* missing transformer.layers.1.mlp.dense_4h",
        ),
        (lambda m: m.update({"tokentype_embeddings.weight": torch.ones(2)}), "unknown tokentype_embeddings.weight"),
        (
            lambda m: m.update({"position_embeddings.weight": torch.ones(5, 24)}),
            r"rank 1: position_embeddings.* \[5, 24\], exp",
        ),
        (lambda m: m.update({"position_embeddings.weight": 3}), "holds no tensor at position_embeddings.weight"),
        (dict.clear, r"missing position_embeddings.weight, (\S+, )+\S+ and 24 more; unknown nothing"),
    ],
)
def test_missing_unknown_and_misshapen_parameters_are_named(saved, tmp_path, change, message):
    contents, _ = saved
    change(contents[1]["model"])
    with pytest.raises(ValueError, match=message):
        read_megatron(save(tmp_path, contents), **KNOWN)


def test_another_torch_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no dict 'model'"):
        read_megatron(save(tmp_path, [{"module": {}}]), **KNOWN)


def test_the_job_goes_on_where_a_run_of_megatron_was_bit_for_bit(corpus, tmp_path):
    """The run is the job's own, with dropout off, put into Megatron-LM's files."""
    job = [*TINY_MODEL, *corpus, "--train-iters", "6", "--log-interval", "1", "--save-interval", "3"]
    whole = run_job([*job, "--save", str(tmp_path / "whole")], 2)
    assert whole.returncode == 0, whole.stdout
    reader = Reader(tmp_path / "whole", "global_step3")
    client = reader.index["client_state"]
    weights = {name: reader.read(name, "master") for name in reader.tensors}
    order = [name for decays in (True, False) for name in weights if (weights[name].ndim > 1) == decays]
    moments = [{key: reader.read(name, key) for key in ("exp_avg", "exp_avg_sq")} for name in order]
    count = sum(tensor.ndim > 1 for tensor in weights.values())
    groups = [{"params": list(range(count))}, {"params": list(range(count, len(order)))}]
    theirs = {
        "args": argparse.Namespace(**client["model"], bias_gelu_fusion=True, consumed_train_samples=12),
        "iteration": 3,
        "model": weights,
        "optimizer": {
            "state": dict(enumerate(moments)),
            "param_groups": [{**group, "lr": 1.0, "step": 3} for group in groups],
        },
        "opt_param_scheduler": {"num_steps": 12},
    }
    save(tmp_path / "theirs", [theirs], "iter_0000003", "3")
    assert main(["import", "--from", "megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    rest = run_job([*job, "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "rest")], 2)
    assert rest.returncode == 0, rest.stdout
    assert "the checkpoint was imported: the samples after its 12 are" in rest.stdout, rest.stdout
    wanted = [line for line in logged(tmp_path / "whole") if line["section"] == "train" and line["iteration"] > 3]
    found = [line for line in logged(tmp_path / "rest") if line["section"] == "train"]
    for key in ("iteration", "lr", "loss", "grad_norm"):
        assert [line[key] for line in found] == [line[key] for line in wanted], key
