"""``tfdist serve`` as a user runs it, over real HTTP."""

from __future__ import annotations

import base64
import io
import json
import random
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from tensorflow import keras

pytestmark = [pytest.mark.timeout(600), pytest.mark.honest_start]


def _file(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def _b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    """Photos in the size that the model reads, [6, 4, 5, 3]."""
    return np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def expected(run_folder, photos) -> np.ndarray:
    return keras.models.load_model(run_folder / "model.keras").predict(photos, verbose=0)


def test_the_gate_has_compared_before_it_listens(server):
    assert "3 records are answered as by tfdist predict" in server.log.read_text()


def test_rows_and_columns_are_answered_with_the_models_numbers(server, photos, expected):
    instances = [_b64(_file(photo)) for photo in photos]
    status, found = server.predict({"instances": instances})
    assert (status, list(found)) == (200, ["predictions"])
    np.testing.assert_allclose(found["predictions"], expected, atol=1e-6)
    status, found = server.predict({"inputs": instances, "signature_name": "serving_default"})
    assert (status, list(found)) == (200, ["outputs"])
    np.testing.assert_allclose(found["outputs"], expected, atol=1e-6)


def test_a_form_of_files_is_answered(server, photos, expected):
    body = b""
    for photo in photos[:2]:
        head = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
        body += head + _file(photo) + b"\r\n"
    status, found = server.predict(
        body + b"--edge--\r\n", content_type="multipart/form-data; boundary=edge"
    )
    assert status == 200, found
    np.testing.assert_allclose(found["predictions"], expected[:2], atol=1e-6)


def test_requests_at_once_get_each_its_own_answer(server, photos, expected):
    found: dict[int, list] = {}

    def ask(number: int) -> None:
        instance = _b64(_file(photos[number % 6]))
        found[number] = server.predict({"instances": [instance] * (1 + number % 3)})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    for number, (status, answer) in found.items():
        assert status == 200, answer
        wanted = np.repeat(expected[[number % 6]], 1 + number % 3, axis=0)
        np.testing.assert_allclose(answer["predictions"], wanted, atol=1e-6)


def test_a_photo_that_is_cut_off_spoils_no_other(server, photos, expected):
    """Its header is whole, so that the replica meets it, perhaps in a batch with others."""
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    cut = _b64(_file(noise)[:4000])
    found: list[tuple[int, dict]] = []
    bad = threading.Thread(target=lambda: found.append(server.predict({"instances": [cut]})))
    bad.start()
    status, good = server.predict({"instances": [_b64(_file(photos[0]))]})
    bad.join()
    assert status == 200, good
    np.testing.assert_allclose(good["predictions"], expected[:1], atol=1e-6)
    assert found[0][0] == 400
    assert "decoded" in found[0][1]["error"]


def test_status_metadata_health_and_metrics(server):
    status, body, _ = server.get("/v1/models/lights")
    assert (status, json.loads(body)["model_version_status"][0]["state"]) == (200, "AVAILABLE")
    metadata = json.loads(server.get("/v1/models/lights/metadata")[1])
    signature = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]
    (photo,), (output,) = signature["inputs"].values(), signature["outputs"].values()
    assert photo["dtype"] == "DT_STRING"
    assert [size["size"] for size in output["tensor_shape"]["dim"]] == ["-1", "2"]
    assert metadata["tfdist"]["classes"] == ["dark", "light"]
    assert server.get("/healthz")[0] == server.get("/readyz")[0] == 200
    before = _metrics(server)
    server.predict({"instances": [1]})
    after = _metrics(server)
    code = 'tfdist_requests_total{code="400"}'
    assert after[code] == before.get(code, 0) + 1
    assert after["tfdist_request_seconds_count"] == before["tfdist_request_seconds_count"] + 1
    assert after["tfdist_batch_rows_sum"] >= 3  # Of the gate.
    assert after["tfdist_serve_replicas"] == 1


def _metrics(server) -> dict[str, float]:
    lines = server.get("/metrics")[1].decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_the_page_needs_nothing_from_outside(server):
    status, body, headers = server.get("/")
    page = body.decode()
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    nonce = headers["content-security-policy"].partition("nonce-")[2].partition("'")[0]
    assert page.count(f'nonce="{nonce}"') == 2
    assert not [part for part in ("http://", "https://", "{{", "eval(") if part in page]


_BOMB = _file(np.zeros((7100, 7100), np.uint8))
_BAD = {
    "no JSON": (b"{", 400, "JSON"),
    "nested without end": (b'{"instances": ' + b"[" * 100_000, 400, "JSON"),
    "a key twice": (b'{"instances": [1], "instances": [2]}', 400, "JSON"),
    "both": (b'{"instances": [1], "inputs": [2]}', 400, "instances"),
    "none": (b'{"instances": []}', 400, "1 to 1024"),
    "many": (json.dumps({"instances": [0] * 1025}).encode(), 400, "1 to 1024"),
    "no base64": (b'{"instances": [{"b64": "?"}]}', 400, "base64"),
    "no image": (json.dumps({"instances": [_b64(b"text")]}).encode(), 400, "image"),
    "a bomb": (json.dumps({"instances": [_b64(_BOMB)]}).encode(), 400, "pixels"),
}


@pytest.mark.parametrize("name", _BAD)
def test_what_is_wrong_is_one_line(server, name):
    body, wanted, word = _BAD[name]
    status, found = server.predict(body)
    assert (status, list(found)) == (wanted, ["error"])
    assert word in found["error"]
    assert "\n" not in found["error"]


def test_a_body_that_says_it_is_too_large_is_not_read(server):
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as large:
        large.sendall(b"POST /v1/models/lights:predict HTTP/1.1\r\nHost: a\r\n")
        large.sendall(b"Content-Length: 1048577\r\n\r\n")
        assert large.recv(100).startswith(b"HTTP/1.1 413")


def test_other_addresses_are_404(server):
    for path in ("/v1/models/other", "/v1/models/lights/versions/2", "/docs", "/predict"):
        status, body, _ = server.get(path)
        assert (status, list(json.loads(body))) == (404, ["error"])


def test_a_body_without_its_end_holds_nobody_up(server, photos):
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(
            b"POST /v1/models/lights:predict HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n["
        )
        assert server.predict({"instances": [_b64(_file(photos[0]))]})[0] == 200


def _fuzz(server, seed: int, count: int) -> None:
    """Asks what nobody should: each is answered, and none with the server's own failure."""
    rng = random.Random(seed)
    good = json.dumps({"instances": [_b64(_file(np.zeros((4, 5, 3), np.uint8)))]}).encode()
    photo = _file(np.zeros((9, 9, 3), np.uint8), "JPEG")
    values = [None, True, -1, 1e308, 10**400, "", "\ud800", [], {}, [[]], {"b64": 3}, {"image": 1}]
    for _ in range(count):
        kind = rng.randrange(4)
        body = bytearray(good)
        if kind == 0:
            for _ in range(rng.randrange(1, 6)):
                body[rng.randrange(len(body))] = rng.randrange(256)
        elif kind == 1:
            key = rng.choice(["instances", "inputs", "x"])
            body = json.dumps({key: rng.choice([rng.choice(values), rng.choices(values, k=3)])})
            body = body.encode()
        elif kind == 2:
            flipped = bytearray(photo)
            for _ in range(rng.randrange(1, 4)):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            body = json.dumps({"instances": [_b64(bytes(flipped))]}).encode()
        else:
            body = rng.randbytes(rng.randrange(300))
        content_type = rng.choice(["application/json", "multipart/form-data; boundary=a"])
        status, found = server.predict(bytes(body), content_type=content_type)
        assert status in (200, 400), (status, found, bytes(body))
        assert status == 200 or "\n" not in found["error"], found


def test_no_request_makes_the_server_fail(server):
    _fuzz(server, seed=0, count=300)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_request_of_many_makes_the_server_fail(server):
    _fuzz(server, seed=1, count=20_000)


def test_a_lost_replica_costs_no_request_and_nothing_is_left(run_folder, serving, tmp_path, photos):
    """One of two is killed while it answers; then a token is asked for, and SIGTERM ends all."""
    (tmp_path / "token").write_text("secret\n")
    options = ("--replicas", "2", "--check", "0", "--token-file", str(tmp_path / "token"))
    with serving(run_folder, tmp_path / "log", *options) as client:
        assert "nothing was compared" in client.log.read_text()
        every = psutil.Process(client.process.pid).children(recursive=True)
        assert not [one for one in every if "secret" in " ".join(one.cmdline())]
        asked = {"instances": [_b64(_file(photos[0]))]}
        assert client.predict(asked)[0] == client.predict(asked, authorization="Bearer x")[0] == 401
        assert client.get("/readyz")[0] == 200
        found = []
        ask = [
            threading.Thread(
                target=lambda: found.extend(
                    client.predict(asked, authorization="Bearer secret")[0] for _ in range(20)
                )
            )
            for _ in range(4)
        ]
        for thread in ask:
            thread.start()
        client.replicas()[0].kill()
        for thread in ask:
            thread.join()
        assert found == [200] * 80
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(60) == 128 + signal.SIGTERM
        assert not psutil.wait_procs(every, timeout=20)[1]
    assert "replica " in Path(client.log).read_text()


@pytest.mark.long
def test_a_divided_model_answers_as_one_device(run_folder, serving, tmp_path, photos, expected):
    """A stage on each of two devices; the gate has compared it with single, too."""
    divided = ("--strategy", "pipeline", "-o", "stages=2", "--check", "2", "--max-batch", "4")
    with serving(run_folder, tmp_path / "log", *divided) as client:
        assert "2 records are answered" in client.log.read_text()
        for count in (6, 1):
            instances = [_b64(_file(photo)) for photo in photos[:count]]
            status, found = client.predict({"instances": instances})
            assert status == 200, found
            np.testing.assert_allclose(found["predictions"], expected[:count], atol=1e-5)


def test_weights_that_answer_otherwise_are_not_served(run_folder, tmp_path, run_cli):
    """The model adds what it keeps from call to call, as nothing may that is served."""
    draw = "keras.layers.Lambda(lambda x: x + _tf.random.uniform([]))"
    model = (run_folder.parent / "model.py").read_text()
    draws = model.replace('(2, "softmax")', f'(2, "softmax"), {draw}')
    (tmp_path / "draws.py").write_text("import tensorflow as _tf\n" + draws)
    data = run_folder.parent / "data"
    done = run_cli(
        *("serve", run_folder, "--model", tmp_path / "draws.py:model_fn", "--port", "0"),
        *("--trained-on", data),
        timeout_s=500,
    )
    assert done.returncode == 2, done.stderr
    assert "record 0 of the validation split" in done.stderr
    assert "listening" not in done.stdout
