"""Tokenizers for the chat tests: bytes, a small committed vocabulary, and Kimi-K3's own where its file is at hand."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import k3stack.config
from k3stack.chat import Tokenizer, load_tokenizer
from k3stack.config.geometry import ModelGeometry, load_geometry

DATA = Path(__file__).parent / "data"
REPOSITORY = Path(__file__).parents[3]
SMALL_RANKS = 700


def k3_geometry(vocab: int = 163_840, first_control: int = 163_584) -> ModelGeometry:
    geometry = load_geometry(Path(k3stack.config.__file__).parent / "data" / "k3_config.json")
    return replace(geometry, vocab=vocab, bos_id=first_control, eos_ids=(first_control + 2,), pad_id=vocab - 1)


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Kimi-K3's tokenizer, from $K3_TIKTOKEN or ../shared beside the checkout."""
    file = Path(os.environ.get("K3_TIKTOKEN") or REPOSITORY.parent / "shared/data/tokenizer/tiktoken.model")
    if not file.exists():
        pytest.skip(f"no {file}: set K3_TIKTOKEN to Kimi-K3's tiktoken.model to check token ids, not only segments")
    folder = tmp_path_factory.mktemp("k3")
    shutil.copy(file, folder / "tiktoken.model")
    return load_tokenizer(folder, k3_geometry())


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    shutil.copy(DATA / "small.tiktoken", folder / "tiktoken.model")
    return folder


@pytest.fixture(scope="session")
def small(small_folder: Path) -> Tokenizer:
    return load_tokenizer(small_folder, k3_geometry(SMALL_RANKS + 256, SMALL_RANKS))


@pytest.fixture(scope="session")
def single_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tmp_path_factory.mktemp("none"), k3_geometry(512, 496))


@pytest.fixture(params=["small", "single_bytes"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
