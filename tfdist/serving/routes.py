"""The addresses of a model, as TensorFlow Serving has them, and those that our server adds."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tfdist.records.format.schema import STRING
from tfdist.records.writing.instances import InstanceError, Limits, records_of
from tfdist.serving import answers, openapi
from tfdist.serving.bodies import RefusedError, asked_in, example, read_body
from tfdist.serving.served import Served

if TYPE_CHECKING:  # For others bring requests, too, where there is no LitServe.
    from tfdist.serving.server import Server

# Whoever watches the server has no token; the page has none before its reader gives it.
_OPEN = ("/", "/healthz", "/readyz")
_DTYPES = {"float16": "DT_HALF", "float32": "DT_FLOAT", "float64": "DT_DOUBLE"}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Of a request, or of an answer, which is made at once.
_SMALL_BYTES = 4096
# Of a version, in its 64 bits.
_MOST_DIGITS = 18
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Door:
    """What is let in.

    Attributes:
        body_bytes: of a request, at most.
        body_s: until the body must have come.
        limits: of what is in it.
        token: that a client must show; None: whoever asks is answered.
    """

    body_bytes: int = 32 << 20
    body_s: float = 30.0
    limits: Limits = field(default_factory=Limits)
    token: str | None = None


class Model(Protocol):
    """What answers: see ``Server``."""

    def admitted(self) -> AbstractContextManager[None]: ...

    async def ask(self, records: list[bytes] | None) -> Any: ...


class Routes:
    """Puts the addresses of a model on an app.

    Args:
        served: the model.
        door: what is let in.
    """

    def __init__(self, served: Served, door: Door):
        # Of photos, which have a limit here; for the whole process, as threads read them.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self._served, self._door = served, door
        self._has_photos = any(feature.is_image for feature in served.schema.features)

    def add(self, app: Any, asked: Model) -> None:
        """Puts them on ``app``, of Starlette or FastAPI; ``asked`` is asked."""
        self._asked = asked
        model = f"/v1/models/{self._served.name}"
        for place in (model, f"{model}/versions/{{number}}"):
            app.router.add_route(f"{place}:predict", self._guarded(self._predict), ["POST"])
            app.router.add_route(place, self._guarded(self._status), ["GET"])
            app.router.add_route(f"{place}/metadata", self._guarded(self._metadata), ["GET"])
        app.router.add_route("/openapi.json", self._guarded(self._described), ["GET"])
        app.add_exception_handler(HTTPException, _refused_by_app)
        app.add_exception_handler(Exception, _failed)

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            try:
                self._check_token(request)
                return await endpoint(request)
            except RefusedError as error:
                return JSONResponse({"error": str(error)}, error.status, error.headers)

        return guarded

    def _check_token(self, request: Request) -> None:
        # Not of request.url, which older Starlettes make of the header Host as well.
        if self._door.token is None or request.scope["path"] in _OPEN:
            return
        shown = request.headers.get("authorization", "").encode(errors="replace")
        if not hmac.compare_digest(shown, f"Bearer {self._door.token}".encode()):
            text = "a request must show the token: Authorization: Bearer TOKEN"
            raise RefusedError(401, text, {"www-authenticate": "Bearer", "connection": "close"})

    async def _predict(self, request: Request) -> Response:
        with self._asked.admitted():
            return await self._predicted(request)

    async def _predicted(self, request: Request) -> Response:
        body = await read_body(request, self._door.body_bytes, self._door.body_s)
        content_type = request.headers.get("content-type", "")
        # A large body takes its time, in which others are answered, and so does any photo.
        is_small = len(body) <= _SMALL_BYTES and not self._has_photos
        records, is_columnar = await _done(is_small, self._decoded, body, content_type)
        found, _ = await self._ask(records, _number(request))
        if isinstance(found, str):
            raise RefusedError(400, found)
        is_small = sum(rows.nbytes for rows in found.values()) <= _SMALL_BYTES
        answer = await _done(is_small, _encoded, found, is_columnar)
        return Response(answer, media_type="application/json")

    def _decoded(self, body: bytes, content_type: str) -> tuple[list[bytes], bool]:
        asked = asked_in(body, content_type, self._served.schema)
        try:
            records = records_of(self._served.schema, asked.instances, self._door.limits)
        except InstanceError as error:
            raise RefusedError(400, str(error)) from None
        return records, asked.is_columnar

    async def _ask(self, records: list[bytes] | None, number: int | None) -> tuple[Any, int]:
        """Returns what a version says, see ``Server.ask``, and which it was; None: any."""
        if number not in (None, 1):
            raise _not_served(number)
        return await self._asked.ask(records), 1

    def _states(self, number: int | None) -> list[dict[str, Any]]:
        """Returns a ModelVersionStatus of TensorFlow Serving's of each version, or of one."""
        status = {"error_code": "OK", "error_message": ""}
        only = {"version": "1", "state": "AVAILABLE", "status": status}
        return [only] if number in (None, 1) else []

    async def _status(self, request: Request) -> Response:
        number = _number(request)
        found = self._states(number)
        if not found:
            raise RefusedError(404, f"there is no version {number} of the model")
        return JSONResponse({"model_version_status": found})

    async def _described(self, request: Request) -> Response:
        has_token = self._door.token is not None
        served = self._served
        return JSONResponse(
            openapi.document(served.name, served.schema, self._door.limits, has_token=has_token)
        )

    async def _metadata(self, request: Request) -> Response:
        with self._asked.admitted():
            outputs, number = await self._ask(None, _number(request))
        inputs = {
            f.name: _tensor(STRING, ()) if f.is_image else _tensor(f.dtype, f.read_shape)
            for f in self._served.schema.features
        }
        signature = {
            "inputs": inputs,
            "outputs": {name: _tensor(dtype, shape) for name, (shape, dtype) in outputs.items()},
            "method_name": "tensorflow/serving/predict",
        }
        spec = {"name": self._served.name, "signature_name": "", "version": str(number)}
        own = {
            "inputs": self._served.schema.to_json(),
            "classes": list(self._served.classes),
            "example": example(self._served.schema),
        }
        defs = {"signature_def": {"serving_default": signature}}
        return JSONResponse(
            {"model_spec": spec, "metadata": {"signature_def": defs}, "tfdist": own}
        )


class ServerRoutes(Routes):
    """Those of our own server, which counts what it answers, and has a page to try it."""

    def __init__(self, served: Served, door: Door):
        super().__init__(served, door)
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self._html = page.replace("{{name}}", served.name)

    def add(self, app: Any, asked: Server) -> None:
        super().add(app, asked)
        self._server = asked
        for place, endpoint in (
            ("/metrics", self._metrics),
            ("/healthz", self._health),
            ("/readyz", self._ready),
            ("/", self._page),
        ):
            app.router.add_route(place, self._guarded(endpoint), ["GET"])

    async def _ask(self, records: list[bytes] | None, number: int | None) -> tuple[Any, int]:
        current = self._server.versions.current
        if number not in (None, current.number):
            raise _not_served(number)
        # What the outputs are, is asked of that version which is told with them.
        is_pinned = number is not None or records is None
        found = await self._server.ask(records, current if is_pinned else None)
        return found, current.number

    def _states(self, number: int | None) -> list[dict[str, Any]]:
        return self._server.versions.status(number)

    async def _predict(self, request: Request) -> Response:
        begun = time.perf_counter()
        status = 500
        try:
            response = await super()._predict(request)
            status = response.status_code
            return response
        except RefusedError as error:
            status = error.status
            raise
        finally:
            self._server.metrics.answers[status] += 1
            self._server.metrics.seconds.add(time.perf_counter() - begun)

    async def _metrics(self, request: Request) -> Response:
        server = self._server
        waiting = await asyncio.to_thread(server.waiting)
        text = server.metrics.text(waiting=waiting, replicas=server.versions.current.replicas)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        is_ready = self._server.can_answer
        text = "ok\n" if is_ready else "no replica is left\n"
        return Response(text, 200 if is_ready else 503, media_type="text/plain")

    async def _page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        page = self._html.replace("{{nonce}}", nonce)
        headers = {
            "content-security-policy": _POLICY.format(nonce=nonce),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(page, headers=headers, media_type="text/html")


def _number(request: Request) -> int | None:
    """Returns the version that the address names. Raises RefusedError: it cannot be one."""
    text = request.path_params.get("number")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise RefusedError(404, "there is no such address")
    return int(text)


def _not_served(number: int | None) -> RefusedError:
    return RefusedError(404, f"version {number} of the model is not served")


async def _done(is_small: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function does: here where it takes less than to hand it to a thread."""
    if is_small:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _encoded(found: dict[str, Any], is_columnar: bool) -> bytes:
    outputs = answers.encode(found)
    if not is_columnar:
        value: Any = {"predictions": answers.by_row(outputs)}
    else:
        value = {"outputs": next(iter(outputs.values())) if len(outputs) == 1 else outputs}
    return json.dumps(value, allow_nan=False).encode()


def _tensor(dtype: str, shape: Any) -> dict[str, Any]:
    """Returns the TensorInfo of a batch."""
    sizes = [{"size": str(-1 if size is None else size), "name": ""} for size in (None, *shape)]
    name = _DTYPES.get(dtype, f"DT_{dtype.upper()}")
    return {"dtype": name, "tensor_shape": {"dim": sizes, "unknown_rank": False}, "name": ""}


async def _refused_by_app(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = "there is no such address" if error.status_code == 404 else error.detail
    return JSONResponse({"error": text}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed"}, 500)
