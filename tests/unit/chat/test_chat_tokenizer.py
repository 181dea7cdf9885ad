"""Tokenizers: ids of the control slots, cuts of long text, every id decodes, nothing typed becomes control."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from k3stack.chat import Detokenizer, Tokenizer, load_tokenizer
from k3stack.chat.tokenizer import PATTERN, RUN_CHARS, cut_long
from k3stack.errors import CheckpointError, UserError

from .conftest import SMALL_RANKS, k3_geometry

TEXTS = [
    "Hello, world!",
    '<|open|>message role="system"<|sep|>',
    "今天天气很好 mixed 12345 I'll",
    "  two\n\n lines\t",
    "naïve 😀👨‍👩‍👧",
    "",
    "x" * 200,
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_is_never_control(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.encode_text(text) == ids, "the cache returns the same ids"


def test_every_id_decodes(tokenizer: Tokenizer) -> None:
    for i in range(tokenizer.vocab_size):
        piece = tokenizer.decode_bytes([i])
        assert piece
        if tokenizer.is_control(i):
            assert tokenizer.control_id(piece.decode()) == i
            assert tokenizer.texts[i] == ""
    with pytest.raises(UserError, match="outside of the vocabulary"):
        tokenizer.decode_bytes([tokenizer.vocab_size])
    with pytest.raises(UserError, match="outside of the vocabulary"):
        tokenizer.decode_bytes([-1])


def test_slots_of_the_published_vocabulary_follow_the_ranks(small: Tokenizer) -> None:
    n = SMALL_RANKS
    c = small.control
    assert (c.bos, c.eos, c.end_of_msg, c.open, c.close, c.sep) == tuple(range(n, n + 6))
    assert (c.eot, c.pad, small.control_id("[UNK]")) == (n + 9, n + 255, n + 254)
    assert small.control_id("<|media_begin|>") == n + 18
    assert small.control_id("<|media_pad|>") == n + 21
    assert small.control_id("<osagent_mode>") == n + 65
    assert small.control_id(f"<|reserved_token_{n + 100}|>") == n + 100
    assert small.end_ids == {n + 1, n + 2, n + 9}


def test_real_slots(real: Tokenizer) -> None:
    c = real.control
    assert (c.bos, c.eos, c.end_of_msg, c.open, c.close, c.sep, c.eot, c.pad) == (
        163584, 163585, 163586, 163587, 163588, 163589, 163593, 163839,
    )  # fmt: skip
    names = {163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>", 163605: "<|media_pad|>"}
    names |= {163649: "<osagent_mode>", 163838: "[UNK]", 163592: "<|reserved_token_163592|>"}
    for i, name in names.items():
        assert real.decode([i]) == name
    assert real.vocab_size == 163_840


def test_stand_in_uses_the_sixteen_highest_ids(single_bytes: Tokenizer) -> None:
    assert single_bytes.kind == "bytes"
    assert [single_bytes.is_control(i) for i in (495, 496, 511)] == [False, True, True]
    c = single_bytes.control
    assert (c.bos, c.end_of_msg, c.open, c.close, c.sep, c.pad) == (496, 498, 499, 500, 501, 511)
    assert single_bytes.encode_text("é!") == [0xC3, 0xA9, 0x21]
    assert single_bytes.decode([300, 0xC3, 0xA9]) == chr(300) + "é"


def test_stand_in_without_room(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="vocabulary of 260 is too small"):
        load_tokenizer(tmp_path, k3_geometry(260, 250))
    odd_eos = replace(k3_geometry(512, 496), eos_ids=(2,))
    assert load_tokenizer(tmp_path, odd_eos).control.bos == 496


def test_names_of_the_checkpoint_win(small_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(small_folder, tmp_path, dirs_exist_ok=True)
    n = SMALL_RANKS
    moved = {n + 40: "<|open|>", n + 41: "<|close|>", n + 42: "<|sep|>", n + 3: "<|something|>"}
    config = {"added_tokens_decoder": {str(i): {"content": name, "special": False} for i, name in moved.items()}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(tmp_path, k3_geometry(n + 256, n))
    assert (found.control.open, found.control.close, found.control.sep) == (n + 40, n + 41, n + 42)
    assert found.control.end_of_msg == n + 2, "what the file does not name keeps its usual place"
    assert found.decode([n + 3, n + 4]) == f"<|something|><|reserved_token_{n + 4}|>"


def test_another_family_serves_text_but_not_chat(small_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(small_folder, tmp_path, dirs_exist_ok=True)
    n = SMALL_RANKS
    names = {n + 2: "<|im_end|>", n + 3: "<|im_user|>", n + 4: "<|im_assistant|>", n + 5: "<|im_middle|>"}
    config = {"added_tokens_decoder": {str(i): {"content": name} for i, name in names.items()}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    geometry = replace(k3_geometry(n + 256, n), family="kimi_linear")
    found = load_tokenizer(tmp_path, geometry)
    assert found.decode(found.encode_text("plain")) == "plain"
    with pytest.raises(CheckpointError, match=r"no control token <\|open\|>"):
        _ = found.control


def test_broken_files_are_named(small_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(small_folder, tmp_path, dirs_exist_ok=True)
    n, file = SMALL_RANKS, tmp_path / "tiktoken.model"
    whole = file.read_text()
    with pytest.raises(CheckpointError, match="leave 10 ids of the vocabulary of 710"):
        load_tokenizer(tmp_path, k3_geometry(n + 10, n))
    with pytest.raises(CheckpointError, match=r"<\|end_of_msg\|> has id 702, but config.json ends .* 5"):
        load_tokenizer(tmp_path, replace(k3_geometry(n + 256, n), eos_ids=(5,)))
    file.write_text(whole + "@@@ 700\n")
    with pytest.raises(CheckpointError, match="line 701"):
        load_tokenizer(tmp_path, k3_geometry(n + 257, n + 1))
    file.write_text("".join(whole.splitlines(keepends=True)[1:]))
    with pytest.raises(CheckpointError, match="the 699 ranks are not 0 to 698"):
        load_tokenizer(tmp_path, k3_geometry(n + 256, n))
    file.write_text(whole)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {}}}')
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path, k3_geometry(n + 256, n))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello world", ["Hello", " world"]),
        ("HTTPServer's", ["HTTPServer's"]),
        ("don't WON'T", ["don't", " WON'T"]),
        ("今天abc", ["今天", "abc"]),
        ("12345", ["123", "45"]),
        ("a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
        ("x = {};\n", ["x", " =", " {};\n"]),
        ("tail   ", ["tail", "   "]),
    ],
)
def test_words_of_the_pattern(text: str, words: list[str]) -> None:
    assert regex.findall(PATTERN, text, flags=regex.V1) == words


def test_long_runs_are_cut() -> None:
    assert cut_long("a" * RUN_CHARS) == ["a" * RUN_CHARS]
    assert [len(p) for p in cut_long("a" * (2 * RUN_CHARS + 1))] == [RUN_CHARS, RUN_CHARS, 1]
    mixed = "ab " + "x" * (RUN_CHARS + 5) + " " * (RUN_CHARS + 2) + "end"
    assert [len(p) for p in cut_long(mixed)] == [3 + RUN_CHARS, 5 + RUN_CHARS, 2 + 3]
    long = "word " * 90_000
    assert [len(p) for p in cut_long(long)] == [400_000, 50_000]
    assert "".join(cut_long(mixed)) == mixed


def test_long_text_with_the_real_ranks(real: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 9_000
    ids = real.encode_text(text)
    assert len(ids) == 90_002, "one more than without the cut at 400,000 characters"
    assert ids[88_888:88_894] == [220, 31039, 13, 646, 5072, 16331]


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text("a\ud800b")) == "a\ufffdb"


@given(st.binary(max_size=40), st.data())
def test_detokeniser_emits_whole_code_points(single_bytes: Tokenizer, raw: bytes, data: st.DataObject) -> None:
    whole = raw.decode("utf-8", "replace")
    detokenizer = Detokenizer(single_bytes)
    pieces = []
    i = 0
    while i < len(raw):
        n = data.draw(st.integers(1, 4))
        pieces.append(detokenizer.feed(raw[i : i + n]))
        i += n
    assert "".join(pieces) + detokenizer.finish() == whole


def test_detokeniser_holds_half_a_code_point(single_bytes: Tokenizer) -> None:
    detokenizer = Detokenizer(single_bytes)
    assert [detokenizer.feed([b]) for b in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert detokenizer.feed([0xF0, 0x9F]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert Detokenizer(single_bytes, show_control=False).feed([65, 499, 66]) == "AB"
    assert Detokenizer(single_bytes).feed([65, 499]) == "A<|open|>"
