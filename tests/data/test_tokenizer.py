"""Tokenizers: equal to their reference implementations, lossless, picklable, and clear about missing or wrong files."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from megazero.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from tests.vocabularies import WORDS, make_gpt2_vocabulary, make_sentencepiece, make_texts, shared_data

AWKWARD = ["", " ", "\n", "  two\n\n\ttabs ", "\u2581", " \u2581x\u2581 ", "\x00", "<|endoftext|>", "</s><unk><0x0A>"]
AWKWARD += ["👋🏽 中文", "a\r\nb"]


@pytest.fixture(scope="module", params=TOKENIZER_TYPES)
def any_tokenizer(request, gpt2_folder, spm_file):
    return build_tokenizer(request.param, tokenizer_path=spm_file if "Piece" in request.param else gpt2_folder)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(WORDS + AWKWARD)).map(" ".join)))
def test_decode_gives_back_every_text(any_tokenizer, text):
    ids = any_tokenizer.encode(text)
    assert any_tokenizer.decode(ids) == text
    assert any_tokenizer.eod not in ids, "no text holds an end of text"
    assert ids == any_tokenizer.encode_array(text).tolist() and all(0 <= i < any_tokenizer.vocab_size for i in ids)


def test_end_of_text_in_a_document_stays_text(any_tokenizer):
    ids = any_tokenizer.encode("a<|endoftext|>b")
    assert len(ids) > 3 and any_tokenizer.eod not in ids
    assert any_tokenizer.decode([*any_tokenizer.encode("a"), any_tokenizer.eod, *any_tokenizer.encode("b")]) in (
        "a<|endoftext|>b",
        "a</s>b",
    )


def test_a_tiktoken_that_ends_documents_at_their_own_words_is_refused(tmp_path, monkeypatch):
    folder, encode = make_gpt2_vocabulary(tmp_path), tiktoken.Encoding.encode_to_numpy

    def as_before_0_11(self, text, **_):
        return encode(self, text, allowed_special="all")

    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy", as_before_0_11)
    with pytest.raises(
        ValueError, match=r"takes a <\|endoftext\|> in a document for its end.*pip install 'tiktoken>=0.13'"
    ):
        build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder)


def special_in_the_model(kind):
    """A trained tokenizer whose special tokens are entries of the model too, as T5's and XLM-R's are, and its end of text."""
    special, words = ["<unk>", "<pad>", "</s>"], ["the cat <s> </a> </ / s p a d u n k < > x"] * 50
    if "unigram" in kind:
        made = tokenizers.Tokenizer(models.Unigram())
        if kind == "unigram":
            made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    elif kind == "word level":
        made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    else:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    made.train_from_iterator(words, trainer)
    if kind == "bpe":
        made.model.ignore_merges = True
    return made


@pytest.mark.parametrize("kind", ["unigram", "bare unigram", "word level", "bpe", "merges"])
def test_special_tokens_of_the_model_itself_are_text_in_a_document(tmp_path, kind):
    made = special_in_the_model(kind)
    made.enable_truncation(3)  # which a file may ask for; documents are whole all the same
    made.enable_padding(length=99)
    made.save(str(tmp_path / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_path=tmp_path)
    pad, eod = made.token_to_id("<pad>"), made.token_to_id("</s>")
    for text in ("the </s> cat <pad> x", "the</s>cat<pad></s></s>", "</s>", "<</s>>", "x<unk>x"):
        ids = ours.encode(text)
        assert ours.eod == eod and eod not in ids and pad not in ids, text
        if kind == "unigram":
            assert ours.decode(ids) == text and made.token_to_id("<unk>") not in ids
    made.encode_special_tokens = True
    assert ours.encode("the cat x < / s>") == made.encode("the cat x < / s>").ids, "other texts are encoded as ever"
    if kind == "merges":  # which make no </s>
        assert ours.encode("the</s>x") == made.encode("the</s>x").ids


def test_an_end_of_text_that_is_not_special_is_refused(tmp_path):
    made = special_in_the_model("unigram")
    content = json.loads(made.to_str())
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match='takes a </s> in a document for its end.*"special": true'):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_path=tmp_path)


def test_unpaired_surrogates_become_replacement_characters(any_tokenizer):
    assert any_tokenizer.decode(any_tokenizer.encode("a \ud800 b")) == "a \ufffd b"


def test_pickled_tokenizer_encodes_equally(any_tokenizer):
    copy = pickle.loads(pickle.dumps(any_tokenizer))
    text = " ".join(WORDS)
    assert copy.encode(text) == any_tokenizer.encode(text) and copy.sha256 == any_tokenizer.sha256


def test_a_pickled_tokenizer_whose_files_have_changed_is_still_the_same(tmp_path):
    folder = make_gpt2_vocabulary(tmp_path)
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder)
    pickled = pickle.dumps(tokenizer)
    (folder / "merges.txt").write_text("")
    assert pickle.loads(pickled).sha256 == tokenizer.sha256


@pytest.mark.parametrize("ids", [[-1], [10**6]])
def test_decoding_an_unknown_id_names_it(any_tokenizer, ids):
    with pytest.raises(ValueError, match=f"token id {ids[0]} is outside the vocabulary of {any_tokenizer.name}"):
        any_tokenizer.decode(ids)


def test_decoding_an_id_in_a_gap_of_the_vocabulary_names_it(tmp_path):
    folder = make_gpt2_vocabulary(tmp_path)
    ids = json.loads((folder / "vocab.json").read_text())
    gap, ids["<|endoftext|>"] = ids["<|endoftext|>"], ids["<|endoftext|>"] + 2
    (folder / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(ValueError, match=f"{gap}: the vocabulary has a gap there"):
        build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder).decode([gap])


@pytest.mark.parametrize("vocab_size", [300, 400, 1000])
def test_gpt2_bpe_equals_the_package_tokenizers(tmp_path, vocab_size):
    folder = make_gpt2_vocabulary(tmp_path, vocab_size)
    ours = build_tokenizer("GPT2BPETokenizer", folder / "vocab.json", folder / "merges.txt")
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in make_texts(200, seed=5):
        assert ours.encode(text) == reference.encode(text).ids
    assert ours.eod == 0 and ours.vocab_size == reference.get_vocab_size()


def test_real_gpt2_ids():
    """The ids of OpenAI's vocabulary where it is at hand; the tests above cover the code without it."""
    if (folder := shared_data()) is None:
        pytest.skip("the vocabulary is not at hand")
    ours = build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder / "gpt2_bpe")
    assert ours.encode("Hello world") == [15496, 995] and ours.encode(" the") == [262]
    assert ours.vocab_size == 50257 and ours.eod == 50256


def test_files_by_their_other_names_are_one_vocabulary(gpt2_folder, tmp_path):
    shutil.copy(gpt2_folder / "vocab.json", tmp_path / "encoder.json")
    shutil.copy(gpt2_folder / "merges.txt", tmp_path / "vocab.bpe")
    renamed = build_tokenizer("GPT2BPETokenizer", tokenizer_path=tmp_path)
    assert renamed.sha256 == build_tokenizer("GPT2BPETokenizer", tokenizer_path=gpt2_folder).sha256
    (tmp_path / "encoder.json").write_text(json.dumps(json.loads((tmp_path / "encoder.json").read_text()), indent=2))
    assert build_tokenizer("GPT2BPETokenizer", tokenizer_path=tmp_path / "encoder.json").sha256 == renamed.sha256


def test_hash_follows_contents(gpt2_folder, tmp_path):
    vocabulary = json.loads((gpt2_folder / "vocab.json").read_text())
    vocabulary["<pad>"] = max(vocabulary.values()) + 1
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    shutil.copy(gpt2_folder / "merges.txt", tmp_path)
    one, other = (build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder) for folder in (gpt2_folder, tmp_path))
    assert one.sha256 != other.sha256 and other.vocab_size == one.vocab_size + 1


def test_sentencepiece_prefers_a_dedicated_end_of_text(tmp_path):
    plain = build_tokenizer("SentencePieceTokenizer", tokenizer_path=make_sentencepiece(tmp_path / "a.model"))
    assert plain.eod == 2  # </s>
    path = make_sentencepiece(tmp_path / "b.model", control_symbols=["<|endoftext|>"])
    assert build_tokenizer("SentencePieceTokenizer", tokenizer_path=path).eod == 3
    # A user-defined symbol is found in texts, so it cannot separate them.
    path = make_sentencepiece(tmp_path / "c.model", user_defined_symbols=["<|endoftext|>"])
    assert build_tokenizer("SentencePieceTokenizer", tokenizer_path=path).eod == 2
    path = make_sentencepiece(tmp_path / "d.model", eos_id=0, unk_id=2)
    assert build_tokenizer("SentencePieceTokenizer", tokenizer_path=path).eod == 0
    with pytest.raises(FileNotFoundError, match=r"should hold one file \*\.model; found a\.model, b\.model, c"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_path=tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"add_dummy_prefix": True, "remove_extra_whitespaces": True}, {"byte_fallback": False, "vocab_size": 300}],
    ids=str,
)
def test_sentencepiece_with_a_dummy_prefix_or_without_bytes_keeps_its_own_rules(tmp_path, options):
    path = make_sentencepiece(tmp_path / "a.model", **options)
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_path=path)
    assert tokenizer.decode(tokenizer.encode("one\u2581two")) == "one two"


def test_sentencepiece_without_an_end_of_text_is_refused(tmp_path):
    path = make_sentencepiece(tmp_path / "a.model", eos_id=-1)
    with pytest.raises(ValueError, match="a.model has no end of text"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_path=path)


def test_white_space_beyond_the_pattern_is_an_error_not_a_crash(tokenizer):
    with pytest.raises(ValueError):
        tokenizer.encode(" " * 3_000_000 + "a")


def test_array_dtype_is_integer(any_tokenizer):
    assert np.issubdtype(any_tokenizer.encode_array("the").dtype, np.integer)
    assert any_tokenizer.encode_array("").shape == (0,)


def test_gpt2_without_files_says_what_is_looked_up_and_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="--vocab-file.*--merge-file.*data/gpt2_bpe/"):
        build_tokenizer("GPT2BPETokenizer")
    make_gpt2_vocabulary(tmp_path / "data" / "gpt2_bpe", 300)
    assert build_tokenizer("GPT2BPETokenizer").vocab_size == 300


def test_wrong_files_get_one_clear_line(gpt2_folder, tmp_path):
    vocab, merges = gpt2_folder / "vocab.json", gpt2_folder / "merges.txt"
    for one, other in (("vocab", "merge"), ("merge", "vocab")):
        with pytest.raises(ValueError, match=f"--{one}-file .* needs --{other}-file"):
            build_tokenizer("GPT2BPETokenizer", **{f"{one}_file": vocab})
    for name in ("vocab.json", "merges.txt"):
        alone = tmp_path / f"only {name}"
        alone.mkdir()
        (alone / name).touch()
        with pytest.raises(FileNotFoundError, match="there are no such two in .*only"):
            build_tokenizer("GPT2BPETokenizer", tokenizer_path=alone)
    with pytest.raises(FileNotFoundError, match="--merge-file .*absent"):
        build_tokenizer("GPT2BPETokenizer", vocab, tmp_path / "absent")
    with pytest.raises(
        FileNotFoundError, match="--tokenizer-path .*absent: there is no such file or folder. .*train a vocab"
    ):
        build_tokenizer("GPT2BPETokenizer", tokenizer_path=tmp_path / "absent")
    (tmp_path / "nested.json").write_text("[" * 10**5)
    for path in (merges, tmp_path / "nested.json"):
        with pytest.raises(ValueError, match="is not JSON"):
            build_tokenizer("GPT2BPETokenizer", path, merges)
    with pytest.raises(ValueError, match="is not a table"):
        build_tokenizer("GPT2BPETokenizer", gpt2_folder / "tokenizer.json", merges)
    with pytest.raises(ValueError, match=":1: expected two tokens"):
        build_tokenizer("GPT2BPETokenizer", vocab, vocab)
    (tmp_path / "packed.bpe").write_bytes(gzip.compress(merges.read_bytes()))
    with pytest.raises(ValueError, match="--merge-file .*packed.bpe is not UTF-8 text, at byte 1$"):
        build_tokenizer("GPT2BPETokenizer", vocab, tmp_path / "packed.bpe")
    (tmp_path / "shuffled.txt").write_text("\n".join(reversed(merges.read_text().strip().split("\n")[1:])))
    with pytest.raises(ValueError, match="does not belong to|do not rise"):
        build_tokenizer("GPT2BPETokenizer", vocab, tmp_path / "shuffled.txt")
    entries = json.loads(vocab.read_text())
    for absent, message in (("<|endoftext|>", "no entry <\\|endoftext\\|>"), ("Ġ", "not a byte-level BPE")):
        (tmp_path / "v.json").write_text(json.dumps({k: v for k, v in entries.items() if k != absent}))
        with pytest.raises(ValueError, match=message):
            build_tokenizer("GPT2BPETokenizer", tmp_path / "v.json", merges)
    with pytest.raises(ValueError, match="is not a sentencepiece model"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_path=vocab)
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_path=vocab)
    with pytest.raises(FileNotFoundError, match="should hold one file \\*.model; found none"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_path=gpt2_folder)
    with pytest.raises(ValueError, match="needs --tokenizer-path: a sentencepiece"):
        build_tokenizer("SentencePieceTokenizer")
    with pytest.raises(ValueError, match="Did you mean 'SentencePieceTokenizer'"):
        build_tokenizer("SentencepieceTokeniser")
