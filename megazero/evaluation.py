"""Evaluates a language model: perplexity of a text by sliding windows, and accuracy on last words and among given endings.

All run on every rank. Each data-parallel rank does its share of the work, in the same number of forward passes, and all ranks
return the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megazero import comm, mpu
from megazero.data.tokenizer import Tokenizer
from megazero.logging import counted
from megazero.metrics import perplexity
from megazero.model.modes import in_mode
from megazero.texts import Question


@dataclass(frozen=True)
class Perplexity:
    """Result of `sliding_window_perplexity`."""

    loss: float  # nats per token
    ppl: float  # exp(loss)
    adjusted_ppl: float | None  # exp(nats per word of the original text): comparable between tokenizers
    tokens: int  # tokens predicted


@dataclass(frozen=True)
class LastWordAccuracy:
    """Result of `last_word_accuracy`."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of passages whose last word was predicted."""
        return self.correct / self.total


@dataclass(frozen=True)
class EndingAccuracy:
    """Result of `ending_accuracy`: shares of the questions whose right ending has the least loss."""

    accuracy: float  # by the sum over the ending's tokens
    accuracy_per_token: float  # by the mean
    total: int


@torch.no_grad()
def sliding_window_perplexity(
    model: nn.Module,
    tokens: Sequence[int] | npt.NDArray[np.integer] | Tensor,
    *,
    seq_length: int,
    overlapping_eval: int,
    batch_size: int,
    groups: mpu.ParallelGroups,
    original_word_count: int | None,
) -> Perplexity:
    """Perplexity of a token stream in which every token but the first is predicted once.

    Windows of `seq_length` tokens advance by `overlapping_eval` tokens. Only tokens that no earlier window has predicted
    count, so each is predicted from at least seq_length - overlapping_eval tokens if the stream has that many before it. A
    stride equal to `seq_length` is the cheapest; a stride of 1 gives each token the longest context.

    Args:
        model: called as `model(tokens, targets=targets)`, both [b, s] on this process's device; returns the loss of each token
            [b, s] in nats.
        tokens: the whole stream, 1-D; of a mapped array a window at a time is read.
        batch_size: windows per forward pass and rank.
        original_word_count: words of the text before any detokenization (`word_count`), for `adjusted_ppl`; None if unknown.

    Raises:
        ValueError: there are fewer than two tokens, or the stride is outside [1, seq_length].
    """
    stream = tokens.cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    targets = len(stream) - 1
    if targets < 1:
        raise ValueError(
            f"the text has {counted(len(stream), 'token')}; perplexity needs at least 2 (the first is not predicted)."
        )
    length = min(seq_length, targets)
    starts, counts = sliding_windows(targets, seq_length, overlapping_eval)
    device = comm.local_device()
    place = torch.arange(length + 1)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    with in_mode(model, training=False):
        for rows, is_real in _share(len(starts), batch_size, groups):
            window = stream[(starts[rows, None] + place).numpy()]  # [b, length + 1], of the stream's integers
            window = torch.from_numpy(window.astype(np.int64)).to(device)
            # [b, length]: the last counts[i] places
            scored = place[:length] >= length - (counts[rows] * is_real)[:, None]
            loss = model(window[:, :-1].contiguous(), targets=window[:, 1:].contiguous())
            nats += (loss.double() * scored.to(device)).sum()
    total = comm.all_reduced(nats, groups.data).item()
    loss_per_token = total / targets
    return Perplexity(
        loss=loss_per_token,
        ppl=perplexity(loss_per_token),
        adjusted_ppl=perplexity(total / original_word_count) if original_word_count else None,
        tokens=targets,
    )


def sliding_windows(targets: int, seq_length: int, stride: int) -> tuple[Tensor, Tensor]:
    """The start of each window, and how many of its last targets are new: two int64 tensors [windows].

    The first window counts all its targets, and each later one `stride` more. The last window ends with the stream, so every
    window is full; a shorter stream has a single window of its own length.

    Raises:
        ValueError: `stride` is not in [1, seq_length].
    """
    check_stride(stride, seq_length)
    first = min(seq_length, targets)
    later = torch.arange(first, targets, stride)  # targets predicted before each later window
    ends = torch.cat([torch.tensor([first]), (later + stride).clamp(max=targets)])
    counts = torch.cat([ends[:1], ends[1:] - later])
    return ends - first, counts


def check_stride(stride: int, seq_length: int) -> None:
    """Raises a ValueError if windows of `seq_length` tokens cannot predict `stride` new ones each."""
    if not 1 <= stride <= seq_length:
        raise ValueError(
            f"--overlapping-eval {stride} must be between 1 and --seq-length {seq_length}: it is the number of new tokens that "
            "each window predicts."
        )


@torch.no_grad()
def last_word_accuracy(
    model: nn.Module,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    batch_size: int,
    vocab_size: int,
    groups: mpu.ParallelGroups,
) -> LastWordAccuracy:
    """How often the model predicts the last word of a passage (LAMBADA, arXiv:1606.06031).

    A word counts if each of its tokens is the likeliest one after the tokens before it (teacher forcing). Passages longer than
    `seq_length` lose their beginning.

    Args:
        model: called as `model(tokens)`, [b, s] on this process's device; returns this model-parallel rank's logits
            [b, s, v_padded/t].
        vocab_size: logits from this index on are padding.

    Raises:
        ValueError: there is no text, a text has fewer than two words, or a last word does not fit into `seq_length`.
    """
    if not texts:
        raise ValueError("there is no text to predict the last word of.")
    examples = [_last_word_example(i, text, tokenizer, seq_length) for i, text in enumerate(texts)]
    device = comm.local_device()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with in_mode(model, training=False):
        for rows, is_real in _share(len(examples), batch_size, groups):
            tokens, wanted = (x.to(device) for x in _padded([examples[i] for i in rows.tolist()]))
            logits = model(tokens[:, :-1].contiguous())  # [b, s, v_padded/t]
            full = mpu.gather_from_model_parallel_region(logits[wanted], groups.model)  # [number wanted, v_padded]
            is_right = torch.ones_like(wanted)
            is_right[wanted] = full[:, :vocab_size].argmax(dim=-1) == tokens[:, 1:][wanted]
            correct += (is_right.all(dim=1) & is_real.to(device)).sum()
    return LastWordAccuracy(correct=int(comm.all_reduced(correct, groups.data)), total=len(texts))


@torch.no_grad()
def ending_accuracy(
    model: nn.Module,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    batch_size: int,
    groups: mpu.ParallelGroups,
) -> EndingAccuracy:
    """How often the model finds the right one of a question's endings likelier than the others (HellaSwag, arXiv:1905.07830).

    An ending's loss is that of its own tokens after the context's, or, if the context is empty, after the end-of-text token. A
    space is put between the two if neither side has one. Contexts that are too long lose their beginning.

    Args:
        model: called as `model(tokens, targets=targets)`, both [b, s] on this process's device; returns the loss of each token
            [b, s] in nats.
        batch_size: endings per forward pass and rank.

    Raises:
        ValueError: there is no question, or an ending has no token or more than `seq_length`.
    """
    if not questions:
        raise ValueError("there is no question to find the ending of.")
    examples = [
        _example(f"question {i}: ending {j}", question.context, ending, tokenizer, seq_length)
        for i, question in enumerate(questions)
        for j, ending in enumerate(question.endings)
    ]
    device = comm.local_device()
    nats = torch.zeros(len(examples), dtype=torch.float64, device=device)
    with in_mode(model, training=False):
        for rows, is_real in _share(len(examples), batch_size, groups):
            tokens, wanted = (x.to(device) for x in _padded([examples[i] for i in rows.tolist()]))
            loss = model(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())
            nats[rows[is_real].to(device)] = (loss.double() * wanted).sum(dim=1)[is_real.to(device)]
    nats = comm.all_reduced(nats, groups.data).cpu()
    per_token = nats / torch.tensor([number for _, number in examples])
    sizes = [len(question.endings) for question in questions]

    def share_right(losses: Tensor) -> float:
        pairs = zip(losses.split(sizes), questions, strict=True)
        return sum(of_each.argmin().item() == question.right for of_each, question in pairs) / len(questions)

    return EndingAccuracy(share_right(nats), share_right(per_token), len(questions))


def _last_word_example(index: int, text: str, tokenizer: Tokenizer, seq_length: int) -> tuple[list[int], int]:
    parts = text.strip().rsplit(None, 1)
    if len(parts) < 2:
        raise ValueError(
            f"text {index} has fewer than two words ({text[:60]!r}): there is no context for its last word."
        )
    context, word = parts
    return _example(f"text {index}: its last word", context, word, tokenizer, seq_length)


def _example(what: str, context: str, ending: str, tokenizer: Tokenizer, seq_length: int) -> tuple[list[int], int]:
    """(token ids, how many of the last ones are the ending), cut to what `seq_length` tokens predict."""
    start = [] if context else [tokenizer.eod]
    is_joined = not context or context[-1].isspace() or ending[:1].isspace()
    ids = start + tokenizer.encode(context + ("" if is_joined else " ") + ending)
    before = start + tokenizer.encode(context)
    shared = next((i for i, (x, y) in enumerate(zip(ids, before, strict=False)) if x != y), min(len(ids), len(before)))
    number = len(ids) - max(shared, 1)
    if not 0 < number <= seq_length:
        raise ValueError(f"{what} has {counted(number, 'token')}, --seq-length is {seq_length}.")
    return ids[-(seq_length + 1) :], number


def _padded(examples: Sequence[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """The ids [b, s + 1], with zeros behind, and which of the s predictions are of the endings, [b, s]."""
    longest = max(len(ids) for ids, _ in examples)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in examples])
    wanted = torch.zeros(len(examples), longest - 1, dtype=torch.bool)
    for row, (ids, number) in enumerate(examples):
        wanted[row, len(ids) - 1 - number : len(ids) - 1] = True
    return tokens, wanted


def _share(count: int, batch_size: int, groups: mpu.ParallelGroups) -> Iterator[tuple[Tensor, Tensor]]:
    """(indices [batch_size], which of them are real [batch_size]) for each forward pass of this data-parallel rank.

    Every rank makes the same number of passes, because forward passes may communicate. Missing indices at the end are filled with
    a repeated one, marked as not real.
    """
    step = batch_size * groups.data_parallel_size
    for start in range(0, count, step):
        index = torch.arange(batch_size) + start + batch_size * groups.data_parallel_rank
        yield index.clamp(max=count - 1), index < count
