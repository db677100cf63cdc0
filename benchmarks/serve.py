"""``tfdist serve`` beside servers by hand: FastAPI with predict and with a graph, and LitServe.

All are started once for a model and take turns: those that are not asked are stopped meanwhile.
The load is locust's, in an environment of its own below .cache.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import apart
from benchmarks.programs import served

_LOCUST = ("locust==2.47.0",)
_PROGRAMS = Path(__file__).parent / "programs"
_MAX_BATCH, _BATCH_WAIT_MS = 32, 2.0
_OURS = "tfdist serve"
# tfdist's requests/s over those of each at 64 clients, at least.
_TARGETS = {"FastAPI, predict": 3.0, "FastAPI, tf.function": None, "LitServe": 0.95}
_CLIENTS = (1, 8, 64)
_MANY = 64
_START_S, _END_S = 400.0, 10.0
_GROWTH_REQUESTS, _GROWTH_TARGET = 100_000, 0.95
_MB = 1e6
# The Keras of tfdist for all.
_ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_USE_LEGACY_KERAS": "1",
}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Returns rows of work, baseline, ours, ratio and target: requests/s, ms, MB."""
    python = apart.python_with("locust", *_LOCUST)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tfdist-serve-") as name:
        apart.call("benchmarks.serve", "prepare", folder=name)
        for kind in ("table",) if quick else tuple(served.READERS):
            with _serving(Path(name), kind) as servers:
                body = Path(name, f"{kind}.json")
                load = _Load(python, body, 0.3 if quick else 4.0)
                rows += _compared(servers, kind, load, 1 if quick else 5)
                if kind == "table":
                    rows.append(_growth(servers[_OURS], load, 300 if quick else _GROWTH_REQUESTS))
    return rows


@dataclass(frozen=True)
class _Asked:
    """What clients met, and what it took.

    Attributes:
        seconds: of each request.
        per_s: requests/s of all clients.
        cpu_s: processor time of the server's processes for a request.
    """

    seconds: list[float]
    per_s: float
    cpu_s: float

    def ms(self, share: float) -> float:
        return float(np.quantile(self.seconds, share) * 1000)


@dataclass(frozen=True)
class _Load:
    """Locust, with clients that send the same body."""

    python: Path
    body: Path
    seconds: float

    def on(self, server: _Server, clients: int, seconds: float | None = None) -> _Asked:
        seconds = seconds or self.seconds
        program = _PROGRAMS / "serve_load.py"
        pids = [str(process.pid) for process in server.processes()]
        done = subprocess.run(
            [self.python, program, server.url, self.body, str(clients), str(seconds), *pids],
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds + _START_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:] + server.log()[-4000:])
        found = json.loads(done.stdout.splitlines()[-1])
        asked = found["latencies"]
        return _Asked(asked, len(asked) / found["seconds"], found["cpu_s"] / len(asked))


class _Server:
    """The processes of a server, asked at ``url``."""

    def __init__(self, command: list[str], url: str, log: Path):
        self.url, self._log = url, log
        with log.open("w") as file:
            self._process = psutil.Popen(
                command,
                env=os.environ | _ENVIRON,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait(self, body: Path) -> None:
        """Returns once it answers."""
        request = urllib.request.Request(
            self.url, body.read_bytes(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as found:
                found.read()
                return
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._process, *self._process.children(recursive=True)]
        return []

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.tell(signal.SIGCONT)
        try:
            yield
        finally:
            self.tell(signal.SIGSTOP)

    def tell(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def memory(self) -> float:
        """Returns the MB of all its processes."""
        return sum(process.memory_info().rss for process in self.processes()) / _MB

    def end(self) -> None:
        self.tell(signal.SIGCONT)
        processes = self.processes()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(processes, _END_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left, _END_S)


def _commands(folder: Path, kind: str, port: int) -> dict[str, tuple[str, list[str]]]:
    """Returns the path and the command of each server."""
    model = str(folder / f"{kind}.keras")

    def by_hand(program: str, *rest: str) -> tuple[str, list[str]]:
        module = f"benchmarks.programs.{program}"
        return "/predict", [sys.executable, "-m", module, kind, model, str(port), *rest]

    ours = [
        *(sys.executable, "-m", "tfdist", "serve", model, "--port", str(port), "--name", kind),
        *("--model", f"{_PROGRAMS / 'served.py'}:{kind}"),
        *("--trained-on", str(folder / f"{kind}_shards")),
        *("--max-batch", str(_MAX_BATCH), "--batch-wait-ms", str(_BATCH_WAIT_MS)),
    ]
    return {
        "FastAPI, predict": by_hand("serve_fastapi", "predict"),
        "FastAPI, tf.function": by_hand("serve_fastapi", "function"),
        "LitServe": by_hand("serve_litserve", str(_MAX_BATCH), str(_BATCH_WAIT_MS / 1000)),
        _OURS: (f"/v1/models/{kind}:predict", ours),
    }


@contextlib.contextmanager
def _serving(folder: Path, kind: str) -> Iterator[dict[str, _Server]]:
    """Encloses a server of each kind, all of which have answered once and are stopped."""
    servers = {}
    with contextlib.ExitStack() as ends:
        for name in (*_TARGETS, _OURS):
            port = _free_port()
            path, command = _commands(folder, kind, port)[name]
            server = _Server(command, f"http://127.0.0.1:{port}{path}", folder / f"{port}.log")
            ends.callback(server.end)
            servers[name] = server
        for server in servers.values():
            server.wait(folder / f"{kind}.json")
        for server in servers.values():
            server.tell(signal.SIGSTOP)
        yield servers


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _compared(
    servers: dict[str, _Server], kind: str, load: _Load, rounds: int
) -> list[dict[str, Any]]:
    rows = []
    for clients in _CLIENTS:
        found: dict[str, list[_Asked]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                with server.awake():
                    found[name].append(load.on(server, clients))
        for name, target in _TARGETS.items():
            work = f"serve {kind}, {clients} client{'s' * (clients > 1)}"
            rows += _rows(work, name, found[name], found[_OURS], target, clients == _MANY)
    return rows


def _rows(
    work: str,
    name: str,
    theirs: list[_Asked],
    ours: list[_Asked],
    target: float | None,
    many: bool,
) -> list[dict[str, Any]]:
    """Returns the rows of requests/s, and of what less is better of: latency, processor time."""
    p99_target = 1.0 if many and name == "FastAPI, predict" else None
    figures: tuple[tuple[str, Callable[[_Asked], float], float | None], ...] = (
        ("requests/s", lambda asked: asked.per_s, target if many else None),
        ("ms of p50", lambda asked: asked.ms(0.5), None),
        ("ms of p99", lambda asked: asked.ms(0.99), p99_target),
        ("ms of processor", lambda asked: asked.cpu_s * 1000, None),
    )
    rows = []
    for what, figure, least in figures:
        pairs = [(figure(a), figure(b)) for a, b in zip(theirs, ours, strict=True)]
        ratios = [own / by_hand for by_hand, own in pairs]
        if what != "requests/s":
            ratios = [1 / ratio for ratio in ratios]
        rows.append(
            {
                "work": f"{work}: {what}, {name}",
                "baseline": round(statistics.median(by_hand for by_hand, _ in pairs), 2),
                "ours": round(statistics.median(own for _, own in pairs), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "target": least,
            }
        )
    return rows


def _growth(server: _Server, load: _Load, requests: int) -> dict[str, Any]:
    """Returns the row of the memory of all processes, before and after many requests."""
    with server.awake():
        per_s = load.on(server, _MANY).per_s
        before, asked = server.memory(), 0
        while asked < requests:
            asked += len(load.on(server, _MANY, max(1.0, (requests - asked) / per_s)).seconds)
        after = server.memory()
    return {
        "work": f"serve table: MB after {requests:,} requests",
        "baseline": round(before, 1),
        "ours": round(after, 1),
        "ratio": round(before / after, 3),
        "target": _GROWTH_TARGET,
    }


# What runs in a process of its own -----------------------------------------------------------


def prepare(folder: str) -> None:
    """Writes models with random weights, shards of what they take, and a request for each."""
    from PIL import Image

    from tfdist import records

    place = Path(folder)
    rng = np.random.default_rng(0)
    for kind in ("photos", "table"):
        getattr(served, kind)().save(place / f"{kind}.keras")
    split = "train=1,validation=1"
    file = io.BytesIO()
    for number in range(40):
        pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((served.SIDE, served.SIDE)).save(file, "JPEG")
        path = place / "files" / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
    size = (served.SIDE, served.SIDE)
    records.write(place / "files", place / "photos_shards", split=split, resize=size)
    photo = {"b64": base64.b64encode(file.getvalue()).decode()}
    _ask(place / "photos.json", photo)
    rows = []
    for number in range(400):
        values = rng.normal(size=len(served.NUMBERS)).round(4).tolist()
        colour = served.COLOURS[number % len(served.COLOURS)]
        rows.append({**dict(zip(served.NUMBERS, values, strict=True)), "colour": colour})
    lines = (json.dumps({**row, "label": number % 2}) for number, row in enumerate(rows))
    (place / "rows.jsonl").write_text("\n".join(lines))
    records.write(place / "rows.jsonl", place / "table_shards", split=split, label="label")
    _ask(place / "table.json", rows[0])


def _ask(path: Path, instance: dict[str, Any]) -> None:
    path.write_text(json.dumps({"instances": [instance]}))


if __name__ == "__main__":
    apart.answer((prepare,))
