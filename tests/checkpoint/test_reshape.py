"""Checkpoints that one process writes: of ours for other ranks, of other frameworks', and back to them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open

from megazero.checkpoint.__main__ import main
from megazero.checkpoint.commands import reshape as reshape_module
from megazero.checkpoint.commands.reshape import reshape
from megazero.checkpoint.commands.verify import verify
from megazero.checkpoint.format import SCHEDULE, CheckpointError
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor, write_foreign
from megazero.checkpoint.plain import client_state, decode
from megazero.checkpoint.reader import Reader
from megazero.data.tokenizer import build_tokenizer
from megazero.model.config import GPT2Config
from tests.checkpoint.checkpoints import TAG, flip, make, tensors
from tests.checkpoint.importers import deepspeed_checkpoints
from tests.checkpoint.test_store import load_case, save_case
from tests.ranks import run_ranks
from tests.vocabularies import make_gpt2_vocabulary, make_sentencepiece

SIZES = [(1, 1), (1, 3), (2, 2), (4, 1), (3, 5), (6, 1)]


@pytest.mark.parametrize("new", SIZES, ids=str)
@pytest.mark.parametrize("old", [(2, 2), (1, 1), (4, 3)], ids=str)
def test_a_reshaped_checkpoint_holds_the_same(old, new, tmp_path):
    before = make(tmp_path / "a", *old)
    path = reshape(before, tmp_path / "b", *new)
    after = Reader(tmp_path / "b")
    assert path == after.path == tmp_path / "b" / TAG and not verify(tmp_path / "b", TAG).problems
    for name, states in tensors().items():
        for state, value in states.items():
            assert after.read(name, state).equal(value)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert str(client_state(after)) == str(client_state(before))
    assert (after.index["model_parallel_size"], after.index["data_parallel_size"]) == new
    assert [len(each) for each in after.index["blobs"]] == [1] + [0] * (new[0] * new[1] - 1)


def test_a_tag_stays_though_it_ends_as_names_of_what_is_being_replaced_do(tmp_path):
    before = make(tmp_path / "a", tag="best.replaced")
    assert reshape(before, tmp_path / "b", 1, 1).name == "best.replaced"
    before.path.rename(tmp_path / "a" / ".best.replaced.replaced")  # died between its two renames
    assert reshape(Reader(tmp_path / "a", "best.replaced"), tmp_path / "c", 1, 1).name == "best.replaced"


def test_a_checkpoint_whose_replacement_died_is_not_replaced(tmp_path):
    before, other = make(tmp_path / "a"), make(tmp_path / "b", client={"other": True})
    want = str(client_state(before))
    before.path.rename(tmp_path / "a" / f".{TAG}.replaced")  # died between its two renames
    with pytest.raises(FileExistsError, match="exists already"):
        reshape(other, tmp_path / "a", 1, 1)
    assert str(client_state(Reader(tmp_path / "a", TAG))) == want


def test_files_are_those_of_the_ranks(tmp_path):
    """What is cut lies in the files of the rank that holds it, what is not in those of the first; each has its equal share."""
    reshape(make(tmp_path / "a"), tmp_path / "b", 2, 3)
    held = []
    for number in range(6):
        with safe_open(tmp_path / "b" / TAG / f"rank_{number:05d}.safetensors", framework="pt") as file:
            held.append({key: file.get_tensor(key).numel() for key in file.keys()})  # noqa: SIM118
    words = sum(rank.get("master/words", 0) for rank in held[1::2])
    assert words == 8 * 5  # half of 13 rows and 3 of padding, as they were saved
    assert not any("master/norm" in rank or "constant/frozen" in rank for rank in held[1::2])
    numel = [sum(n for key, n in rank.items() if key.startswith(("master/", "constant/"))) for rank in held]
    assert max(numel[1::2]) - min(numel[1::2]) <= 1 and max(numel[::2]) - min(numel[::2]) <= 1


def test_no_more_than_a_piece_is_in_memory(tmp_path, monkeypatch):
    before, largest = make(tmp_path / "a", 1, 1), []
    real = reshape_module.write_checkpoint

    def recorded(directory, tag, index, blobs, read):
        def read_and_note(piece, state):
            value = read(piece, state)
            largest.append(value.untyped_storage().nbytes())
            return value

        return real(directory, tag, index, blobs, read_and_note)

    monkeypatch.setattr(reshape_module, "write_checkpoint", recorded)
    reshape(before, tmp_path / "b", 1, 4)
    assert max(largest) <= 4 * 36 * 7


def test_nothing_is_left_of_a_damaged_source(tmp_path):
    before = make(tmp_path / "a")
    path = tmp_path / "a" / TAG / "rank_00003.safetensors"
    flip(path, -1)
    with pytest.raises(CheckpointError, match="rank_00003"):
        reshape(before, tmp_path / "b", 1, 1)
    assert {each.name for each in (tmp_path / "b").iterdir()} <= {".lock"}


def test_padding_is_as_little_as_the_ranks_allow(tmp_path):
    after = Reader(reshape(make(tmp_path / "a"), tmp_path / "b", 3, 1).parent)
    assert after.index["tensors"]["words"]["cut"] == {"dim": 0, "stride": 1, "padded": 15}


def test_training_continues_from_a_checkpoint_that_was_rewritten(tmp_path):
    want = run_ranks(2, save_case, 2, str(tmp_path / "a"))[0]
    reshape(Reader(tmp_path / "a"), tmp_path / "b", 4, 3)
    write_foreign(as_foreign(Reader(tmp_path / "a")), tmp_path / "c")
    for directory in ("b", "c"):
        got = run_ranks(1, load_case, 1, str(tmp_path / directory))
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want), rtol=1e-5, atol=1e-7)


def as_foreign(reader: Reader) -> ForeignCheckpoint:
    """A checkpoint of ours as an importer would give it."""
    found = {}
    for name, entry in reader.tensors.items():
        read = {state: lambda name=name, state=state: reader.read(name, state) for state in entry.states}
        found[name] = ForeignTensor(entry.shape, entry.kind, read, entry.states.get("constant", torch.float32))
    optimizer = reader.index["optimizer"]
    return ForeignCheckpoint(
        found,
        global_steps=reader.index["global_steps"],
        optimizer_type=optimizer["type"],
        optimizer_counters=optimizer["counters"],
        optimizer_groups=optimizer["groups"],
        client_state=client_state(reader),
    )


def foreign() -> ForeignCheckpoint:
    """As an importer makes it: every value is made when it is asked for."""
    found = {}
    for name, states in tensors().items():
        kind = "trained" if "master" in states else "frozen" if name == "frozen" else "buffer"
        shape = tuple(next(iter(states.values())).shape)
        readers = {state: value.clone for state, value in states.items()}
        found[name] = ForeignTensor(shape, kind, readers, next(iter(states.values())).dtype)
    return ForeignCheckpoint(
        found,
        aliases={"head": "words"},
        global_steps=1000,
        skipped_steps=2,
        global_samples=4000,
        optimizer_type="AdamW",
        optimizer_counters={"step": 998.0},
        optimizer_groups=[{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1], "hook": print}],
        lr_scheduler={"last": 1000, "sizes": (1, 2), "rates": torch.tensor([0.1])},
        loss_scaler={"scale": 2.0**16},
        client_state={"args": {"lr": 0.1}, "rng": torch.arange(3, dtype=torch.uint8), "history": [float("inf")]},
    )


def test_a_foreign_checkpoint_becomes_one_of_ours(tmp_path):
    path = write_foreign(foreign(), tmp_path)
    reader = Reader(tmp_path)
    assert path == reader.path == tmp_path / "global_step1000" and not verify(tmp_path, path.name).problems
    for name, states in tensors().items():
        assert {state: reader.read(name, state).equal(value) for state, value in states.items()} == dict.fromkeys(
            states, True
        )
    index = reader.index
    assert (index["global_steps"], index["skipped_steps"], index["aliases"]) == (1000, 2, {"head": "words"})
    assert index["counters"] == {"global_samples": 4000}
    assert index["optimizer"] == {
        "type": "AdamW",
        "counters": {"step": 998.0},
        "counters_of": {},
        "groups": [{"lr": 0.1, "betas": [0.9, 0.95]}],
    }
    schedule = decode(index["lr_scheduler"], reader.blobs(SCHEDULE))
    assert schedule["sizes"] == (1, 2) and schedule["rates"].equal(torch.tensor([0.1]))
    client = client_state(reader)
    assert client["history"] == [float("inf")] and client["rng"].equal(torch.arange(3, dtype=torch.uint8))


def test_every_foreign_tensor_is_read_once(tmp_path):
    checkpoint, reads = foreign(), Counter()

    def counted(name: str, state: str, read):
        return lambda: (reads.update([(name, state)]), read())[1]

    for name, tensor in checkpoint.tensors.items():
        states = {state: counted(name, state, read) for state, read in tensor.states.items()}
        checkpoint.tensors[name] = replace(tensor, states=states)
    write_foreign(checkpoint, tmp_path)
    assert reads[("frozen", "constant")] == 1 and set(reads.values()) == {1}


def test_a_foreign_checkpoint_of_weights_alone_has_no_optimizer(tmp_path):
    only = {
        name: ForeignTensor(tensor.shape, tensor.kind, {"master": tensor.states["master"]})
        for name, tensor in foreign().tensors.items()
        if tensor.kind == "trained"
    }
    path = write_foreign(ForeignCheckpoint(only), tmp_path)
    index = json.loads((path / "index.json").read_text())
    assert (path.name, index["optimizer"], index["lr_scheduler"]) == ("global_step0", None, None)


@pytest.mark.parametrize(
    "tensor, message",
    [
        (
            ForeignTensor((3,), "trained", {"master": lambda: torch.zeros(2)}),
            r"master of a has shape \[2\], announced as \[3\]",
        ),
        (ForeignTensor((3,), "trained", {"exp_avg": lambda: torch.zeros(3)}), "it has no weights"),
        (ForeignTensor((3,), "trained", {"constant": lambda: torch.zeros(3)}), "with the states constant: it has no"),
        (ForeignTensor((3,), "frozen", {"master": lambda: torch.zeros(3)}), "with the states master: it has no"),
        (ForeignTensor((3,), "frozen", {}), "with the states none: it has no weights"),
        (
            ForeignTensor((3,), "frozen", {"constant": lambda: torch.zeros(3).half()}),
            "a is torch.float16, announced as",
        ),
        (
            ForeignTensor((3,), "buffer", {"constant": lambda: None}, torch.uint16),
            "^a: tensors of torch.uint16 cannot be saved",
        ),
    ],
)
def test_a_foreign_checkpoint_that_is_wrong_leaves_nothing(tensor, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_foreign(ForeignCheckpoint({"a": tensor}), tmp_path / "out")
    assert not (tmp_path / "out").exists() or {each.name for each in (tmp_path / "out").iterdir()} <= {".lock"}


@pytest.mark.parametrize("names, aliases", [([("a",)], {}), (["b"], {("a",): "b"})])
def test_a_name_that_is_no_text_is_refused(names, aliases, tmp_path):
    tensor = ForeignTensor((3,), "trained", {"master": lambda: torch.zeros(3)})
    with pytest.raises(ValueError, match=r"^\('a',\) stands for the name of a tensor"):
        write_foreign(ForeignCheckpoint(dict.fromkeys(names, tensor), aliases=aliases), tmp_path)


def test_what_has_no_tensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no tensor of a model, so nothing was written"):
        write_foreign(ForeignCheckpoint({}, global_steps=3), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_to_huggingface_and_back(tmp_path, capsys):
    config = GPT2Config(num_layers=2, hidden_size=12, num_attention_heads=3, max_position_embeddings=9, vocab_size=17)
    torch.manual_seed(0)
    values = {name: torch.randn(shape) for name, shape in config.full_shapes().items()}
    weights = {name: ForeignTensor(tuple(v.shape), "trained", {"master": v.clone}) for name, v in values.items()}
    ours = write_foreign(ForeignCheckpoint(weights, client_state={"model": asdict(config)}), tmp_path / "ours")
    reshape(Reader(ours.parent, ours.name), tmp_path / "cut", 1, 3)
    for dtype, status in (("fp32", 0), ("bf16", 1)):
        theirs, back = str(tmp_path / dtype), str(tmp_path / f"back_{dtype}")
        assert main(["export", "--to", "huggingface", str(tmp_path / "cut"), theirs, "--dtype", dtype]) == 0
        assert main(["import", "--from", "huggingface", theirs, back]) == 0
        assert main(["diff", "--weights-only", str(ours), back]) == status
    out = capsys.readouterr().out.splitlines()
    assert f"wrote {tmp_path / 'fp32'}" in out and "equal: 28 tensors, value for value" in out
    assert any(
        line.startswith(f"wrote {tmp_path / 'back_fp32' / 'global_step0'}: 28 tensors in 1 file, ") for line in out
    )


def test_a_deepspeed_checkpoint_is_imported(tmp_path, capsys):
    theirs = deepspeed_checkpoints.small_model()
    deepspeed_checkpoints.write_checkpoint(tmp_path / "theirs", theirs, 2, 3)
    assert main(["import", "--from", "deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    reader = Reader(tmp_path / "ours")
    constants = {name: {"constant": value} for name, value in (theirs.frozen | theirs.buffers).items()}
    for name, states in (theirs.trained | constants).items():
        for state, value in states.items():
            assert reader.read(name, state).equal(value)
    assert reader.index["optimizer"]["counters"] == {"step": theirs.steps} and reader.index["aliases"] == theirs.shared
    assert not verify(tmp_path / "ours", reader.path.name).problems


def test_the_tokenizer_is_exported_too(tmp_path, caplog):
    folder = make_gpt2_vocabulary(tmp_path / "vocabulary")
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=folder)
    vocab_size = tokenizer.vocab_size
    config = GPT2Config(
        num_layers=1, hidden_size=4, num_attention_heads=1, max_position_embeddings=3, vocab_size=vocab_size
    )
    weights = {
        name: ForeignTensor(shape, "trained", {"master": lambda shape=shape: torch.zeros(shape)})
        for name, shape in config.full_shapes().items()
    }
    flags = {"tokenizer_type": tokenizer.name, "vocab_file": None, "merge_file": None, "tokenizer_path": str(folder)}
    client = {"model": asdict(config), "tokenizer": flags, "tokenizer_sha256": tokenizer.sha256}
    write_foreign(ForeignCheckpoint(weights, client_state=client), tmp_path / "ours")
    assert main(["export", "--to", "huggingface", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "theirs" / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["eos_token_id"] == tokenizer.eod
    files = ["--tokenizer-files", str(folder / "vocab.json"), str(folder / "merges.txt")]
    assert main(["export", "--to", "huggingface", str(tmp_path / "ours"), str(tmp_path / "with_files"), *files]) == 0
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [3, 4]}')
    files = ["--tokenizer-files", str(generation)]
    assert main(["export", "--to", "huggingface", str(tmp_path / "ours"), str(tmp_path / "with_ends"), *files]) == 0
    assert {file.name for file in (tmp_path / "with_ends").iterdir()} == {
        f.name for f in (tmp_path / "theirs").iterdir()
    }
    assert (tmp_path / "with_ends" / generation.name).read_bytes() == generation.read_bytes()
    assert not caplog.messages

    path = make_sentencepiece(tmp_path / "a.model", model_type="char", hard_vocab_limit=False)
    of_characters = {**flags, "tokenizer_type": "SentencePieceTokenizer", "tokenizer_path": str(path)}
    for name, changes, why in (
        ("changed", {"tokenizer_sha256": "another"}, "the files that it was trained with have changed"),
        ("script", {"tokenizer": "of a script"}, "the checkpoint names none"),
        (
            "unfit",
            {"tokenizer": of_characters, "tokenizer_sha256": build_tokenizer(**of_characters).sha256},
            "no tokenizer",
        ),
    ):
        write_foreign(ForeignCheckpoint(weights, client_state={**client, **changes}), tmp_path / name)
        assert main(["export", "--to", "huggingface", str(tmp_path / name), str(tmp_path / f"of_{name}")]) == 0
        assert f"without a tokenizer, which --tokenizer-files can give: {why}" in caplog.text
        assert not {"tokenizer_config.json", "vocab.json"} & {file.name for file in (tmp_path / f"of_{name}").iterdir()}

    of_vocabulary = ["--tokenizer-files", str(folder / "vocab.json"), str(folder / "merges.txt")]
    for name, more, is_told in (("endless", [], True), ("ended", [str(generation)], False)):
        caplog.clear()
        command = ["export", "--to", "huggingface", str(tmp_path / "script"), str(tmp_path / name)]
        assert main([*command, *of_vocabulary, *more]) == 0
        assert ("does not know which token ends a text" in caplog.text) == is_told

    (folder / "merges.txt").unlink()
    assert main(["export", "--to", "huggingface", str(tmp_path / "ours"), str(tmp_path / "bare")]) == 0
    assert "exported without a tokenizer, which --tokenizer-files can give" in caplog.text
    assert not (tmp_path / "bare" / "vocab.json").exists()
    files = ["--tokenizer-files", str(folder / "vocab.json")]
    assert main(["export", "--to", "huggingface", str(tmp_path / "ours"), str(tmp_path / "given"), *files]) == 0
    assert (tmp_path / "given" / "vocab.json").exists()
    assert "does not know which token ends a text" in caplog.text
    assert 'only if a tokenizer_config.json says "tokenizer_class": "PreTrainedTokenizerFast"' in caplog.text
