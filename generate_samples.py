"""Generates text from a checkpoint: `python generate_samples.py --load DIR --prompt "Once upon a time"`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":  # imports take seconds; Ctrl-C should end them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import torch

from megazero import comm
from megazero.arguments import load_components
from megazero.data.corpora import is_json
from megazero.data.tokenizer import Tokenizer
from megazero.entry import run_script
from megazero.inference import InferenceConfig, Trained, load_model, open_checkpoint
from megazero.logging import counted
from megazero.metrics import append_json, refuse_unwritable_output
from megazero.model.generation import check_sampling, generate
from megazero.model.gpt2 import GPT2Model
from megazero.option import check_options, option
from megazero.texts import load_texts, read_text

logger = logging.getLogger("megazero.generate")


@dataclass(frozen=True)
class SampleConfig:
    """What to generate."""

    prompt: list[str] | None = option(None, "texts to continue (default: start from the end-of-text token)")
    sample_input_file: str | None = option(
        None, 'file of texts to continue, one per line; of a file of JSON lines (.jsonl): {"prompt": "..."}'
    )
    output: str | None = option(
        None,
        "file to which each continuation is appended, as a line of JSON: prompt, text, tokens, and the log-probability that "
        "the model gives each token",
        aliases=("--sample-output-file", "--genfile"),
    )
    stop: list[str] | None = option(None, "texts before the first of which a continuation ends")
    num_samples: int = option(1, "continuations of each prompt", at_least=1)
    out_seq_length: int = option(
        256, "maximum number of new tokens", at_least=1, aliases=("--max-new-tokens", "--num-tokens-to-generate")
    )
    batch_size: int = option(8, "continuations that are computed together; samples depend on it", at_least=1)
    temperature: float = option(1.0, "0 always takes the likeliest token; above 1, the text is more varied")
    top_k: int = option(
        0, "sample from this many of the likeliest tokens; 0: from all", flag="--top_k", aliases=("--top-k",)
    )
    top_p: float = option(
        0.0,
        "sample from the likeliest tokens that together have this probability; 0: from all",
        flag="--top_p",
        aliases=("--top-p",),
    )
    seed: int = option(1234, "seed for sampling", at_least=0, at_most=2**64 - 1)

    def __post_init__(self) -> None:
        if self.prompt and self.sample_input_file:
            raise ValueError("--prompt and --sample-input-file exclude each other. Drop one of them.")
        if self.sample_input_file and (not (path := Path(self.sample_input_file)).exists() or path.is_dir()):
            raise ValueError(f"--sample-input-file {self.sample_input_file}: there is no such file.")
        check_options(self)
        if "" in (self.stop or ()):
            raise ValueError("--stop has an empty text, before which every continuation would end. Drop it.")
        check_sampling(self.temperature, self.top_k, self.top_p)

    def prompts(self) -> list[str]:
        """The texts to continue, each repeated --num-samples times."""
        texts = self.prompt or [""]
        if self.sample_input_file and is_json(Path(self.sample_input_file)):
            texts = load_texts(self.sample_input_file, "prompt")
        elif self.sample_input_file:
            # not by splitlines(), which also divides at form feeds and Unicode's separators
            content = read_text(self.sample_input_file, "--sample-input-file").removesuffix("\n")
            texts = content.split("\n") if content else []
        if not texts:
            raise ValueError(
                f"--sample-input-file {self.sample_input_file} is empty: write one prompt a line. A launcher and its ranks all "
                "read it, so that they need a file: a pipe is empty for the second one."
            )
        return [text for text in texts for _ in range(self.num_samples)]


@dataclass(frozen=True)
class Request:
    """A checked request: the checkpoint, the prompts, and how to continue them."""

    config: InferenceConfig
    sampling: SampleConfig
    trained: Trained
    texts: list[str]  # the prompts
    prompts: list[list[int]]  # their tokens
    new_tokens: list[int]  # in the continuation of each, at most

    def batches(self) -> Iterator[slice]:
        """Prompts to continue together, in order: --batch-size at most, with the same number of new tokens.

        So a prompt that leaves room for few tokens does not cut the others' continuations.
        """
        for _, group in groupby(range(len(self.prompts)), self.new_tokens.__getitem__):
            rows = list(group)
            for i in range(0, len(rows), self.sampling.batch_size):
                some = rows[i : i + self.sampling.batch_size]
                yield slice(some[0], some[-1] + 1)


def check(world_size: int) -> Request:
    """The configuration, the checkpoint and the prompts, after all checks that need no communication."""
    config, sampling = load_components((InferenceConfig, SampleConfig), "Generate text from a checkpoint.")
    config.check_world(world_size)
    trained, texts = open_checkpoint(config), sampling.prompts()
    prompts = [trained.tokenizer.encode(text) or [trained.tokenizer.eod] for text in texts]
    positions = trained.model.max_position_embeddings
    for text, prompt in zip(texts, prompts, strict=True):
        if len(prompt) >= positions:
            raise ValueError(
                f"The prompt {text[:40]!r}... has {len(prompt)} tokens, and the model {positions} positions "
                f"(--max-position-embeddings of the training job). Shorten it to {positions - 1}, so that one more fits."
            )
    refuse_unwritable_output(sampling.output)
    new_tokens = [min(sampling.out_seq_length, positions - len(prompt)) for prompt in prompts]
    return Request(config, sampling, trained, texts, prompts, new_tokens)


def main(request: Request) -> None:
    """Prints each prompt with its continuation."""
    sampling, tokenizer = request.sampling, request.trained.tokenizer
    model, _ = load_model(request.config, request.trained)
    cut = 0
    for batch in request.batches():
        prompts = request.prompts[batch]
        stream = np.random.SeedSequence(sampling.seed, spawn_key=(batch.start,))  # no batch of any seed has another's
        outputs = generate(
            model,
            prompts,
            request.new_tokens[batch.start],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            eod=tokenizer.eod,
            seed=int(stream.generate_state(1, np.uint64)[0]),
            is_over=partial(has_stop, tokenizer, sampling.stop, prompts) if sampling.stop else None,
            vocab_size=tokenizer.vocab_size,
        )
        for text, prompt, output in zip(request.texts[batch], prompts, outputs, strict=True):
            whole = continuation(tokenizer, prompt, output)
            more = before_stops(whole, sampling.stop or ())
            cut += len(output) == request.new_tokens[batch.start] < sampling.out_seq_length and more == whole
            logger.info("%s", "-" * 80)
            logger.info("%s", text + more)
            if sampling.output:
                sample = {"prompt": text, "text": more, "tokens": output}
                sample["log_probs"] = log_probabilities(model, prompt, output)
                if torch.distributed.get_rank() == 0:
                    append_json(sampling.output, sample)
    if cut:
        logger.info("%s", "-" * 80)
        logger.info(
            "%s stopped before --out-seq-length %d, at the end of the model's %d positions",
            counted(cut, "continuation"),
            sampling.out_seq_length,
            request.trained.model.max_position_embeddings,
        )


def has_stop(tokenizer: Tokenizer, stops: Sequence[str], prompts: list[list[int]], row: int, output: list[int]) -> bool:
    """Whether one of the texts is in the continuation `output`. Asked after each token: one that ends in the last is near it."""
    longest = max(len(stop.encode()) for stop in stops)  # in tokens, each of a byte at least
    last = [*prompts[row][-1:], *output][-longest - 1 :]
    end = continuation(tokenizer, last[:1], last[1:])
    return any(stop in end for stop in stops)


def before_stops(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the stops in it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


@torch.no_grad()
def log_probabilities(model: GPT2Model, prompt: list[int], output: list[int]) -> list[float]:
    """Of each token of `output`, by the model itself: without temperature, top-k and top-p."""
    if not output:
        return []
    tokens = torch.tensor([prompt + output], device=comm.local_device())
    losses = model(tokens[:, :-1], targets=tokens[:, 1:])
    return (-losses[0, len(prompt) - 1 :]).tolist()


def continuation(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """The text of `output` after `prompt`: decoded alone, sentencepiece's would lose the space that it begins with."""
    return tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


if __name__ == "__main__":
    run_script(check, main)
