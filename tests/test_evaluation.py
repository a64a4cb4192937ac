"""Perplexity and the accuracies against the naive way to compute them."""

import gzip
import json
import math
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from evaluate_gpt2 import EvaluationConfig, read_stream
from generate_samples import SampleConfig, continuation, has_stop
from megazero import evaluation, inference, mpu
from megazero.arguments import load_components
from megazero.checkpoint.vocabulary import vocabulary_state
from megazero.data.tokenizer import build_tokenizer
from megazero.evaluation import ending_accuracy, last_word_accuracy, sliding_window_perplexity, sliding_windows
from megazero.inference import InferenceConfig, refuse_other_model
from megazero.metrics import perplexity
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.texts import Question, load_questions, load_rows, load_texts, read_text, wikitext_detokenize, word_count
from tests.model.plain_gpt2 import PlainGPT2, load_same
from tests.ranks import run_ranks
from tests.vocabularies import make_sentencepiece

CONFIG = GPT2Config(
    num_layers=1,
    hidden_size=12,
    num_attention_heads=2,
    max_position_embeddings=16,
    vocab_size=29,
    make_vocab_size_divisible_by=8,
)


class Letters:
    """A tokenizer of one token per character, a space belonging to the letter after it as in GPT-2's vocabulary."""

    eod = 28

    def encode(self, text):
        ids, is_after_space = [], False
        for letter in text:
            if letter == " ":
                is_after_space = True
            else:
                ids.append((ord(letter) + 13 * is_after_space) % CONFIG.vocab_size)
                is_after_space = False
        return ids


def same_model(model_parallel_size):
    groups = mpu.initialize_model_parallel(model_parallel_size)
    plain, model = PlainGPT2(CONFIG), GPT2Model(CONFIG)
    load_same(model, plain)
    return model, plain, groups


def naive_nats(plain, stream, seq_length, stride):
    """Each target alone, from the context that its window gives it."""
    total, targets = 0.0, len(stream) - 1
    for target in range(targets):
        if target < seq_length:
            end = min(seq_length, targets)
        else:
            end = min(seq_length + stride * ((target - seq_length) // stride + 1), targets)
        start = max(0, end - seq_length)
        context = torch.tensor([stream[start : target + 1]])
        total -= F.log_softmax(plain(context)[0, -1], dim=-1)[stream[target + 1]].item()
    return total


@torch.no_grad()
def perplexity_case(model_parallel_size):
    model, plain, groups = same_model(model_parallel_size)
    for length, seq_length, stride in ((30, 7, 3), (6, 9, 9), (23, 11, 11), (2, 7, 3)):
        assert_perplexity_of_a_random_stream(model, plain, groups, length, seq_length, stride)


def assert_perplexity_of_a_random_stream(model, plain, groups, length, seq_length, stride):
    stream = torch.randint(29, (length,), generator=torch.Generator().manual_seed(5)).tolist()
    got = sliding_window_perplexity(
        model,
        stream,
        seq_length=seq_length,
        overlapping_eval=stride,
        batch_size=2,
        groups=groups,
        original_word_count=11,
    )
    nats = naive_nats(plain, stream, seq_length, stride)
    assert got.tokens == length - 1
    assert got.loss == pytest.approx(nats / (length - 1), rel=1e-5)
    assert got.ppl == pytest.approx(math.exp(nats / (length - 1)), rel=1e-4)
    assert got.adjusted_ppl == pytest.approx(math.exp(nats / 11), rel=1e-3)
    assert model.training


@pytest.mark.parametrize(("world_size", "model_parallel_size"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_perplexity_equals_predicting_each_token_alone(world_size, model_parallel_size):
    run_ranks(world_size, perplexity_case, model_parallel_size)


@pytest.mark.parametrize(("tokens", "found"), [([], "0 tokens"), ([1], "1 token")])
def test_a_stream_of_which_nothing_is_predicted_is_refused(tokens, found):
    settings = {"seq_length": 7, "overlapping_eval": 7, "batch_size": 1, "groups": None, "original_word_count": None}
    with pytest.raises(ValueError, match=f"the text has {found}; perplexity needs at least 2"):
        sliding_window_perplexity(None, tokens, **settings)


def test_perplexity_is_not_capped():
    assert perplexity(25.0) == math.exp(25) and perplexity(1e4) == math.inf and math.isnan(perplexity(math.nan))


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_windows_count_each_target_once_with_full_context(targets, seq_length, data):
    stride = data.draw(st.integers(1, seq_length))
    starts, counts = sliding_windows(targets, seq_length, stride)
    length = min(seq_length, targets)
    scored = [
        target
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        for target in range(start + length - count, start + length)
    ]
    assert scored == list(range(targets))
    assert (counts[1:] <= stride).all() and counts[0] == length
    assert starts.min() >= 0


@pytest.mark.parametrize("stride", [0, 9])
def test_a_stride_outside_the_window_is_refused(stride):
    with pytest.raises(ValueError, match=f"--overlapping-eval {stride} .*--seq-length 8"):
        sliding_windows(20, 8, stride)


TEXTS = ["ab cd", "the cat sat on the mat", "x y", "one two three", "a very long passage that will be cut somewhere"]


def naive_is_right(plain, text, seq_length):
    context, word = text.rsplit(" ", 1)
    before, last = Letters().encode(context), Letters().encode(" " + word)
    ids = (before + last)[-(seq_length + 1) :]
    predicted = plain(torch.tensor([ids[:-1]]))[0].argmax(dim=-1).tolist()
    return predicted[-len(last) :] == last


def letter_of(token, is_after_space=False):
    return next(chr(c) for c in range(97, 126) if (c + 13 * is_after_space) % CONFIG.vocab_size == token)


def with_predicted_word(plain, context, is_first_letter_wrong=False):
    """`context` and a word of two letters, each the likeliest one after what stands before it, but perhaps the first."""
    ids = Letters().encode(context)
    first = (plain(torch.tensor([ids]))[0, -1].argmax().item() + is_first_letter_wrong) % CONFIG.vocab_size
    second = plain(torch.tensor([[*ids, first]]))[0, -1].argmax().item()
    return f"{context} {letter_of(first, is_after_space=True)}{letter_of(second)}"


@torch.no_grad()
def last_word_case(model_parallel_size):
    model, plain, groups = same_model(model_parallel_size)
    texts = [
        *TEXTS,
        with_predicted_word(plain, "ab"),
        with_predicted_word(plain, "other words", is_first_letter_wrong=True),
        with_predicted_word(plain, "more words"),
    ]
    right = [naive_is_right(plain, text, 12) for text in texts]
    assert right[-3:] == [True, False, True] and not all(right[:-3])
    sizes = {"seq_length": 12, "batch_size": 3, "vocab_size": CONFIG.vocab_size, "groups": groups}
    got = last_word_accuracy(model, texts, Letters(), **sizes)
    assert (got.correct, got.total) == (sum(right), len(texts))
    assert got.accuracy == sum(right) / len(texts)

    # Every logit negative, so that those of the padding (0) would win.
    for parameter, value in ((model.word_embeddings.weight, -1.0), (model.transformer.final_layernorm.bias, 1.0)):
        torch.nn.init.constant_(parameter, value)
    torch.nn.init.zeros_(model.transformer.final_layernorm.weight)
    if groups.model_parallel_rank == 0:
        model.word_embeddings.weight[3] = -0.5  # the likeliest token
    first, last = model.group.rank() * model.word_embeddings.weight.size(0), CONFIG.vocab_size
    model.word_embeddings.weight[max(0, last - first) :] = 0
    text = f"ab {letter_of(3, is_after_space=True)}"
    assert last_word_accuracy(model, [text], Letters(), **sizes).correct == 1


@pytest.mark.parametrize(("world_size", "model_parallel_size"), [(1, 1), (2, 2), (2, 1)])
def test_last_word_accuracy_equals_each_passage_alone(world_size, model_parallel_size):
    run_ranks(world_size, last_word_case, model_parallel_size)


def naive_losses(plain, question, seq_length):
    """Of each ending, the loss of each of its tokens."""
    losses = []
    for ending in question.endings:
        before = Letters().encode(question.context) or [Letters.eod]
        own = Letters().encode(f" {ending}" if question.context else ending)
        ids = torch.tensor((before + own)[-(seq_length + 1) :])
        of_all = F.cross_entropy(plain(ids[None, :-1])[0], ids[1:], reduction="none")
        losses.append(of_all[-len(own) :])
    return losses


QUESTIONS = [
    Question(context, endings, right)
    for right, (context, endings) in enumerate(
        [
            ("one ctx", ["abc", "de fgh ij", "k", "lmnop qr"]),
            ("another", ["st uv", "w", "a b c d e f"]),
            ("a context that is longer than the window", ["x", "yz abc", "q r s t u"]),
            ("c", ["a", "bcdefgh", "ijk", "lm no"]),
            ("", ["ab cd", "e", "fgh ij", "kl", "m no"]),
        ]
    )
]


@torch.no_grad()
def ending_case(model_parallel_size):
    model, plain, groups = same_model(model_parallel_size)
    losses = [naive_losses(plain, question, 12) for question in QUESTIONS]
    found = [
        [int(torch.stack([reduce(x) for x in of_each]).argmin()) for of_each in losses]
        for reduce in (torch.sum, torch.mean)
    ]
    assert found[0] != found[1]
    for right in (found[0], found[1], [question.right for question in QUESTIONS]):
        questions = [question._replace(right=each) for question, each in zip(QUESTIONS, right, strict=True)]
        got = ending_accuracy(model, questions, Letters(), seq_length=12, batch_size=3, groups=groups)
        assert got.total == len(questions)
        shares = [sum(map(operator.eq, each, right)) / len(right) for each in found]
        assert [got.accuracy, got.accuracy_per_token] == shares
    assert model.training


@pytest.mark.parametrize(("world_size", "model_parallel_size"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_the_likeliest_ending_is_that_of_each_ending_alone(world_size, model_parallel_size):
    run_ranks(world_size, ending_case, model_parallel_size)


@pytest.mark.parametrize(
    ("context", "ending", "text"),
    [
        ("is", "it", "is it"),
        ("is ", "it", "is it"),
        ("is", " it", "is it"),
        ("is:\n", "it", "is:\nit"),
        ("", "it", "\0it"),
        ("", " it", "\0 it"),
    ],
)
def test_a_space_joins_an_ending_to_its_context_if_neither_has_one(context, ending, text):
    tokenizer = SimpleNamespace(encode=lambda text: [*text.encode()], eod=0)
    ids, number = evaluation._example("it", context, ending, tokenizer, 20)
    assert (bytes(ids).decode(), number) == (text, len(text) - len(context or "\0"))


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "no question"),
        ([Question("fine", ["here", " "], 0)], "question 0: ending 1 has 0 tokens"),
        ([Question("fine", ["here", "it is too long"], 0)], "ending 1 has 11 tokens, --seq-length is 8"),
    ],
)
def test_questions_without_endings_that_fit_are_refused(one_rank, questions, message):
    with pytest.raises(ValueError, match=message):
        ending_accuracy(GPT2Model(CONFIG), questions, Letters(), seq_length=8, batch_size=1, groups=mpu.get_groups())


def test_questions_are_read_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    lines = [
        '{"ind": 4, "ctx": "A man", "endings": ["sits", "is"], "label": 1}',
        '{"ctx": "", "endings": ["b"], "label": "0"}',
    ]
    path.write_text("\n\n".join(lines))
    assert load_questions(path) == [Question("A man", ["sits", "is"], 1), Question("", ["b"], 0)]
    for line, message in (
        ('{"text": "A man"}', "no key 'ctx'"),
        ('{"ctx": " ", "endings": ["sits"], "label": 0}', "'ctx' is blank"),
        ('{"ctx": "A man", "label": 0}', "'endings' is not a list of strings"),
        ('{"ctx": "A man", "endings": ["sits", 1], "label": 0}', "'endings' is not a list of strings"),
        ('{"ctx": "A man", "endings": ["sits"], "label": 1}', "'label' is 1, not the place of one of 1 ending"),
        ('{"ctx": "A man", "endings": ["sits"], "label": ""}', "'label' is '', not the place"),
        ('{"ctx": "A man", "endings": ["sits"]}', "'label' is None, not the place"),
    ):
        path.write_text(f"{lines[0]}\n{line}\n")
        with pytest.raises(ValueError, match=rf"hellaswag.jsonl:2: {message}.*Expected lines like"):
            load_questions(path)


@pytest.mark.parametrize("texts", [[], ["word"], ["fine here", "  "]])
def test_passages_without_a_context_are_refused(one_rank, texts):
    with pytest.raises(ValueError, match="no text|fewer than two words"):
        last_word_accuracy(
            GPT2Model(CONFIG), texts, Letters(), seq_length=8, batch_size=1, vocab_size=29, groups=mpu.get_groups()
        )


def test_a_checkpoint_in_place_of_its_directory_has_no_tag_beside_it(tmp_path):
    (tmp_path / "index.json").touch()
    with pytest.raises(ValueError, match=f"{tmp_path} is a checkpoint itself: drop --tag other"):
        inference.open_checkpoint(InferenceConfig(load=str(tmp_path), tag="other"))


def test_texts_are_read_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "passages.jsonl"
    path.write_text('{"text": "a b"}\n\n{"text": "c d"}\n')
    (packed := tmp_path / "passages.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert load_texts(path) == load_texts(packed) == ["a b", "c d"]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"passages.jsonl.gz: damaged or cut off"):
        load_texts(packed)
    with pytest.raises(ValueError, match=r'jsonl:1: no key .id. .*Expected lines like {"text": "...", "id": "..."}'):
        load_rows(path, "text", "id")
    path.write_text('{"text": "a b"}\n{"txt": "c d"}\n')
    with pytest.raises(ValueError, match=r"passages.jsonl:2: no key 'text'.*Expected lines like"):
        load_texts(path)
    for line in ("a b\n", "[" * 10**5):
        path.write_text(line)
        with pytest.raises(ValueError, match=r"passages.jsonl:1: bad JSON"):
            load_texts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"passages.jsonl is empty: expected lines like"):
        load_texts(path)
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"passages.jsonl:1: invalid UTF-8"):
        load_texts(path)
    with pytest.raises(ValueError, match=f"--valid-data {path} is not UTF-8 text, at byte 10"):
        read_text(str(path), "--valid-data")
    path.write_text(json.dumps(["text"]))
    with pytest.raises(ValueError, match="passages.jsonl:1: not a JSON object but list"):
        load_texts(path)


def test_the_window_is_the_flags_the_jobs_or_all_positions():
    imported, trained = (SimpleNamespace(client=client, model=CONFIG) for client in ({}, {"seq_length": 5}))
    assert EvaluationConfig(valid_data=[__file__]).window(imported) == CONFIG.max_position_embeddings
    assert EvaluationConfig(valid_data=[__file__]).window(trained) == 5
    assert EvaluationConfig(valid_data=[__file__], seq_length=3).window(trained) == 3
    with pytest.raises(ValueError, match="--seq-length must be at least 1, got 0"):
        EvaluationConfig(valid_data=[__file__], seq_length=0)
    with pytest.raises(ValueError, match="--valid-data no_such_file: there is no such file"):
        EvaluationConfig(valid_data=[__file__, "web=no_such_file"])


def test_wrong_samples_are_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "prompts").touch()
    with pytest.raises(ValueError, match="prompts is empty: write one prompt a line"):
        SampleConfig(sample_input_file=str(tmp_path / "prompts")).prompts()
    with pytest.raises(ValueError, match="--stop has an empty text"):
        SampleConfig(stop=[".", ""])
    with pytest.raises(ValueError, match="--temperature is -1"):
        SampleConfig(temperature=-1)
    with pytest.raises(ValueError, match="--seed must be at most"):
        SampleConfig(seed=2**64)
    with pytest.raises(ValueError, match="--distributed-timeout-s must be above 0"):
        InferenceConfig(load="DIR", distributed_timeout_s=0)


@pytest.mark.parametrize("name", ["--out-seq-length", "--max-new-tokens", "--num-tokens-to-generate"])
def test_the_number_of_new_tokens_has_the_names_of_other_programs(name):
    assert load_components((SampleConfig,), "", [name, "20"]) == [SampleConfig(out_seq_length=20)]


def test_the_flags_of_launchers_and_megatrons_script_are_taken_and_those_of_another_model_refused(tmp_path):
    flags = (
        "--local_rank=1 --tensor-model-parallel-size 1 --distributed-timeout-s 60 --num-layers 2 --hidden-size 32 --load DIR "
        "--num-attention-heads 4 --max-position-embeddings 64 --tokenizer-type GPT2BPETokenizer --fp16 --cache-dir cache "
        "--out-seq-length 20 --temperature 0.9 --top_k 0 --top_p 0"
    )
    config, sampling = load_components((InferenceConfig, SampleConfig), "", flags.split())
    assert (config.fp16, config.distributed_timeout_s, sampling.out_seq_length) == (True, 60, 20)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 10}
    refuse_other_model(config, GPT2Config(**sizes, max_position_embeddings=64), tmp_path)
    with pytest.raises(ValueError, match=r"is not one of --max-position-embeddings 64 \(it has 128\)\. Drop"):
        refuse_other_model(config, GPT2Config(**sizes, max_position_embeddings=128), tmp_path)


@pytest.mark.parametrize("flags", [{}, {"tokenizer_type": "SentencePieceTokenizer"}, {"tokenizer_path": "other.model"}])
def test_the_vocabulary_is_the_jobs_unless_flags_name_another_file(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    saved = {"tokenizer_type": "SentencePieceTokenizer", "vocab_file": None, "tokenizer_path": "job.model"}
    for name, prefix in (("job.model", True), ("other.model", False)):
        make_sentencepiece(tmp_path / name, add_dummy_prefix=prefix)
    tokenizer = inference._tokenizer(InferenceConfig(load="DIR", **flags), {"tokenizer": saved}, tmp_path)
    wanted = build_tokenizer(**{**saved, **flags})
    assert tokenizer.sha256 == wanted.sha256
    (tmp_path / "job.model").unlink()
    client = {"tokenizer": saved, **vocabulary_state(tokenizer, saved)}  # the checkpoint has it
    assert inference._tokenizer(InferenceConfig(load="DIR", **flags), client, tmp_path).sha256 == wanted.sha256
    with pytest.raises(
        FileNotFoundError, match=rf"job\.model: there is no such file\. The checkpoint {tmp_path} has rec"
    ):
        inference._tokenizer(InferenceConfig(load="DIR"), {"tokenizer": saved}, tmp_path)


@pytest.mark.parametrize("client", [{}, {"tokenizer": "of a script"}])
def test_a_checkpoint_that_says_nothing_of_its_vocabulary_takes_that_of_the_flags(tmp_path, client):
    path = make_sentencepiece(tmp_path / "a.model")
    config = InferenceConfig(load="DIR", tokenizer_type="SentencePieceTokenizer", tokenizer_path=str(path))
    assert inference._tokenizer(config, client, tmp_path).contents == {"tokenizer.model": path.read_bytes()}
    with pytest.raises(ValueError, match=f"{tmp_path} was not saved by the training job, so it does not say where its"):
        inference._tokenizer(InferenceConfig(load="DIR"), client, tmp_path)


def test_a_text_is_evaluated_with_the_line_ends_that_it_has(tmp_path):
    (tmp_path / "text").write_bytes(b"one\r\ntwo\rthree\n")
    read, tokenizer = [], SimpleNamespace(encode_array=lambda text: read.append(text) or list(text))
    task = EvaluationConfig(valid_data=[str(tmp_path / "text")])
    read_stream(task, task.sets[0], SimpleNamespace(tokenizer=tokenizer))
    assert read == ["one\r\ntwo\rthree\n"]


def test_a_line_of_the_prompts_ends_where_the_files_line_ends(tmp_path):
    (tmp_path / "prompts").write_bytes("a form\x0cfeed\r\n\nand a\u2028separator\n".encode())
    prompts = SampleConfig(sample_input_file=str(tmp_path / "prompts")).prompts()
    assert prompts == ["a form\x0cfeed", "", "and a\u2028separator"]


def test_a_continuation_keeps_the_space_that_it_begins_with(tmp_path):
    path = make_sentencepiece(tmp_path / "a.model", add_dummy_prefix=True, remove_extra_whitespaces=True)
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_path=path)
    prompt, whole = tokenizer.encode("the ranks"), tokenizer.encode("the ranks of")
    assert whole[: len(prompt)] == prompt
    assert continuation(tokenizer, prompt, whole[len(prompt) :]) == " of"
    assert continuation(tokenizer, [tokenizer.eod], prompt) == "the ranks"
    output = whole[len(prompt) :]
    ends = [has_stop(tokenizer, ["x", " of"], [prompt], 0, output[: i + 1]) for i in range(len(output))]
    assert ends == [False] * (len(output) - 1) + [True]
    assert not has_stop(tokenizer, [" the"], [[tokenizer.eod]], 0, prompt)
    letters = SimpleNamespace(decode=lambda ids: bytes(ids).decode())
    assert has_stop(letters, ["."], [[*b"A"]], 0, [*b"B."])


@pytest.mark.parametrize(
    ("spaced", "typed"),
    [
        ("a 1 @,@ 000 @.@ 5 mid @-@ air one", "a 1,000.5 mid-air one"),
        ("He came , saw ; and won : all . Yes !", "He came, saw; and won: all. Yes !"),
        ("It ( the dog ) is [ sic ] here", "It (the dog) is [sic] here"),
        ("a { set } or ' map ' of", "a {set} or 'map' of"),
        ('he said " no way " twice', 'he said "no way" twice'),
        (" \n = = = Early life = = = \n Born", "\n=== Early life ===\nBorn"),
        ("the dog 's bone", "the dog's bone"),
        ("at 5 ° C", "at 5°C"),
    ],
)
def test_wikitext_is_detokenized(spaced, typed):
    assert wikitext_detokenize(spaced) == typed


@pytest.mark.parametrize("mark", "([{\"'")
def test_what_is_not_closed_in_wikitext_stays_as_it_is_and_is_searched_once(mark):
    """By a regex that tries each end of each run of spaces, this would take hours."""
    text = f"a {mark}{' ' * 50_000}b"
    assert wikitext_detokenize(text) == text and wikitext_detokenize(mark * 100_001) == mark * 100_001


def test_words_are_counted_between_spaces():
    assert word_count(" = Title = \n Some words . \n ", is_wikitext=True) == 7
    assert word_count("alpha\nbeta  gamma\tdelta\n") == 4
