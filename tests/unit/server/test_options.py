"""The one table of options: types, bounds, combinations and what the messages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3stack.config.flag_names import ALWAYS, OTHER_SPELLING, REFUSED, SAME_AS
from k3stack.config.flags import ServeCommand, help_text, parse_serve
from k3stack.config.options import EngineOptions, ServeOptions, make_engine_options, rows
from k3stack.errors import UserError


def test_defaults_are_valid() -> None:
    assert EngineOptions(model_path="x").engine == "k3"
    assert ServeOptions().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("dtype", "float16", "--dtype is 'float16'; it must be one of auto, float32, float64, bfloat16"),
        ("mem_fraction_static", 0.0, "above 0 to 1"),
        ("mem_fraction_static", 1.5, "above 0 to 1"),
        ("chunked_prefill_size", 0, "from 1 or -1"),
        ("max_running_requests", True, "of type int"),
        ("max_running_requests", "4", "of type int"),
        ("device", "tpu", "cuda:N"),
        ("device", "cuda:x", "cuda:N"),
        ("latent_norm_eps", 0, "above 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: Any, says: str) -> None:
    with pytest.raises(UserError, match="--") as caught:
        make_engine_options("x", {name: value})
    assert says in str(caught.value)
    assert caught.value.param == "--" + name.replace("_", "-")


@pytest.mark.parametrize("value", [-1, 1, 4096])
def test_off_is_allowed_beside_the_bounds(value: int) -> None:
    assert make_engine_options("x", {"chunked_prefill_size": value}).chunked_prefill_size == value


def test_two_settings_of_one_thing_contradict() -> None:
    with pytest.raises(UserError, match="give one of them"):
        make_engine_options("x", {"mem_fraction_static": 0.8, "arena_gib": 1.0})
    with pytest.raises(UserError, match="give one of them"):
        make_engine_options("x", {"mamba_full_memory_ratio": 0.9, "max_mamba_cache_size": 10})


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean max_running_requests"):
        make_engine_options("x", {"max_runing_requests": 4})


def test_every_row_has_words_and_a_flag_of_its_own() -> None:
    every = [*rows(EngineOptions), *rows(ServeOptions)]
    flags = [flag for opt in every for flag in (opt.flag, *opt.row.short)]
    assert len(flags) == len(set(flags))
    assert all(len(opt.row.doc) > 10 and opt.row.group for opt in every)


def parse(line: str, **env: str) -> ServeCommand:
    return parse_serve(line.split(), env)


def test_flags_become_options() -> None:
    got = parse(
        "--model-path /m --dtype=bfloat16 --mem-fraction-static 0.8 --disable-radix-cache --port 0 "
        "--chunked-prefill-size -1 --api-key a --api-key b --max_running_requests 4"
    )
    assert (got.engine.model_path, got.engine.dtype, got.engine.mem_fraction_static) == ("/m", "bfloat16", 0.8)
    assert got.engine.disable_radix_cache and got.engine.chunked_prefill_size == -1
    assert (got.serve.port, got.serve.api_key, got.engine.max_running_requests) == (0, ("a", "b"), 4)
    assert got.notes == ()


def test_an_operators_command_says_what_its_flags_stand_for() -> None:
    got = parse(
        "--model-path /m --trust-remote-code --reasoning-parser kimi_k3 --tool-call-parser kimi_k3 --dp-size 1 "
        "--max-model-len 4096"
    )
    assert got.engine.context_length == 4096
    assert [note.split(":")[0] for note in got.notes] == [
        "--trust-remote-code",
        "--reasoning-parser kimi_k3",
        "--tool-call-parser kimi_k3",
        "--dp-size 1",
        "--max-model-len stands for --context-length",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "--model-path is missing"),
        ("--model-path m --tp 8", "--tp-size 8 is not taken: this version serves on one GPU"),
        ("--model-path m --ep-size 2", "--ep-size 2 is not taken: this version serves on one GPU"),
        ("--model-path m --emulate-routing slowest", "--emulate-routing is for --emulate-rank"),
        ("--model-path m --reasoning-parser qwen3", "always parsed as Kimi-K3's"),
        ("--model-path m --speculative-algorithm EAGLE", "--speculative-algorithm is not taken: drafting"),
        ("--model-path m --chunked-prefil-size 5", "did you mean --chunked-prefill-size?"),
        ("--model-path m --port x", "--port is 'x'; it must be a whole number"),
        ("--model-path m --port", "--port needs a value"),
        ("--model-path m --port --host x", "--port needs a value"),
        ("--model-path m --port 1 --port 2", "--port is given twice, as 1 and 2"),
        ("--model-path m --disable-radix-cache=3", "takes no value"),
        ("m", "'m' stands alone"),
        ("--model-path m --api-key-file /does/not/exist", "--api-key-file /does/not/exist: No such file"),
    ],
)
def test_a_wrong_command_line_is_answered_with_what_to_do(line: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(line)
    assert says in str(caught.value)


def test_keys_come_from_flag_file_or_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    assert parse(f"--model-path m --api-key-file {file}").serve.api_key == ("one", "two")
    assert parse("--model-path m", K3_API_KEYS="x,y z").serve.api_key == ("x", "y", "z")
    assert parse("--model-path m --api-key k", K3_API_KEYS="x").serve.api_key == ("k",)


def test_no_flag_is_in_two_tables() -> None:
    table = {flag for cls in (EngineOptions, ServeOptions) for opt in rows(cls) for flag in (opt.flag, *opt.row.short)}
    others = [set(OTHER_SPELLING), set(ALWAYS), set(SAME_AS), set(REFUSED)]
    for i, names in enumerate(others):
        assert not names & table
        assert not any(names & more for more in others[i + 1 :])
    assert set(OTHER_SPELLING.values()) <= table
    assert set(SAME_AS.values()) <= set(ALWAYS)


def test_help_names_every_flag() -> None:
    text = help_text()
    assert all(opt.flag in text for cls in (EngineOptions, ServeOptions) for opt in rows(cls))
