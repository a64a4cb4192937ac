"""Tokens as other trainers store them: their files, written as they write them, become those of `tokenize`, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_tools import import_tokens, parquet
from megazero.data import mmidx
from megazero.data.corpora import find_corpora
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.sidecar import check_tokenizer, read_sidecar
from megazero.data.tokenizer import build_tokenizer
from megazero.lines.partial_shard import PartialShard
from tests.data_tools.steps import run_step
from tests.vocabularies import make_gpt2_vocabulary, make_texts, write_jsonl

EOT, BOS = 0, 7


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_gpt2_vocabulary(tmp_path / "v")
    return tmp_path


def import_files(*flags):
    return run_step("import_tokens", "--output-prefix", "out", "--tokenizer-path", "v", "--input", *flags)


def files(prefix):
    return [Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def documents_of(prefix="out"):
    data = IndexedDataset(f"{prefix}_text_document")
    return [data.get(i).tolist() for i in range(len(data))]


def write_nanogpt(folder, documents):
    """karpathy/nanoGPT, data/openwebtext/prepare.py."""
    ids = [[*document, EOT] for document in documents]
    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="w+", shape=(sum(map(len, ids)),))
    tokens[:] = np.concatenate(ids)
    tokens.flush()
    return ["train.bin", "--dtype", "uint16"]


def write_llm_c(folder, documents, magic=20240520, version=1, dtype=np.uint16, shard_size=50, first=EOT):
    """karpathy/llm.c, dev/data/fineweb.py and data_common.py."""
    stream = [token for document in documents for token in (first, *document)]
    for start in range(0, len(stream), shard_size):
        tokens = np.array(stream[start : start + shard_size], dtype=dtype)
        header = np.zeros(256, dtype=np.int32)
        header[:3] = magic, version, len(tokens)
        (folder / f"fineweb_train_{start:06}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return sorted(path.name for path in folder.glob("fineweb_train_*.bin"))


def write_saved(folder, documents):
    """karpathy/build-nanogpt, fineweb.py: shards by np.save."""
    (folder / "saved").mkdir()
    stream = np.array([token for document in documents for token in (EOT, *document)], np.uint16)
    for number, tokens in enumerate(np.array_split(stream, 4)):
        np.save(folder / "saved" / f"edufineweb_train_{number:06}", tokens)
    return ["saved"]


def write_olmo(folder, documents):
    """allenai/OLMo, scripts/prepare_memmap_dataset.py: .npy without a header."""
    write_nanogpt(folder, documents)
    (folder / "train.bin").rename(folder / "part-0-00000.npy")
    return ["part-0-00000.npy", "--dtype", "uint16"]


def write_rows(folder, rows, kind="list"):
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kinds = {"list": pyarrow.list_(pyarrow.int32()), "large": pyarrow.large_list(pyarrow.int64())}
    kinds["fixed"] = pyarrow.list_(pyarrow.uint16(), len(rows[0]))
    column = pyarrow.array([list(map(int, row)) for row in rows], kinds[kind])
    table = pyarrow.table({"text": ["some"] * len(rows), "input_ids": column})
    tables.write_table(table, folder / "rows.parquet", row_group_size=7)
    return ["rows.parquet"]


@pytest.mark.parametrize("write", [write_nanogpt, write_llm_c, write_saved, write_olmo, write_rows])
def test_an_imported_corpus_is_the_one_that_is_tokenized_here(folder, write):
    texts, tokenizer = make_texts(30), build_tokenizer("GPT2BPETokenizer", tokenizer_path="v")
    write_jsonl(folder / "in.jsonl", texts)
    run_step("tokenize", "--input", "in.jsonl", "--output-prefix", "c", "--append-eod", "--tokenizer-path", "v")
    result = import_files(*write(folder, [tokenizer.encode(text) for text in texts]))
    assert files("out") == files("c")
    ours, theirs = read_sidecar("c_text_document"), read_sidecar("out_text_document")
    assert (theirs.tokenizer, theirs.eod, theirs.documents) == (ours.tokenizer, ours.eod, 30)
    (corpus,) = find_corpora(["out"])
    assert check_tokenizer(corpus.path, IndexedDataset(corpus.path).num_tokens, tokenizer)
    result = json.loads(json.dumps(result))
    assert (result["documents"], result["dtype"], result["tokens"]) == (30, "uint16", theirs.tokens)
    # The end of text before the first document is none's end.
    assert result["empty_documents"] == (write in (write_llm_c, write_saved))
    assert {path.name for path in folder.glob("out*")} == {f"out_text_document.{end}" for end in ("bin", "idx", "json")}


@pytest.mark.parametrize("shard_size", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("block_bytes", [2, 6, 1 << 20])
def test_documents_go_on_in_the_next_piece_and_file(folder, monkeypatch, shard_size, block_bytes):
    monkeypatch.setattr(import_tokens, "_BLOCK_BYTES", block_bytes)
    documents = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10], [], [], [11]]
    result = import_files(*write_llm_c(folder, documents, shard_size=shard_size))
    assert documents_of() == [[1, 2, 3, EOT], [4, EOT], [5, 6, 7, 8, 9, 10, EOT], [11, EOT]]
    assert (result["documents"], result["tokens"], result["empty_documents"]) == (4, 15, 4)


def test_without_any_end_of_text_all_is_one_document(folder, caplog):
    np.array([3, 4, 5], "<u2").tofile("train.bin")
    np.array([], "<u2").tofile("empty.bin")
    import_files("train.bin", "empty.bin", "--dtype", "uint16")
    assert documents_of() == [[3, 4, 5, EOT]]
    assert "all is one document" in caplog.text and "empty.bin is empty" in caplog.text


def test_another_delimiter_becomes_the_end_of_text(folder):
    """llm.c puts Llama 3's beginning of text before each document."""
    shards = write_llm_c(folder, [[300, 1], [2], [3]], 20240801, 7, np.uint32, 4, first=BOS)
    import_files(*shards, "--delimiter", BOS)
    assert documents_of() == [[300, 1, EOT], [2, EOT], [3, EOT]]


@pytest.mark.parametrize("kind", ["list", "large"])
def test_rows_are_documents(folder, kind):
    rows = [[1, 2], [], [3, EOT], [EOT, 4, 5], [EOT], *([6] for _ in range(20))]
    result = import_files(*write_rows(folder, rows, kind))
    assert documents_of() == [[1, 2, EOT], [3, EOT], [4, 5, EOT], *([6, EOT] for _ in range(20))]
    assert result["empty_documents"] == 3  # two rows without text, and the end of text at a beginning


@pytest.mark.parametrize("kind", ["list", "fixed"])
def test_packed_rows_are_one_stream(folder, kind):
    stream = [1, 2, EOT, 3, 4, 5, 6, 7, 8, 9, 10, EOT]
    rows = write_rows(folder, np.reshape(stream * 10, (-1, 3)).tolist(), kind)
    with pytest.raises(ValueError, match=r"rows.parquet: row 30 \(from 0\) has the end of text inside.*add --packed"):
        write_rows(folder, [*([1, 2, 3] for _ in range(30)), [4, EOT, 5]], kind)
        import_files(*rows)
    write_rows(folder, np.reshape(stream * 10, (-1, 3)).tolist(), kind)
    import_files(*rows, "--packed")
    assert documents_of() == [[1, 2, EOT], [3, 4, 5, 6, 7, 8, 9, 10, EOT]] * 10


def test_tokens_are_stored_in_the_dtype_of_the_vocabulary(folder):
    np.save("big.npy", np.array([1, 2, EOT], ">i8"))
    assert import_files("big.npy")["dtype"] == "uint16"
    assert files("out")[0] == np.array([1, 2, EOT], "<u2").tobytes()


def test_a_finished_import_is_found_and_other_flags_make_it_anew(folder):
    flags = write_nanogpt(folder, [[1, 2, BOS, 3]])
    assert not import_files(*flags)["skipped"]
    assert import_files(*flags)["skipped"]
    assert not import_files(*flags, "--delimiter", BOS)["skipped"]
    assert documents_of() == [[1, 2, EOT], [3, EOT]]


@pytest.mark.parametrize("write", [write_llm_c, write_rows])
def test_a_killed_import_goes_on_where_it_stopped(folder, monkeypatch, write, caplog):
    flags = write(folder, [[1 + number] * (number + 1) for number in range(40)])
    import_files(*flags)
    wanted, record = files("out"), Path("out_text_document.json").read_bytes()
    for path in folder.glob("out*"):
        path.unlink()
    monkeypatch.setattr(import_tokens, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(parquet, "_BATCH_ROWS", 3)
    commit, sizes = PartialShard.commit, []

    def dies(partial, *_):
        sizes.append(partial.sizes[0])
        if len(sizes) % 3 == 0:
            raise KeyboardInterrupt
        commit(partial)

    monkeypatch.setattr(PartialShard, "commit", dies)
    with caplog.at_level("INFO"):
        while not Path("out_text_document.idx").exists():
            try:
                import_files(*flags)
            except KeyboardInterrupt:
                continue
    assert caplog.text.count("continuing after") > 1
    assert (files("out"), Path("out_text_document.json").read_bytes()) == (wanted, record)


def test_a_document_longer_than_the_index_can_tell_is_an_error(folder, monkeypatch):
    flags = write_nanogpt(folder, [[1] * 10])
    monkeypatch.setattr(mmidx, "MAX_SEQUENCE", 10)
    with pytest.raises(ValueError, match=r"no end of text \(id 0\) in 11 tokens.*--delimiter"):
        import_files(*flags)
    assert not Path("out_text_document.idx").exists()


def header(*numbers):
    return np.array([*numbers, *[0] * (256 - len(numbers))], "<i4").tobytes()


@pytest.mark.parametrize(
    "name, content, flags, message",
    [
        ("a.bin", b"\1\0\2\0", "", "a.bin has no header .* give --dtype"),
        ("a.bin", b"\1\0\2\0\3", "--dtype uint16", "a.bin has 5 bytes, 2 tokens of uint16 take 4"),
        ("a.bin", header(20240520, 1, 3) + b"\1\0" * 2, "", "a.bin has 1028 bytes, 3 tokens of uint16 take 1030"),
        ("a.bin", header(20240520, 2, 1) + b"\1\0", "", "a.bin is of llm.c's version 2, only 1 is known"),
        ("a.bin", header(20240801, 7, 1) + b"\1\0\0\0", "--dtype uint16", "--dtype uint16: .*a.bin .* stores uint32"),
        ("a.bin", b"\1\0\x90\1", "--dtype uint16", "a.bin holds token ids from 1 to 400, but GPT2BPETokenizer has 400"),
        ("a.bin", b"\1\0\xff\xff", "--dtype int32", "a.bin holds token ids from -65535 to -65535"),
        ("a.bin", b"\0\0" * 3, "--dtype uint16", "a.bin: there are no documents in it"),
        ("a.bin", b"", "--dtype uint16", "a.bin: there are no documents in it"),
        ("a.npy", np.zeros((2, 2), np.uint16), "", r"a.npy is an array of uint16 with the shape \(2, 2\)"),
        ("a.npy", np.zeros(2), "", "a.npy is an array of float64"),
        ("a.npy", b"\x93NUMPY\1\0v\0{'descr", "", "a.npy is damaged"),
        ("a.npy", b"\x93NUMPY\1\0v\0" + b"('descr': '<u2',".ljust(118), "", "a.npy is damaged"),
        ("a.parquet", b"PAR1", "", "a.parquet: damaged or not a parquet file"),
    ],
)
def test_files_that_are_not_what_they_seem(folder, name, content, flags, message):
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    else:
        np.save(name, content)
    with pytest.raises(ValueError, match=message):
        import_files(name, *flags.split())
    assert not list(folder.glob("out*.idx"))


@pytest.mark.parametrize(
    "column, message", [("ids", "has no column 'ids', but text, input_ids"), ("text", "the column 'text' has string")]
)
def test_other_columns(folder, column, message):
    with pytest.raises(ValueError, match=f"rows.parquet.* {message}.*--column"):
        import_files(*write_rows(folder, [[1], [2]]), "--column", column)


def test_nulls_are_no_tokens(folder):
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for rows in ([[1, None]], [[1], None]):
        tables.write_table(pyarrow.table({"input_ids": rows}), "rows.parquet")
        with pytest.raises(ValueError, match="the column 'input_ids' has list.* nulls"):
            import_files("rows.parquet")


def test_what_a_folder_stands_for(folder):
    shards = write_llm_c(folder, [[1], [2], [3]], shard_size=2)
    (folder / "in").mkdir()
    for name in shards[::-1]:
        Path(name).rename(folder / "in" / name)
    Path("in/notes.txt").touch()
    import_files("in")
    assert documents_of() == [[1, EOT], [2, EOT], [3, EOT]]
    Path("in", shards[0]).rename("in/fineweb_val_000000.bin")
    with pytest.raises(ValueError, match="holds fineweb_val_000000.bin beside others.* in/.train."):
        import_files("in")
    with pytest.raises(ValueError, match="--output-prefix in/c.* lies in --input in"):
        run_step("import_tokens", "--input", "in", "--output-prefix", "in/c", "--tokenizer-path", "v")
    Path("none").mkdir()
    with pytest.raises(FileNotFoundError, match="--input none: the folder holds no .bin, .npy"):
        import_files("none")


def test_inputs_that_are_refused(folder):
    Path("saved").mkdir()
    Path("saved/data-00000-of-00001.arrow").touch()
    with pytest.raises(ValueError, match=r"\.arrow is of .*: datasets.load_from_disk\('saved'\)\.to_parquet\(FILE\)"):
        import_files("saved")
    with IndexedDatasetWriter("pair", np.uint16) as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match="pair.bin has an .idx.*merge_datasets"):
        import_files("pair.bin")
    write_jsonl(folder / "in.jsonl", ["ASCII has small ids"])
    with pytest.raises(ValueError, match="--input in.jsonl is text, not tokens.*data_tools tokenize"):
        import_files("in.jsonl", "--dtype", "uint16")
    with pytest.raises(FileNotFoundError, match="--input absent.bin: there is no such file"):
        import_files("absent.bin")
    files = write_rows(folder, [[1]]) + write_llm_c(folder, [[1]])
    with pytest.raises(ValueError, match="--input names .parquet and other files"):
        import_files(*files)
    with pytest.raises(ValueError, match=r"rows.parquet is named twice"):
        import_files("rows.parquet", "./rows.parquet")
