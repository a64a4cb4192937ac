"""Text generation: sampling from a GPT-2 with a key-value cache, at any model-parallel size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero import comm, mpu
from megazero.logging import counted
from megazero.model.cache import KeyValueCache
from megazero.model.gpt2 import GPT2Model
from megazero.model.modes import in_mode


def filter_logits(logits: Tensor, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """`logits` [b, v] with -inf where a token may not be drawn.

    Args:
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this probability (nucleus sampling,
            arXiv:1904.09751), after `top_k`; 0 keeps all.
    """
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if 0.0 < top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(dim=-1)
        # Mass of all likelier tokens; 0 for the first, which always stays.
        before = probability.cumsum(dim=-1) - probability
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, -math.inf)
    return logits


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row of `logits` [b, v]: drawn from softmax(logits / temperature), or the likeliest at temperature 0."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probability = filter_logits(logits.float() / temperature, top_k, top_p).softmax(dim=-1)
    return torch.multinomial(probability, 1, generator=generator).squeeze(1)


@torch.no_grad()
def generate(
    model: GPT2Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    eod: int | None = None,
    seed: int = 1234,
    is_over: Callable[[int, list[int]], bool] | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Continuations of `prompts`, without the prompts, each ended before its first `eod`, or when it `is_over`.

    All ranks of the model-parallel group call it with the same arguments and get the same result: the group's first rank draws,
    the others are told. The prompts, of any lengths, are read in one pass; each further pass computes one token per row.

    Args:
        prompts: token ids, at least one each.
        max_new_tokens: length at which a continuation ends without `eod`.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k, top_p: see `filter_logits`.
        seed: of the draws. Nothing else depends on it, and the default random streams are left alone.
        is_over: whether a continuation ends with its last token; asked after each before `eod`, with the number of its prompt.
        vocab_size: ids from this one on are not drawn: the tokenizer's, of which the model may have more.
        use_cache: False reads all tokens again for each new one. A model that looks at earlier tokens other than by attention
            needs that.

    Raises:
        ValueError: an empty prompt, a prompt that with `max_new_tokens` does not fit the model's positions, or a sampling option
            outside its range.
    """
    check_sampling(temperature, top_k, top_p)
    _check_lengths(prompts, max_new_tokens, model.config.max_position_embeddings)
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    device = model.word_embeddings.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    # [b, longest]. Padding stands to the right: no token reads it, and the cache slots that it takes are overwritten.
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    cache = None
    if use_cache:
        cache = KeyValueCache(
            model.config,
            len(prompts),
            longest + max_new_tokens,
            model_parallel_size=model.group.size(),
            device=device,
            dtype=model.word_embeddings.weight.dtype,
        )
    generator = torch.Generator(device).manual_seed(seed)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    steps: list[Tensor] = []
    going: dict[int, list[int]] = {} if is_over is None else {row: [] for row in range(len(prompts))}
    ends: dict[int, int] = {}  # of rows that are over
    with in_mode(model, training=False):
        logits = model(tokens, cache=cache, logit_index=lengths - 1)  # [b, 1, v/t]
        while True:
            drawn = _draw(model, logits[:, 0], vocab_size, temperature, top_k, top_p, generator)  # [b]
            steps.append(drawn)
            if eod is not None:
                finished |= drawn == eod
            if is_over is not None:
                for row, token in enumerate(drawn.tolist()):
                    if row in going:
                        going[row].append(token)
                        if token == eod or is_over(row, going[row]):
                            finished[row], ends[row] = True, len(going.pop(row))
            can_end = eod is not None or is_over is not None
            if len(steps) == max_new_tokens or (can_end and bool(finished.all())):
                break
            positions = lengths + len(steps) - 1
            if cache is None:
                tokens = F.pad(tokens, (0, 1)).scatter_(1, positions[:, None], drawn[:, None])
                logits = model(tokens, logit_index=positions)
            else:
                logits = model(drawn[:, None], position_ids=positions[:, None], cache=cache)
    rows = [row[: ends.get(i)] for i, row in enumerate(torch.stack(steps, dim=1).tolist())]
    return [row[: row.index(eod)] if eod in row else row for row in rows]


def _draw(
    model: GPT2Model,
    logits: Tensor,
    vocab_size: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    generator: torch.Generator,
) -> Tensor:
    """One token per row [b], equal on every rank, from this rank's logits [b, v_padded/t]."""
    logits = mpu.gather_from_model_parallel_region(logits, model.group)[:, : model.config.vocab_size]  # [b, v]
    drawn = sample(logits[:, :vocab_size], temperature, top_k, top_p, generator)
    comm.broadcast_(drawn, model.group)
    return drawn


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuses options outside their ranges with a ValueError; it needs no model."""
    for name, value, is_valid, valid in (
        # Below that, logits over it overflow in fp32.
        ("--temperature", temperature, temperature == 0 or temperature >= 1e-30, "0, or at least 1e-30"),
        ("--top-k", top_k, top_k >= 0, "at least 0 (0 is off)"),
        ("--top-p", top_p, 0 <= top_p <= 1, "between 0 and 1 (0 is off)"),
    ):
        if not is_valid:
            raise ValueError(f"{name} is {value}; it must be {valid}.")


def _check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, available: int) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0.")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompt {i} is empty: there is nothing to continue. Begin it with the end-of-document token."
            )
        if len(prompt) + max_new_tokens > available:
            raise ValueError(
                f"prompt {i} has {counted(len(prompt), 'token')} and {max_new_tokens} are to be generated, but the model has "
                f"--max-position-embeddings {available}. Shorten the prompt or generate fewer tokens."
            )
