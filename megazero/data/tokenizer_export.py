"""The files by which transformers' AutoTokenizer gives the ids of one of our tokenizers, beside a model of any kind."""

from __future__ import annotations

import json

from megazero.data.sentencepiece_json import tokenizer_json
from megazero.data.tokenizer import GPT2BPETokenizer, SentencePieceTokenizer, Tokenizer


def huggingface_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """By name what the files hold. A text that spells the end of text is its token there, as is usual in transformers.

    Raises:
        ValueError: transformers cannot give the same ids.
    """
    if isinstance(tokenizer, GPT2BPETokenizer):
        return {**tokenizer.contents, **_config("GPT2Tokenizer")}
    [content] = tokenizer.contents.values()
    if isinstance(tokenizer, SentencePieceTokenizer):
        described = tokenizer_json(content, tokenizer.eod)
        content = _json(described)
    else:
        from tokenizers import Tokenizer as Theirs

        described, theirs = json.loads(content), Theirs.from_buffer(content)
        # Documents are trained on at full length, without what a post-processor would add. Otherwise it is the same file.
        if theirs.num_special_tokens_to_add(is_pair=False) or theirs.truncation or theirs.padding:
            content = _json({**described, **dict.fromkeys(("post_processor", "truncation", "padding"))})
    # The class that does what the file says; the one of GPT-2, which is the default beside such a model, replaces most of it.
    # But transformers 4 sets this option, if the file has it, to what is said here.
    starts_with_space = bool((described.get("pre_tokenizer") or {}).get("add_prefix_space"))
    ends = {"bos_token": tokenizer.end, "eos_token": tokenizer.end}
    config = _config("PreTrainedTokenizerFast", **ends, add_prefix_space=starts_with_space)
    return {"tokenizer.json": content, **config}


def _config(tokenizer_class: str, **more: str | bool) -> dict[str, bytes]:
    settings = {"tokenizer_class": tokenizer_class, **more, "clean_up_tokenization_spaces": False}
    return {"tokenizer_config.json": _json(settings, indent=2)}


def _json(content: object, indent: int | None = None) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=indent).encode()
