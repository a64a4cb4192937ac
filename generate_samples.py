"""Generates text from a checkpoint: `python generate_samples.py --load DIR --prompt "Once upon a time"`."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.arguments import load_components
from megazero.inference import InferenceConfig, load_model, open_checkpoint
from megazero.logging import exit_on_all_ranks, setup_logging
from megazero.model.generation import generate
from megazero.mpu.groups import check_model_parallel_size
from megazero.option import option

logger = logging.getLogger("megazero.generate")


@dataclass(frozen=True)
class SampleConfig:
    """What is generated."""

    prompt: list[str] | None = option(None, "texts to continue (default: start from the end-of-text token)")
    sample_input_file: str | None = option(None, "file of texts to continue, one a line")
    num_samples: int = option(1, "continuations of each prompt")
    out_seq_length: int = option(256, "new tokens at most")
    temperature: float = option(1.0, "0 always takes the likeliest token; above 1 is more varied")
    top_k: int = option(0, "draw from this many likeliest tokens; 0 from all", flag="--top_k", aliases=("--top-k",))
    top_p: float = option(
        0.0,
        "draw from the likeliest tokens of this total probability; 0 from all",
        flag="--top_p",
        aliases=("--top-p",),
    )
    seed: int = option(1234, "seed of the draws")

    def __post_init__(self) -> None:
        if self.prompt and self.sample_input_file:
            raise ValueError("--prompt and --sample-input-file exclude each other. Drop one of them.")

    def prompts(self) -> list[str]:
        """The texts to continue, each as often as asked for."""
        texts = self.prompt or [""]
        if self.sample_input_file:
            texts = Path(self.sample_input_file).read_text(encoding="utf-8").splitlines()
        return [text for text in texts for _ in range(self.num_samples)]


def main() -> None:
    """Loads the checkpoint and prints each prompt with its continuation."""
    setup_logging(int(os.environ.get("RANK", 0)))
    try:
        config, sampling = load_components((InferenceConfig, SampleConfig), "Generate text from a checkpoint.")
        check_model_parallel_size(int(os.environ.get("WORLD_SIZE", 1)), config.model_parallel_size)
        reader, tokenizer = open_checkpoint(config)
        texts = sampling.prompts()
    except (ValueError, OSError) as error:
        exit_on_all_ranks(error)
    model, _ = load_model(config, reader)
    prompts = [tokenizer.encode(text) or [tokenizer.eod] for text in texts]
    room = model.config.max_position_embeddings - max(len(prompt) for prompt in prompts)
    if room < 1:
        sys.exit(
            f"error: the longest prompt fills all {model.config.max_position_embeddings} positions of the model. Shorten it."
        )
    outputs = generate(
        model,
        prompts,
        min(sampling.out_seq_length, room),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        eod=tokenizer.eod,
        seed=sampling.seed,
    )
    for text, output in zip(texts, outputs, strict=True):
        logger.info("%s", "-" * 80)
        logger.info("%s", text + tokenizer.decode(output))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
