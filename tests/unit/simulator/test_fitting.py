"""Fits of step-time constants: they find back what made the rows, and say what moved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from k3stack.cli import main
from k3stack.errors import UserError
from k3stack.estimate.seconds import load_efficiency, write_efficiency
from k3stack.simulator.fitting import Row, RowFile, fit_rows, predict, read_rows
from k3stack.workload.choose import WorkloadSpec


def rows() -> list[Row]:
    one = WorkloadSpec(name="fresh", concurrency=1, input_len=4_096, output_len=24, requests=1)
    many = WorkloadSpec(name="fresh", concurrency=8, input_len=512, output_len=32, requests=8)
    scenario = "b300x8-low-latency"
    return [
        Row(name="first token", scenario=scenario, workload=one, metric="ttft_s.p50", value=1.0),
        Row(name="token", scenario=scenario, workload=one, metric="tpot_ms.p50", value=1.0),
        Row(name="token of eight", scenario=scenario, workload=many, metric="tpot_ms.p90", value=1.0),
    ]


def file(constants: list[str], these: list[Row]) -> RowFile:
    return RowFile(efficiency="b300", constants=constants, engine="k3", rows=these)


def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    start = load_efficiency("b300")
    truth = replace(start, product=0.5, expert_read=0.4)
    names = ["product", "expert_read"]
    made = predict(rows(), truth, file(names, rows()))
    measured = [msgspec.structs.replace(r, value=v) for r, v in zip(rows(), made, strict=True)]
    fit = fit_rows(file(names, measured), start, rounds=6)
    assert fit.after.product == pytest.approx(0.5, rel=0.01)
    assert fit.after.expert_read == pytest.approx(0.4, rel=0.01)
    assert fit.changed["product"] == (start.product, fit.after.product)
    assert max(abs(r.error(v)) for r, v in zip(measured, fit.new, strict=True)) < 0.01
    assert max(abs(r.error(v)) for r, v in zip(measured, fit.old, strict=True)) > 0.05
    assert "fitted" in fit.after.provenance["product"] and fit.after.attention == start.attention


def test_rows_that_are_only_checked_do_not_pull() -> None:
    start = load_efficiency("b300")
    true = predict(rows(), start, file(["product"], rows()))
    measured = [msgspec.structs.replace(r, value=v) for r, v in zip(rows(), true, strict=True)]
    measured[0] = msgspec.structs.replace(measured[0], value=99.0, fit=False)
    fit = fit_rows(file(["expert_read"], measured), start, rounds=2)
    assert fit.after.expert_read == pytest.approx(start.expert_read, rel=0.01)


def test_verb_writes_a_set_that_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = load_efficiency("b300")
    true = predict(rows(), replace(start, chunk_s=0.04), file(["chunk_s"], rows()))
    measured = [msgspec.structs.replace(r, value=v) for r, v in zip(rows(), true, strict=True)]
    source, out = tmp_path / "rows.json", tmp_path / "set.json"
    source.write_bytes(msgspec.json.encode(file(["chunk_s"], measured)))
    assert main(["simulate", "--fit", str(source), "--write", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["constants"]["chunk_s"]["after"] == pytest.approx(0.04, rel=0.02)
    assert [r["inside"] for r in printed["rows"]] == [True] * 3
    assert load_efficiency(str(out)).chunk_s == printed["constants"]["chunk_s"]["after"]
    args = "simulate --scenario b300x8-low-latency --concurrency 1 --requests 1 --policy prefill-first --json"
    assert main([*args.split(), "--efficiency", str(out)]) == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"constants": ["speed"]}, "speed"),
        ({"constants": ["product", "expert_read", "chunk_s", "sum_s"]}, "3 rows cannot fix 4"),
        ({"rows": [{"name": "x"}]}, "not a file of measured rows"),
    ],
)
def test_files_of_rows_are_checked(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    raw = json.loads(msgspec.json.encode(file(["product"], rows())))
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(raw | change))
    with pytest.raises(UserError, match=word):
        read_rows(path)


def test_sets_of_constants_in_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    write_efficiency(load_efficiency("b300"), path, "a copy")
    assert load_efficiency(str(path)) == load_efficiency("b300")
    path.write_text('{"product": 0.4}')
    with pytest.raises(UserError, match="value"):
        load_efficiency(str(path))
    with pytest.raises(UserError, match="roofline"):
        load_efficiency("b301")
