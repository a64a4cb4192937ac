"""Evaluates a checkpoint: perplexity of a text or of WikiText, accuracy on LAMBADA's last words or HellaSwag's endings.

python evaluate_gpt2.py --load DIR --task wikitext --valid-data wiki.test.tokens
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # imports take seconds; Ctrl-C should end them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import numpy.typing as npt
import torch

from megazero.arguments import load_components
from megazero.comm import told_world
from megazero.data.corpora import Corpus, indexed_prefix, named_entry
from megazero.data.sources import Sources
from megazero.entry import run_script
from megazero.evaluation import check_stride, ending_accuracy, last_word_accuracy, sliding_window_perplexity
from megazero.inference import InferenceConfig, Trained, load_model, open_checkpoint
from megazero.logging import counted, table
from megazero.metrics import append_json, refuse_unwritable_output
from megazero.model.gpt2 import GPT2Model
from megazero.mpu.groups import ParallelGroups
from megazero.option import check_options, option
from megazero.texts import (
    Question,
    has_lines_of_json,
    load_questions,
    load_texts,
    read_text,
    wikitext_detokenize,
    word_count,
)

logger = logging.getLogger("megazero.evaluate")

_OF_LINES = ("lambada", "hellaswag")  # tasks whose data are JSON lines


class Data(NamedTuple):
    """A text, or tokens, to evaluate on."""

    name: str  # "" where none is given
    path: str

    @classmethod
    def of(cls, entry: str) -> Data:
        """What an entry "PATH" or "NAME=PATH" names, as in the training job."""
        name, path = named_entry(entry)
        return cls(name or "", path)

    @property
    def tokens(self) -> Path | None:
        """The prefix of the tokens; None of a text."""
        path = Path(self.path)
        is_text = path.is_file() and path.suffix not in (".bin", ".idx")
        return None if is_text else indexed_prefix(path)


@dataclass(frozen=True)
class EvaluationConfig:
    """What to evaluate."""

    task: str = option(
        "perplexity",
        "perplexity of a plain text file or of tokens, word-level perplexity of WikiText, last-word accuracy on LAMBADA's JSON "
        "lines, or how often the right one of HellaSwag's endings is the likeliest",
        choices=("perplexity", "wikitext", *_OF_LINES),
    )
    valid_data: list[str] | None = option(
        None,
        "text files to evaluate on, one after the other; for lambada and hellaswag, files of JSON lines; for perplexity also "
        "those, and prefixes of .bin/.idx files; each may have a name before it: web=FILE",
    )
    output: str | None = option(None, "file to which each result is appended, as a line of JSON")
    text_key: str = option("text", "key of the text in each JSON line, for lambada and perplexity")
    overlapping_eval: int | None = option(
        None,
        "new tokens that each window predicts; a smaller number gives more context and a longer run (default: 32, or the "
        "window if that is shorter)",
        at_least=1,
    )
    seq_length: int | None = option(
        None,
        "tokens per window (default: the training job's, or all positions if the checkpoint does not record it)",
        at_least=1,
        aliases=("--eval-seq-length",),
    )
    batch_size: int = option(
        8, "windows or passages per forward pass and data-parallel rank", at_least=1, aliases=("--eval-batch-size",)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.valid_data:
            raise ValueError("--valid-data is missing: name the file to evaluate on.")
        for data in self.sets:
            if not Path(data.path).is_file() and data.tokens is None:
                raise ValueError(f"--valid-data {data.path}: there is no such file.")
            if data.tokens is not None and self.task != "perplexity":
                raise ValueError(f"--valid-data {data.path} names tokens, and --task {self.task} needs the text.")

    @property
    def sets(self) -> list[Data]:
        """What --valid-data names."""
        return [Data.of(entry) for entry in self.valid_data or ()]

    def window(self, trained: Trained) -> int:
        """Tokens per window. An imported checkpoint does not record its training job's, so the window is all positions."""
        return self.seq_length or trained.client.get("seq_length", trained.model.max_position_embeddings)

    def stride(self, window: int) -> int:
        """New tokens that each window predicts."""
        return min(32, window) if self.overlapping_eval is None else self.overlapping_eval


Checked = tuple[InferenceConfig, EvaluationConfig, Trained]
Stream = tuple[npt.NDArray[np.integer], int | None]  # tokens, and how many words they are; None if that is unknown
Result = tuple[dict[str, Any], list[tuple[str, str]]]  # numbers by name, and the rows of a table


def check(world_size: int) -> Checked:
    """The configuration and the checkpoint, after all checks that need no communication."""
    config, task = load_components((InferenceConfig, EvaluationConfig), "Evaluate a checkpoint.")
    config.check_world(world_size)
    for data in task.sets:
        if task.task == "wikitext" and has_lines_of_json(data.path):
            raise ValueError(
                f"--valid-data {data.path} holds JSON lines, whose keys and escapes would count as text. Write the text alone "
                "into a file, or take --task perplexity."
            )
    trained = open_checkpoint(config)
    window = task.window(trained)
    trained.model.check_sequence(window)
    if task.task not in _OF_LINES:
        check_stride(task.stride(window), window)
    refuse_unwritable_output(task.output)
    return config, task, trained


def main(checked: Checked) -> None:
    """Prints the checkpoint's result on each set of the task's data."""
    config, task, trained = checked
    read, evaluate = _TASKS[task.task]
    contents = [read(task, data, trained) for data in task.sets]
    model, groups = load_model(config, trained)
    for data, content in zip(task.sets, contents, strict=True):
        numbers, rows = evaluate(task, trained, model, groups, content)
        logger.info("%s", table(f"{task.task} of {data.name or data.path}", rows))
        if task.output and torch.distributed.get_rank() == 0:
            checkpoint = {"checkpoint": str(trained.reader.path.parent), "tag": trained.reader.path.name}
            what = {"task": task.task, "set": data.name, "data": data.path}
            append_json(task.output, {**checkpoint, **what, **numbers})


def last_words(
    task: EvaluationConfig, trained: Trained, model: GPT2Model, groups: ParallelGroups, texts: list[str]
) -> Result:
    """LAMBADA's result."""
    result = last_word_accuracy(
        model,
        texts,
        trained.tokenizer,
        seq_length=task.window(trained),
        batch_size=task.batch_size,
        vocab_size=model.config.require_vocab_size(),
        groups=groups,
    )
    numbers = {**asdict(result), "accuracy": result.accuracy}
    return numbers, [("last words", f"{result.correct} of {result.total}"), ("accuracy", f"{result.accuracy:.4f}")]


def endings(
    task: EvaluationConfig, trained: Trained, model: GPT2Model, groups: ParallelGroups, questions: list[Question]
) -> Result:
    """HellaSwag's result."""
    result = ending_accuracy(
        model,
        questions,
        trained.tokenizer,
        seq_length=task.window(trained),
        batch_size=task.batch_size,
        groups=groups,
    )
    return asdict(result), [
        ("questions", f"{result.total:,}"),
        ("accuracy", f"{result.accuracy:.4f} by the loss of the whole ending"),
        ("normalized accuracy", f"{result.accuracy_per_token:.4f} by the loss per token"),
    ]


def perplexity(
    task: EvaluationConfig, trained: Trained, model: GPT2Model, groups: ParallelGroups, stream: Stream
) -> Result:
    """The result on a text."""
    tokens, words = stream
    seq_length = task.window(trained)
    result = sliding_window_perplexity(
        model,
        tokens,
        seq_length=seq_length,
        overlapping_eval=task.stride(seq_length),
        batch_size=task.batch_size,
        groups=groups,
        original_word_count=words,
    )
    number = "" if words is None else f", {words:,} word{'s' * (words != 1)}"
    per_word = "unknown: tokens do not say which words they are of"
    if result.adjusted_ppl is not None:
        per_word = f"{result.adjusted_ppl:.3f} per word, comparable between tokenizers"
    return {**asdict(result), "words": words}, [
        ("tokens", f"{result.tokens:,}{number}"),
        ("loss", f"{result.loss:.4f} nats per token"),
        ("perplexity", f"{result.ppl:.3f} per token"),
        ("adjusted perplexity", per_word),
    ]


def read_stream(task: EvaluationConfig, data: Data, trained: Trained) -> Stream:
    """The tokens to predict, and the number of words in them.

    Raises:
        ValueError: there are too few, or they are of another vocabulary.
    """
    if data.tokens is not None:
        rank, _ = told_world()  # the first one warns, and takes the cache's checksums
        corpus = Corpus(data.tokens, is_indexed=True)
        return Sources(trained.tokenizer, task.text_key, None, rank, rank).open(corpus).tokens, None
    encode, is_wikitext = trained.tokenizer.encode_array, task.task == "wikitext"
    if has_lines_of_json(data.path):
        texts = [text for text in load_texts(data.path, task.text_key) if text]  # as in training
        words = sum(map(word_count, texts))
        pieces = (np.append(encode(text), trained.tokenizer.eod) for text in texts)
        tokens = np.concatenate([np.empty(0, np.int64), *pieces])
    else:
        text = read_text(data.path, "--valid-data", newline="")  # with the line ends that it has
        words = word_count(text, is_wikitext)
        tokens = encode(wikitext_detokenize(text) if is_wikitext else text)
    if len(tokens) < 2 or not words:
        found = f"{counted(len(tokens), 'token')} and {counted(words, 'word')}"
        raise ValueError(
            f"--valid-data {data.path} has {found}; the first token is not predicted, and the result is also given per word: "
            "give a longer text."
        )
    return tokens, words


_TASKS: dict[str, tuple[Callable[..., Any], Callable[..., Result]]] = {  # how data are read, and evaluated
    "perplexity": (read_stream, perplexity),
    "wikitext": (read_stream, perplexity),
    "lambada": (lambda task, data, _: load_texts(data.path, task.text_key), last_words),
    "hellaswag": (lambda task, data, _: load_questions(data.path), endings),
}


if __name__ == "__main__":
    run_script(check, main)
