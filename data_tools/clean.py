"""Cleans documents: repairs broken Unicode (ftfy), keeps one language, and drops short documents.

Dropped are, with these reasons in the dropped list: `empty`, `language` (another one, or none with certainty), `short` (under
--min-tokens tokens of the GPT-2 vocabulary). Input are JSON lines {"text", ...}, .parquet, or Common Crawl's .wet files.

    python -m data_tools clean --input raw/ --output clean/ --vocab-file encoder.json --merge-file vocab.bpe
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

from data_tools.documents import Document
from data_tools.language import LanguageIdentifier, TextFixer
from data_tools.line_functions import Dropped
from data_tools.options import add_input_output, add_run_options
from data_tools.shards import run_documents
from megazero.data.encoding import encoded
from megazero.data.tokenizer import Tokenizer, build_tokenizer

_CHARACTERS_PER_TOKEN = 8  # nearly always enough text to see that a document is long
# A single space between two words begins a token, whatever lies before it: up to there, a part has the whole's tokens.
_WORD_BOUNDARY = re.compile(r"(?<=\w) (?=\w)")


@dataclass(frozen=True)
class Cleaner:
    """A document function.

    Attributes:
        key: which entry is the text.
        fix: what repairs the text; None leaves it as it is.
        identify: what tells the language; None keeps all.
        language: the one that is kept, if `identify` gives it a score of `min_score` at least.
        tokenizer: counts tokens; None keeps short documents.
    """

    key: str
    fix: TextFixer | None
    identify: LanguageIdentifier | None
    language: str
    min_score: float
    tokenizer: Tokenizer | None
    min_tokens: int

    def __call__(self, document: Document) -> Document:
        """The document with its text repaired; raises Dropped."""
        text = document[self.key]
        fixed = (self.fix(text) if self.fix else text).strip()
        if not fixed:
            raise Dropped("empty")
        if self.tokenizer is not None:
            check_length(fixed, self.min_tokens, self.tokenizer)
        if self.identify is not None:
            language, score = self.identify(fixed)
            if language != self.language or score < self.min_score:
                raise Dropped("language", detail=f"{language} {score:.2f}")
        return document if fixed == text else {**document, self.key: fixed}


def check_length(text: str, min_tokens: int, tokenizer: Tokenizer) -> None:
    """Raises Dropped for a text of fewer tokens, LineError for one that has none; of a long text only the beginning counts."""
    boundary = _WORD_BOUNDARY.search(text, _CHARACTERS_PER_TOKEN * min_tokens)
    if boundary is not None and len(encoded(text[: boundary.start()], tokenizer)) >= min_tokens:
        return
    count = len(encoded(text, tokenizer))
    if count < min_tokens:
        raise Dropped("short", detail=f"{count} tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    add_input_output(parser)
    rules = parser.add_argument_group("rules")
    rules.add_argument("--language", default="en", help="code of the language to keep, or 'any'")
    rules.add_argument(
        "--min-score", type=float, default=0.65, help="least certainty (0 to 1) that it is that language"
    )
    rules.add_argument(
        "--min-tokens", type=int, default=128, help="least number of GPT-2 tokens in a document; 0 keeps all"
    )
    rules.add_argument(
        "--no-fix", action="store_true", help="do not repair the text; only strip white space at its ends"
    )
    rules.add_argument("--vocab-file", help="GPT-2's encoder.json (default: found in data/gpt2_bpe or data/tokenizer)")
    rules.add_argument("--merge-file", help="GPT-2's vocab.bpe")
    rules.add_argument("--tokenizer-path", help="folder that holds both files")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Cleans, and returns the statistics."""
    if not 0 <= args.min_score <= 1 or args.min_tokens < 0:
        raise ValueError(
            f"--min-score {args.min_score} must lie in [0, 1], and --min-tokens {args.min_tokens} not be negative"
        )
    if not re.fullmatch("[a-z]{2,3}|any", args.language):
        raise ValueError(f"--language {args.language}: expected a code of ISO 639, such as en, or any")
    tokenizer = None
    if args.min_tokens > 0:
        try:
            tokenizer = build_tokenizer("GPT2BPETokenizer", args.vocab_file, args.merge_file, args.tokenizer_path)
        except FileNotFoundError as error:
            raise ValueError(f"--min-tokens {args.min_tokens} counts tokens: {error} Or use --min-tokens 0.") from error
    fix = None if args.no_fix else TextFixer()
    identify = None if args.language == "any" else LanguageIdentifier()
    cleaner = Cleaner(args.json_key, fix, identify, args.language, args.min_score, tokenizer, args.min_tokens)
    settings = {
        "fix": fix and fix.name,
        "identify": identify and identify.name,
        "language": args.language,
        "min_score": args.min_score,
        "min_tokens": args.min_tokens,
        "tokenizer_sha256": tokenizer and tokenizer.sha256,
    }
    return run_documents("clean", cleaner, settings, args)
