"""Supervised finetuning of a GPT-2: JSON lines {"prompt": "...", "response": "..."}, with the loss on the responses alone.

python -m megazero.launch --nproc-per-node 2 examples/finetune_gpt2.py --pretrained-checkpoint BASE --load TUNED --save TUNED \\
    --train-data rows.jsonl --calculate-per-token-loss --num-layers ...

The flags are those of pretrain_gpt2.py, and those of the sizes as the base has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import pretrain_gpt2
from megazero import mpu
from megazero.arguments import load_config
from megazero.config import Config
from megazero.data.tokenizer import Tokenizer
from megazero.entry import run_script
from megazero.job import Job
from megazero.job_checkpoints import job_tokenizer
from megazero.logging import ALIKE, get_logger
from megazero.texts import load_rows
from megazero.training import pretrain

logger = get_logger("megazero.finetune")  # which is shown; __name__ is that of the script


class Answers:
    """The rows of some files, each a sample: prompt, response and end of text, then padding. Longer ones lose their end."""

    def __init__(self, files: Sequence[str], tokenizer: Tokenizer, seq_length: int) -> None:
        self.tokenizer, self.seq_length = tokenizer, seq_length
        self.rows = [row for file in files for row in load_rows(file, "prompt", "response")]
        prompts = (row["prompt"] for row in self.rows)
        # A token has a byte or more. JSON may have unpaired surrogates, of which each is three bytes for a tokenizer, too.
        long = (prompt for prompt in prompts if len(prompt.encode(errors="surrogatepass")) >= seq_length)
        cut = sum(len(tokenizer.encode(prompt)) > seq_length for prompt in long)
        if cut:
            found = f"in {cut} of {len(self.rows)} rows of {', '.join(files)}, the prompt alone fills --seq-length {seq_length}"
            if cut == len(self.rows):
                raise ValueError(f"{found}: there is nothing to learn. Raise --seq-length, or shorten the prompts.")
            logger.warning("%s: nothing is learned from these", found, extra=ALIKE)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row, eod = self.rows[index], self.tokenizer.eod
        prompt = self.tokenizer.encode(row["prompt"]) or [eod]
        ids = torch.tensor([*prompt, *self.tokenizer.encode(row["response"]), eod])[: self.seq_length + 1]
        text, counts = torch.full((self.seq_length + 1,), eod), torch.zeros(self.seq_length, dtype=torch.int64)
        text[: len(ids)] = ids
        counts[len(prompt) - 1 : len(ids) - 1] = 1  # the place of a token predicts the next one
        return {"text": text, "counts": counts}


def make_datasets(job: Job) -> tuple[Answers, dict[str, Answers]]:
    """The rows to train on and, if there are any, those of validation."""
    data = job.config.data
    train, valid = (
        Answers(files, job.tokenizer, data.seq_length) for files in (data.train_data or [], data.valid_data or [])
    )
    return train, {"": valid} if valid else {}


def forward_step(job: Job, iterator: Iterator[dict[str, Tensor]] | None) -> Tensor:
    """The mean loss of the responses' tokens in the next micro-batch."""
    b, s = job.micro_batch_size, job.config.data.seq_length
    shapes = {"text": (b, s + 1), "counts": (b, s)}
    data = None if iterator is None else next(iterator)  # None where tensor-parallel ranks get it from the first
    batch = mpu.broadcast_data([*shapes], data, torch.int64, job.groups.model, job.device, shapes)
    text, counts = batch["text"], batch["counts"]
    losses = job.engine(text[:, :-1].contiguous(), targets=text[:, 1:].contiguous())  # [b, s] fp32
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def count_tokens(job: Job, data: dict[str, Tensor]) -> int:
    """The number of tokens in a micro-batch over which `forward_step` takes the mean."""
    return int(data["counts"].sum())


def check(world_size: int) -> tuple[Config, Tokenizer]:
    """The configuration and the tokenizer."""
    config = load_config(world_size=world_size)
    config.check_world(world_size)
    return config, job_tokenizer(config)


def main(checked: tuple[Config, Tokenizer]) -> None:
    """Trains."""
    pretrain(*checked, pretrain_gpt2.make_model, forward_step, count_tokens, make_datasets=make_datasets)


if __name__ == "__main__":
    run_script(check, main)
