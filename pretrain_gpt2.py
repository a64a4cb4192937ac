"""Pretrains GPT-2. `python pretrain_gpt2.py --help` lists the flags; the scripts in scripts/ show how to start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

if __name__ == "__main__":  # imports take seconds; Ctrl-C should end them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from torch import Tensor, nn

from megazero import mpu
from megazero.arguments import load_config
from megazero.config import Config
from megazero.data.build import check_data
from megazero.data.tokenizer import Tokenizer
from megazero.entry import run_script
from megazero.job import Job
from megazero.job_checkpoints import job_tokenizer, refuse_to_replace, refuse_unwritable, sees_something_to_load
from megazero.model.config import GPT2Config
from megazero.model.documents import document_positions
from megazero.model.gpt2 import GPT2Model
from megazero.mpu.groups import ParallelGroups
from megazero.nvme import check_folder
from megazero.training import pretrain
from megazero.wandb_log import require_wandb


def make_model(config: GPT2Config, groups: ParallelGroups, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """GPT-2 on `device`, split over the tensor-parallel group."""
    return GPT2Model(config, group=groups.model, device=device, dtype=dtype)


def get_batch(iterator: Iterator[dict[str, Tensor]] | None, job: Job) -> tuple[Tensor, Tensor]:
    """The next micro-batch: inputs and targets [b, s] int64, the same on every tensor-parallel rank."""
    data = None
    if iterator is not None:
        with job.timers("data loader"):
            data = next(iterator)
    shape = (job.micro_batch_size, job.config.data.seq_length + 1)
    text = mpu.broadcast_data(
        ["text"], data, torch.int64, group=job.groups.model, device=job.device, shapes={"text": shape}
    )["text"]
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def forward_step(job: Job, iterator: Iterator[dict[str, Tensor]] | None) -> Tensor:
    """The mean loss of the next micro-batch.

    The token after an end-of-text token cannot be predicted, so it counts only with --no-eod-mask-loss.
    """
    with job.timers("batch generator"):
        tokens, targets = get_batch(iterator, job)
    flags, eod = job.config.training, job.tokenizer.eod
    position_ids = document_ids = None
    if flags.reset_position_ids or flags.reset_attention_mask:
        positions, documents = document_positions(tokens, eod)
        position_ids = positions if flags.reset_position_ids else None
        document_ids = documents if flags.reset_attention_mask else None
    losses = job.engine(tokens, position_ids=position_ids, document_ids=document_ids, targets=targets)  # [b, s] fp32
    if not flags.eod_mask_loss:
        return losses.mean()
    counts = (tokens != eod).float()
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def count_tokens(job: Job, data: dict[str, Tensor]) -> int:
    """The number of tokens in a micro-batch over which `forward_step` takes the mean."""
    tokens = data["text"][:, :-1]
    return int((tokens != job.tokenizer.eod).sum()) if job.config.training.eod_mask_loss else tokens.numel()


def check(world_size: int) -> tuple[Config, Tokenizer]:
    """The configuration and the tokenizer, after all checks that need no communication."""
    config = load_config(world_size=world_size)
    config.check_world(world_size)
    if not config.data.train_data and not config.checkpoint.load:
        raise ValueError("--train-data is missing: name the data to train on, as --help says.")
    if config.training.wandb_project:
        require_wandb()
    refuse_unwritable(config.checkpoint)
    refuse_to_replace(config.checkpoint)  # as `pretrain` does, but before the ranks start
    for folder in config.swap_folders:
        check_folder(folder)
    tokenizer = job_tokenizer(config)
    config = replace(config, data=replace(config.data, tokenizer_type=tokenizer.name))
    trains = config.checkpoint.finetune or not sees_something_to_load(config.checkpoint)  # else the run may be over
    check_data(config.data, tokenizer, trains=trains, evaluates=config.training.eval_iters > 0)
    return config, tokenizer


def main(checked: tuple[Config, Tokenizer]) -> None:
    """Trains."""
    pretrain(*checked, make_model, forward_step, count_tokens)


if __name__ == "__main__":
    run_script(check, main)
