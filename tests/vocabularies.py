"""Small vocabularies and texts made on the spot, so that no test needs a file from elsewhere."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import sentencepiece
import tokenizers

WORDS = (
    "the of and a to in is that it was for on are with as his they at be this from have or by one had not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more Time's don't we'll 1984 42 (maybe) naïve café 中文 Ωmega — \t \n \n\n"
).split(" ")


def shared_data() -> Path | None:
    """Folder with the real GPT-2 vocabulary and real text, where this machine has one."""
    folder = Path(os.environ.get("MEGAZERO_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    return folder if (folder / "gpt2_bpe" / "encoder.json").is_file() else None


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Documents of 1 to `longest` words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "url": f"u{i}"}) + "\n" for i, text in enumerate(texts)))
    return path


def make_gpt2_vocabulary(folder: Path, vocab_size: int = 400) -> Path:
    """A folder with vocab.json, merges.txt and tokenizer.json of one byte-level BPE; `<|endoftext|>` is its id 0."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = tokenizers.ByteLevelBPETokenizer()
    trainer.train_from_iterator(
        make_texts(300), vocab_size=vocab_size, min_frequency=1, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trainer.save_model(str(folder))
    trainer.save(str(folder / "tokenizer.json"))
    return folder


def make_sentencepiece(path: Path, **settings: object) -> Path:
    """A sentencepiece model file; by default with bytes, text taken as it is, and </s> as the end of text."""
    import io

    model = io.BytesIO()
    defaults = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    defaults |= {"add_dummy_prefix": False, "vocab_size": 400, "model_type": "bpe", "minloglevel": 3}
    lines = [line for text in make_texts(300) for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **{**defaults, **settings}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return path
