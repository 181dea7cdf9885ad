"""/openapi.json describes what the endpoints take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.unit.server.harness import Live, saying


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(saying("a[MC]")) as running:
        yield running


@pytest.fixture(scope="module")
def paths(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    return found


def test_parameters_of_paths_are_declared(paths: dict[str, Any]) -> None:
    for path, methods in paths.items():
        for operation in methods.values():
            declared = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path))


def test_every_post_has_a_valid_schema(paths: dict[str, Any]) -> None:
    for path, methods in paths.items():
        if "post" in methods and path != "/flush_cache":
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            jsonschema.Draft202012Validator.check_schema(schema)


def test_chat_schema_takes_a_conversation_and_not_another_role(paths: dict[str, Any]) -> None:
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    call = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "f:0", "content": "done"},
    ]
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"messages": messages})
    assert not validator.is_valid({"messages": [{"role": "robot", "content": "Hi"}]})
    assert not validator.is_valid({"messages": []})


def check_error(answer: httpx.Response, status: int, operation: dict[str, Any]) -> None:
    """It is declared, and looks as declared."""
    assert answer.status_code == status
    schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(schema).validate(answer.json())


def test_errors_are_those_declared(live: Live, paths: dict[str, Any]) -> None:
    for path, methods in paths.items():
        if "requestBody" in methods.get("post", {}):
            check_error(httpx.post(live.url + path, content=b"{"), 400, methods["post"])
    elsewhere = {"model": "elsewhere", "prompt": "x"}
    check_error(httpx.post(f"{live.url}/tokenize", json=elsewhere), 404, paths["/tokenize"]["post"])
    check_error(httpx.get(f"{live.url}/v1/models/elsewhere"), 404, paths["/v1/models/{name}"]["get"])
    check_error(httpx.get(f"{live.url}/dashboard/data?since=x"), 400, paths["/dashboard/data"]["get"])
    check_error(httpx.get(f"{live.url}/flush_cache?timeout=x"), 400, paths["/flush_cache"]["get"])
    generating = {path for path, methods in paths.items() if "429" in methods.get("post", {}).get("responses", {})}
    assert generating == {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate"}


def test_a_key_is_declared_where_one_is_asked_for(paths: dict[str, Any]) -> None:
    assert not any("401" in operation["responses"] for methods in paths.values() for operation in methods.values())
    with Live(saying("a[MC]"), api_key=("sesame",)) as live:
        assert httpx.get(f"{live.url}/openapi.json").status_code == 401
        given = httpx.get(f"{live.url}/openapi.json", headers={"authorization": "Bearer sesame"})
        for path, methods in given.json()["paths"].items():
            for method, operation in methods.items():
                status = httpx.request(method, live.url + path.replace("{name}", "x")).status_code
                assert (status == 401) == ("401" in operation["responses"])
