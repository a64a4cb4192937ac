"""Makes a clean corpus look like a dump of the web: duplicates, broken encodings, other languages, lines that are no documents.

Every fault is planted by a seeded generator, so the same corpus always gives the same dump, and how many of each there are is
known: what the steps must find can be compared with it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence

from data_tools.documents import Document, dump

BOILERPLATE = (
    "Share this page with your friends. All rights reserved. Subscribe to the newsletter to hear of new articles first."
)
_QUOTES = str.maketrans({"'": "\u2019", '"': "\u201d", "-": "\u2013"})
_LANGUAGES = (
    (
        "Der Regen fiel den ganzen Tag auf die alten D\u00e4cher der Stadt",
        "niemand wusste, wann der n\u00e4chste Zug nach Hamburg fahren w\u00fcrde",
        "die Kinder spielten im Garten hinter dem kleinen gelben Haus",
        "am Abend erz\u00e4hlte die Gro\u00dfmutter wieder die Geschichte vom verlorenen Schl\u00fcssel",
        "im Fr\u00fchling wird der Fluss so breit, dass man die Br\u00fccke sperren muss",
    ),
    (
        "La pluie tombait depuis le matin sur les toits de la vieille ville",
        "personne ne savait quand partirait le prochain train pour Marseille",
        "les enfants jouaient dans le jardin derri\u00e8re la petite maison jaune",
        "le soir, la grand-m\u00e8re racontait encore l'histoire de la cl\u00e9 perdue",
        "au printemps la rivi\u00e8re devient si large qu'il faut fermer le pont",
    ),
    (
        "La lluvia cay\u00f3 todo el d\u00eda sobre los tejados de la ciudad vieja",
        "nadie sab\u00eda cu\u00e1ndo saldr\u00eda el pr\u00f3ximo tren hacia Sevilla",
        "los ni\u00f1os jugaban en el jard\u00edn detr\u00e1s de la peque\u00f1a casa amarilla",
        "por la noche la abuela contaba otra vez la historia de la llave perdida",
        "en primavera el r\u00edo crece tanto que hay que cerrar el puente",
    ),
)


def plant_faults(documents: Sequence[Document], seed: int = 1234) -> tuple[bytes, dict[str, int]]:
    """JSON lines of the documents with faults among them, and how many of each fault there are.

    Every document is there, in its order, unchanged; faults are further lines, each somewhere behind the document it is made of.
    """
    generator = random.Random(seed)
    slots: list[list[bytes]] = [[] for _ in documents]
    planted: Counter[str] = Counter()
    for fault, (share, line_of) in FAULTS.items():
        for number in range(max(1, round(share * len(documents)))):
            source = generator.randrange(len(documents))
            url = f"planted/{fault}/{number}"
            line = line_of(generator, documents[source]["text"], url)
            slots[generator.randrange(source, len(documents))].append(line)
            planted[fault] += 1
    lines = (line for document, faults in zip(documents, slots, strict=True) for line in (dump(document), *faults))
    return b"".join(lines), dict(planted)


def _line(text: str, url: str) -> bytes:
    return dump({"text": text, "url": url})


def _near_duplicate(generator: random.Random, text: str, url: str) -> bytes:
    """The page again: a word in a hundred edited, other white space and capitals, a little cut off, a footer."""
    words = text.split()
    words = words[: max(1, len(words) - len(words) // 50)]
    for _ in range(len(words) // 100):
        words[generator.randrange(len(words))] = "edited"
    near = " ".join(words)
    footer = f"\n\n{BOILERPLATE}" if len(words) > 1000 else ""
    return _line((near.upper() if generator.random() < 0.3 else near) + footer, url)


def _broken_encoding(generator: random.Random, text: str, url: str) -> bytes:
    """UTF-8 that was read as Latin-1, as happens to curly quotes and dashes."""
    head = f"Planted page {generator.randrange(10**9)}.\n\n" + " ".join(
        generator.sample(text.split(), len(text.split()))
    )
    return _line(head.translate(_QUOTES).encode().decode("latin-1"), url)


def _other_language(generator: random.Random, _: str, url: str) -> bytes:
    sentences = generator.choice(_LANGUAGES)
    return _line(
        ". ".join(generator.choice(sentences) + f" ({generator.randrange(1000)})" for _ in range(40)) + ".", url
    )


def _repetitive(generator: random.Random, _: str, url: str) -> bytes:
    return _line(f"Buy the best product number {generator.randrange(10**6)} now and save money today!\n" * 60, url)


def _surrogate(generator: random.Random, text: str, url: str) -> bytes:
    text = f"Planted page {generator.randrange(10**9)}. " + " ".join(reversed(text.split()))
    return _line(f"{text} \ud83d half a pair", url)


def _end_of_text(generator: random.Random, text: str, url: str) -> bytes:
    words = text.split()
    generator.shuffle(words)
    return _line(f"How tokenizers mark the end: {' '.join(words)} <|endoftext|> {' '.join(words[:50])}", url)


FAULTS: dict[str, tuple[float, Callable[[random.Random, str, str], bytes]]] = {
    "exact_duplicate": (0.03, lambda _, text, url: _line(text, url)),
    "near_duplicate": (0.03, _near_duplicate),
    "broken_encoding": (0.02, _broken_encoding),
    "other_language": (0.02, _other_language),
    "too_short": (0.02, lambda generator, text, url: _line(f"{text[:60]} ({generator.randrange(10**6)})", url)),
    "repetitive": (0.01, _repetitive),
    "end_of_text_in_text": (0.005, _end_of_text),
    "unpaired_surrogate": (0.005, _surrogate),
    "cut_json": (0.005, lambda _, text, url: _line(text, url)[:-10].rstrip(b'"}') + b"\n"),
    "invalid_utf8": (0.005, lambda _, text, url: b'{"text": "caf\xe9 ' + _line(text, url)[10:]),
    "no_text_key": (0.005, lambda _, text, url: json.dumps({"body": text, "url": url}).encode() + b"\n"),
    "no_object": (0.005, lambda _, text, url: json.dumps([url]).encode() + b"\n"),
    "blank_line": (0.01, lambda *_: b"  \n"),
}
"""Fault -> how many are planted, as a share of the documents (at least one of each); what makes its line of a text and a URL."""
