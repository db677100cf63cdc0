"""The body of a request: read within bounds, and the instances that it holds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tfdist.errors import read_json
from tfdist.records.format.schema import Schema
from tfdist.records.writing.instances import B64

_BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_SAYS_FILE = b"filename="
# What is read of a body that is too large is thrown away, and the connection closed.
_CLOSE = {"connection": "close"}


class RefusedError(Exception):
    """A request that is not answered: a status of HTTP, a line, and headers."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None):
        super().__init__(text)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Asked:
    """What a body asks.

    Attributes:
        instances: one for each row.
        is_columnar: whether it said "inputs", and the answer says "outputs".
    """

    instances: list[Any]
    is_columnar: bool


async def read_body(request: Request, most_bytes: int, deadline_s: float) -> bytes:
    """Returns the whole body.

    Raises:
        RefusedError: it is larger, or takes longer to come, or does not come at all.
    """
    too_large = RefusedError(413, f"a request must have at most {most_bytes} bytes", _CLOSE)
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > most_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise too_large
    except TimeoutError:
        text = f"a request must have come within {deadline_s:g} s"
        raise RefusedError(408, text, _CLOSE) from None
    except ClientDisconnect:
        raise RefusedError(400, "the request ended too early") from None
    return bytes(body)


def asked_in(body: bytes, content_type: str, schema: Schema) -> Asked:
    """Returns the instances of JSON as TensorFlow Serving takes it, or the files of a form.

    Raises:
        RefusedError: the body is neither.
    """
    form = _BOUNDARY.match(content_type)
    if form is not None:
        return Asked(_files(body, form[1].encode(errors="replace")), is_columnar=False)
    try:
        found = read_json(body, keys_once=True)
    except ValueError:  # Of half letters and of two keys alike, too.
        raise RefusedError(400, "the body must be JSON") from None
    if not isinstance(found, dict) or len({"instances", "inputs"} & found.keys()) != 1:
        raise RefusedError(400, 'the body must be an object with "instances" or "inputs"')
    if "instances" in found:
        if not isinstance(found["instances"], list):
            raise RefusedError(400, '"instances" must be a list')
        return Asked(found["instances"], is_columnar=False)
    return Asked(_rows(found["inputs"], schema), is_columnar=True)


def _rows(inputs: Any, schema: Schema) -> list[Any]:
    """Returns the rows of columns."""
    if isinstance(inputs, list) and len(schema.features) == 1:
        return inputs
    are_lists = isinstance(inputs, dict) and all(isinstance(v, list) for v in inputs.values())
    if not are_lists or len({len(column) for column in inputs.values()}) != 1:
        raise RefusedError(400, '"inputs" must be lists, by name, of the same length')
    return [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]


def _files(form: bytes, boundary: bytes) -> list[Any]:
    """Returns the files of a multipart form (RFC 7578), each as an instance."""
    found = []
    for part in (b"\r\n" + form).split(b"\r\n--" + boundary)[1:]:
        head, _, content = part.partition(b"\r\n\r\n")
        if _SAYS_FILE in head:
            found.append(content)
    if not found:
        raise RefusedError(400, "a form must hold at least one file")
    return found


def example(schema: Schema) -> dict[str, Any]:
    """Returns a request as the page shows it."""
    values: dict[str, Any] = {}
    for feature in schema.features:
        if feature.is_image:
            values[feature.name] = {B64: "..."}
        elif feature.classes:
            (name,) = feature.columns or (feature.name,)
            values[name] = feature.classes[0]
        elif feature.columns:
            values |= dict.fromkeys(feature.columns, 0)
        else:
            value: Any = "text" if feature.dtype == "string" else 0
            for size in reversed(feature.read_shape):
                value = [value] * (size or 1)
            values[feature.name] = value
    is_alone = len(values) == len(schema.features) == 1
    return {"instances": [next(iter(values.values())) if is_alone else values]}
