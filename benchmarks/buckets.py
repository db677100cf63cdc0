"""Shards in a bucket against the same shards in a folder: moto's S3 server, on this machine.

The server is a process of its own, on the same cores, and no network lies between: what is measured
is the way through fsspec, the checksums and the cache, not any bucket's speed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.records import row

_BATCH_SIZE = 256
_SHARDS = 8
_START_TIMEOUT_S = 60


def run(quick: bool = False) -> list[dict]:
    """Returns a row each for shards that are fetched and that were: work, baseline, ours, ratio."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    count, rounds = (2_000, 1) if quick else (50_000, 5)
    from tfdist import records

    with tempfile.TemporaryDirectory() as name, _server() as environment:
        os.environ |= environment
        folder, url = Path(name), "s3://bucket/data"
        os.environ["TFDIST_CACHE"] = str(folder / "cache")
        images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), np.uint8)
        source = ({"image": images}, np.arange(count) % 10)
        options = {"split": "train=1", "num_shards": _SHARDS}
        records.write(source, folder / "data", **options)
        records.write(source, url, **options)
        times: dict[str, list[float]] = {"folder": [], "fetched": [], "kept": []}
        for number in range(rounds + 1):
            os.environ["TFDIST_CACHE"] = str(folder / f"cache-{number}")
            for case, place in (("folder", folder / "data"), ("fetched", url), ("kept", url)):
                seconds = _read(place)
                if number:
                    times[case].append(seconds)
    return [
        row("bucket, fetched and read", count, times["folder"], times["fetched"], None),
        row("bucket, read from the cache", count, times["folder"], times["kept"], None),
    ]


def _read(place: Path | str) -> float:
    """Returns the seconds of opening shards and reading them once."""
    from tfdist import records

    start = time.perf_counter()
    for _ in records.read(place, batch_size=_BATCH_SIZE, cache=False):
        pass
    return time.perf_counter() - start


@contextlib.contextmanager
def _server() -> Iterator[dict[str, str]]:
    """Gives the environment that leads to a server with a bucket, in a process of its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _has_bucket(address):
            assert process.poll() is None, "moto's server must start"
            assert time.monotonic() < deadline, "moto's server must answer"
            time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
    finally:
        process.terminate()
        process.wait(timeout=10)


def _has_bucket(address: str) -> bool:
    """Makes the bucket; whether the server has answered."""
    request = urllib.request.Request(f"{address}/bucket", method="PUT")
    with contextlib.suppress(urllib.error.URLError, OSError):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=5) as answer:
            return answer.status == 200
    return False
