"""Hugging Face directories, opened and written by transformers itself where it is installed."""

import errno
import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from megazero.checkpoint.commands import export
from megazero.checkpoint.commands.export import named_files, write_huggingface
from megazero.checkpoint.importers.foreign import ForeignCheckpoint, ForeignTensor, write_foreign
from megazero.checkpoint.importers.huggingface import read_huggingface
from megazero.checkpoint.vocabulary import saved_tokenizer
from megazero.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from megazero.data.tokenizer_export import huggingface_files
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from megazero.model.huggingface import config_to_huggingface, to_huggingface
from megazero.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from tests.model.nanogpt import NanoGPT
from tests.model.plain_gpt2 import PlainGPT2, random_state, random_tokens, randomize
from tests.model.test_gpt2 import LLAMA
from tests.vocabularies import make_gpt2_vocabulary, make_sentencepiece, make_texts

ROOT = Path(__file__).parents[3]
CONFIG = GPT2Config(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=11,
    vocab_size=131,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
UNBIASED = replace(CONFIG, disable_bias_linear=True)
GROUPED = replace(CONFIG, **LLAMA)
TIED = replace(GROUPED, group_query_attention=False, num_query_groups=None, untie_embeddings_and_output_weights=False)


@pytest.fixture
def full():
    return random_state(CONFIG)


@pytest.fixture
def written(full, tmp_path):
    """A directory that we have written."""
    write_huggingface(tmp_path / "model", full.__getitem__, CONFIG, torch.float32)
    return tmp_path / "model"


def read_all(directory):
    return {name: tensor.states["master"]() for name, tensor in read_huggingface(directory).tensors.items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize(
    ("config", "max_shard_bytes"), [(CONFIG, 10**9), *((c, 9_000) for c in (CONFIG, UNBIASED, GROUPED, TIED))]
)
def test_transformers_opens_it_and_computes_the_same_logits(tmp_path, monkeypatch, config, max_shard_bytes):
    transformers = pytest.importorskip("transformers")
    full = random_state(config)
    ours = GPT2Model(config, group=dist.ProcessGroup(dist.HashStore(), 0, 1)).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter[: len(full[name])] = full[name]
    directory = tmp_path / "model"
    monkeypatch.setattr(export, "_MAX_SHARD_BYTES", max_shard_bytes)
    write_huggingface(directory, full.__getitem__, config, torch.float32, end_of_text=0)
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    assert (len(shards) > 3) == (max_shard_bytes == 9_000)
    assert shards == ["model.safetensors"] or shards[0].startswith("model-00001-of-")
    assert len(list(tmp_path.iterdir())) == 1, "files aside are left"

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    is_tied = theirs.lm_head.weight is theirs.get_input_embeddings().weight
    assert is_tied != config.untie_embeddings_and_output_weights
    tokens = random_tokens(3, 11, config.vocab_size)
    assert_close(theirs.eval()(tokens).logits, ours(tokens)[..., : config.vocab_size], atol=1e-5, rtol=1e-5)
    generated = theirs.generate(tokens[:, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert generated.shape[1] <= 9 and torch.equal(generated[:, :4], tokens[:, :4])
    assert theirs.generation_config.eos_token_id == 0


@pytest.mark.parametrize("config", [CONFIG, GROUPED, TIED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_theirs_to_ours_to_theirs_is_bitwise(tmp_path, dtype, config):
    transformers = pytest.importorskip("transformers")
    described = transformers.AutoConfig.for_model(**config_to_huggingface(config))
    model = transformers.AutoModelForCausalLM.from_config(described)
    randomize(model)
    model.to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size="9KB" if dtype == torch.bfloat16 else "5GB")
    checkpoint = read_huggingface(tmp_path / "theirs")
    assert GPT2Config(**checkpoint.client_state["model"]) == config
    assert checkpoint.optimizer_counters is None
    assert {(t.kind, *t.states) for t in checkpoint.tensors.values()} == {("trained", "master")}
    assert all(t.states["master"]().dtype == torch.float32 for t in checkpoint.tensors.values())

    write_huggingface(tmp_path / "ours", lambda name: checkpoint.tensors[name].states["master"](), config, dtype)
    assert_same(load_file(tmp_path / "ours" / "model.safetensors"), _saved(model.state_dict(), config))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == dtype
    assert_same(again.state_dict(), model.state_dict())


def _saved(state, config):
    has_head = config.untie_embeddings_and_output_weights
    return {name: tensor for name, tensor in state.items() if has_head or name != "lm_head.weight"}


def test_round_trip_of_ours_is_bitwise_and_gives_no_view_of_the_file(full, written):
    found = read_all(written)
    assert_same(found, full)
    assert {name: t.shape for name, t in read_huggingface(written).tensors.items()} == CONFIG.full_shapes()
    tensor = read_huggingface(written).tensors["transformer.final_layernorm.bias"]
    tensor.states["master"]().zero_()
    assert tensor.states["master"]().any()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_old_directory_with_pytorch_files_masks_and_a_head(full, tmp_path, is_sharded):
    state = {name.removeprefix("transformer."): t for name, t in to_huggingface(full, CONFIG).items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 11, 11, dtype=torch.uint8)
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(CONFIG)))
    if is_sharded:
        names = dict.fromkeys(state, "pytorch_model-00001-of-00002.bin") | {
            "wpe.weight": "pytorch_model-00002-of-00002.bin"
        }
        for file in set(names.values()):
            torch.save({name: t for name, t in state.items() if names[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(read_all(tmp_path), full)


def test_a_model_of_theirs_in_a_checkpoint_of_their_names_is_imported_by_way_of_plain_weights(tmp_path):
    """As the Trainer's under DeepSpeed."""
    full = random_state(TIED)
    theirs = to_huggingface(full, TIED)
    del theirs["lm_head.weight"]
    tensors = {name: ForeignTensor(t.shape, "trained", {"master": lambda t=t: t}) for name, t in theirs.items()}
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    write_foreign(ForeignCheckpoint(tensors, aliases=aliases), tmp_path / "ours")
    file = tmp_path / "theirs" / "model.safetensors"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ours", file)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config_to_huggingface(TIED)))
    assert_same(read_all(tmp_path / "theirs"), full)


@pytest.mark.parametrize(("prefix", "bias"), [("_orig_mod.", False), ("", True)])
def test_the_pages_lines_make_a_model_of_nanogpts_one_that_is_imported(tmp_path, monkeypatch, prefix, bias):
    args = {"n_layer": 2, "n_head": 4, "n_embd": 24, "block_size": 11, "bias": bias, "vocab_size": 131}
    theirs = NanoGPT(**args)
    randomize(theirs)
    state = {prefix + name: value for name, value in theirs.state_dict().items()}
    state[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 11, 11)  # its mask, without flash attention
    monkeypatch.chdir(tmp_path)
    torch.save({"model": state, "model_args": {**args, "dropout": 0.0}, "iter_num": 3}, "ckpt.pt")
    page = (ROOT / "docs" / "checkpoints.md").read_text().split("## From nanoGPT")[1]
    exec(compile(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], "docs/checkpoints.md", "exec"), {})
    model = PlainGPT2(GPT2Config(**read_huggingface("nanogpt").client_state["model"]))
    model.load_state_dict(read_all("nanogpt"))
    tokens = random_tokens(3, 11, 131)
    monkeypatch.setattr(F, "gelu", partial(F.gelu, approximate="tanh"))
    assert_close(model(tokens), theirs(tokens), atol=1e-5, rtol=1e-5)


def test_tokenizer_files_come_under_the_names_that_transformers_looks_for(full, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = make_gpt2_vocabulary(tmp_path / "vocabulary", vocab_size=CONFIG.vocab_size)
    vocab = (folder / "vocab.json").rename(folder / "encoder.json")
    merges = (folder / "merges.txt").rename(folder / "vocab.bpe")
    write_huggingface(tmp_path / "model", full.__getitem__, CONFIG, torch.float32, named_files([vocab, merges]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("the ranks, 中")) == "the ranks, 中"
    assert (tmp_path / "model" / "vocab.json").read_bytes() == vocab.read_bytes()
    clash = tmp_path / "config.json"
    clash.write_text("{}")
    with pytest.raises(ValueError, match="would take the place of config.json"):
        write_huggingface(tmp_path / "other", full.__getitem__, CONFIG, torch.float32, named_files([clash]))
    assert not (tmp_path / "other").exists()


def test_a_generation_config_that_is_given_says_the_special_tokens(full, tmp_path):
    ids = {"bos_token_id": 5, "eos_token_id": [7, 9], "pad_token_id": 3}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**ids, "temperature": 0.6}))
    write_huggingface(tmp_path / "model", full.__getitem__, CONFIG, torch.float32, named_files([path]), end_of_text=0)
    assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "model" / "config.json").read_text()).items() >= ids.items()
    for content in ("", "{", "3"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"the generation_config\.json that was given is none"):
            write_huggingface(tmp_path / "other", None, CONFIG, torch.float32, named_files([path]))


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_transformers_gives_the_ids_of_our_tokenizer(full, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    is_model = kind == "SentencePieceTokenizer"
    path = make_sentencepiece(tmp_path / "a.model") if is_model else make_gpt2_vocabulary(tmp_path / "vocabulary")
    ours = build_tokenizer(kind, tokenizer_path=path)
    write_huggingface(tmp_path / "model", full.__getitem__, CONFIG, torch.float32, huggingface_files(ours))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (theirs.eos_token_id, len(theirs)) == (ours.eod, ours.vocab_size)
    for text in make_texts(50):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text) and theirs.decode(ids) == text


@pytest.mark.parametrize(
    ("kind", "size"), [(TOKENIZER_TYPES[0], 131), (TOKENIZER_TYPES[2], 131), (TOKENIZER_TYPES[2], 300)]
)
def test_the_tokenizer_beside_the_weights_comes_along_unless_the_model_is_too_small_for_it(
    full, tmp_path, caplog, kind, size
):
    folder = make_gpt2_vocabulary(tmp_path / "vocabulary", vocab_size=size)
    ours = build_tokenizer(kind, tokenizer_path=folder)
    config = replace(CONFIG, vocab_size=min(ours.vocab_size, 299))  # exactly as large, or one too small
    files = {name: (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}  # a tokenizer.json says more
    files |= huggingface_files(ours)
    write_huggingface(tmp_path / "model", random_state(config).__getitem__, config, torch.float32, files)
    client = read_huggingface(tmp_path / "model").client_state
    if ours.vocab_size <= config.vocab_size:
        found = saved_tokenizer(client, tmp_path)
        assert found.name == kind and found.encode("the ranks") == ours.encode("the ranks")
    else:
        assert client.keys() == {"model"}
        assert f"it has {ours.vocab_size} entries, and the model {config.vocab_size}" in caplog.text


def test_a_wrong_tokenizer_file_is_told_before_any_weight_is_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for file, error in (("config.json", ValueError), ("missing", FileNotFoundError)):
        with pytest.raises(error, match=file):
            write_huggingface(tmp_path / "model", None, CONFIG, torch.float32, named_files([tmp_path / file]))
    assert not (tmp_path / "model").exists()


def test_a_failed_write_leaves_nothing_and_a_full_directory_is_not_touched(full, written, monkeypatch):
    def fails(name):
        raise OSError(errno.ENOSPC, "the disk is full")

    with pytest.raises(OSError, match="model.safetensors: the disk is full"):
        write_huggingface(written.parent / "other", fails, CONFIG, torch.float32)
    assert list(written.parent.iterdir()) == [written]
    with pytest.raises(FileExistsError, match="exists already"):
        write_huggingface(written, full.__getitem__, CONFIG, torch.float32)
    with pytest.raises(ValueError, match=r"word_embeddings.weight has shape \[2, 2\]"):
        write_huggingface(written.parent / "other", lambda name: torch.ones(2, 2), CONFIG, torch.float32)
    with pytest.raises(ValueError, match="torch.int8"):
        write_huggingface(written.parent / "other", full.__getitem__, CONFIG, torch.int8)
    (written.parent / "empty").mkdir()
    with monkeypatch.context() as patch, pytest.raises(FileExistsError, match="empty is a mount point"):
        patch.setattr(os.path, "ismount", lambda path: path == written.parent / "empty")
        write_huggingface(written.parent / "empty", fails, CONFIG, torch.float32)
    other = written.parent / f"empty.tmp{os.getpid()}"  # of an export in another container, with the same process id
    (other / "under way").mkdir(parents=True)
    write_huggingface(written.parent / "empty", full.__getitem__, CONFIG, torch.float32)
    assert_same(read_all(written.parent / "empty"), full)
    assert (other / "under way").is_dir()
    assert sorted(path.name for path in written.parent.iterdir()) == ["empty", other.name, "model"]


def test_what_is_missing_is_named(written):
    (written / "model.safetensors").rename(written / "weights")
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        read_huggingface(written)
    (written / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        read_huggingface(written)
    (written / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=r"an adapter of PEFT's, not a model: .*model\.merge_and_unload"):
        read_huggingface(written)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "bert"}', "model_type='bert'"),
        ('{"model_type": "llama"}', "missing embed_tokens.weight"),
        ("{", "config.json is not JSON"),
        ("[]", "holds a list"),
        ('{"n_embd": "many"}', "config.json: "),
        ('{"quantization_config": {"bits": 4}}', "has a quantization_config; quantised checkpoints cannot"),
        (
            '{"architectures": ["GPT2ForSequenceClassification"]}',
            "GPT2ForSequenceClassification, and only language models",
        ),
    ],
)
def test_another_or_a_damaged_configuration_is_refused(written, content, message):
    (written / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_huggingface(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("transformer.h.1.ln_2.bias"), r"missing h\.1\.ln_2\.bias"),
        (lambda s: s.update({"transformer.h.2.ln_1.bias": torch.ones(24)}), r"unknown h\.2\.ln_1\.bias"),
        (
            lambda s: s.update({"transformer.wpe.weight": torch.ones(9, 24)}),
            r"position_embeddings.weight has \[9, 24\]",
        ),
        (lambda s: s.update({"lm_head.weight": torch.ones(131, 24)}), "lm_head.weight differs"),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_named(written, change, message):
    state = load_file(written / "model.safetensors")
    change(state)
    save_file(state, written / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        read_huggingface(written)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path, dtype):
    write_huggingface(tmp_path / "model", random_state(TIED).__getitem__, TIED, torch.float32)
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = state[name].to(dtype)  # one of two that become one parameter here
    save_file(state, file)
    message = f"{name} is of {dtype}; quantised checkpoints cannot be read"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_all(file.parent)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].to(dtype)}, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight is of"):  # and not one that differs from the embedding
        read_huggingface(file.parent)


def test_files_of_other_objects_are_refused(written):
    (written / "model.safetensors").unlink()
    for content in ([torch.ones(3)], {"transformer.wpe.weight": 1}):
        torch.save(content, written / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pytorch_model.bin is no state dict"):
            read_huggingface(written)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "model.pkl", "", 3, "x\n.bin", "a\\b.bin"]
)
def test_an_index_cannot_point_out_of_its_directory(written, name):
    (written / "model.safetensors").rename(written.parent / "model.safetensors")
    (written / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    with pytest.raises(ValueError, match="only .safetensors and .bin files of the index's own directory"):
        read_huggingface(written)


def test_damaged_shards_are_named(written):
    (written / "model.safetensors").rename(written / "a.safetensors")
    index = written / "model.safetensors.index.json"
    for weight_map, message in [
        (None, "no weight_map"),
        ({"transformer.wte.weight": "b.safetensors"}, "b.safetensors, which is missing"),
        ({"transformer.other": "a.safetensors"}, "says that transformer.other is in a.safetensors, and it is not"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            read_huggingface(written)
    index.unlink()
    (written / "model.safetensors").write_bytes((written / "a.safetensors").read_bytes()[:-4])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        read_huggingface(written)
