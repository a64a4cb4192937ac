"""A model of a script's own in the GPT-2 job: what it does not carry out is said, and it continues as it has begun."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megazero
import pretrain_gpt2
from examples.finetune_gpt2 import Answers
from megazero import mpu
from megazero.checkpoint.__main__ import main as checkpoint_command
from megazero.checkpoint.commands.export import export_huggingface
from megazero.checkpoint.commands.samples import show_samples
from megazero.checkpoint.own_model import OF_GPT2, gpt2_of, name_of
from megazero.checkpoint.reader import Reader
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.tokenizer import build_tokenizer
from megazero.inference import InferenceConfig, load_model, open_checkpoint, read_model
from megazero.job_batches import Epochs, own_datasets
from megazero.model.config import GPT2Config
from megazero.model.gpt2 import GPT2Model
from tests.ranks import run_ranks, run_script
from tests.tiny import ROOT, TINY_MODEL, WORDS, logged, run_job

SCRIPT = """
import pretrain_gpt2
import torch
from megazero.entry import run_script
from megazero.training import pretrain
from torch import nn
from torch.nn.functional import cross_entropy


class Own(nn.Module):
    def __init__(self, vocab_size, device):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.register_buffer("features", torch.empty(8, 8).normal_(), persistent=False)
        self.to(device)

    def forward(self, tokens):
        return self.head(torch.relu(self.embedding(tokens) @ self.features))


def with_adapter(model):
    model.adapter = nn.Linear(8, 8)
    return model


def make_model(config, groups, device, dtype):
    return RETURNED


def forward_step(job, iterator):
    tokens, targets = BATCH
    return cross_entropy(job.engine(tokens).flatten(0, 1), targets.flatten())


run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, make_model, forward_step))
"""


MUP = """
import pretrain_gpt2
from megazero.entry import run_script
from megazero.training import pretrain


def make_model(*arguments):
    return changed(pretrain_gpt2.make_model(*arguments))


run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, make_model, pretrain_gpt2.forward_step))
"""
PAGE = ROOT / "docs" / "own_scripts.md"


ROWS = [
    {"prompt": "the ranks of a group ", "response": "share one bucket"},
    {"prompt": "and each rank\n", "response": "keeps its shard\nuntil the next gather"},
    {"prompt": "the", "response": " next gather"},
    {"prompt": "one bucket", "response": " and" * 40},
    *({"prompt": f"bucket {i}:", "response": " the ranks" * i} for i in range(1, 5)),
]


JOBS_BATCH = "pretrain_gpt2.get_batch(iterator, job)"
OWN_BATCH = """torch.randint(0, 300, (2, job.micro_batch_size, 32),
        generator=torch.Generator().manual_seed(job.consumed_samples + job.groups.data_parallel_rank))"""


def train(
    corpus: list[str],
    folder: Path,
    *flags: str,
    returned: str = "Own(config.vocab_size, device)",
    batch: str = JOBS_BATCH,
) -> str:
    """What a run of two ranks says."""
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("RETURNED", returned).replace("BATCH", batch))
    return run_script(
        2, str(script), [*TINY_MODEL, *corpus, "--log-interval", "1", "--train-iters", "1", *flags]
    ).stdout


def test_flags_that_another_model_does_not_carry_out_are_named_in_one_warning(corpus, tmp_path):
    flags = (
        "--model-parallel-size 2",
        "--vocab-chunk-size 64",
        "--recompute full",
        "--partition-activations",
        "--compile",
    )
    output = train(corpus, tmp_path, *" ".join([*flags, "--reset-attention-mask"]).split())
    (warning,) = [line for line in output.splitlines() if "make_model returned a Own" in line]
    assert all(flag in warning for flag in (*flags, "--reset-attention-mask")), warning
    assert "--num-layers" not in warning and "--max-position-embeddings" not in warning, "checks need the sizes"


def test_a_model_without_such_flags_has_no_warning_and_a_table_of_its_own_size(corpus, tmp_path):
    output = train(
        corpus,
        tmp_path,
        "--zero-stage",
        "3",
        "--attention-dropout",
        "0.1",
        "--hidden-dropout",
        "0.1",
        "--save",
        str(tmp_path),
    )
    vocabulary = 300
    assert f"parameters  {2 * 8 * vocabulary + vocabulary:,} of Own; TFLOP/s is a GPT-2's" in output, output
    assert "WARNING" not in output and "generate text" not in output, output
    with pytest.raises(ValueError, match="is not of this library's GPT2Model: it has embedding.weight, head.weight"):
        open_checkpoint(InferenceConfig(load=str(tmp_path)))


def test_a_gpt2_with_adapters_is_neither_evaluated_nor_exported_without_them(corpus, tmp_path):
    made = "with_adapter(pretrain_gpt2.make_model(config, groups, device, dtype))"
    train(corpus, tmp_path, "--save", str(tmp_path), returned=made)
    for use in (
        lambda: open_checkpoint(InferenceConfig(load=str(tmp_path))),
        lambda: export_huggingface(Reader(tmp_path), tmp_path / "hf", torch.float32),
    ):
        with pytest.raises(ValueError, match=r"GPT2Model: it has adapter.weight, adapter.bias\. Merge adapters"):
            use()


def test_saved_buffers_of_a_changed_model_are_read_as_its_parameters(one_rank, tmp_path):
    config = GPT2Config(num_layers=1, hidden_size=4, num_attention_heads=1, max_position_embeddings=3, vocab_size=8)

    def changed(model: GPT2Model) -> GPT2Model:
        model.register_buffer("scale", torch.zeros(3))
        model.register_buffer("table", torch.zeros(2), persistent=False)
        return model

    (model := changed(GPT2Model(config))).scale += torch.arange(3)
    settings = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    megazero.initialize(model=model, config=settings)[0].save_checkpoint(tmp_path)
    trained = SimpleNamespace(reader=Reader(tmp_path), model=config, changed=changed)
    assert torch.equal(read_model(trained, mpu.get_groups(), torch.float32).scale, model.scale)


@pytest.mark.parametrize("adds_parameters", [False, True])
def test_the_pages_evaluation_of_a_changed_model_has_the_jobs_own_loss_and_others_refuse_or_warn(
    own_world, corpus, tmp_path, caplog, adds_parameters
):
    block, code = (
        re.search(rf"```python\n({start}.*?)```", PAGE.read_text(), re.DOTALL)[1]
        for start in ("import torch.nn.functional", "from megazero.evaluation")
    )
    imports, change, use = re.fullmatch(r"(.*?)(def changed.*?)(config =.*)", code, re.DOTALL).groups()
    change = block if adds_parameters else change
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=corpus[3])
    tokens = tokenizer.encode(" ".join(WORDS * 20))[: 4 * 32 + 1]  # four samples of the job, which reads all of them
    (tmp_path / "valid.txt").write_text(tokenizer.decode(tokens))
    with IndexedDatasetWriter(str(tmp_path / "valid"), dtype="uint16") as writer:
        writer.add_document(tokens)
    (script := tmp_path / "mup.py").write_text(change + MUP)
    data = [*corpus[:4], "--split", "1,0,0", "--valid-data", str(tmp_path / "valid"), "--eval-iters", "2"]
    flags = [*TINY_MODEL, *data, "--lr", "1e-2", "--train-iters", "4"]

    def trained(ranks: int, *more: str) -> float:
        save = tmp_path / str(ranks)
        done = run_script(ranks, str(script), [*flags, "--save", str(save), *more])
        assert done.returncode == 0, done.stdout
        return next(line["loss"] for line in logged(save) if line["section"] == "valid")

    loss = trained(1)
    if adds_parameters:
        assert trained(2, "--model-parallel-size", "2") == pytest.approx(loss, rel=1e-5)
        script.write_text(script.read_text().replace("mpu.copy_to_model_parallel_region(x, group)", "x"))
        done = run_script(2, str(script), [*flags, "--model-parallel-size", "2"])
        assert "attention.k_weight: not marked as parts" in done.stdout, done.stdout
    names = {}
    use = use.replace("checkpoints/run1", str(tmp_path / "1")).replace("valid.txt", str(tmp_path / "valid.txt"))
    exec(imports + change + use, names)
    assert names["result"].loss == pytest.approx(loss, rel=1e-6) and "mup.make_model" not in caplog.text
    config = InferenceConfig(load=str(tmp_path / "1"))
    if adds_parameters:
        with pytest.raises(ValueError, match=r"is not of this model: the model has no .*\.attention\.q_weight"):
            read_model(open_checkpoint(config, lambda model: model), names["groups"], torch.float32)

        def changed(model: GPT2Model) -> GPT2Model:  # into fp32 and another layout, as layers of one's own may be
            for parameter in names["changed"](model).float().parameters():
                parameter.data = parameter.data.t().contiguous().t()
            return model

        read = read_model(open_checkpoint(config, changed), names["groups"], torch.bfloat16)
        for ours, theirs in zip(read.parameters(), names["model"].parameters(), strict=True):
            assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs.bfloat16())
        return
    for use in (
        lambda: open_checkpoint(config),
        lambda: export_huggingface(Reader(tmp_path / "1"), tmp_path / "hf", torch.float32),
    ):
        caplog.clear()
        use()
        said = "mup.make_model made the model in training. Here, the plain GPT2Model gets the weights"
        assert caplog.text.count(said) == 1


TRAINS_LORA = """
from megazero.entry import run_script
from megazero.training import pretrain

run_script(pretrain_gpt2.check, lambda checked: pretrain(*checked, make_model, forward_step))
"""


def test_the_pages_merge_of_adapters_has_the_loss_that_they_had_in_training(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lora, merge = re.findall(r"```python\n(.*?)```", PAGE.read_text().split("## Adapters")[1], re.DOTALL)[:2]
    flags = [*TINY_MODEL, *corpus, "--train-iters", "4", "--eval-iters", "1", "--no-eod-mask-loss"]
    assert run_job([*flags, "--save", str(tmp_path / "checkpoints/base")], 1).returncode == 0
    (tmp_path / "script.py").write_text(lora.replace("checkpoints/base", f"{tmp_path}/checkpoints/base") + TRAINS_LORA)
    more = [
        "--save",
        str(tmp_path / "checkpoints/lora"),
        "--lr",
        "1e-2",
        "--zero-stage",
        "3",
        "--global-batch-size",
        "8",
    ]
    done = run_script(2, str(tmp_path / "script.py"), [*flags, *more])
    assert done.returncode == 0, done.stdout
    exec(compile(merge, "docs/own_scripts.md", "exec"), {})
    assert checkpoint_command(["import", "--from", "huggingface", "merged", "checkpoints/merged"]) == 0
    more = ["--load", str(tmp_path / "checkpoints/merged"), "--finetune", "--lr", "0"]
    assert run_job([*flags, *more, "--save", str(tmp_path / "checkpoints/still")], 2).returncode == 0
    base, trained, merged = (
        next(line["loss"] for line in logged(tmp_path / "checkpoints" / name) if line["section"] == "valid")
        for name in ("base", "lora", "still")
    )
    assert merged == pytest.approx(trained, rel=1e-5) and trained < base - 0.01


@pytest.mark.parametrize("asks", [False, True])
def test_what_leaves_a_recomputed_block_sideways_has_a_gradient_as_the_page_says(one_rank, asks):
    again, use = (
        re.search(f"`({start}[^`]*)`", PAGE.read_text())[1] for start in ("again = ", "model.trans[^`]*=again")
    )
    grads = []
    for mode in ("none", "full"):
        torch.manual_seed(0)
        config = GPT2Config(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=9, recompute=mode)
        model, aside = GPT2Model(config).eval(), []
        model.transformer.layers[0].mlp.register_forward_hook(lambda _, given, out, aside=aside: aside.append(out))
        if asks:
            exec(f"{again}\n{use}", {"model": model, "megazero": megazero, "SimpleNamespace": SimpleNamespace})
        tokens = torch.arange(8)[None]
        loss = model(tokens, targets=tokens).mean() + aside[0].square().mean()
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads)) == asks


MADE = type("Made", (), {"__module__": "__main__"})


@pytest.mark.parametrize(
    ("function", "script", "name"),
    [
        (partial(pretrain_gpt2.make_model), "mup.py", OF_GPT2),
        (Reader.close, "mup.py", "megazero.checkpoint.reader.Reader.close"),
        (SimpleNamespace(), "mup.py", "types.SimpleNamespace"),
        (MADE, "folder/mup.py", "mup.Made"),
        (MADE, None, "__main__.Made"),  # in a notebook
    ],
)
def test_a_partial_is_named_for_its_function_a_method_with_its_class_and_an_object_for_its_class(
    monkeypatch, function, script, name
):
    monkeypatch.setattr("__main__.__file__", script, raising=False)
    assert name_of(function) == name


def test_a_checkpoint_that_does_not_say_who_made_its_model_is_of_a_plain_gpt2(caplog):
    gpt2_of(SimpleNamespace(path="x", tensors=()), {"model": {"vocab_size": 300}})
    assert not caplog.text


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "returned NoneType. It must return one nn.Module"),
        ("(Own(config.vocab_size, device), None)", "returned tuple. It must return one nn.Module"),
        ("Own(config.vocab_size, 'meta')", "parameter 'embedding.weight' is on meta, and the job's device is cpu"),
    ],
)
@pytest.mark.parametrize("stage", ["0", "2"])
def test_what_is_no_model_with_values_is_refused_in_one_line(corpus, tmp_path, returned, said, stage):
    output = train(corpus, tmp_path, "--zero-stage", stage, returned=returned)
    assert "error: make_model" in output and said in output and "Traceback" not in output, output


def test_what_the_jobs_own_checks_refuse_is_one_line_in_a_script_that_imports_them(tmp_path):
    output = train([], tmp_path)
    assert "error: --train-data is missing" in output and "Traceback" not in output, output


@pytest.mark.parametrize("batch", [JOBS_BATCH, OWN_BATCH], ids=["data", "data of its own"])
def test_a_continued_run_has_the_buffers_that_no_checkpoint_has_and_its_place_in_the_data(corpus, tmp_path, batch):
    (whole := tmp_path / "whole").mkdir()
    (parts := tmp_path / "parts").mkdir()
    constant = ("--lr-decay-style", "constant", "--train-iters")
    train(corpus, whole, "--save", str(whole), *constant, "4", batch=batch)
    for iters in ("2", "4"):
        train(corpus, parts, "--save", str(parts), "--load", str(parts), *constant, iters, batch=batch)
    losses = [[line["loss"] for line in logged(folder)] for folder in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_own_samples_come_once_an_epoch_in_orders_that_no_length_of_the_run_changes():
    short, long = (Epochs("abcdefgh", number, seed=1) for number in (10, 24))
    epochs = ["".join(long[i] for i in range(first, first + 8)) for first in (0, 8, 16)]
    assert ["".join(sorted(epoch)) for epoch in epochs] == ["abcdefgh"] * 3 and len(set(epochs)) == 3
    assert [short[i] for i in range(len(short))] == [*epochs[0], *epochs[1][:2]]


def job_of_own_samples(eval_samples):
    return SimpleNamespace(
        config=SimpleNamespace(training=SimpleNamespace(seed=1)),
        phase_samples=5,
        eval_samples=eval_samples,
        corpora=["0-8 of another"],
        shuffled_epochs=[[1]],
    )


def test_no_sample_of_ones_own_is_refused_and_a_checkpoints_corpora_are_forgotten(one_rank):
    job = job_of_own_samples(6)
    with pytest.raises(ValueError, match="make_datasets returned no sample: validation code"):
        own_datasets(job, ["a"], {"web": ["b"], "code": []})
    assert job.corpora is job.shuffled_epochs is None
    for train, valid, missing in (([], {"training": ["a"]}, "training"), (["a"], {"": []}, "validation")):
        with pytest.raises(ValueError, match=f"make_datasets returned no sample: {missing}"):
            own_datasets(job, train, valid)


@pytest.mark.parametrize(("eval_samples", "numbers"), [(24, {"web": 24}), (0, {})])
def test_own_samples_are_as_many_as_the_job_takes_and_none_without_evaluations(one_rank, eval_samples, numbers):
    train, valid, test = own_datasets(job_of_own_samples(eval_samples), ["a"], {"web": ["b"]})
    assert (len(train), {name: len(samples) for name, samples in valid.items()}, test) == (5, numbers, {})


def unequal_case():
    with pytest.raises(
        ValueError, match=r"the samples of make_datasets is \"{'training': 2}.*Give every rank the same"
    ):
        own_datasets(job_of_own_samples(1), ["a"] * (1 + torch.distributed.get_rank()), {})


def test_ranks_with_other_numbers_of_own_samples_are_refused():
    run_ranks(2, unequal_case)


@pytest.mark.parametrize(("seq_length", "cut"), [(9, 0), (8, 1), (3, 7)])
def test_rows_whose_prompt_leaves_no_response_are_counted_and_refused_if_all(corpus, tmp_path, caplog, seq_length, cut):
    (rows := tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (long := tmp_path / "long.jsonl").write_text(f"{json.dumps(ROWS[0])}\n" * 2)  # a prompt of 9 tokens
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=corpus[3])
    samples = Answers([str(rows)], tokenizer, seq_length)
    assert sum(not sample["counts"].any() for sample in samples) == cut
    told = [(record.name, record.getMessage().split(" rows")[0]) for record in caplog.records]
    assert told == [("megazero.finetune", f"in {cut} of 8")] * bool(cut)  # the library's log, which the job shows
    with pytest.raises(
        ValueError, match="in 2 of 2 rows of .*/long.jsonl, the prompt alone fills --seq-length 8: there"
    ):
        Answers([str(long)], tokenizer, 8)
    long.write_text(json.dumps({"prompt": "\ud800", "response": "an unpaired surrogate"}))
    assert Answers([str(long)], tokenizer, 8)[0]["counts"].any() and len(caplog.records) == bool(cut)


def test_the_finetuning_example_trains_and_evaluates_on_the_responses_alone(own_world, corpus, tmp_path):
    base, tuned, parts = (str(tmp_path / name) for name in ("base", "tuned", "parts"))
    (rows := tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    run_job([*TINY_MODEL, *corpus, "--train-iters", "1", "--save", base], 1)

    def tune(save: str, iters: int, *more: str) -> str:  # with the vocabulary in the checkpoint
        data = ["--train-data", str(rows), "--valid-data", str(rows), "--eval-iters", "2"]
        flags = [*TINY_MODEL, *data, "--calculate-per-token-loss", "--log-interval", "1", "--train-iters", str(iters)]
        script = str(ROOT / "examples" / "finetune_gpt2.py")
        done = run_script(2, script, [*flags, "--lr-decay-style", "constant", "--save", save, *more])
        assert done.returncode == 0, done.stdout
        return done.stdout

    all_rows = ("--model-parallel-size", "2", "--eval-iters", "4")  # once each, as one epoch has them
    tune(str(tmp_path / "still"), 1, "--load", base, "--finetune", "--lr", "0", *all_rows)
    trained = open_checkpoint(InferenceConfig(load=base))
    model, _ = load_model(InferenceConfig(load=base), trained)
    losses = []
    for row in ROWS:
        prompt, response = (trained.tokenizer.encode(row[key]) for key in ("prompt", "response"))
        ids = torch.tensor([[*prompt, *response, trained.tokenizer.eod]])[:, :33]
        losses += model(ids[:, :-1], targets=ids[:, 1:])[0, len(prompt) - 1 :].tolist()
    (evaluated,) = [line["loss"] for line in logged(tmp_path / "still") if line["section"] == "valid"]
    assert evaluated == pytest.approx(sum(losses) / len(losses), rel=1e-5)

    tune(tuned, 8, "--load", base, "--finetune", "--lr", "1e-2")
    with pytest.raises(ValueError, match=r"read its script's own samples \(make_datasets\), not --train-data"):
        [*show_samples(Reader(tuned), [1], max_tokens=8)]
    tune(parts, 3, "--load", base, "--finetune", "--lr", "1e-2")
    tune(parts, 8, "--load", parts, "--lr", "1e-2")
    whole, continued = (
        [line["loss"] for line in logged(Path(save)) if line["section"] == "train"] for save in (tuned, parts)
    )
    assert whole == continued and whole[-1] < 0.8 * whole[0]
