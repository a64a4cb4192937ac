"""Vocabularies trained by sentencepiece and by the package tokenizers, with the settings that lose no text."""

from __future__ import annotations

import io
import json
import string
from collections.abc import Sequence
from itertools import chain

import sentencepiece

from data_tools.optional import require
from megazero.data.gpt2_bpe import END_OF_TEXT

_THREADS = 8
"""Of sentencepiece, on every machine: it sums in the order of its threads' shares, and the number stands in the model."""
_REQUIRED = "".join(c for c in string.printable if c not in string.whitespace)
"""Characters that get a piece of their own, whether the text has them or not."""


def train_sentencepiece(lines: Sequence[str], vocab_size: int, model_type: str) -> bytes:
    """A sentencepiece model, serialised; `<|endoftext|>` is its id 1.

    No path of this machine is in it, so that equal vocabularies have equal hashes.

    Raises:
        ValueError: the text is too small for the vocabulary, or the vocabulary too small for the bytes.
    """
    model = io.BytesIO()
    # Before 0.2.3 sentencepiece ends the process at a required character that does not occur, so each occurs once.
    absent = set(_REQUIRED)
    for line in lines:
        absent.difference_update(line)
        if not absent:
            break
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain(lines, sorted(absent)),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=_THREADS,
            byte_fallback=True,
            character_coverage=0.9995,
            required_chars=_REQUIRED,
            user_defined_symbols=["\n"],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 24,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=END_OF_TEXT,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"--vocab-size {vocab_size} cannot be trained on this text: {error}") from error
    return model.getvalue()


def train_byte_level_bpe(texts: Sequence[str], vocab_size: int) -> list[bytes]:
    """The contents of the files of a byte-level BPE: vocab.json, merges.txt and tokenizer.json.

    Laid out as GPT-2's: 256 bytes, then the merges in their order, `<|endoftext|>` last; words are cut by GPT-2's pattern.

    Raises:
        ValueError: the text is too small for the vocabulary, the vocabulary too small for the bytes; the package is missing.
    """
    tokenizers = require("tokenizers", "--model-type byte_level_bpe")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"--vocab-size {vocab_size} cannot be trained: 256 bytes and the end of text need {len(alphabet) + 1}"
        )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    found = model.get_vocab_size()
    if found < vocab_size - 1:
        raise ValueError(
            f"--vocab-size {vocab_size} cannot be trained on this text: it has merges for {found + 1} entries that occur at "
            "least twice. Give more text, or a smaller vocabulary."
        )
    model.add_special_tokens([END_OF_TEXT])
    content = json.loads(model.to_str())
    vocabulary = {**content["model"]["vocab"], END_OF_TEXT: found}
    merges = ["#version: 0.2", *(" ".join(pair) for pair in content["model"]["merges"])]
    return [
        json.dumps(vocabulary, ensure_ascii=False).encode(),
        "\n".join(merges).encode() + b"\n",
        model.to_str(pretty=True).encode(),
    ]
