"""A training whose output is in a bucket: real requests to an S3 server on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import s3fs

import tfdist
from tfdist.errors import DataError, InUseError, ModelError, OptionError, TfdistError, WriteError
from tfdist.export.models import open_model
from tfdist.records.buckets import cache, mirror
from tfdist.records.buckets.store import Store
from tfdist.runs.settings import Start
from tfdist.runs.uploads import uploading
from tfdist.traces import places
from tfdist.training.checkpoints import checkpoint_files

pytestmark = pytest.mark.timeout(200)
URL = "s3://bucket/run"
_MODEL = """
def model_fn():
    from tensorflow import keras

    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model
"""


@pytest.fixture(autouse=True)
def emptied(emptied_bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "_BETWEEN_TRIES_S", 0.01)


@pytest.fixture
def no_patience(monkeypatch):
    """A request that fails is not tried again."""
    once = {"config_kwargs": {"connect_timeout": 1, "retries": {"total_max_attempts": 1}}}
    monkeypatch.setattr("tfdist.records.buckets.store._OF_S3", once)


def there(name: str = "run") -> dict[str, bytes]:
    store = Store(f"s3://bucket/{name}")
    return {name: store.read(name) for name in store.sizes()}


def mark() -> dict:
    return json.loads(there()[".tfdist-run"])


@contextlib.contextmanager
def training(told: list[str] | None = None, url: str = URL, resume=False, overwrite=False):
    """A training without one: what is written is the test's."""
    tell = (told if told is not None else []).append
    with uploading(url, Start(resume=resume, overwrite=overwrite), tell) as uploads:
        yield uploads


def write_epoch(folder: Path, epoch: int, text: str = "") -> None:
    kept = folder / "checkpoints"
    kept.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "history.csv").write_text(f"epoch\n{epoch}\n{text}")
    (kept / f"ckpt-{epoch}.data-00000-of-00001").write_text(f"data {epoch} {text}")
    (kept / f"ckpt-{epoch}.index").write_text(f"index {epoch} {text}")


def checkpoints(found: dict[str, bytes]) -> list[str]:
    return sorted(n.split("/")[1] for n in found if n.startswith("checkpoints/"))


NAMES_1 = ["checkpoint", "ckpt-1.data-00000-of-00001", "ckpt-1.index"]
NAMES_2 = ["checkpoint", "ckpt-2.data-00000-of-00001", "ckpt-2.index"]


def test_what_is_complete_goes_there_in_order_and_what_was_pruned_goes(s3_server, monkeypatch):
    put = []
    original = Store.put
    monkeypatch.setattr(
        Store, "put", lambda self, path, name: (put.append(name), original(self, path, name))
    )
    with training() as uploads:
        write_epoch(uploads.folder, 1)
        (uploads.folder / "checkpoints" / "ckpt-2.data-00000-of-00001").write_text("half")
        uploads._send_whole()
        # First what the state in a checkpoint tells of.
        kept = [f"checkpoints/{name}" for name in (*NAMES_1[1:], "checkpoint")]
        assert put == ["config.json", "history.csv", *kept]
        assert mark()["running"]
        put.clear()
        write_epoch(uploads.folder, 2)
        for path in uploads.folder.glob("checkpoints/ckpt-1.*"):
            path.unlink()
        (uploads.folder / "model.keras").write_text("model")
        trace = places.run_of(uploads.folder / places.FOLDER)
        trace.mkdir(parents=True)
        for name in ("rank-0.json", "rank-0.xplane.pb", "mine"):
            (trace / name).write_text("trace")
    assert [name for name in put if "checkpoints" in name][-1] == "checkpoints/checkpoint"
    found = there()
    assert checkpoints(found) == NAMES_2
    assert b'"ckpt-2"' in found["checkpoints/checkpoint"]
    assert found["model.keras"] == b"model"
    traced = [name for name, content in found.items() if content == b"trace"]
    assert sorted(traced) == [
        "profile/plugins/profile/tfdist/rank-0.json",
        "profile/plugins/profile/tfdist/rank-0.xplane.pb",
    ]
    assert not mark()["running"]


def test_resume_fetches_what_is_whole_and_keeps_the_rest():
    with training() as uploads:
        write_epoch(uploads.folder, 1)
        (uploads.folder / "model.keras").write_text("model")
    Store(URL).write("checkpoints/ckpt-7.data-00000-of-00001", b"half")
    with pytest.raises(OptionError, match="Add --resume to go on"), training():
        pass
    with training(resume=True) as uploads:
        got = sorted(p.name for p in uploads.folder.rglob("*") if p.is_file())
        assert got == ["ckpt-1.data-00000-of-00001", "ckpt-1.index", "config.json", "history.csv"]
        write_epoch(uploads.folder, 2)
    found = there()
    assert checkpoints(found) == sorted({*NAMES_1, *NAMES_2})
    assert found["model.keras"] == b"model"


def test_overwrite_replaces_after_an_epoch_and_touches_nothing_else():
    with training() as uploads:
        write_epoch(uploads.folder, 1, "old")
        (uploads.folder / "model.keras").write_text("old model")
    Store(URL).write("notes.txt", b"mine")
    before = {name: data for name, data in there().items() if name != ".tfdist-run"}
    with training(overwrite=True) as uploads:
        (uploads.folder / "config.json").write_text("{}")
    assert {name: data for name, data in there().items() if name != ".tfdist-run"} == before
    with training(overwrite=True) as uploads:
        write_epoch(uploads.folder, 1, "new")
    found = there()
    assert found.pop("notes.txt") == b"mine"
    assert checkpoints(found) == NAMES_1
    assert found["checkpoints/ckpt-1.index"] == b"index 1 new"
    assert set(found) - {f"checkpoints/{name}" for name in NAMES_1} == {
        ".tfdist-run",
        "config.json",
        "history.csv",
    }


def test_what_is_no_training_is_left_alone():
    Store("s3://bucket").write("run/thing", b"mine")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OptionError, match="holds something else"), training(**options):
            pass
    assert there() == {"thing": b"mine"}


class _LostError(BaseException):
    """The machine has gone."""


def test_an_overwriting_that_was_killed_leaves_one_whole_training(monkeypatch):
    """Before each request of it that changes something, as if the machine had gone then."""
    # The order of requests is the same in memory, and each is a millisecond.
    monkeypatch.setattr(cache, "WRITABLE", ("memory",))
    for allowed in range(40):
        url = f"memory://bucket/run-{allowed}"
        with training(url=url) as uploads:
            write_epoch(uploads.folder, 1, "old")
            (uploads.folder / "model.keras").write_text("old")
        with monkeypatch.context() as patched:
            was_lost = _overwrite_until(allowed, url, patched)
        with training(url=url, resume=True) as uploads:
            texts = {p.name: p.read_text().split()[-1] for p in uploads.folder.rglob("ckpt-1.*")}
            assert set(texts) == set(NAMES_1[1:])
            (kind,) = set(texts.values())
            assert (uploads.folder / "history.csv").read_text().split()[-1] == kind
        names = set(Store(url).sizes())
        assert not [name for name in names if name.startswith(".tfdist-new")]
        assert ("model.keras" in names) == (kind == "old")
        assert checkpoints(dict.fromkeys(names)) == NAMES_1
        if not was_lost:
            assert kind == "new"
            return
    raise AssertionError("more requests than expected")


def _overwrite_until(allowed: int, url: str, patched: pytest.MonkeyPatch) -> bool:
    """Overwrites until so many requests were made; whether there were more."""
    left = [allowed]

    def counted(method):
        def request(self, *arguments):
            left[0] -= 1
            if left[0] < 0:
                raise _LostError
            return method(self, *arguments)

        return request

    try:
        with training(url=url, overwrite=True) as uploads:
            write_epoch(uploads.folder, 1, "new")
            for name in ("put", "write", "remove"):
                patched.setattr(Store, name, counted(getattr(Store, name)))
    except _LostError:
        return True
    return False


def test_two_in_one_place():
    with training() as uploads:
        with pytest.raises(InUseError, match=f"in use by process {os.getpid()}"), training():
            pass
        write_epoch(uploads.folder, 1)
    # As from another machine.
    other = replace(uploads._mark, machine="other", host="far", owner="x", running=True)

    def put(mark) -> None:
        Store(URL).write(".tfdist-run", json.dumps(asdict(mark)).encode())

    put(replace(other, beat=time.time()))
    with pytest.raises(InUseError, match=r"in use by process \d+ on far"), training(resume=True):
        pass
    put(replace(other, beat=time.time() - 3600))  # It was killed.
    uploads = None

    def lose_it() -> None:
        nonlocal uploads
        with training(resume=True) as uploads:
            put(replace(other, beat=time.time()))
            write_epoch(uploads.folder, 2)

    with pytest.raises(WriteError, match="taken by process") as caught:
        lose_it()
    assert checkpoints(there()) == NAMES_1
    assert str(uploads.folder) in str(caught.value)
    assert (uploads.folder / "checkpoints" / "ckpt-2.index").exists()


def test_what_takes_long_to_send_leaves_no_mark_silent(monkeypatch):
    monkeypatch.setattr("tfdist.runs.uploads._BEAT_S", 0.05)
    beats = []

    def put(self, path, name):
        while len(beats) < 3:  # The test's own deadline ends it.
            beats.append(mark()["beat"])
            while mark()["beat"] == beats[-1]:
                time.sleep(0.02)
        return sent(self, path, name)

    with training() as uploads:
        sent = Store.put
        monkeypatch.setattr(Store, "put", put)
        write_epoch(uploads.folder, 1)
    assert beats == sorted(set(beats))
    assert not mark()["running"]
    assert checkpoints(there()) == NAMES_1


def test_a_server_that_goes_away_loses_nothing(monkeypatch, no_patience):
    told: list[str] = []
    folders = []

    def train() -> None:
        with training(told) as uploads:
            folders.append(uploads.folder)
            write_epoch(uploads.folder, 1)
            uploads._send_whole()
            with monkeypatch.context() as patched:
                patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
                s3fs.S3FileSystem.clear_instance_cache()
                uploads._mirror.store = Store(URL)
                with contextlib.suppress(DataError):
                    uploads._mirror.store.sizes()  # It connects now.
            s3fs.S3FileSystem.clear_instance_cache()
            write_epoch(uploads.folder, 2)
            uploads.note({"event": "written"})
            deadline = time.monotonic() + 60
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)

    with pytest.raises(WriteError, match=r"s3://bucket/run must hold all.*kept in") as caught:
        train()
    assert len(told) == 1
    assert "the training goes on" in told[0]
    assert "\n" not in told[0]
    assert "s3://bucket/run/.tfdist-run must be within reach" in str(caught.value)
    assert checkpoint_files.finished(folders[0] / "checkpoints") == ["ckpt-1", "ckpt-2"]
    assert checkpoints(there()) == NAMES_1


def test_one_that_comes_to_nothing_leaves_nothing():
    with pytest.raises(KeyError), training():
        raise KeyError
    assert there() == {}
    with pytest.raises(OptionError, match="s3:// or gs://"), training(url="https://host/run"):
        pass


# Real trainings ----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    tfdist.records.write("digits", tmp_path / "data", num_shards=2)
    (tmp_path / "model.py").write_text(_MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_killed_training_goes_on_from_the_bucket_alone(project, monkeypatch):
    asked = ("model.py:model_fn", "data")
    options = {"strategy": "single", "epochs": 3, "checkpoint_every": 4, "global_batch_size": 64}
    whole = tfdist.train(*asked, "whole", verbose=False, **options)
    command = [sys.executable, "-m", "tfdist", "train", "--model", asked[0], "--data", asked[1]]
    command += ["--strategy", "single", "--epochs", "3", "--checkpoint-every", "4"]
    command += ["--global-batch-size", "64", "--output", URL]
    # The machine that is lost; its parts end when their command does.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while "checkpoints/checkpoint" not in Store(URL).sizes():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
    assert process.returncode == 143, said
    assert not mark()["running"]
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(project / "another machine"))
    run = tfdist.train(*asked, URL, resume=True, verbose=False, **options)
    assert run.url == URL
    assert run.summary["train"] == pytest.approx(whole.summary["train"], abs=1e-6)
    for ours, theirs in zip(
        run.load_model().get_weights(), whole.load_model().get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    found = there()
    assert json.loads(found["config.json"])["output"] == URL
    assert found["model.keras"] == run.model_path.read_bytes()
    for name in (name for name in found if name.endswith(".index")):
        Store(URL).write(name, b"damaged")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(project / "a third machine"))
    with pytest.raises(TfdistError, match=f"damaged ones, .* Remove {URL}/checkpoints and train"):
        tfdist.train(*asked, URL, resume=True, verbose=False, **options | {"epochs": 4})
    names = {"config.json", "history.csv", "metrics.json", "model.keras", "curves.png"}
    assert names < set(found)
    with pytest.raises(OptionError, match="Add --resume"):
        tfdist.train(*asked, URL, **options)
    exported = open_model(f"{URL}/model.keras").given
    for ours, theirs in zip(exported.get_weights(), run.load_model().get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(
        DataError, match=r"s3://bucket/run/none.keras must be a folder or an object"
    ):
        open_model(f"{URL}/none.keras")
    with pytest.raises(ModelError, match=r"s3://bucket/run/history.csv must be a model") as caught:
        open_model(f"{URL}/history.csv")
    assert "scratch" not in str(caught.value)
