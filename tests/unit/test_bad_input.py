"""What a user types or names wrongly ends in one line and exit status 2: numbers, files, options nothing would read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from k3stack.chat import load_tokenizer
from k3stack.chat.grammar import build_text_grammar
from k3stack.chat.masks import Grammars
from k3stack.chat.tokenizer import read_ranks
from k3stack.cli import main
from k3stack.config import hardware
from k3stack.config.files import check_writable, read_json, read_text
from k3stack.config.flags import parse_serve
from k3stack.config.geometry import load_geometry, parse_geometry
from k3stack.config.options import EngineOptions
from k3stack.config.sampling import SamplingParams
from k3stack.engine.budget import arena_budget
from k3stack.errors import CheckpointError, DoesNotFit, UserError
from k3stack.estimate.pools import BlockLayout, PoolPlan
from k3stack.estimate.saved_plan import SavedPlan, figures, load_plan, plan_json
from k3stack.estimate.seconds import load_efficiency
from k3stack.models.builtin import resolve
from k3stack.models.checkpoint import read_header
from k3stack.server.run import read_defaults
from k3stack.server.service import Defaults
from k3stack.simulator import scenario
from k3stack.workload.lengths import arrival_times

SIMULATE = "simulate --scenario b300x8-balanced"
LOAD = f"{SIMULATE} --rate 1 --requests 3"


def refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    status = main(words)
    out, err = capsys.readouterr()
    assert status == 2 and said in err and "Traceback" not in err and not out, err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --hardware 8xB300 --budget-gib nan", "--budget-gib is nan; it must be above 0"),
        ("plan --hardware 8xB300 --budget-gib inf", "--budget-gib is inf"),
        ("plan --hardware 8xB300 --tp-size 8 --budget-gib 1e308", "at most 1,000,000,000,000"),
        ("plan --hardware 8xB300 --disk-gbps nan", "--disk-gbps is nan"),
        ("plan --hardware 8xB300 --tp-size 8 --input-len 99999999999999999999", "at most 100,000,000"),
        ("plan --hardware 8xB300 --tp-size 8 --engine sglang --mamba-full-memory-ratio inf", "at most 1,000,000"),
        ("plan --hardware 8xB300 --tp-size 8 --engine sglang --mamba-full-memory-ratio nan", "ratio is nan"),
        (f"{SIMULATE} --rate nan", "--rate: nan; it must be above 0"),
        (f"{SIMULATE} --rate inf", "--rate: inf"),
        (f"{SIMULATE} --rate 1000000 --duration 1000", "1e+09 requests; a run keeps at most 5,000,000"),
        (f"{SIMULATE} --rate 1 --duration nan", "--duration: nan"),
        (f"{SIMULATE} --rate 1 --requests 999999999999", "--requests: 999999999999; it must be from 1 to 1,000,000"),
        (f"{SIMULATE} --concurrency 99999999999999", "--concurrency: 99999999999999"),
        (f"{LOAD} --input-len 0", "--input-len: 0"),
        (f"{LOAD} --input-len 99999999999999", "--input-len: 99999999999999"),
        (f"{LOAD} --seed -1", "--seed: -1"),
        (f"{LOAD} --ttft nan", "--ttft: nan"),
        (f"{LOAD} --share 1", "--share: 1; it must be above 0 and below 1"),
        (f"{LOAD} --max-gap nan", "--max-gap: nan"),
        (f"{LOAD} --chunked-prefill-size 0", "--chunked-prefill-size: 0"),
        (f"{LOAD} --repeats 0", "--repeats: 0"),
        ("bench --base-url http://127.0.0.1:1 --rate 1 --gpus 0", "--gpus: 0"),
        ("bench --base-url http://127.0.0.1:1 --rate 1 --tokens-per-word nan", "--tokens-per-word: nan"),
        ("verify --model-path nano --workers 99999999", "--workers: 99999999; it must be from 1 to 256"),
        ("verify --model-path nano --threshold agreement.top1=nan", "expected NAME=NUMBER"),
    ],
)
def test_numbers_out_of_range(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    refused(capsys, words.split(), said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{LOAD} --write x.json", "--write is for --fit or --fit-steps"),
        (f"{LOAD} --rounds 3", "--rounds is for --fit"),
        (f"{LOAD} --pools x.json", "--pools is for --fit-steps"),
        (f"{LOAD} --repeats 3", "--repeats is for --sustained"),
        (f"{LOAD} --compare rack-a,rack-b", "give --compare or --scenario, not both"),
        (f"{LOAD} --time-scale 7", "--time-scale would change nothing here: only a trace"),
        (f"{LOAD} --duration 5", "--duration would change nothing here: --requests says how many"),
        (f"{SIMULATE} --concurrency 2 --arrivals bursty", "--arrivals would change nothing here"),
        (f"{SIMULATE} --workload interference --duration 5", "--duration would change nothing here"),
        ("simulate --compare rack-a,rack-b --rate 1 --png x", "needs --sustained"),
        ("verify --model-path nano --api-key x", "--api-key is for --base-url"),
        ("verify --base-url http://127.0.0.1:1 --device cpu", "--device is for --model-path"),
        ("verify --base-url http://127.0.0.1:1 --limit 5", "--limit is for --dataset"),
    ],
)
def test_options_that_nothing_would_read(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    refused(capsys, words.split(), said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--arena-gib inf", "--arena-gib is inf; it must be a finite number"),
        ("--arena-gib 1e308", "--arena-gib is 1e+308"),
        ("--mamba-full-memory-ratio inf", "--mamba-full-memory-ratio is inf"),
        ("--drain-timeout inf", "--drain-timeout is inf"),
        ("--max-running-requests 999999999999", "it must be from 1 to 65536"),
        ("--random-seed 99999999999999999999", "--random-seed is 99999999999999999999"),
        ("--host=", "--host is empty"),
        ("--api-key=", "--api-key is empty"),
        ("--served-model-name=", "--served-model-name is empty"),
        ("--max-gap-ms 5", "--max-gap-ms is for --policy slo"),
        ("--policy slo --enable-mixed-chunk", "--enable-mixed-chunk is for --policy prefill-first"),
    ],
)
def test_serve_flags(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_serve(["--model-path", "nano", *words.split()])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(range(256)), "not a text file (byte 128 is no UTF-8)"),
        (b"[" * 200_000, "nested too deep"),
        (b"{", "not valid JSON (line 1, column 2"),
        (b"1" * 10_000, "not valid JSON"),
    ],
)
def test_files_that_are_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_json(file)
    assert str(caught.value).startswith(f"{file}: ") and said in str(caught.value)
    for words in (
        ["simulate", "--rate", "1", "--scenario"],
        ["plan", "--hardware", "8xB300", "--hardware-file"],
        ["plan", "--from"],
        ["simulate", "--fit"],
        [*LOAD.split(), "--efficiency"],
    ):
        refused(capsys, [*words, str(file)], str(file))


def test_traces_and_records_nested_too_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b"[" * 200_000)
    refused(capsys, [*SIMULATE.split(), "--workload", str(file)], "nested too deep")
    refused(capsys, ["bench", "--compare", str(file), str(file)], "line 1 is not JSON")


def test_a_folder_in_place_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="Is a directory"):
        read_text(tmp_path)
    refused(capsys, ["plan", "--hardware", "8xB300", "--hardware-file", str(tmp_path)], "Is a directory")
    refused(capsys, ["bench", "--compare", str(tmp_path), str(tmp_path)], "Is a directory")


@pytest.mark.parametrize("flag", ["--records", "--html", "--png"])
def test_outputs_are_checked_before_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    taken = tmp_path / "taken"
    taken.write_text("kept")
    path = taken / "below"
    wrong = f"{flag} {path}: " + ("Not a directory" if flag == "--png" else f"there is no folder {taken}")
    refused(capsys, [*LOAD.split(), flag, str(path)], wrong)
    refused(capsys, [*LOAD.split(), flag, ""], f"{flag} is empty")
    # With a server that is not there: the path is looked at first.
    refused(capsys, ["bench", "--base-url", "http://127.0.0.1:1", "--rate", "1", flag, str(path)], wrong)
    assert taken.read_text() == "kept"


def test_checking_leaves_no_file_and_keeps_one(tmp_path: Path) -> None:
    check_writable(tmp_path / "new", "--records")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old", "--records")
    assert (tmp_path / "old").read_text() == "kept"
    with pytest.raises(UserError, match=r"--records .*: Is a directory"):
        check_writable(tmp_path, "--records")


def test_a_full_disk_names_flag_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LOAD.split(), "--records", "/dev/full"]) == 2
    assert "k3 simulate: --records /dev/full: No space left on device" in capsys.readouterr().err


def test_efficiencies_without_constants(tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(UserError, match="no constants; known: "):
        load_efficiency(str(tmp_path / "none.json"))


def test_arrivals_of_a_library_user() -> None:
    import numpy as np

    for rate in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="it must be above 0"):
            arrival_times(np.random.default_rng(0), rate, 10.0)


def _file(tmp_path: Path, header: bytes) -> Path:
    file = tmp_path / "m.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return file


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[1]", "expected a JSON object, found list"),
        (b"[" * 100_000, "nested too deep"),
        (b"\xff\xfe", "not valid JSON"),
        (json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode(), "whole numbers from 0"),
        (json.dumps({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}).encode(), "whole numbers from 0"),
        (json.dumps({"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}).encode(), "from 0"),
    ],
)
def test_safetensors_headers(tmp_path: Path, header: bytes, said: str) -> None:
    with pytest.raises(CheckpointError, match=r"m\.safetensors") as caught:
        list(read_header(_file(tmp_path, header)))
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    folder = resolve("nano").path
    return Grammars(load_tokenizer(folder, load_geometry(folder)))


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": r"[^\s\S]"},
        {"regex": r"ab[^\s\S]"},
        {"ebnf": "root ::= root"},
        {"ebnf": 'root ::= "a" root'},
        {"ebnf": 'root ::= "a" x\nx ::= x'},
    ],
)
def test_structures_that_no_text_matches(grammars: Grammars, asked: dict[str, str]) -> None:
    grammar = build_text_grammar(**asked)
    assert grammar is not None
    with pytest.raises(UserError, match="cannot be compiled: no text matches it"):
        grammars.session(grammar)


@pytest.mark.parametrize("asked", [{"regex": ""}, {"regex": r"ab|[^\s\S]"}, {"ebnf": 'root ::= "" | "a" root'}])
def test_structures_that_some_text_matches(grammars: Grammars, asked: dict[str, str]) -> None:
    grammar = build_text_grammar(**asked)
    assert grammar is not None and any(grammars.session(grammar).mask())


def test_a_penalty_that_single_precision_cannot_hold() -> None:
    with pytest.raises(UserError, match=r"repetition_penalty is 1e-308; it must be from 0.000001 to 2"):
        SamplingParams(repetition_penalty=1e-308).validate()
    SamplingParams(repetition_penalty=1e-6).validate()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("eos_token_id", "x", "expected token ids"),
        ("bos_token_id", float("nan"), "expected token ids"),
        ("pad_token_id", [[]], "expected token ids"),
        ("text_config.vocab_size", 10**29, "expected at most 100,000,000"),
        ("text_config.rms_norm_eps", -1, "expected a number above 0"),
        ("text_config.rms_norm_eps", float("nan"), "expected a number"),
        ("text_config.activation_situ_beta", 0, "expected a number above 0"),
        ("text_config.attn_res_block_size", 0, "expected a whole number >= 1"),
    ],
)
def test_config_values(field: str, value: object, said: str) -> None:
    raw = json.loads((Path(resolve("nano").path) / "config.json").read_text())
    inner, _, last = field.rpartition(".")
    (raw[inner] if inner else raw)[last] = value
    with pytest.raises(CheckpointError) as caught:
        parse_geometry(raw)
    assert f"{last} is " in str(caught.value) and said in str(caught.value)


def test_sampling_defaults_of_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": null, "top_p": 0.5}')
    assert read_defaults(tmp_path) == Defaults(1.0, 0.5)
    for text, said in (('{"temperature": NaN}', "temperature is nan"), ('{"top_p": 7}', "top_p is 7.0; it must be")):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=said):
            read_defaults(tmp_path)


def test_checkpoint_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").mkdir()
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: Is a directory"):
        read_ranks(tmp_path / "tiktoken.model")


def test_an_arena_larger_than_the_memory() -> None:
    options = EngineOptions(model_path="nano", arena_gib=100_000.0)
    with pytest.raises(
        DoesNotFit, match=r"--arena-gib 100000 is 99991\.00 GiB more than what the 10\.00 GiB that are free"
    ):
        arena_budget(options, on_cpu=True, free_at_start=10 * 2**30, weight_bytes=2**30)
    fits = EngineOptions(model_path="nano", arena_gib=9.0)
    assert arena_budget(fits, on_cpu=True, free_at_start=10 * 2**30, weight_bytes=2**30)[0] == 9 * 2**30


def test_a_layout_with_more_gpus_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --hardware 8xB300 --tp-size 8 --dp-size 8".split()) == 1
    assert capsys.readouterr().err == "k3 plan: does not fit: the layout needs 64 GPUs and there are 8\n"


def _set(raw: Any, field: str, value: object) -> Any:
    *inner, last = field.split(".")
    found = raw
    for name in inner:
        found = found[int(name) if isinstance(found, list) else name]
    found[last] = value
    return raw


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("plan", "x", "Expected `object`, got `str`"),
        ("plan.layout.dcp", None, "Expected `int`, got `null`"),
        ("plan.layout.dcp", 0, "dcp is 0, which no boot saves"),
        ("plan.notes", [1], "Expected `str`, got `int`"),
        ("actual.admitted", [], "Expected `object`, got `array`"),
    ],
)
def test_saved_plans(tmp_path: Path, field: str, value: object, said: str) -> None:
    layout = BlockLayout(3, 128, 6, 16384, 9216, 7)
    plan = PoolPlan("k3", layout, 2**26, 100)
    raw = plan_json(SavedPlan("m", "cpu", plan, figures(plan, 5), figures(plan, 6)))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(raw))
    assert load_plan(file).plan == plan
    file.write_text(json.dumps(_set(json.loads(json.dumps(raw)), field, value)))
    with pytest.raises(UserError) as caught:
        load_plan(file)
    assert said in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("gpus", None, "'gpus' must be a JSON object"),
        ("gpus.Z9", 5, "must be a JSON object"),
        ("gpus.Z9.links", [], "'links' must be a JSON object"),
        ("gpus.Z9.gpus_per_node", 0, "whole numbers from 1"),
        ("gpus.Z9.sm", float("inf"), "whole numbers from 1"),
        ("gpus.Z9.memory.value", float("nan"), "memory is nan; it must be above 0"),
        ("systems.box.count", float("inf"), "needs 'gpu' and 'count'"),
    ],
)
def test_hardware_files(tmp_path: Path, field: str, value: object, said: str) -> None:
    shipped = json.loads((Path(hardware.__file__).parent / "data" / "hardware.json").read_text())
    raw = {"gpus": {"Z9": shipped["gpus"]["B300"]}, "systems": {"box": {"gpu": "Z9", "count": 8}}}
    (tmp_path / "good.json").write_text(json.dumps(raw))
    assert hardware.load_catalogue(str(tmp_path / "good.json")).parse("8xZ9").count == 8
    (tmp_path / "bad.json").write_text(json.dumps(_set(raw, field, value)))
    with pytest.raises(UserError) as caught:
        hardware.load_catalogue(str(tmp_path / "bad.json"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("servers.0.layout.tp", 0, "tp is 0; it must be from 1"),
        ("servers.0.pools.budget_gib", float("inf"), "budget_gib is inf; it must be from 0 to 10,000"),
    ],
)
def test_scenario_files(tmp_path: Path, field: str, value: object, said: str) -> None:
    text = (Path(scenario.__file__).parent / "data" / "scenarios.json").read_text()
    raw = next(s for s in json.loads(text)["scenarios"] if s["name"] == "b300x8-balanced")
    (tmp_path / "x.json").write_text(json.dumps(_set(raw, field, value)))
    with pytest.raises(UserError) as caught:
        scenario.load_scenario(str(tmp_path / "x.json"))
    assert said in str(caught.value)
