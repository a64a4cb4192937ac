"""From flags to datasets: splits, separate files, blends, JSON, checks of the tokenizer, and many ranks."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megazero import comm
from megazero.data import cache, preprocess, sources
from megazero.data.blend import BlendedDataset
from megazero.data.build import DataConfig, build_datasets, build_tokenizer_from, check_data
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.preprocess import tokenize_json
from megazero.data.tokenizer import build_tokenizer
from megazero.lines import contents
from megazero.lines.resumable import WorkOptions
from tests.bad_disks import failing
from tests.lines.test_contents import change_a_byte
from tests.ranks import run_ranks
from tests.vocabularies import make_texts, write_jsonl


@pytest.fixture
def corpora(tmp_path, tokenizer):
    """a and b: tokenized corpora of 100 and 40 documents; their text beside them."""
    for name, count in (("a", 100), ("b", 40)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", make_texts(count, seed=count))
        tokenize_json([path], tmp_path / f"{name}_text_document", tokenizer, options=WorkOptions(1))
    return tmp_path


def build(tokenizer, num_samples=(30, 10, 5), seed=1, rank=0, meet=lambda what: None, local_rank=0, **flags):
    config = DataConfig(seq_length=8, **flags)
    train, *others = build_datasets(config, tokenizer, num_samples, seed, rank, meet, local_rank)
    return train, *(sets.get("") for sets in others)


def texts(dataset):
    return [dataset[i]["text"].tolist() for i in range(len(dataset))]


def test_three_parts_of_one_corpus(corpora, tokenizer):
    train, valid, test = build(tokenizer, train_data=[str(corpora / "a")], split="80,15,5")
    assert [len(d) >= n for d, n in zip((train, valid, test), (30, 10, 5), strict=True)] == [True] * 3
    assert [sorted(set(d.index.doc_idx.tolist())) for d in (train, valid, test)] == [
        list(range(80)),
        list(range(80, 95)),
        list(range(95, 100)),
    ]
    assert all(len(text) == 9 for text in texts(train))
    assert (corpora / "cache").is_dir()


def test_cache_folder_can_be_chosen(corpora, tokenizer):
    build(tokenizer, train_data=[str(corpora / "a")], split="1", data_cache_path=str(corpora / "elsewhere"))
    assert list((corpora / "elsewhere").glob("gpt2-train-*")) and not (corpora / "cache").exists()


def test_zero_weight_no_samples_and_no_data_are_none(corpora, tokenizer):
    train, valid, test = build(tokenizer, train_data=[str(corpora / "a")], split="90,0,10", num_samples=(5, 5, 0))
    assert train is not None and valid is None and test is None
    assert build(tokenizer) == (None, None, None)


@pytest.mark.parametrize("split, part", [("1000,1,1", "valid"), ("1000,100,1", "test")])
def test_empty_part_names_the_flag(corpora, tokenizer, split, part):
    said = f"--split {split} leaves no {part} data of .*a_text_document: it has 100 documents"
    with pytest.raises(ValueError, match=said):
        build(tokenizer, train_data=[str(corpora / "a")], split=split)
    config = DataConfig(train_data=[str(corpora / "a")], split=split)
    with pytest.raises(ValueError, match=said):  # so it is told before the ranks start
        check_data(config, tokenizer, trains=True, evaluates=True)
    check_data(config, tokenizer, trains=True, evaluates=False)
    own = replace(config, valid_data=[str(corpora / "b")], test_data=[str(corpora / "b.jsonl")])
    check_data(own, tokenizer, trains=True, evaluates=True)


def test_a_run_that_has_nothing_to_train_on_is_told_before_the_ranks_start(corpora, tokenizer):
    none = DataConfig(train_data=[str(corpora / "a")], split="0,5,5")
    for config in (none, DataConfig(valid_data=[str(corpora / "a")])):
        with pytest.raises(ValueError, match="training split is empty: give --train-data, and a first share above 0"):
            check_data(config, tokenizer, trains=True, evaluates=True)
        check_data(config, tokenizer, trains=False, evaluates=True)


def test_validation_on_what_is_trained_on_is_a_warning(corpora, tokenizer, caplog):
    a, b = (str(corpora / name) for name in "ab")
    for unseen in (
        {"valid_data": [b]},
        {"valid_data": [a], "num_samples": (0, 5, 5)},
        {"test_data": [a], "num_samples": (5, 5, 0)},
    ):
        build(tokenizer, train_data=[a], split="90,5,5", **unseen)
    assert "what --train-data names too" not in caplog.text
    build(tokenizer, train_data=[a], valid_data=[f"{a}_text_document.bin", b], split="1")
    assert f"--valid-data names what --train-data names too: {a}_text_document; its loss" in caplog.text
    assert "--test-data" not in caplog.text


def test_files_of_their_own_beat_the_split(corpora, tokenizer):
    train, valid, test = build(
        tokenizer,
        train_data=[str(corpora / "a")],
        valid_data=[str(corpora / "b")],
        split="60,39,1",
        num_samples=(30, 90, 1),
    )
    assert sorted(set(valid.index.doc_idx.tolist())) == list(range(40))
    assert valid.indexed.prefix.name == "b_text_document"
    assert set(train.index.doc_idx.tolist()) == set(range(98)), "60 of 61 parts of 100 documents"
    assert set(test.index.doc_idx.tolist()) == {98, 99}
    train, valid, test = build(tokenizer, valid_data=[str(corpora / "b")], split="0,1,0")
    assert (train, test) == (None, None) and len(valid) >= 10


def test_each_set_with_a_name_has_the_samples_that_it_has_alone_and_must_hold_text(corpora, tokenizer):
    a, b = str(corpora / "a"), str(corpora / "b")
    alone = build(tokenizer, valid_data=[b])[1], build(tokenizer, valid_data=["1", a, "3", b])[1]
    config = DataConfig(seq_length=8, valid_data=[f"b={b}", "both=1", a, "3", b], test_data=[f"a={a}"], split="1")
    train, valid, test = build_datasets(config, tokenizer, (30, 10, 5), seed=1)
    assert train is None and list(valid) == ["b", "both"] and list(test) == ["a"]
    assert [texts(dataset) for dataset in valid.values()] == [texts(dataset) for dataset in alone]
    with IndexedDatasetWriter(corpora / "empty", np.uint16):
        pass
    config = replace(config, valid_data=[f"a={a}", f"none={corpora / 'empty'}"])
    with pytest.raises(ValueError, match="leaves no valid data of .*empty: it has 0 documents"):
        check_data(config, tokenizer, trains=False, evaluates=True)
    with pytest.raises(ValueError, match="leaves no train data of .*empty"):
        check_data(DataConfig(train_data=[str(corpora / "empty")]), tokenizer, trains=True, evaluates=False)


def test_blend_by_weights_and_by_size(corpora, tokenizer):
    a, b = str(corpora / "a"), str(corpora / "b")
    train, valid, _ = build(tokenizer, train_data=["1", a, "3", b], split="8,2", num_samples=(40, 8, 0))
    assert isinstance(train, BlendedDataset) and train.order.counts == [10, 30] and valid.order.counts == [2, 6]
    assert len(train) == 40 and len(texts(train)) == 40
    train, _, _ = build(tokenizer, train_data=[a, b], split="1", num_samples=(70, 0, 0))
    sizes = [d.tokens_per_epoch for d in train.datasets]
    assert train.order.counts[0] == round(70 * sizes[0] / sum(sizes)), "each corpus gives its share of all tokens"


def test_every_run_says_how_often_each_corpus_is_read_in_one_line_for_each_set(corpora, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    a, b = str(corpora / "a"), str(corpora / "b")
    for _ in range(2):  # the second finds the index of the first
        caplog.clear()
        train, valid, _ = build(tokenizer, train_data=["1", a, "3", b], split="8,2", num_samples=(4000, 8, 0))
        said = [record for record in caplog.records if "asked for" in record.message]
        tokens = sum(d.tokens_per_epoch for d in train.datasets)
        samples = sum((d.tokens_per_epoch - 1) // 8 for d in train.datasets)
        epochs = [
            -(-(count * 8 + 1) // d.tokens_per_epoch) for count, d in zip((1000, 3000), train.datasets, strict=True)
        ]
        of_corpora = f"{epochs[1]} epochs of {b}_text_document, {epochs[0]} epochs of {a}_text_document"
        assert (
            said[0].message
            == f"train: 112 documents, {tokens} tokens, {samples} samples of 8 tokens, 4000 asked for: {of_corpora}"
        )
        assert epochs[1] > epochs[0] > 1 and len(said) == 2 and said[1].message.startswith("valid: 28 documents, ")


def test_a_corpus_shorter_than_a_sample_is_repeated_with_a_warning(tmp_path, tokenizer, caplog):
    with IndexedDatasetWriter(tmp_path / "short", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    build(tokenizer, valid_data=[str(tmp_path / "short")], split="0,1", num_samples=(0, 4, 0))
    assert "valid: 1 document, 3 tokens, 0 samples of 8 tokens, 4 asked for: 11 epochs of" in caplog.text
    assert [record.levelname for record in caplog.records if "asked for" in record.message] == ["WARNING"]


def test_json_equals_its_preprocessed_files(corpora, tokenizer):
    ready = build(tokenizer, train_data=[str(corpora / "a")], split="80,15,5")
    loose = build(tokenizer, train_data=[str(corpora / "a.jsonl")], split="80,15,5")
    for one, other in zip(ready, loose, strict=True):
        assert texts(one) == texts(other)
    (made,) = (corpora / "cache").glob("a-*_text_document.bin")
    stamp = made.stat().st_mtime_ns
    build(tokenizer, train_data=[str(corpora / "a.jsonl")], split="80,15,5", seed=2)
    assert made.stat().st_mtime_ns == stamp, "tokenized at the first use only"
    write_jsonl(corpora / "a.jsonl", make_texts(50))
    changed, _, _ = build(tokenizer, train_data=[str(corpora / "a.jsonl")], split="1")
    assert len(changed.indexed) == 50 and len(list((corpora / "cache").glob("a-*.bin"))) == 2


def test_json_is_known_by_every_byte_and_read_once_for_each_time_that_it_is_touched(corpora, tokenizer, monkeypatch):
    monkeypatch.setattr(contents, "_TICK_NS", 0)  # the file is old enough for its hash to be remembered
    read, hash_piece = [], contents._hash_piece
    monkeypatch.setattr(contents, "_hash_piece", lambda piece: read.append(piece) or hash_piece(piece))
    data, found = corpora / "a.jsonl", []

    def tokens():
        contents._known.clear()  # as in another process
        train, _, _ = build(tokenizer, train_data=[str(data)], split="1")
        found.append((len(read), len(list((corpora / "cache").glob("a-*.bin"))), train.indexed.num_tokens))

    tokens()
    tokens()
    os.utime(data)  # as if it had been fetched again
    tokens()
    change_a_byte(data)
    tokens()
    assert [entry[:2] for entry in found] == [(1, 1), (1, 1), (2, 1), (3, 2)] and found[0] == (1, 1, found[2][2])
    monkeypatch.setattr(contents, "_TICK_NS", 1 << 62)  # a further change might bear the same time
    change_a_byte(data)
    tokens()
    assert len(list((corpora / "cache").glob("content-*.json"))) == 3, "what is that new is not remembered"


def test_json_is_kept_for_each_tokenizer(corpora, tokenizer, spm_file):
    other = build_tokenizer("SentencePieceTokenizer", tokenizer_path=spm_file)
    for one in (tokenizer, other, tokenizer):
        train, _, _ = build(one, train_data=[str(corpora / "a.jsonl")], split="1")
        assert train.indexed.get(0).tolist() == [*one.encode(make_texts(100, seed=100)[0]), one.eod]
    assert len(list((corpora / "cache").glob("a-*.bin"))) == 2


def test_json_with_another_key(corpora, tokenizer):
    train, _, _ = build(tokenizer, train_data=[str(corpora / "a.jsonl")], split="1", text_key="url")
    assert train.indexed.get(3).tolist() == [*tokenizer.encode("u3"), tokenizer.eod]
    with pytest.raises(ValueError, match="under the key 'body'.*--text-key"):
        build(tokenizer, train_data=[str(corpora / "a.jsonl")], split="1", text_key="body")


def test_webtext_by_name(corpora, tokenizer, monkeypatch):
    monkeypatch.chdir(corpora)
    os.makedirs("data/webtext")
    shutil.copy("a.jsonl", "data/webtext/data.json")
    train, _, _ = build(tokenizer, train_data=["webtext"], split="1")
    assert len(train.indexed) == 100


def test_parts_that_a_pipeline_has_split_off_webtext_beat_the_split(corpora, tokenizer, monkeypatch):
    monkeypatch.chdir(corpora)
    os.makedirs("data/webtext")
    for source, part in (("a", "train"), ("b", "valid")):
        before = build(tokenizer, train_data=["webtext"], split="98,1,1")[0] if part == "valid" else None
        for suffix in (".bin", ".idx", ".json"):
            shutil.copy(f"{source}_text_document{suffix}", f"data/webtext/{part}_text_document{suffix}")
    train, valid, test = build(tokenizer, train_data=["webtext"], split="98,1,1")
    assert train.corpora != before.corpora, "by which a job that goes on knows that it has other documents"
    assert set(train.index.doc_idx.tolist()) == set(range(99)) and set(test.index.doc_idx.tolist()) == {99}
    assert valid.indexed.prefix.name == "valid_text_document" and set(valid.index.doc_idx.tolist()) == set(range(40))
    train, valid, test = build(tokenizer, train_data=["webtext"], split="1,0,0")
    assert len(set(train.index.doc_idx.tolist())) == 100 and (valid, test) == (None, None), "none is wanted"
    own = build(tokenizer, train_data=["webtext"], valid_data=[str(corpora / "a")], split="1,1,0")[1]
    assert own.indexed.prefix.name == "a_text_document"


def test_another_tokenizer_than_the_datas_names_both(corpora, gpt2_folder, spm_file):
    other = build_tokenizer("SentencePieceTokenizer", tokenizer_path=spm_file)
    config = DataConfig(train_data=[str(corpora / "a")], split="1")
    said = "tokenized with GPT2BPETokenizer \\(.*sha256 .*uses SentencePieceTokenizer \\("
    with pytest.raises(ValueError, match=said):
        build_datasets(config, other, (30, 10, 5), seed=1)
    with pytest.raises(ValueError, match=said):  # so it is told before the ranks start
        check_data(config, other, trains=True, evaluates=True)


def test_a_damaged_record_is_not_said_to_be_missing(corpora, tokenizer, caplog):
    path = corpora / "a_text_document.json"
    os.truncate(path, path.stat().st_size // 2)
    with caplog.at_level(logging.WARNING, "megazero"):
        build(tokenizer, train_data=[str(corpora / "a")], split="1")
    assert "record its tokenizer (a_text_document.json is damaged, or something else): cannot check" in caplog.text


def test_the_first_rank_of_every_machine_checks_the_cache_there(corpora, tokenizer, caplog):
    flags = {"train_data": [str(corpora / "a")], "split": "1", "data_cache_path": str(corpora / "own")}
    with caplog.at_level(logging.WARNING, "megazero"):
        build(tokenizer, rank=3, local_rank=1, **flags)
        assert caplog.text == "", "one rank of a machine warns"
        shutil.rmtree(corpora / "own")
        build(tokenizer, rank=2, local_rank=0, **flags)
        assert caplog.text.count("is it not shared between the machines?") == 1
    array = max((corpora / "own").glob("gpt2-train-*.npy"))
    whole = array.read_bytes()
    array.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    build(tokenizer, rank=3, local_rank=1, **flags)
    with pytest.raises(ValueError, match="is damaged"):
        build(tokenizer, rank=2, local_rank=0, **flags)


def test_megatrons_own_files_get_one_warning(corpora, tokenizer, caplog):
    (corpora / "a_text_document.json").unlink()
    with caplog.at_level(logging.WARNING, "megazero"):
        build(tokenizer, train_data=[str(corpora / "a")], split="8,2")
    assert caplog.text.count("does not record its tokenizer (no a_text_document.json)") == 1
    caplog.clear()
    build(tokenizer, train_data=[str(corpora / "a")], split="8,2", rank=1)
    assert caplog.text == "", "one rank warns"


@pytest.mark.parametrize(
    "tokens, dtype", [([3, 9, 399], np.uint16), ([3, 400], np.uint16), ([3, 70_000], np.int32), ([-1, 3], np.int32)]
)
def test_ids_beyond_the_vocabulary_are_refused_on_every_start(tmp_path, tokenizer, tokens, dtype):
    with IndexedDatasetWriter(tmp_path / "m", dtype) as writer:
        writer.add_document(tokens * 10)
    assert tokenizer.vocab_size == 400
    for _ in range(2):
        if min(tokens) >= 0 and max(tokens) < 400:
            build(tokenizer, train_data=[str(tmp_path / "m")], split="1")
        else:
            message = f"m.bin holds token ids from {min(tokens)} to {max(tokens)}, but GPT2BPETokenizer has 400 entries"
            with pytest.raises(ValueError, match=message):
                build(tokenizer, train_data=[str(tmp_path / "m")], split="1")
    assert len(list((tmp_path / "cache").glob("ids-m-*.json"))) == 1, "the tokens were read once"


def test_ids_are_looked_at_again_when_the_tokens_change(tmp_path, tokenizer):
    for last in (5, 5000):
        with IndexedDatasetWriter(tmp_path / "m", np.uint16) as writer:
            writer.add_document([1, 2, last] * 10)
        if last == 5:
            build(tokenizer, train_data=[str(tmp_path / "m")], split="1")
    with pytest.raises(ValueError, match="holds token ids from 1 to 5000"):
        build(tokenizer, train_data=[str(tmp_path / "m")], split="1")


def test_record_of_other_files_is_noticed(corpora, tokenizer):
    with IndexedDatasetWriter(corpora / "new", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    for ending in ("bin", "idx"):
        (corpora / f"new.{ending}").replace(corpora / f"a_text_document.{ending}")
    with pytest.raises(
        ValueError, match="a_text_document.json records .* tokens, .*a_text_document.idx 3: one of them was replaced"
    ):
        build(tokenizer, train_data=[str(corpora / "a")], split="1")
    record = json.loads((corpora / "b_text_document.json").read_text())
    del record["eod"]
    (corpora / "b_text_document.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="b_text_document.json lacks an entry .*eod"):
        build(tokenizer, train_data=[str(corpora / "b")], split="1")


def test_unwritable_cache_names_the_flag(corpora, tokenizer):
    (corpora / "cache").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match="--data-cache-path"):
        build(tokenizer, train_data=[str(corpora / "a")], split="1")
    build(tokenizer, train_data=[str(corpora / "a")], split="1", data_cache_path=str(corpora / "other"))


@pytest.mark.parametrize(
    ("code", "error", "advice"),
    [
        (errno.EACCES, ValueError, ". Choose a folder .* --data-cache-path"),
        (errno.EROFS, ValueError, ". Choose a folder .* --data-cache-path"),
        (errno.EIO, OSError, "$"),
    ],
)
def test_a_folder_in_which_no_tokens_can_be_stored_names_the_flag(corpora, tokenizer, monkeypatch, code, error, advice):
    monkeypatch.setattr(preprocess, "locked", failing(code))
    with pytest.raises(error, match=os.strerror(code) + advice):
        build(tokenizer, train_data=[str(corpora / "a.jsonl")], split="1")


@pytest.mark.parametrize("name", ["a", "a.jsonl"])
def test_a_read_only_copy_with_a_finished_cache_is_enough(corpora, tokenizer, monkeypatch, caplog, name):
    flags = {"train_data": [str(corpora / name)], "split": "1"}
    monkeypatch.setattr(sources, "shows_changes", lambda changed_ns: True)
    first = build(tokenizer, **flags)[0]
    for path in (corpora / "a.jsonl", corpora / "a_text_document.bin"):
        shutil.copy(path, corpora / "copy")  # of another inode and time
        (corpora / "copy").replace(path)
    for module in (cache, preprocess):
        monkeypatch.setattr(module, "locked", failing(errno.EROFS))
    assert texts(build(tokenizer, **flags)[0]) == texts(first)
    assert "since what is known of it cannot be stored: cannot write the index cache" in caplog.text


@pytest.mark.parametrize(
    "flags, message",
    [({"split": "a"}, "--split"), ({"seq_length": 0}, "--seq-length"), ({"num_workers": -1}, "--num-workers")],
)
def test_bad_values_name_their_flag(flags, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**flags)


def test_tokenizer_from_flags(gpt2_folder):
    vocab, merges = str(gpt2_folder / "vocab.json"), str(gpt2_folder / "merges.txt")
    by_files, by_folder = DataConfig(vocab_file=vocab, merge_file=merges), DataConfig(tokenizer_path=str(gpt2_folder))
    assert build_tokenizer_from(by_files).sha256 == build_tokenizer_from(by_folder).sha256


def meet(what):
    comm.meet_world(what, 20)


def build_on_a_rank(vocabulary, data, caches, shared):
    """What one rank sees, and whether it had to build: with a cache of its own it does, and gets the same samples."""
    rank, messages = dist.get_rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megazero").addHandler(handler)
    logging.getLogger("megazero").setLevel(logging.INFO)
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary)
    train, valid, _ = build(
        tokenizer,
        train_data=data,
        split="8,2",
        data_cache_path=caches if shared else f"{caches}-{rank}",
        num_samples=(100, 20, 0),
        rank=rank,
        meet=meet,
    )
    missing = sum("is it not shared" in message for message in messages)
    return texts(train) + texts(valid), any(message.startswith("built gpt2") for message in messages), missing


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["indexed", "json"])
def test_ranks_agree_and_rank_0_builds_for_all(corpora, gpt2_folder, shared, kind):
    data = ["2", str(corpora / "a"), "1", str(corpora / "b")] if kind == "indexed" else [str(corpora / "a.jsonl")]
    results = run_ranks(3, build_on_a_rank, str(gpt2_folder), data, str(corpora / "cache"), shared)
    samples, built, missing = zip(*results, strict=True)
    assert samples[0] == samples[1] == samples[2] and len(samples[0]) >= 120
    assert built == ((True, False, False) if shared else (True, True, True))
    assert missing == ((0, 0, 0) if shared else (0, 1, 1)), "said once"


def build_late_on_a_rank(vocabulary, data, caches):
    """Whether the other ranks, each with a cache of its own, had built when this one returned."""
    rank, tokenize = dist.get_rank(), sources.tokenize_json

    def slowly(*args, **options):
        time.sleep(0.3 * rank)
        made = tokenize(*args, **options)
        Path(f"{caches}-{rank}", "done").touch()
        return made

    sources.tokenize_json = slowly
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary)
    flags = {"train_data": data, "split": "1", "data_cache_path": f"{caches}-{rank}"}
    build(tokenizer, rank=rank, meet=meet, **flags)
    return all(Path(f"{caches}-{other}", "done").exists() for other in range(dist.get_world_size()))


def test_no_rank_goes_on_while_another_still_builds_on_its_own(corpora, gpt2_folder):
    """Its first collective would wait for that one no longer than a collective may."""
    data = [str(corpora / "a.jsonl")]
    assert all(run_ranks(3, build_late_on_a_rank, str(gpt2_folder), data, str(corpora / "cache")))


def fail_on_a_rank(vocabulary, missing):
    """`missing` names the ranks without the data; what each of all then says."""
    tokenizer, rank = build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary), dist.get_rank()
    flags = {"train_data": ["/absent"]} if rank in missing else {}
    try:
        build(tokenizer, rank=rank, meet=meet, **flags)
    except (FileNotFoundError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(("missing", "fails"), [([0], 0), ([1], 1), ([0, 1, 2], 0)])
def test_an_error_on_any_rank_reaches_every_rank_with_its_reason_instead_of_a_hang(gpt2_folder, missing, fails):
    """Where all lack the data, the first rank is the first to notice."""
    for rank, message in enumerate(run_ranks(3, fail_on_a_rank, str(gpt2_folder), missing, timeout_s=30)):
        assert "/absent" in message, "a rank that is first to end may be the only one that is heard"
        assert rank == fails or f") on rank {fails}" in message.partition("but building the data failed (")[2]
