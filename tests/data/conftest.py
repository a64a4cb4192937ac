"""Vocabularies for the tests of data: made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.data.tokenizer import Tokenizer, build_tokenizer
from tests.vocabularies import make_gpt2_vocabulary, make_sentencepiece


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def spm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentencepiece(tmp_path_factory.mktemp("spm") / "tiny.model")


@pytest.fixture(scope="session")
def tokenizer(gpt2_folder: Path) -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", tokenizer_path=gpt2_folder)
