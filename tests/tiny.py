"""A tiny corpus, vocabulary and model, and the job on them: what end-to-end tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.sidecar import Sidecar, write_sidecar
from megazero.data.tokenizer import build_tokenizer
from tests.ranks import run_script

ROOT = Path(__file__).parent.parent

TINY_MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--batch-size 2 --attention-dropout 0 --hidden-dropout 0 --num-workers 0 --eval-iters 0 --lr 1e-3 --warmup 0
--peak-tflops 1""".split()

WORDS = "the ranks of a group share one bucket and each rank keeps its shard until the next gather".split()


def make_texts(count: int = 200) -> list[str]:
    """Documents of some regularity: each continues the word list from another place."""
    return [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(12 + i % 7)) + ".\n" for i in range(count)]


def make_vocabulary(folder: Path, texts: list[str], size: int = 300) -> Path:
    """A small byte-level BPE in GPT-2's two files."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save_model(str(folder))
    return folder


def make_corpus(folder: Path) -> list[str]:
    """Flags --train-data, --tokenizer-type and --tokenizer-path of a tokenized corpus in `folder`."""
    texts = make_texts()
    vocabulary = make_vocabulary(folder / "vocab", texts)
    tokenizer = build_tokenizer("GPT2BPETokenizer", tokenizer_path=vocabulary)
    prefix = folder / "tiny_text_document"
    with IndexedDatasetWriter(str(prefix), dtype="uint16") as writer:
        for text in texts:
            writer.add_document([*tokenizer.encode(text), tokenizer.eod])
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    sidecar = Sidecar(tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod, len(texts), tokens)
    write_sidecar(prefix, sidecar)
    return ["--train-data", str(prefix), "--tokenizer-path", str(vocabulary), "--split", "8,1,1"]


def logged(save: Path) -> list[dict[str, Any]]:
    """The lines of a job's metrics.jsonl."""
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def run_job(arguments: list[str], world_size: int) -> subprocess.CompletedProcess[str]:
    """Trains by pretrain_gpt2.py's flags and returns its exit status and output, without the seconds that a launcher takes."""
    return run_script(world_size, str(ROOT / "pretrain_gpt2.py"), arguments)


def launch_job(arguments: list[str], world_size: int) -> subprocess.CompletedProcess[str]:
    """As `run_job`, by the launcher."""
    launcher = ["-m", "megazero.launch", "--standalone", "--nproc-per-node", str(world_size)]
    return run_command([sys.executable, *launcher, "pretrain_gpt2.py", *arguments])


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    """In the repository, with one thread per rank; what it says is `stdout`."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
