"""One server for the tests of this room: a model of photos, two replicas."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

import tfdist
from tfdist.training.engine import model_path

MODEL = """
from tensorflow import keras

def model_fn():
    layers = [keras.Input((4, 5, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(2, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model
"""
_START_S = 300


@dataclass
class Client:
    """Speaks HTTP with a server."""

    address: str
    process: subprocess.Popen
    log: Path

    def replicas(self) -> list[psutil.Process]:
        """Returns the processes that have the model."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # It has just left.
                if "spawn_main" in " ".join(one.cmdline()):
                    found.append(one)
        return found

    def get(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
        """Returns status, body and headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.address + path, body, named)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=310) as response:
                return response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers

    def predict(self, asked: Any, **headers: str) -> tuple[int, Any]:
        body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        status, found, _ = self.get("/v1/models/lights:predict", body, **headers)
        return status, json.loads(found)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """What a training on photos leaves, with weights that its function does not make."""
    folder = tmp_path_factory.mktemp("serving")
    rng = np.random.default_rng(0)
    for kind, light in (("dark", 50), ("light", 200)):
        (folder / "photos" / kind).mkdir(parents=True)
        for number in range(4):
            pixels = rng.normal(light, 20, (8, 10 + number, 3)).clip(0, 255).astype(np.uint8)
            suffix = "png" if number % 2 else "jpg"
            Image.fromarray(pixels).save(folder / "photos" / kind / f"{number}.{suffix}")
    split = "train=1,validation=1"
    tfdist.records.write(folder / "photos", folder / "data", split=split, resize="4x5")
    (folder / "model.py").write_text(MODEL)
    run = folder / "lights"
    run.mkdir()
    model = model_path.load(f"{folder / 'model.py'}:model_fn")()
    model.train_on_batch(rng.random((4, 4, 5, 3)).astype(np.float32) * 255, np.arange(4) % 2)
    model.save(run / "model.keras")
    config = {"model": "model.py:model_fn", "data": "data", "splits": {}, "strategy": "single"}
    config |= {"output": "lights", "global_batch_size": 4, "seed": 0}
    (run / "config.json").write_text(json.dumps(config | {"working_folder": str(folder)}))
    return run


@contextlib.contextmanager
def _serving(run: Path, log: Path, *options: str) -> Iterator[Client]:
    """Encloses a server of ``run`` on a port of its own."""
    environ = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    start = ("--start-timeout-s", str(_START_S))
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tfdist", "serve", str(run), "--port", "0", *start, *options],
            env=environ,
            cwd=run.parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _START_S
        while "listening" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        address = log.read_text().partition("listening  ")[2].partition("/v1/")[0]
        yield Client(address, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractContextManager[Client]]:
    return _serving


@pytest.fixture(scope="module")  # Not beside tests that end all processes below their own.
def server(run_folder, serving, tmp_path_factory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(run_folder, log, "--check", "3", "--max-body-mb", "1") as client:
        yield client
