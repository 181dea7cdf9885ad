"""/openapi.json describes what the endpoints take."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.unit.server.harness import Live, saying


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    with Live(saying("a[MC]")) as live:
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
