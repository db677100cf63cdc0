"""What the description says of requests is what the server takes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import jsonschema
import pytest

from benchmarks import apart
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.writing.instances import InstanceError, Limits, as_asked, records_of
from tfdist.serving.bodies import RefusedError, asked_in, example
from tfdist.serving.openapi import document


def _input(name: str, shape: tuple, dtype: str, encoding: str = "bytes", **more: Any) -> Feature:
    return Feature(name=name, shape=shape, dtype=dtype, encoding=encoding, role="input", **more)


_MANY = Limits(instances=2)
_SCHEMAS = {
    "photos": [_input("image", (4, 5, 3), "uint8", "jpeg")],
    "numbers": [_input("x", (2,), "float32", "float")],
    "row": [
        _input("x", (2,), "float32", "float", columns=("a", "b")),
        _input("colour", (), "int64", "int64", classes=("red", "blue"), columns=("colour",)),
    ],
    "table": [
        _input("user", (), "int64", "int64", classes=("", "7", "07", "8"), columns=("user",)),
        _input("on", (), "int64", "int64", columns=("on",), day_first=True),
    ],
    "lists": [
        _input("a", (), "float32", "float", columns=("a",)),
        _input("seq", (None,), "int64", "int64", longest=3),
    ],
    "words": [_input("words", (None,), "string", longest=3)],
    "text": [_input("text", (), "string")],
}
_BODIES = {
    "photos": [{"instances": [{"b64": "aGk="}]}, {"instances": [{"b64": 1}]}],
    "numbers": [
        {"instances": [[1, 2.5]]},
        {"instances": [{"x": [1, 2]}], "signature_name": "serving_default"},
        {"inputs": [[1, 2], [3, 4]]},
        {"inputs": {"x": [[1, 2]]}},
        {"instances": [[1, 2, 3]]},
        {"instances": [["1", "2"]]},
        {"instances": []},
        {"instances": [[1, 2]] * 3},
        {"instances": [[1, 2]], "inputs": [[1, 2]]},
        {},
        [],
    ],
    "row": [
        {"instances": [{"a": 1, "b": 2, "colour": "red"}]},
        {"instances": [{"x": [1, 2], "colour": "red"}]},
        {"instances": [{"x": [1, 2], "colour": 1}]},
        {"instances": [{"x": [1, 2]}]},
        {"instances": [3]},
        {"instances": [{}]},
        {"inputs": {}},
        {"inputs": {"a": [1], "b": [2], "colour": ["red"]}},
        {"inputs": {"a": [1], "b": [2], "colour": ["red"]}, "instances": 3},
    ],
    "table": [
        {"instances": [{"user": 7, "on": "05/06/2024"}]},
        {"instances": [{"user": "07", "on": 1717545600}]},
        {"instances": [{"user": 1, "on": "2024-06-05"}]},
        {"instances": [{"user": True, "on": "2024-06-05"}]},
        {"instances": [{"user": "", "on": 0.5}]},
    ],
    "lists": [
        {"instances": [{"a": 1, "seq": [1, 2]}]},
        {"instances": [{"a": 1, "seq": []}]},
        {"instances": [{}]},
    ],
    "words": [{"instances": [["a", "b"]]}, {"instances": [[]]}, {"instances": ["a"]}],
    "text": [
        {"instances": ["a"]},
        {"instances": [{"b64": "aGk="}]},
        {"instances": [{"text": "a"}]},
        {"instances": [1]},
    ],
}


def _is_described(schema: Schema, body: object) -> bool:
    found = document("m", schema, _MANY, has_token=False)
    content = found["paths"]["/v1/models/m:predict"]["post"]["requestBody"]["content"]
    asked = content["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(asked)
    return jsonschema.Draft202012Validator(asked).is_valid(body)


def _is_taken(schema: Schema, body: object) -> bool:
    try:
        asked = asked_in(json.dumps(body).encode(), "application/json", schema)
        records_of(schema, asked.instances, _MANY)
    except (RefusedError, InstanceError) as error:
        return "image that can be read" in str(error)  # No type tells which bytes are a photo.
    return True


@pytest.mark.parametrize("kind", _SCHEMAS)
def test_what_is_described_is_taken_and_nothing_else(kind):
    schema = as_asked(_SCHEMAS[kind])
    bodies = [*_BODIES[kind], example(schema)]
    if kind == "photos":
        bodies.pop()  # Three points are no photo.
    found = [_is_described(schema, body) for body in bodies]
    assert found == [_is_taken(schema, body) for body in bodies]
    assert True in found
    assert False in found


def test_a_token_is_described():
    found = document("m", as_asked(_SCHEMAS["text"]), _MANY, has_token=True)
    assert found["security"] == [{"token": []}]
    for way in (way for path in found["paths"].values() for way in ("get", "post") if way in path):
        assert all(
            "401" in path[way]["responses"] for path in found["paths"].values() if way in path
        )


def test_the_server_describes_itself(server):
    status, body, _ = server.get("/openapi.json")
    found = json.loads(body)
    assert status == 200
    assert len(found["paths"]) == 6
    content = found["paths"]["/v1/models/lights:predict"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "multipart/form-data"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_schemathesis_finds_no_failure_of_the_server(server, tmp_path):
    """Thousands of requests, right and wrong ones, from its own description."""
    python = apart.python_with("schemathesis", "schemathesis==4.32.5")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    done = subprocess.run(
        [
            *(python.with_name("st"), "run", f"{server.address}/openapi.json"),
            *("--checks", f"{checks},response_schema_conformance"),
            *("--max-examples", "1500", "--seed", "1", "--mode", "all", "--no-color"),
            *("--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"),
            *("--request-timeout", "60"),
        ],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
