"""Shards on the Hugging Face Hub: the package's real requests, to a server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest

from tfdist.records import write

pytest.importorskip("huggingface_hub", reason="not in this lane")

REPO = "datasets/someone/things"


class _Hub(BaseHTTPRequestHandler):
    """The part of the Hub's interface that reading a data set asks for; ``root`` is its files."""

    root = None

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/{REPO}/resolve/main/"):
            self._send_file(path.removeprefix(f"/{REPO}/resolve/main/"))
        elif path in (f"/api/{REPO}", f"/api/{REPO}/revision/main"):
            self._send_json({"id": REPO.partition("/")[2], "sha": "0" * 40, "siblings": []})
        elif path.startswith(f"/api/{REPO}/tree/main"):
            below = path.removeprefix(f"/api/{REPO}/tree/main").strip("/")
            self._send_tree(below)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self):
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = [self.root / path for path in asked["paths"]]
        self._send_json([self._told(path) for path in found if path.exists()])

    def _send_tree(self, below):
        folder = self.root / below
        if not folder.is_dir():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self._send_json([self._told(path) for path in sorted(folder.rglob("*"))])

    def _told(self, path):
        name = path.relative_to(self.root).as_posix()
        oid = hashlib.sha1(name.encode()).hexdigest()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": oid, "size": 0}
        return {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}

    def _send_file(self, name):
        path = self.root / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        asked = self.headers.get("Range")
        if asked is None:
            self._send(200, data, {})
            return
        first, last = asked.removeprefix("bytes=").split("-")
        self._send(206, data[int(first) : int(last) + 1], {})

    def _send_json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code, data, headers):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def hub(tmp_path):
    """The folder of a data set's files, and the environment in which it is the Hub's."""

    class OfThis(_Hub):
        root = tmp_path / "hub"

    server = ThreadingHTTPServer(("127.0.0.1", 0), OfThis)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    OfThis.root.mkdir()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "TFDIST_CACHE": str(tmp_path / "cache"),
    }
    yield OfThis.root, environment
    server.shutdown()
    thread.join()
    server.server_close()


_PROGRAM = """
import sys
from tfdist.errors import TfdistError
from tfdist.records import check, load_manifest, write
base, out = sys.argv[1:]
print(check(f"{base}/shards"), load_manifest(f"{base}/shards").splits["train"].records)
print(write(f"{base}/table.csv", out, split="train=1", num_shards=1).splits["train"].records)
for url in (f"{base}/nothing", "hf://datasets/no/body/shards"):
    try:
        load_manifest(url)
    except TfdistError as error:
        print(error)
"""


@pytest.mark.timeout(60)
def test_shards_and_a_table_are_read_from_there(hub, tmp_path):
    folder, environment = hub
    write((np.arange(40.0).reshape(20, 2), np.arange(20) % 3), folder / "shards", num_shards=2)
    (folder / "table.csv").write_text("a,label\n1,0\n2,1\n3,0\n")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, f"hf://{REPO}", str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shards, table, nothing, nobody = done.stdout.splitlines()
    assert (shards, table) == ("[] 17", "3")
    assert nothing.startswith(f"hf://{REPO}/nothing must be a folder of shards")
    assert nobody.startswith("hf://datasets/no/body/shards must be a folder of shards")
    written = (folder / "shards" / "train-00000-of-00002.tfrecord").read_bytes()
    (copy,) = (tmp_path / "cache").glob("*/train-00000-of-00002.tfrecord")
    assert copy.read_bytes() == written
