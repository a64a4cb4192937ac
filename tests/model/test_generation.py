"""Sampling, the key-value cache, and generation at several model-parallel sizes."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from megazero import mpu
from megazero.model.cache import KeyValueCache
from megazero.model.config import GPT2Config
from megazero.model.generation import filter_logits, generate, sample
from megazero.model.gpt2 import GPT2Model
from tests.model.plain_gpt2 import PlainGPT2, load_same, random_tokens
from tests.model.test_gpt2 import LLAMA
from tests.ranks import run_ranks

CONFIG = GPT2Config(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    max_position_embeddings=16,
    vocab_size=37,
    make_vocab_size_divisible_by=8,
)
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


def same_model(config=CONFIG):
    """A GPT2Model over all ranks (dropout configured, in evaluation mode) and a plain one with the same values."""
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    plain, model = PlainGPT2(config), GPT2Model(config)
    load_same(model, plain)
    return model.eval(), plain


def greedy(plain, prompt, new_tokens):
    """The likeliest continuation, the whole sequence computed anew for every token."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(plain(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


@torch.no_grad()
def cache_case(config):
    model, plain = same_model(config)
    tokens = random_tokens(2, 12, CONFIG.vocab_size)
    cache = KeyValueCache(config, 2, 12, model_parallel_size=model.group.size())
    pieces = [model(part, cache=cache) for part in tokens.split([5, 1, 4, 2], dim=1)]
    logits = mpu.gather_from_model_parallel_region(torch.cat(pieces, dim=1))[..., : CONFIG.vocab_size]
    assert_close(logits, plain(tokens), atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = KeyValueCache(config, 2, 12, model_parallel_size=model.group.size())
        pieces = [model(part, cache=cache) for part in tokens.split([5, 1, 4, 2], dim=1)]
        assert_close(torch.cat(pieces, dim=1), model(tokens), atol=0.05, rtol=0.05)
        generate(model, PROMPTS, 4)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, **LLAMA)], ids=["gpt2", "llama"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_with_a_cache_equal_those_of_the_whole_sequence(world_size, config):
    run_ranks(world_size, cache_case, config)


@torch.no_grad()
def greedy_case():
    model, plain = same_model()
    got = generate(model, PROMPTS, 8, temperature=0)
    assert got == [greedy(plain, prompt, 8) for prompt in PROMPTS]
    for module, dim in ((model, 0), (plain, 1)):  # they look back without attention: no cache has what they see
        module.word_embeddings.register_forward_hook(lambda _, tokens, x, dim=dim: x - x.cumsum(dim))
    want = [greedy(plain, prompt, 8) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 8, temperature=0, use_cache=False) == want != got
    assert generate(model, PROMPTS, 8, temperature=0) != want
    return got


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_greedy_generation_equals_recomputing_the_whole_sequence(world_size):
    results = run_ranks(world_size, greedy_case)
    assert all(result == results[0] for result in results)


def sampling_case():
    model, _ = same_model()
    return [generate(model, PROMPTS, 8, temperature=0.8, top_k=20, top_p=0.9, seed=seed) for seed in (0, 0, 1)]


def test_sampling_is_a_function_of_the_seed_and_equal_on_every_rank():
    one = run_ranks(1, sampling_case)[0]
    assert one[0] == one[1] != one[2]
    assert run_ranks(2, sampling_case) == [one, one]


def test_a_row_ends_before_its_first_end_token(one_rank_model):
    model, plain = one_rank_model
    free = [greedy(plain, prompt, 8) for prompt in PROMPTS]
    eod = free[0][3]
    want = [row[: row.index(eod)] if eod in row else row for row in free]
    assert len(want[0]) < 8
    assert generate(model, PROMPTS, 8, temperature=0, eod=eod) == want


def test_a_row_ends_with_the_token_after_which_it_is_over_or_before_its_end_token(one_rank_model):
    model, plain = one_rank_model
    free = [greedy(plain, prompt, 8) for prompt in PROMPTS]
    last, eod = free[0][3], free[1][5]

    def cut(row):
        row = row[: row.index(last) + 1] if last in row else row
        return row[: row.index(eod)] if eod in row else row

    want = [cut(row) for row in free]
    assert len(want[0]) <= 4
    asked = []
    is_over = lambda _, row: asked.append(row[-1]) or row[-1] == last  # noqa: E731
    assert generate(model, PROMPTS, 8, temperature=0, eod=eod, is_over=is_over) == want
    assert sorted(asked) == sorted(sum(want, [])), "no more of a row that has ended"
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert generate(model, PROMPTS, 8, temperature=0, is_over=lambda i, row: len(row) > i) == [
        free[0][:1],
        free[1][:2],
        free[2][:3],
    ]
    assert len(calls) == 3


@pytest.mark.parametrize(("vocab_size", "most"), [(None, 37), (30, 30), (40, 37)])
def test_neither_padding_nor_what_the_tokenizer_does_not_know_is_drawn(one_rank_model, vocab_size, most):
    model, _ = one_rank_model
    assert model.word_embeddings.weight.size(0) == 40 and CONFIG.vocab_size == 37
    drawn = sum(generate(model, [[1]] * 100, 4, temperature=100.0, vocab_size=vocab_size), [])
    assert max(drawn) == most - 1


def test_generation_stops_when_every_row_has_ended(one_rank_model):
    model, plain = one_rank_model
    eod = greedy(plain, PROMPTS[0], 3)[2]
    first = greedy(plain, PROMPTS[0], 8).index(eod)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert len(generate(model, PROMPTS[:1], 8, temperature=0, eod=eod)[0]) == first
    assert len(calls) == first + 1


def test_generation_without_an_end_token_does_not_ask_the_device_whether_to_go_on(one_rank_model, monkeypatch):
    model, _ = one_rank_model
    asked = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: bool(asked.append(x)))
    generate(model, PROMPTS, 4, temperature=0)
    assert not asked
    generate(model, PROMPTS, 4, temperature=0, eod=CONFIG.vocab_size)
    assert len(asked) == 3


def test_generation_leaves_mode_and_random_streams_alone(one_rank_model):
    model, _ = one_rank_model
    frozen = model.transformer.layers[0]
    model.train()
    frozen.eval()
    before = torch.get_rng_state()
    a, b = (generate(model, PROMPTS, 4, temperature=0) for _ in range(2))
    assert a == b, "dropout must be off"
    assert model.training and model.transformer.layers[1].training and not frozen.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def one_rank_model(own_world):
    from megazero import comm

    comm.init_distributed("gloo")
    return same_model()


def test_top_k_keeps_the_k_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert filter_logits(logits, top_k=2).isfinite().tolist() == [[False, True, False, True]]
    assert filter_logits(logits, top_k=9).isfinite().all()


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, 4), (0.1, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4), (1.0, 4)],
)
def test_top_p_keeps_the_smallest_set_with_that_probability(top_p, kept):
    probability = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
    likeliest = probability.argsort(descending=True)[0, :kept]
    finite = filter_logits(probability.log(), top_p=top_p).isfinite()[0]
    assert finite.nonzero().flatten().tolist() == sorted(likeliest.tolist())


def test_samples_follow_the_tempered_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits.expand(20000, 3), temperature=0.5, generator=generator)
    share = drawn.bincount(minlength=3) / 20000
    assert_close(share, (logits / 0.5).softmax(0), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 10], {"max_new_tokens": 7}, "--max-position-embeddings 16"),
        ([[1]], {"temperature": -1.0}, "--temperature is -1.0"),
        ([[1]], {"temperature": 1e-40}, "--temperature is 1e-40; it must be 0, or at least 1e-30"),
        ([[1]], {"top_p": 1.5}, "--top-p is 1.5"),
        ([[1]], {"top_k": -1}, "--top-k is -1"),
    ],
)
def test_bad_requests_are_refused(one_rank_model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(one_rank_model[0], prompts, **{"max_new_tokens": 2, **options})


def test_a_full_cache_and_documents_with_a_cache_are_refused(one_rank_model):
    model, _ = one_rank_model
    cache, tokens = KeyValueCache(CONFIG, 1, 4), torch.zeros(1, 3, dtype=torch.int64)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="holds 4 positions, 3 are taken and 3 more"):
        model(tokens, cache=cache)
    with pytest.raises(ValueError, match="document_ids"):
        model(tokens, cache=KeyValueCache(CONFIG, 1, 4), document_ids=tokens)
