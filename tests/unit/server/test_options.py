"""The one table of options: types, bounds, combinations and what the messages say."""

from __future__ import annotations

from typing import Any

import pytest

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
