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
    else:  # documents are trained on at full length, without what a post-processor would add
        described = {**json.loads(content), **dict.fromkeys(("post_processor", "truncation", "padding"))}
    # The class that does what the file says; the one of GPT-2, which is the default beside such a model, replaces most of it.
    config = _config("PreTrainedTokenizerFast", bos_token=tokenizer.end, eos_token=tokenizer.end)
    return {"tokenizer.json": json.dumps(described, ensure_ascii=False).encode(), **config}


def _config(tokenizer_class: str, **ends: str) -> dict[str, bytes]:
    settings = {"tokenizer_class": tokenizer_class, **ends, "clean_up_tokenization_spaces": False}
    return {"tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2).encode()}
