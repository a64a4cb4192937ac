"""Loads a trained model for use: a checkpoint's weights, at any model-parallel size, and the tokenizer it was trained with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch

from megazero import comm, mpu
from megazero.backends import leave_out_cudnn_attention, round_fp32_products, say_what_is_idle
from megazero.checkpoint.own_model import gpt2_of
from megazero.checkpoint.plain import client_state
from megazero.checkpoint.reader import Reader
from megazero.checkpoint.restore import check_tensors
from megazero.checkpoint.tags import named
from megazero.checkpoint.training_state import cut_of
from megazero.checkpoint.vocabulary import saved_flags, saved_tokenizer
from megazero.config import ParallelConfig
from megazero.data.build import TOKENIZER_FLAGS
from megazero.data.tokenizer import Tokenizer, build_tokenizer, refuse_other_vocabulary
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.init import NoDraws
from megazero.mpu.groups import ParallelGroups, check_model_parallel_size, groups_of_size
from megazero.optim.loss_scaler import DtypeConfig
from megazero.option import check_options, flag_of, option
from megazero.zero.init import suspended
from megazero.zero.units import target_dtype

logger = logging.getLogger(__name__)

_OF_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


@dataclass(frozen=True)
class InferenceConfig(DtypeConfig, ParallelConfig):
    """Which checkpoint to use, and how to run its model."""

    load: str | None = option(None, "directory of checkpoints, as given to the training job's --save, or one of them")
    tag: str | None = option(None, "which checkpoint in the directory, such as global_step200 (default: the latest)")
    num_layers: int | None = option(None, "the model's, which the checkpoint says; refused if it is another one")
    hidden_size: int | None = option(None, "the same")
    num_attention_heads: int | None = option(None, "the same")
    max_position_embeddings: int | None = option(None, "the same")
    cache_dir: str | None = option(None, "accepted without effect: nothing is downloaded")
    tokenizer_type: str | None = option(None, "kind of vocabulary (default: the training job's)")
    tokenizer_path: str | None = option(None, "file or directory of the vocabulary (default: the training job's)")
    vocab_file: str | None = option(None, "encoder.json or vocab.json (default: the training job's)")
    merge_file: str | None = option(None, "vocab.bpe or merges.txt (default: the training job's)")

    def __post_init__(self) -> None:
        if self.load is None:
            raise ValueError(
                "--load is missing: name the directory of checkpoints, as given to --save of the training job."
            )
        super().__post_init__()
        check_options(self)

    def check_world(self, world_size: int) -> None:
        """Checks that --model-parallel-size divides the number of ranks."""
        check_model_parallel_size(world_size, self.model_parallel_size)


@dataclass(frozen=True)
class Trained:
    """An open checkpoint, and what it says of its model."""

    reader: Reader
    client: dict[str, Any]  # what the training job saved beside the weights
    model: GPT2Config  # without settings that only training needs
    tokenizer: Tokenizer
    changed: Callable[[GPT2Model], GPT2Model] | None = None  # makes it the model that was trained


def open_checkpoint(config: InferenceConfig, changed: Callable[[GPT2Model], GPT2Model] | None = None) -> Trained:
    """The checkpoint that the flags name; communicates nothing.

    Args:
        changed: what the `make_model` of a script of one's own does to a GPT2Model, which may have other parameters then.

    Raises:
        FileNotFoundError: there is no checkpoint, or no vocabulary where the training job had it.
        ValueError: the checkpoint is damaged, or not of a GPT2Model and not `changed`, or the vocabulary is not the one it was
            trained with.
    """
    assert config.load is not None
    reader = Reader(*named(config.load, config.tag))
    client = client_state(reader)
    model = (gpt2_of(reader, client) if changed is None else GPT2Config.of_saved(client, reader.path)).for_inference()
    tokenizer = _tokenizer(config, client, reader.path)
    model.check_parallel(config.model_parallel_size)
    refuse_other_model(config, model, reader.path)
    return Trained(reader, client, model, tokenizer, changed)


def refuse_other_model(config: InferenceConfig, model: GPT2Config, path: Path) -> None:
    """Raises a ValueError if flags describe another model than the checkpoint's, of which scripts may repeat the sizes."""
    given = {name: getattr(config, name) for name in _OF_MODEL}
    others = {name: value for name, value in given.items() if value not in (None, getattr(model, name))}
    if others:
        wanted = ", ".join(f"{flag_of(name)} {value} (it has {getattr(model, name)})" for name, value in others.items())
        raise ValueError(
            f"The model in {path} is not one of {wanted}. Drop these flags: the checkpoint says what it is."
        )


def _tokenizer(config: InferenceConfig, client: dict[str, Any], path: Path) -> Tokenizer:
    """The training job's tokenizer, from the files that the flags name, or else from those in the checkpoint."""
    saved = saved_flags(client)
    given = {name: getattr(config, name) for name in TOKENIZER_FLAGS if getattr(config, name) is not None}
    if given.keys() - {"tokenizer_type"}:  # files go together
        tokenizer = build_tokenizer(**{"tokenizer_type": saved.get("tokenizer_type", "GPT2BPETokenizer"), **given})
    elif not given or given["tokenizer_type"] == saved.get("tokenizer_type"):
        tokenizer = saved_tokenizer(client, path)
    else:
        tokenizer = build_tokenizer(**{**saved, **given})
    refuse_other_vocabulary(tokenizer, client.get("tokenizer_sha256", tokenizer.sha256), path)
    return tokenizer


def load_model(config: InferenceConfig, trained: Trained) -> tuple[GPT2Model, ParallelGroups]:
    """The model in evaluation mode on this process's device, split over the model-parallel group.

    Initializes torch.distributed and the model-parallel groups, if there are none. `read_model` reads further models over them.

    Raises:
        RuntimeError: there are groups of another size.
    """
    round_fp32_products(config.tf32)
    leave_out_cudnn_attention()
    comm.init_distributed(config.distributed_backend, timeout=timedelta(seconds=config.distributed_timeout_s))
    say_what_is_idle(config.dtype, config.tf32, comm.local_device())
    groups = groups_of_size(config.model_parallel_size, timeout_s=config.distributed_timeout_s)
    return read_model(trained, groups, config.dtype), groups


def read_model(trained: Trained, groups: ParallelGroups, dtype: torch.dtype) -> GPT2Model:
    """The model in evaluation mode on this process's device, split over `groups.model`: also in a job, as a teacher.

    Each rank reads its own part, without communication; in addition, one parameter at a time is in memory. Neither random streams
    nor a `zero.Init` around it take part.

    Raises:
        ValueError: the checkpoint has not the parameters of the model, which a script may have changed.
    """
    reader = trained.reader
    with suspended(), torch.random.fork_rng(devices=[]), NoDraws():
        model = GPT2Model(trained.model, group=groups.model, device=comm.local_device(), dtype=dtype)
        model = trained.changed(model) if trained.changed else model
    for parameter in model.parameters():  # a script's own may be of any, which the engine converts, too
        parameter.data = parameter.data.to(target_dtype(parameter.dtype, dtype))
    cuts, rank, size = mpu.partitions(model), groups.model_parallel_rank, groups.model_parallel_size
    tensors = {name: p.data for name, p in model.named_parameters()}
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in reader.tensors}
    full = {name: cuts[name].full_shape(x.shape) if name in cuts else tuple(x.shape) for name, x in tensors.items()}
    check_tensors(reader, list(full.items()))
    for name, x in tensors.items():
        cut = cut_of(cuts.get(name), tuple(x.shape), size)
        values = x.reshape(-1)
        reader.read_part(name, reader.entry(name).weight_state, values, cut=cut, rank=rank, size=size)
        if not x.is_contiguous():  # then these are a copy
            x.copy_(values.view(x.shape))
    logger.info("loaded %s: %s parameters", reader.path, f"{sum(map(prod, full.values())):,}")
    return model.eval()
