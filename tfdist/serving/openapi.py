"""What a server answers, as OpenAPI 3.1: clients are made from it, and tools try it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.records.format.schema import STRING, Feature, Schema
from tfdist.records.writing.as_trained import columns_in, is_date
from tfdist.records.writing.instances import B64, Limits

_BYTES = {
    "type": "object",
    "properties": {B64: {"type": "string", "contentEncoding": "base64"}},
    "required": [B64],
    "additionalProperties": False,
}
# Categories that are numbers may be sent as such.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ERROR = {"$ref": "#/components/schemas/Error"}
_MEANINGS = {
    400: "What was sent is not what the model takes.",
    401: "The token is missing, or another one.",
    404: "That version is not served.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    500: "The model failed.",
    503: "No replica was free: ask again.",
    504: "No replica answered in time: ask again.",
}


def document(name: str, schema: Schema, limits: Limits, *, has_token: bool) -> dict[str, Any]:
    """Returns the addresses of a model, and the types of what they take.

    Args:
        name: the model's.
        schema: its inputs, see ``instances.as_asked``.
        limits: of a request.
        has_token: whether a client must show one.
    """
    model = f"/v1/models/{name}"
    always = (401,) if has_token else ()
    answered = {"type": "object"}
    paths: dict[str, Any] = {}
    for place in (model, f"{model}/versions/{{number}}"):
        unknown = (404,) if place != model else ()
        predict = {
            "summary": "Predictions",
            "requestBody": {"required": True, "content": _bodies(schema, limits)},
            "responses": _responses(answered, 400, *always, *unknown, 408, 413, 500, 503, 504),
        }
        status = {"summary": "State", "responses": _responses(answered, *always, *unknown)}
        metadata = {
            "summary": "Inputs and outputs",
            "responses": _responses(answered, *always, *unknown, 500, 503, 504),
        }
        number = {"name": "number", "in": "path", "required": True}
        number["schema"] = {"type": "integer", "minimum": 1}
        shared = {"parameters": [number]} if place != model else {}
        paths[f"{place}:predict"] = {**shared, "post": predict}
        paths[place] = {**shared, "get": status}
        paths[f"{place}/metadata"] = {**shared, "get": metadata}
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": name, "version": "1"},
        "paths": paths,
        "components": {"schemas": {"Error": error}},
    }
    if has_token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def _responses(answer: Mapping[str, Any], *refusals: int) -> dict[str, Any]:
    def told(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"description": text, "content": {"application/json": {"schema": schema}}}

    refused = {str(status): told(_MEANINGS[status], _ERROR) for status in refusals}
    return {"200": told("The answer.", answer), **refused}


def _bodies(schema: Schema, limits: Limits) -> dict[str, Any]:
    many = {"type": "array", "minItems": 1, "maxItems": limits.instances}
    rows = {**many, "items": _instance(schema)}
    columns: dict[str, Any] = {"type": "object", "additionalProperties": many, "minProperties": 1}
    if len(schema.features) == 1:
        columns = {"anyOf": [columns, rows]}
    bodies = [
        {"properties": {key: value}, "required": [key], "not": {"required": [other]}}
        for key, value, other in (("instances", rows, "inputs"), ("inputs", columns, "instances"))
    ]
    found = {"application/json": {"schema": {"type": "object", "oneOf": bodies}}}
    if len(schema.features) == 1 and schema.features[0].is_image:
        file = {"type": "string", "contentMediaType": "application/octet-stream"}
        form = {"type": "object", "properties": {"file": file}, "required": ["file"]}
        found["multipart/form-data"] = {"schema": form}
    return found


def _instance(schema: Schema) -> dict[str, Any]:
    """Returns the type of an instance: see ``instances.records_of``."""
    values = {feature.name: _value(feature) for feature in schema.features}
    by_name = {"type": "object", "properties": values, "required": list(values)}
    ways: list[dict[str, Any]] = [{**by_name, "additionalProperties": False}]
    if len(schema.features) == 1:
        ways.append(_value(schema.features[0]))
    if all(columns_in(feature) for feature in schema.features):
        cells = {
            name: _cell(feature) for feature in schema.features for name in columns_in(feature)
        }
        # One that is left out is null.
        some = [{"required": [name]} for name in cells]
        row = {"type": "object", "properties": cells, "anyOf": some}
        # With just the names of the inputs it is none.
        ways.append({**row, "not": {"required": list(values), "maxProperties": len(values)}})
    return {"anyOf": ways}


def _cell(feature: Feature) -> dict[str, Any]:
    # What else it may be, the table of the training has told: text of dates, null, a category.
    return {"type": ["number", "string", "boolean", "null", *["array"] * feature.is_ragged]}


def _value(feature: Feature) -> dict[str, Any]:
    if feature.is_image:
        return _BYTES
    if feature.dtype == STRING:
        return _nested({"anyOf": [{"type": "string"}, _BYTES]}, feature.shape, least=1)
    dtype = np.dtype(feature.dtype)
    if dtype.kind == "f":
        value: dict[str, Any] = {"type": "number"}
    elif dtype.kind == "b":
        value = {"type": "boolean"}
    else:
        bounds = np.iinfo(dtype)
        value = {"type": "integer", "minimum": int(bounds.min), "maximum": int(bounds.max)}
    value = _nested(value, feature.shape, least=0)
    if is_date(feature):
        return {"anyOf": [{"type": "string"}, value]}
    if feature.classes is None:
        return value
    if feature.columns:
        numbers = [int(name) for name in feature.classes if _WHOLE.fullmatch(name)]
        missing = [None] if "" in feature.classes else []
        return {"enum": [*feature.classes, *numbers, *missing]}
    return {"anyOf": [{"enum": list(feature.classes)}, value]}


def _nested(value: dict[str, Any], shape: Sequence[int | None], least: int) -> dict[str, Any]:
    """Returns the type of nested lists of values; ``least`` of them where the length is open."""
    for size in reversed(shape):
        many: dict[str, Any] = {"type": "array", "items": value}
        bounds = {"minItems": least} if size is None else {"minItems": size, "maxItems": size}
        value = many | bounds
    return value
