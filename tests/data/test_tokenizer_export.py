"""What is written for transformers gives the ids and texts of our tokenizers; `tokenizers` is what reads it there."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megazero.data.tokenizer import build_tokenizer
from megazero.data.tokenizer_export import huggingface_files
from tests.vocabularies import make_sentencepiece, make_texts

TEXTS = [
    *make_texts(100, seed=5),
    "",
    "  ",
    "a",
    "  two\n\n\ttabs  ",
    "two  spaces   or three",
    "\x00",
    "a <unk> b",
    "👋🏽 中文 ﬁ①",
    "aaaa" * 9,
]
DEFAULTS = {
    "byte_fallback": False,
    "normalization_rule_name": "nmt_nfkc",
    "remove_extra_whitespaces": True,
    "add_dummy_prefix": True,
    "vocab_size": 340,
}


def assert_reads_as(ours, files):
    theirs = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    config = json.loads(files["tokenizer_config.json"])
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    cuts = json.loads(files["tokenizer.json"]).get("pre_tokenizer") or {}
    assert config["add_prefix_space"] == cuts.get("add_prefix_space", False)
    assert theirs.token_to_id(config["eos_token"]) == theirs.token_to_id(config["bos_token"]) == ours.eod
    assert theirs.get_vocab_size() == ours.vocab_size
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text) and theirs.decode(ids) == ours.decode(ids), text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"user_defined_symbols": ["\n", "up"]},
        {"control_symbols": ["about", "th"]},  # in words of the texts, which stay text
        DEFAULTS,
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
    ],
    ids=["as_it_is", "own_pieces", "control_pieces", "defaults", "dummy_prefix", "trimmed"],
)
def test_a_sentencepiece_model(tmp_path, model_type, settings):
    settings = {"vocab_size": 345, **settings, "hard_vocab_limit": False, "model_type": model_type}
    ours = build_tokenizer(
        "SentencePieceTokenizer", tokenizer_path=make_sentencepiece(tmp_path / "a.model", **settings)
    )
    assert_reads_as(ours, huggingface_files(ours))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "char"},
        {"treat_whitespace_as_suffix": True},
        {"user_defined_symbols": ["\n"], "add_dummy_prefix": True},
        {"user_defined_symbols": ["\n"], "remove_extra_whitespaces": True},
    ],
)
def test_a_sentencepiece_model_that_tokenizers_cannot_imitate_is_refused(tmp_path, settings):
    path = make_sentencepiece(tmp_path / "a.model", **{"hard_vocab_limit": False, **settings})
    with pytest.raises(ValueError, match="no tokenizer.json encodes as this sentencepiece model does"):
        huggingface_files(build_tokenizer("SentencePieceTokenizer", tokenizer_path=path))


@pytest.mark.parametrize(
    "cuts",
    [
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    ids=["digits", "prefix_space", "as_it_is"],
)
def test_a_tokenizer_json_is_kept_but_for_what_adds_tokens_and_cuts(tmp_path, cuts):
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.normalizer = normalizers.Lowercase()
    theirs.pre_tokenizer = cuts
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    theirs.train_from_iterator(make_texts(300), trainer)
    theirs.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    theirs.enable_truncation(3)
    theirs.enable_padding(length=9)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_path=tmp_path)
    assert_reads_as(ours, files := huggingface_files(ours))
    kept, saved = json.loads(files["tokenizer.json"]), json.loads((tmp_path / "tokenizer.json").read_bytes())
    assert {key for key in saved if kept[key] != saved[key]} == {"post_processor", "truncation", "padding"}

    theirs.no_truncation()
    theirs.no_padding()
    # These add nothing, so the file is kept, and is still the vocabulary of its data.
    for adds_nothing in (processors.ByteLevel(), processors.TemplateProcessing(single="$A", special_tokens=[]), None):
        theirs.post_processor = adds_nothing
        theirs.save(str(tmp_path / "tokenizer.json"))
        ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_path=tmp_path)
        assert_reads_as(ours, files := huggingface_files(ours))
        assert files["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    for change, back in ((theirs.enable_truncation, theirs.no_truncation), (theirs.enable_padding, theirs.no_padding)):
        change(**({"max_length": 3} if back == theirs.no_truncation else {"length": 9}))  # one alone
        theirs.save(str(tmp_path / "tokenizer.json"))
        assert_reads_as(ours, huggingface_files(build_tokenizer("HuggingFaceTokenizer", tokenizer_path=tmp_path)))
        back()
    theirs.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert_reads_as(ours, huggingface_files(build_tokenizer("HuggingFaceTokenizer", tokenizer_path=tmp_path)))


def test_the_files_of_a_gpt2_vocabulary_are_what_transformers_takes(tokenizer, gpt2_folder):
    files = huggingface_files(tokenizer)
    assert json.loads(files.pop("tokenizer_config.json"))["tokenizer_class"] == "GPT2Tokenizer"
    assert files == {name: (gpt2_folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}
