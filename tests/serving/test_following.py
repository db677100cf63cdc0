"""Real servers that take in new versions while they are asked."""

from __future__ import annotations

import base64
import io
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from tensorflow import keras

pytestmark = pytest.mark.timeout(900)
_PHOTO = np.random.default_rng(3).integers(0, 256, (1, 4, 5, 3), dtype=np.uint8)


class _Load:
    """Clients that ask one after the other's answer."""

    def __init__(self, client):
        file = io.BytesIO()
        Image.fromarray(_PHOTO[0]).save(file, "PNG")
        photo = {"b64": base64.b64encode(file.getvalue()).decode()}
        self._client, self._asked = client, {"instances": [photo] * 3}
        self._is_over = threading.Event()
        self.answers: list[list] = [[] for _ in range(3)]

    def _ask(self, answers: list) -> None:
        while not self._is_over.wait(0.05):  # All cores are not theirs.
            try:
                answers.append(self._client.predict(self._asked))
            except OSError as error:
                answers.append((0, repr(error)))

    def __enter__(self) -> _Load:
        self._threads = [threading.Thread(target=self._ask, args=(a,)) for a in self.answers]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def versions(self, expected: list[np.ndarray]) -> list[list[int]]:
        """Returns which versions each client was answered by, in its order; all are whole."""
        found = []
        for answers in self.answers:
            assert [answer for status, answer in answers if status != 200] == []
            rows = np.array([answer["predictions"] for _, answer in answers])  # [n, 3, 2]
            is_of = [np.abs(rows - each).max(axis=(1, 2)) < 1e-5 for each in expected]
            assert (np.sum(is_of, axis=0) == 1).all()
            numbers = np.argmax(is_of, axis=0)
            found.append([int(n) for i, n in enumerate(numbers) if not i or n != numbers[i - 1]])
        return found


@pytest.fixture(scope="module")
def versions(run_folder, tmp_path_factory) -> list[Path]:
    """Three files of weights that answer differently."""
    folder, found = tmp_path_factory.mktemp("versions"), []
    model = keras.models.load_model(run_folder / "model.keras")
    for number in range(3):
        kernel, bias = model.layers[-1].get_weights()
        model.layers[-1].set_weights([kernel, bias + np.array([0, 0.4 * number])])
        found.append(folder / f"{number}.keras")
        model.save(found[-1])
    return found


@pytest.fixture(scope="module")
def expected(versions) -> list[np.ndarray]:
    return [keras.models.load_model(file).predict(_PHOTO, verbose=0) for file in versions]


@pytest.fixture
def run(run_folder, versions, request) -> Iterator[Path]:
    """A run folder beside the other one, with the first version as its best model."""
    folder = run_folder.parent / f"run-{abs(hash(request.node.name))}"
    folder.mkdir()
    shutil.copy(run_folder / "config.json", folder)
    _replace(folder, versions[0])
    yield folder
    shutil.rmtree(folder)


def _replace(run: Path, file: Path) -> None:
    shutil.copy(file, run / ".beside")
    (run / ".beside").replace(run / "best.keras")


def _states(client) -> dict[str, str]:
    told = json.loads(client.get("/v1/models/lights")[1])["model_version_status"]
    return {one["version"]: one["state"] for one in told}


def _until(client, is_there) -> None:
    deadline = time.monotonic() + 300
    while not is_there(_states(client)):
        assert time.monotonic() < deadline, (_states(client), client.log.read_text())
        time.sleep(0.1)


def test_a_new_version_answers_and_no_request_is_lost(run, versions, expected, serving, tmp_path):
    """One replaces the first; then comes a file that is none."""
    options = ("--watch", "--name", "lights", "--check", "2")
    with serving(run, tmp_path / "log", *options) as client:
        with _Load(client) as load:
            _replace(run, versions[1])
            _until(client, lambda states: states == {"2": "AVAILABLE"})
            (tmp_path / "broken").write_bytes(versions[2].read_bytes()[:3000])
            _replace(run, tmp_path / "broken")
            _until(client, lambda states: states == {"3": "END", "2": "AVAILABLE"})
        assert load.versions(expected) == [[0, 1]] * 3
        spec = json.loads(client.get("/v1/models/lights/metadata")[1])["model_spec"]
        assert spec["version"] == "2"
        assert client.get("/v1/models/lights/versions/2")[0] == 200
        assert client.get("/v1/models/lights/versions/1")[0] == 404
    text = client.log.read_text()
    assert text.count("version 2 is served: 2 records are answered as by tfdist predict") == 1
    told = [line for line in text.splitlines() if "is not served" in line]
    assert len(told) == 1, text
    assert "version 3 is not served, version 2 stays: the weights must be" in told[0]
    assert str(run / "best.keras") in told[0]


@pytest.mark.long
@pytest.mark.honest_start
def test_versions_come_though_replicas_are_killed(run, versions, expected, serving, tmp_path):
    """One of the two that answer, and one of those that are to; SIGTERM comes in the midst."""
    options = ("--watch", "--name", "lights", "--check", "2", "--replicas", "2")
    with serving(run, tmp_path / "log", *options) as client:
        first = client.replicas()
        with _Load(client) as load:
            _replace(run, versions[1])
            _until(client, lambda states: states.get("2") == "LOADING")
            first[0].kill()
            while not (new := [one for one in client.replicas() if one not in first]):
                time.sleep(0.05)
            new[0].kill()
            _until(client, lambda states: states == {"2": "AVAILABLE"})
            assert len(client.replicas()) == 2
            _replace(run, versions[2])
            _until(client, lambda states: states == {"3": "AVAILABLE"})
        assert load.versions(expected) == [[0, 1, 2]] * 3
        _replace(run, versions[2])
        _until(client, lambda states: states.get("4") == "LOADING")
        every = psutil.Process(client.process.pid).children(recursive=True)
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(60) == 128 + signal.SIGTERM
        assert not psutil.wait_procs(every, timeout=20)[1]
    assert client.log.read_text().count("ended with code -9") == 2


@pytest.mark.long
@pytest.mark.honest_start
def test_a_version_for_nobody_is_what_the_next_start_loads(
    run, versions, expected, serving, tmp_path
):
    """No replica is left when it comes, and none when it has gone through the gate."""
    scaled = ("--min-replicas", "0", "--max-replicas", "1", "--down-delay-s", "1")
    options = ("--watch", "--name", "lights", "--check", "2", "--timeout-s", "300", *scaled)
    with serving(run, tmp_path / "log", *options) as client:
        deadline = time.monotonic() + 300
        while client.replicas():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        _replace(run, versions[1])
        _until(client, lambda states: states == {"2": "AVAILABLE"})
        while client.replicas():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with _Load(client) as load:
            while not all(load.answers):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert load.versions(expected) == [[1]] * 3
