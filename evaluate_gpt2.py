"""Evaluates a checkpoint: perplexity of a text or of WikiText, accuracy on LAMBADA's last words or HellaSwag's endings.

python evaluate_gpt2.py --load DIR --task wikitext --valid-data wiki.test.tokens
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # imports take seconds; Ctrl-C should end them without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from torch import Tensor

from megazero.arguments import load_components
from megazero.comm import told_world
from megazero.data.corpora import Corpus, indexed_prefix
from megazero.data.sources import Sources
from megazero.data.tokenizer import Tokenizer
from megazero.entry import run_script
from megazero.evaluation import check_stride, ending_accuracy, last_word_accuracy, sliding_window_perplexity
from megazero.inference import InferenceConfig, Trained, load_model, open_checkpoint
from megazero.logging import counted, table
from megazero.option import check_options, option
from megazero.texts import has_lines_of_json, load_questions, load_texts, read_text, wikitext_detokenize, word_count

logger = logging.getLogger("megazero.evaluate")

_OF_LINES = ("lambada", "hellaswag")  # tasks whose data are JSON lines


@dataclass(frozen=True)
class EvaluationConfig:
    """What to evaluate."""

    task: str = option(
        "perplexity",
        "perplexity of a plain text file or of tokens, word-level perplexity of WikiText, last-word accuracy on LAMBADA's JSON "
        "lines, or how often the right one of HellaSwag's endings is the likeliest",
        choices=("perplexity", "wikitext", *_OF_LINES),
    )
    valid_data: str | None = option(
        None,
        "text file to evaluate on; for lambada and hellaswag, a file of JSON lines; for perplexity also the prefix of .bin/.idx "
        "files",
    )
    text_key: str = option("text", "key of the text in each JSON line, for lambada")
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
        if self.valid_data is None:
            raise ValueError("--valid-data is missing: name the file to evaluate on.")
        if not Path(self.valid_data).is_file() and self.tokens is None:
            raise ValueError(f"--valid-data {self.valid_data}: there is no such file.")
        if self.tokens is not None and self.task != "perplexity":
            raise ValueError(f"--valid-data {self.valid_data} names tokens, and --task {self.task} needs the text.")
        check_options(self)

    @property
    def tokens(self) -> Path | None:
        """The prefix of the tokens that --valid-data names; None if it names a text."""
        assert self.valid_data is not None
        path = Path(self.valid_data)
        is_text = path.is_file() and path.suffix not in (".bin", ".idx")
        return None if is_text else indexed_prefix(path)

    def window(self, trained: Trained) -> int:
        """Tokens per window. An imported checkpoint does not record its training job's, so the window is all positions."""
        return self.seq_length or trained.client.get("seq_length", trained.model.max_position_embeddings)

    def stride(self, window: int) -> int:
        """New tokens that each window predicts."""
        return min(32, window) if self.overlapping_eval is None else self.overlapping_eval


Checked = tuple[InferenceConfig, EvaluationConfig, Trained]
Rows = list[tuple[str, str]]


def check(world_size: int) -> Checked:
    """The configuration and the checkpoint, after all checks that need no communication."""
    config, task = load_components((InferenceConfig, EvaluationConfig), "Evaluate a checkpoint.")
    config.check_world(world_size)
    assert task.valid_data is not None
    if task.task not in _OF_LINES and task.tokens is None and has_lines_of_json(task.valid_data):
        raise ValueError(
            f"--valid-data {task.valid_data} holds JSON lines, whose keys and escapes would count as text. Write the texts alone "
            "into a file; or tokenize them by data_tools/preprocess_data.py --append-eod, and give the prefix of the tokens."
        )
    trained = open_checkpoint(config)
    window = task.window(trained)
    trained.model.check_sequence(window)
    if task.task not in _OF_LINES:
        check_stride(task.stride(window), window)
    return config, task, trained


def main(checked: Checked) -> None:
    """Prints the checkpoint's result on the task."""
    task = checked[1]
    rows = {"lambada": last_words, "hellaswag": endings}.get(task.task, perplexity)(*checked)
    logger.info("%s", table(f"{task.task} of {task.valid_data}", rows))


def last_words(config: InferenceConfig, task: EvaluationConfig, trained: Trained) -> Rows:
    """The rows of LAMBADA's result."""
    assert task.valid_data is not None
    texts = load_texts(task.valid_data, task.text_key)
    model, groups = load_model(config, trained)
    assert model.config.vocab_size is not None
    result = last_word_accuracy(
        model,
        texts,
        trained.tokenizer,
        seq_length=task.window(trained),
        batch_size=task.batch_size,
        vocab_size=model.config.vocab_size,
        groups=groups,
    )
    return [("last words", f"{result.correct} of {result.total}"), ("accuracy", f"{result.accuracy:.4f}")]


def endings(config: InferenceConfig, task: EvaluationConfig, trained: Trained) -> Rows:
    """The rows of HellaSwag's result."""
    assert task.valid_data is not None
    questions = load_questions(task.valid_data)
    model, groups = load_model(config, trained)
    result = ending_accuracy(
        model,
        questions,
        trained.tokenizer,
        seq_length=task.window(trained),
        batch_size=task.batch_size,
        groups=groups,
    )
    return [
        ("questions", f"{result.total:,}"),
        ("accuracy", f"{result.accuracy:.4f} by the loss of the whole ending"),
        ("normalized accuracy", f"{result.accuracy_per_token:.4f} by the loss per token"),
    ]


def perplexity(config: InferenceConfig, task: EvaluationConfig, trained: Trained) -> Rows:
    """The rows of the result on a text."""
    tokens, words = read_stream(task, trained.tokenizer)
    model, groups = load_model(config, trained)
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
    rows = [
        ("tokens", f"{result.tokens:,}{number}"),
        ("loss", f"{result.loss:.4f} nats per token"),
        ("perplexity", f"{result.ppl:.3f} per token"),
    ]
    per_word = "unknown: tokens do not say which words they are of"
    if result.adjusted_ppl is not None:
        per_word = f"{result.adjusted_ppl:.3f} per word, comparable between tokenizers"
    return [*rows, ("adjusted perplexity", per_word)]


def read_stream(task: EvaluationConfig, tokenizer: Tokenizer) -> tuple[Sequence[int] | Tensor, int | None]:
    """The tokens to predict, and the number of words in them; None if it is unknown.

    Raises:
        ValueError: there are too few, or they are of another vocabulary.
    """
    assert task.valid_data is not None
    if task.tokens is not None:
        rank, _ = told_world()  # the first one warns, and takes the cache's checksums
        corpus = Sources(tokenizer, task.text_key, None, rank, rank).open(Corpus(task.tokens, is_indexed=True))
        return torch.as_tensor(corpus.read(0, corpus.num_tokens), dtype=torch.int64), None
    text, is_wikitext = read_text(task.valid_data, "--valid-data"), task.task == "wikitext"
    words = word_count(text, is_wikitext)
    tokens = tokenizer.encode(wikitext_detokenize(text) if is_wikitext else text)
    if len(tokens) < 2 or not words:
        found = f"{counted(len(tokens), 'token')} and {counted(words, 'word')}"
        raise ValueError(
            f"--valid-data {task.valid_data} has {found}; the first token is not predicted, and the result is also given per "
            "word: give a longer text."
        )
    return tokens, words


if __name__ == "__main__":
    run_script(check, main)
