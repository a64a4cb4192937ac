"""PatrickStar's `initialize_engine` (arXiv:2108.05818, v0.4) over megazero's engine: its chunk corresponds to a bucket.

Parameters, gradients and optimizer states are sharded (ZeRO stage 3). The placement policy "auto" decides where they are kept;
with `with_static_partition` they are kept in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megazero import comm, zero
from megazero.compat.wrappers import EngineModule, EngineOptimizer, join
from megazero.deepspeed.api import initialize
from megazero.deepspeed.engine import DeepSpeedEngine
from megazero.json_config import load_json_config
from megazero.option import check_known

__all__ = ["FP16Adam", "PatrickStarEngine", "initialize_engine"]

logger = logging.getLogger(__name__)

_FP16 = ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "use_hybrid_adam": True}
_MARGIN, _STATIC = "client.mem_tracer.margin_use_ratio", "client.mem_tracer.with_static_partition"
_OBEYED = (
    *("optimizer", "fp16", "gradient_clipping", "default_chunk_size", "chunk_size", "release_after_init", "client"),
    *(_MARGIN, _STATIC),
)
# Refused if true, because the feature does not exist; false or absent is accepted.
_REFUSED = {
    "use_cpu_embedding": "embeddings compute on the device, like every other layer",
    "use_fake_dist": "ranks are real processes; start several with torchrun on one machine",
    "client.opts.with_mem_saving_comm": "a bucket travels in one all-gather; chunk-by-chunk broadcasts are not built",
    "client.mem_tracer.use_fake_dist": "ranks are real processes; start several with torchrun on one machine",
}
# These choose how something is done; the result does not depend on them.
_NO_EFFECT = {
    "client.opts.with_mem_cache": "torch's allocator keeps freed memory",
    "client.opts.with_async_move": "transfers always overlap with computing",
    "client.mem_tracer.use_async_mem_monitor": "memory is counted, not sampled",
    "client.mem_tracer.warmup_gpu_chunk_mem_ratio": "the budget is measured",
    "client.mem_tracer.overall_gpu_mem_ratio": "the budget is measured",
    "client.mem_tracer.overall_cpu_mem_ratio": "the budget is measured",
}


def initialize_engine(
    model_func: Callable[[], nn.Module], local_rank: int, config: Mapping[str, Any] | None = None, client: None = None
) -> tuple[PatrickStarEngine, FP16Adam]:
    """A model whose parameters, gradients and Adam states are sharded over all ranks, and its optimizer.

    Args:
        model_func: builds the model; it is sharded while it is built, unless `release_after_init`.
        local_rank: this process's number on its host, as set by the launcher.
        config: PatrickStar's dict; see docs/coming_from_other_systems.md for each key. "Adam" adds weight decay to the gradient,
            "AdamW" decouples it. Without "fp16" the model computes in the dtype that it was built in.
        client: must be None, because there are no chunk clients here.

    Raises:
        ValueError: a key is unknown, or asks for something that does not exist here; the message names it.
        TypeError: `model_func` is a model instead of a function, or `client` is given.
    """
    if isinstance(model_func, nn.Module) or not callable(model_func) or client is not None:
        raise TypeError(
            "initialize_engine needs model_func, a function without arguments that builds the model, and no client: chunks are "
            f"the engine's own. Got {type(model_func).__name__} and client={client!r}."
        )
    join()
    settings = _checked(config or {})
    device = comm.local_device()
    # Count as `init_distributed` does: a batch system may show each rank only its own device.
    if device.type == "cuda" and device.index != local_rank % torch.cuda.device_count():
        raise ValueError(
            f"initialize_engine: local_rank is {local_rank}, and this process computes on {device}, by LOCAL_RANK. Give both "
            "the same number: start with torchrun and pass int(os.environ['LOCAL_RANK'])."
        )
    fp16 = None if settings.get("fp16") is None else _fp16(_section(settings, "fp16"))
    section: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    if not settings.get(_STATIC, False):
        margin = settings.get(_MARGIN, 0.8)
        if not 0 <= margin <= 1:
            raise ValueError(f"{_MARGIN} must lie between 0 and 1, got {margin}.")
        section |= {"placement": "auto", "gpu_margin_mem_ratio": margin}
    chunk = settings.get("chunk_size", settings.get("default_chunk_size"))
    if chunk is not None:
        section["sub_group_size"] = chunk
    document = {
        "train_micro_batch_size_per_gpu": 1,  # a batch may have any number of samples
        "optimizer": _optimizer(_section(settings, "optimizer")),
        "gradient_clipping": max(0.0, settings.get("gradient_clipping", 0.0)),  # -1 means none in PatrickStar
        "zero_optimization": section,
    }
    if fp16:
        document |= {"fp16": fp16, "data_types": {"buffer_dtype": "fp16"}}
    load_json_config(document)  # checks it before the model is built
    dtype = torch.float16 if fp16 else None
    with nullcontext() if settings.get("release_after_init", False) else zero.Init(dtype=dtype):
        model = model_func()
    engine = PatrickStarEngine(model, initialize(model=model, config=document)[0])
    return engine, engine.optimizer


class PatrickStarEngine(EngineModule):
    """The model that `initialize_engine` returns. It is called like the original model, and also runs backward.

    Use: `optimizer.zero_grad()`, `loss = model(data)`, `model.backward(loss)`, `optimizer.step()`.
    """

    def __init__(self, module: nn.Module, engine: DeepSpeedEngine) -> None:
        super().__init__(module)
        self._engine = engine
        self.optimizer = FP16Adam(engine)
        self.train()

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of `loss`, the mean over this rank's batch. They replace earlier ones: nothing accumulates."""
        self.engine.zero_grad()
        self.engine.backward(loss)


class FP16Adam(EngineOptimizer):
    """The optimizer that `initialize_engine` returns: Adam or AdamW on fp32 master weights."""


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are obeyed, after checking all of them."""
    values = {key: value for key, value in config.items() if key != "client"}
    client = _section(config, "client")
    check_known("config['client'] has no", client, ("mem_tracer", "opts"))
    for part in client:
        values.update({f"client.{part}.{key}": value for key, value in _section(client, part, "['client']").items()})
    check_known("PatrickStar's configuration has no", values, {*_OBEYED, *_REFUSED, *_NO_EFFECT})
    for key, value in values.items():
        if value and key in _REFUSED:
            raise ValueError(f"{key} true cannot be obeyed: {_REFUSED[key]}. Drop it.")
    idle = [f"{key} ({_NO_EFFECT[key]})" for key in values if key in _NO_EFFECT]
    if _MARGIN in values and values.get(_STATIC):
        idle.append(f"{_MARGIN} ({_STATIC} keeps all states in host memory)")
    if idle:
        logger.info("given, but without effect: %s", "; ".join(idle))
    return {key: value for key, value in values.items() if key in _OBEYED}


def _section(config: Mapping[str, Any], key: str, path: str = "") -> Mapping[str, Any]:
    """The section at `key`, in the one at `path`; empty if it is absent."""
    section = config.get(key, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"config{path}[{key!r}] must be a dict, got {section!r}. Give one, or drop the key.")
    return section


def _fp16(section: Mapping[str, Any]) -> dict[str, Any] | None:
    """DeepSpeed's fp16 section, with PatrickStar's default of 2000 clean steps, or None if fp16 is not enabled."""
    check_known("config['fp16'] has no", section, _FP16)
    return {"loss_scale_window": 2000, **section} if section.get("enabled", False) else None


def _optimizer(section: Mapping[str, Any]) -> dict[str, Any]:
    kind, given = section.get("type", "Adam"), _section(section, "params", "['optimizer']")
    if kind not in ("Adam", "AdamW"):
        raise ValueError(f"config['optimizer']['type'] must be Adam or AdamW, got {kind!r}.")
    check_known("config['optimizer']['params'] has no", given, _ADAM)
    params = {**_ADAM, **given}
    params.pop("use_hybrid_adam")  # the kernel of a shard's device updates it in place
    return {"type": "Adam", "params": {**params, "adam_w_mode": kind == "AdamW"}}
