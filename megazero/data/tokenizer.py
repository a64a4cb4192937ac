"""Tokenizers behind one small interface, always built from local files: nothing is ever downloaded.

All of them encode text as text: a literal `<|endoftext|>` inside a document stays ordinary characters, because a real end of text
in the middle of a document would cut it in two. The end-of-text id is `eod`, appended by whoever packs documents.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megazero.data.gpt2_bpe import END_OF_TEXT, find_gpt2_files, read_gpt2_vocabulary
from megazero.files import read_whole
from megazero.option import check_known

PathLike = str | Path

# The word boundaries of GPT-2 with possessive quantifiers, so that only white space can make the engine go back; it gives up on
# a run of a million characters with a ValueError.
_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_HF_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(ABC):
    """Text to token ids and back. Made from files, of which a missing one is a FileNotFoundError; a pickled copy is made anew.

    Args:
        files: paths.
        contents: of the files, where they are known; else they are read.

    Attributes:
        name: the value of --tokenizer-type that builds it.
        vocab_size: one more than the largest id.
        eod, end: id of the end of text, and what the vocabulary calls it.
        sha256: hex digest of what defines it (contents, never file names); equal digests encode equally.
        files: that it was built from.
        contents: of these, by the names under which `build_tokenizer` finds them in a folder.
    """

    name: str
    vocab_size: int
    eod: int
    end: str = END_OF_TEXT
    sha256: str
    flags: tuple[str, ...] = ("--tokenizer-path",)  # that name the files
    file_names: tuple[str, ...]
    contents: Mapping[str, bytes] = {}  # of a tokenizer that a script has made in another way

    def __init__(self, *files: PathLike, contents: Sequence[bytes] = ()) -> None:
        self.files = tuple(map(str, files))
        for flag, file in zip(self.flags, self.files, strict=True):
            if not contents and not Path(file).is_file():
                raise FileNotFoundError(f"{flag} {file}: there is no such file")
        read = contents or [read_whole(Path(file)) for file in self.files]
        self.contents = dict(zip(self.file_names, read, strict=True))

    def __reduce__(self) -> tuple[Callable[[], Tokenizer], tuple[()]]:
        # Of the same vocabulary, also where its files have changed meanwhile.
        return partial(type(self), *self.files, contents=tuple(self.contents.values())), ()

    @abstractmethod
    def encode_array(self, text: str) -> npt.NDArray[np.integer]:
        """Ids of `text` as a 1-d integer array, possibly read-only; no end of text is added."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not valid UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no end of text is added. Unpaired surrogates, which no UTF-8 text has, become U+FFFD."""
        return self.encode_array(text).tolist()

    def _known(self, ids: Iterable[int]) -> list[int]:
        known = list(map(int, ids))
        for i in known:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {self.name} ({self.vocab_size} entries)")
        return known


class GPT2BPETokenizer(Tokenizer):
    """Byte-level BPE as in GPT-2, from encoder.json + vocab.bpe, also known as vocab.json + merges.txt.

    Raises:
        ValueError: the two files do not describe one byte-level BPE with an end of text.
    """

    name, flags = "GPT2BPETokenizer", ("--vocab-file", "--merge-file")
    file_names = ("vocab.json", "merges.txt")

    def __init__(self, vocab_file: PathLike, merge_file: PathLike, *, contents: Sequence[bytes] = ()) -> None:
        import tiktoken  # here, not above: the other tokenizers do without it

        super().__init__(vocab_file, merge_file, contents=contents)
        ranks, special = read_gpt2_vocabulary(vocab_file, merge_file, *self.contents.values())
        self._encoding = tiktoken.Encoding(
            self.name, pat_str=_GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = self._encoding.n_vocab
        self.eod = special[END_OF_TEXT]
        if self.eod in self.encode_array(END_OF_TEXT):
            raise ValueError(
                f"tiktoken {tiktoken.__version__} takes a {END_OF_TEXT} in a document for its end, so that whoever writes one "
                "cuts it in two. Install a later one: pip install 'tiktoken>=0.13'."
            )
        # Ids give the order of merges too, so tokens and ids are the whole definition.
        entries = sorted((i, token.hex()) for token, i in ranks.items())
        self.sha256 = hashlib.sha256(json.dumps([entries, sorted(special.items())]).encode()).hexdigest()

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """Ids of `text`, uint32."""
        return self._encoding.encode_to_numpy(valid_unicode(text), disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids."""
        known = self._known(ids)
        try:
            return self._encoding.decode(known)
        except KeyError as error:  # from the text of tiktoken: which id
            raise ValueError(f"{self.name}: {error.args[0]}: the vocabulary has a gap there") from error


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model file (BPE or unigram). `eod` is the piece `<|endoftext|>` where there is one, else the model's </s>.

    Raises:
        ValueError: the file is not a sentencepiece model, or the model has no end of text.
    """

    name, file, pattern = "SentencePieceTokenizer", "a sentencepiece .model", "*.model"
    file_names = ("tokenizer.model",)
    _SPACE = "\u2581"  # stands for a space inside pieces

    def __init__(self, path: PathLike, *, contents: Sequence[bytes] = ()) -> None:
        import sentencepiece

        super().__init__(path, contents=contents)
        [content] = self.contents.values()
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
        self.vocab_size = self._model.get_piece_size()
        dedicated = self._model.piece_to_id(END_OF_TEXT)
        self.eod = dedicated if self._model.is_control(dedicated) else self._model.eos_id()
        if self.eod < 0:
            raise ValueError(f"{path} has no end of text: neither the piece {END_OF_TEXT} nor an eos_id")
        self.end = self._model.id_to_piece(self.eod)
        # sentencepiece reads U+2581 as a space; as bytes it survives, in models that have bytes and take text as it is.
        space_bytes = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in self._SPACE.encode()]
        is_verbatim = self._model.decode(self._model.encode("  a ")) == "  a "
        self._space_ids = space_bytes if is_verbatim and all(map(self._model.is_byte, space_bytes)) else None

    def encode_array(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of `text`, int32."""
        text = valid_unicode(text)
        if self._space_ids is None:
            return np.asarray(self._model.encode(text), dtype=np.int32)
        first, *rest = text.split(self._SPACE)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._space_ids + self._model.encode(part)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; the end of text is shown as `<|endoftext|>`."""
        parts: list[list[int]] = [[]]
        for i in self._known(ids):
            if i == self.eod:
                parts.append([])
            else:
                parts[-1].append(i)
        return END_OF_TEXT.join(self._model.decode(part) for part in parts)


class HuggingFaceTokenizer(Tokenizer):
    """Any tokenizer.json, through the package `tokenizers`.

    Raises:
        ValueError: the package is missing, the file is not a tokenizer, or it has no end-of-text token that no text can write.
    """

    name, file, pattern = "HuggingFaceTokenizer", "a tokenizer.json", "tokenizer.json"
    file_names = ("tokenizer.json",)

    def __init__(self, path: PathLike, *, contents: Sequence[bytes] = ()) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(f"--tokenizer-type {self.name} needs a package: pip install tokenizers") from error
        super().__init__(path, contents=contents)
        [content] = self.contents.values()
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises nothing more exact
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
        self._tokenizer.encode_special_tokens = True  # special tokens inside a text are text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        end = next((token for token in _HF_END_OF_TEXT if token in vocabulary), None)
        if end is None:
            raise ValueError(f"{path} has no end-of-text token; looked for {', '.join(_HF_END_OF_TEXT)}")
        self.eod, self.end = vocabulary[end], end
        self._keep_as_text(end)
        if self.eod in self.encode_array(end):
            raise ValueError(
                f"{path} takes a {end} in a document for its end, so that whoever writes one cuts it in two. Mark {end} as "
                '"special": true among the "added_tokens" of the file.'
            )

    def _keep_as_text(self, end: str) -> None:
        """Has words that spell a special token cut in two, where the model (Unigram, WordLevel) would take them for it."""
        from tokenizers import Regex, pre_tokenizers

        model, own = self._tokenizer.model, self._tokenizer.get_vocab(with_added_tokens=False)
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        # What the model does not make of the word alone, it makes of it nowhere.
        forged = [
            word
            for word in sorted({end, *special} & own.keys())
            if len(word) > 1 and own[word] in {token.id for token in model.tokenize(word)}
        ]
        if forged:
            firsts = "|".join(f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in forged)
            # Last of all, so that it sees what the model would, and words get no further mark of a beginning.
            cut = pre_tokenizers.Split(Regex(firsts), "merged_with_previous")
            before = self._tokenizer.pre_tokenizer
            self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([before, cut]) if before else cut

    def encode_array(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of `text`, int32."""
        return np.asarray(self._tokenizer.encode(valid_unicode(text), add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens shown."""
        return self._tokenizer.decode(self._known(ids), skip_special_tokens=False)


_ONE_FILE = {kind.name: kind for kind in (SentencePieceTokenizer, HuggingFaceTokenizer)}
TOKENIZER_TYPES = (GPT2BPETokenizer.name, *_ONE_FILE)


def build_tokenizer(
    tokenizer_type: str,
    vocab_file: PathLike | None = None,
    merge_file: PathLike | None = None,
    tokenizer_path: PathLike | None = None,
) -> Tokenizer:
    """The tokenizer that --tokenizer-type, --vocab-file, --merge-file and --tokenizer-path ask for.

    Args:
        tokenizer_path: a file, or a folder that holds the files under their usual names: encoder.json and vocab.bpe (or
            vocab.json and merges.txt), *.model, tokenizer.json.

    Raises:
        FileNotFoundError: a file was named and is missing, or none was found where they are looked up.
        ValueError: an unknown type, or files that do not make such a tokenizer.
    """
    if tokenizer_type == GPT2BPETokenizer.name:
        return GPT2BPETokenizer(*find_gpt2_files(vocab_file, merge_file, tokenizer_path))
    check_known("there is no --tokenizer-type", [tokenizer_type], TOKENIZER_TYPES)
    kind, path = _ONE_FILE[tokenizer_type], tokenizer_path or vocab_file
    if path is None:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} needs --tokenizer-path: {kind.file}, or the folder that holds one"
        )
    return kind(_inside(Path(path), kind.pattern))


def _inside(path: Path, pattern: str) -> Path:
    """`path`, or the one file of this name in the folder `path`."""
    if not path.is_dir():
        return path
    found = sorted(path.glob(pattern))
    if len(found) != 1:
        names = ", ".join(f.name for f in found) or "none"
        raise FileNotFoundError(
            f"--tokenizer-path {path} should hold one file {pattern}; found {names}. Name the file itself."
        )
    return found[0]


def tokenizer_of(tokenizer_type: str, contents: Mapping[str, bytes], where: Path) -> Tokenizer:
    """The tokenizer whose `contents` these are; `where` stands for the folder of its files."""
    check_known("there is no --tokenizer-type", [tokenizer_type], TOKENIZER_TYPES)
    kind: type[Tokenizer] = _ONE_FILE.get(tokenizer_type, GPT2BPETokenizer)
    return kind(*(where / name for name in kind.file_names), contents=[contents[name] for name in kind.file_names])


def refuse_other_vocabulary(tokenizer: Tokenizer, sha256: str, checkpoint: Path) -> None:
    """Raises a ValueError unless a checkpoint, trained with the vocabulary of this digest, was trained with the tokenizer's."""
    if tokenizer.sha256 != sha256:
        raise ValueError(
            f"The checkpoint {checkpoint} was trained with another vocabulary (sha256 {sha256[:12]}..., now "
            f"{tokenizer.sha256[:12]}...). Give the --vocab-file and --merge-file, or the --tokenizer-path, that it was "
            "trained with."
        )


def valid_unicode(text: str) -> str:
    """`text` with U+FFFD in the place of unpaired surrogates, which JSON can spell ("\\ud800") and no UTF-8 text can hold."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
