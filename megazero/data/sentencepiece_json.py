"""A sentencepiece model as a tokenizer.json, which Hugging Face's tokenizers read: the same ids for the same text.

The file of a model is a protocol buffer (sentencepiece_model.proto). The few fields that matter are read here: the classes that
sentencepiece has for it need a protobuf package of their own version.

What remains, because tokenizers do it so:

- Of two segmentations by a unigram model whose scores are equal but for rounding, the other one may be chosen.
- A unigram model takes a text that spells a control or byte piece (`<s>`, `<0x41>`) for it, if it does not know each character.
- Where a model's normalization replaces a character, it loses what combines with it (U+0301 behind U+FB01, U+000A
  behind U+000D).
- A U+2581 in a text is a space.
"""

from __future__ import annotations

import base64
import struct
from typing import Any, NamedTuple

_SPACE = "\u2581"  # stands for a space inside pieces
_UNKNOWN_TEXT = (
    " \u2047 "  # to which the unknown piece is decoded; no text spells it, as inside pieces there are no spaces
)
_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6  # types of pieces
_UNIGRAM, _BPE = 1, 2  # types of models


class _Piece(NamedTuple):
    text: str
    score: float
    type: int


def tokenizer_json(model: bytes, eod: int) -> dict[str, Any]:
    """The content of the tokenizer.json that encodes and decodes as the sentencepiece model with this content does.

    Args:
        eod: id of the end of text, the only special token: what spells another control piece stays text.

    Raises:
        ValueError: there is none: the model does what tokenizers do not.
    """
    fields = _fields(model)
    pieces = [_piece(content) for content in fields[1]]
    trainer, normalizer = (_fields(b"".join(fields.get(number, []))) for number in (2, 3))
    [kind], [is_space_last] = trainer.get(3, [_UNIGRAM]), trainer.get(24, [0])
    [charsmap], [adds_space], [trims], [escapes] = (
        normalizer.get(number, [default]) for number, default in ((2, b""), (3, 1), (4, 1), (5, 1))
    )
    own = [i for i, piece in enumerate(pieces) if piece.type == _USER_DEFINED]
    # tokenizers look at what lies between the user's own pieces as if each were a text.
    if kind not in (_UNIGRAM, _BPE) or is_space_last or not escapes or (own and (adds_space or trims)):
        raise ValueError("no tokenizer.json encodes as this sentencepiece model does")
    before, after = [], [_replace({"String": _SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if charsmap:
        before.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if trims:
        before += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if adds_space:
        before.append({"type": "Prepend", "prepend": " "})
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    as_it_is = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": pieces[i].text, **as_it_is, "special": i == eod} for i in sorted({eod, *own})
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*before, _replace({"String": " "}, _SPACE)]},
        "decoder": {"type": "Sequence", "decoders": after},
        "model": {
            **(_bpe if kind == _BPE else _unigram)(pieces),
            "byte_fallback": any(p.type == _BYTE for p in pieces),
        },
    }


def _bpe(pieces: list[_Piece]) -> dict[str, Any]:
    """Merges are all pairs that make a piece, in the order of the pieces' scores."""
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    made = {piece.text for piece in pieces if piece.type == _NORMAL}
    merges = []
    for text, score, _ in (piece for piece in pieces if piece.text in made):
        for left, right in ((text[:cut], text[cut:]) for cut in range(1, len(text))):
            if left in made and right in made:
                merges.append((-score, ids[left], ids[right], f"{left} {right}"))
    pairs = [pair for *_, pair in sorted(merges)]
    return {"type": "BPE", "vocab": ids, "merges": pairs, "unk_token": _UNKNOWN_TEXT, "fuse_unk": True}


def _unigram(pieces: list[_Piece]) -> dict[str, Any]:
    low = 20 * min(piece.score for piece in pieces)  # so that a text that spells a control piece is not taken for it
    vocabulary = [(text, score if type in (_NORMAL, _USER_DEFINED) else low) for text, score, type in pieces]
    [unknown] = [i for i, piece in enumerate(pieces) if piece.type == _UNKNOWN]
    return {"type": "Unigram", "vocab": vocabulary, "unk_id": unknown}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _piece(message: bytes) -> _Piece:
    fields = _fields(message)
    [text], [packed], [type] = fields[1], fields.get(2, [bytes(4)]), fields.get(3, [_NORMAL])
    [score] = struct.unpack("<f", packed)
    return _Piece(_UNKNOWN_TEXT if type == _UNKNOWN else text.decode(), score, type)


def _fields(message: bytes) -> dict[int, list[Any]]:
    """The values of a protocol buffer's fields by their numbers: each an int, or bytes."""
    fields: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        value: Any
        if wire == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(wire) or varint()
            value, at = message[at : at + size], at + size
        fields.setdefault(number, []).append(value)
    return fields
