"""Searches as a user has them: real trainings on digits, killed, resumed, and compared."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import tfdist
from tfdist.errors import OptionError, TfdistError
from tfdist.records.format.manifest import load_manifest
from tfdist.runs.files import read_config, read_rows
from tfdist.tuning import folds
from tfdist.tuning.study import Study

pytestmark = pytest.mark.timeout(280)
_MODEL = """
from tensorflow import keras

def _built(width, lr):
    layers = [keras.Input((8, 8, 1)), keras.layers.Rescaling(1 / 16), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(width, "relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(lr, momentum=0.9), loss, metrics=["accuracy"])
    return model

def model_fn(width, lr):
    return _built(width, lr)

def defines(trial):
    width = trial.suggest_categorical("width", [8, 16])
    return _built(width, trial.suggest_float(f"lr_of_{width}", 0.01, 0.1, log=True))

def breaks(width):
    raise OSError("a fault of the user's own")
"""
_SPACE = {
    "width": [8, 16],
    "lr": {"low": 0.01, "high": 0.3, "log": True},
    "train": {"global_batch_size": [64, 128]},
}
_ASKED = {"strategy": "single", "epochs": 2, "metric": "val_accuracy", "reduction": 2}
_STUDY = {"mode": "max", "seed": 0, "pruner": "halving", "grace": 1, "reduction": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tuning")
    split = "train=5,validation=1,test=1"
    tfdist.records.write("digits", folder / "data", num_shards=4, split=split)
    (folder / "model.py").write_text(_MODEL)
    (folder / "space.yaml").write_text(json.dumps(_SPACE))
    return folder


@pytest.fixture
def within(folder, monkeypatch):
    monkeypatch.chdir(folder)


def weights(path: Path, unpacked: Path) -> dict[str, np.ndarray]:
    """Returns all that a model.keras holds but its metrics, without TensorFlow: by its name."""
    found = {}

    def take(name: str, item: Any) -> None:
        if hasattr(item, "dtype") and not name.startswith("metrics"):
            found[name] = item[()]

    with zipfile.ZipFile(path) as archive:
        file = archive.extract("model.weights.h5", unpacked)
    with h5py.File(file) as opened:
        opened.visititems(take)
    return found


def command(output: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tfdist", "tune", "--model", "model.py:model_fn"),
        *("--space", "space.yaml", "--data", "data", "--strategy", "single", "--epochs", "2"),
        *("--metric", "val_accuracy", "--reduction", "2", "--output", output, "--json", *more),
    ]


def test_the_best_of_two_and_a_promoted_one_is_exact(within, folder, tmp_path, run_cli):
    changes = []
    found = tfdist.tune(
        "model.py:model_fn",
        "data",
        "search",
        space=_SPACE,
        trials=2,
        parallel=2,
        on_change=changes.append,
        **_ASKED,
    )
    assert [row.number for row in found.rows] == [0, 1]
    assert {row.state for row in found.rows} <= {"done", "ended early"}
    done = [row for row in found.rows if row.state == "done"]
    assert found.best.value == max(row.value for row in done)
    assert found.best_folder.resolve() == (folder / f"search/trials/{found.best.number:03d}")
    assert {path.name for path in found.charts} >= {"history.png", "epochs.png", "slices.png"}
    for row in found.rows:
        run = folder / f"search/trials/{row.number:03d}"
        history = read_rows(run / "history.csv")
        assert [each["epoch"] for each in history] == ([1, 2] if row in done else [1])
        assert history[-1]["val_accuracy"] == row.value
        assert "test" not in read_config(run / "config.json")["splits"]
        assert set(row.params) == {"width", "lr", "train.global_batch_size"}
    with (folder / "search/trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["value"]) for row in rows] == [row.value for row in found.rows]
    assert {row.state for row in changes} >= {"running", "done"}

    # It was trained for an epoch, chosen, and for another one; here it is at once.
    whole = run_cli(*found.command.split()[1:])
    assert whole.returncode == 0, whole.stderr
    assert found.command.endswith(f"--output {folder / 'search-best'}")
    promoted = weights(found.best_folder / "model.keras", tmp_path / "promoted")
    at_once = weights(folder / "search-best/model.keras", tmp_path / "at_once")
    assert len(promoted) > 4
    assert promoted.keys() == at_once.keys()
    for name, values in promoted.items():
        np.testing.assert_array_equal(values, at_once[name], name)
    assert json.loads((folder / "search-best/metrics.json").read_text())["test"]

    with pytest.raises(OptionError, match="which holds a search"):
        tfdist.tune("model.py:model_fn", "data", "search", space=_SPACE, **_ASKED)
    changed = {**_ASKED, "epochs": 3}
    with pytest.raises(OptionError, match=r"must have the epochs .* Give epochs=2"):
        tfdist.tune("model.py:model_fn", "data", "search", space=_SPACE, resume=True, **changed)


def state_of(journal: Path) -> dict[int, tuple]:
    trials = Study(journal, **_STUDY).trials
    return {each.number: (each.state.name, each.params, each.value) for each in trials}


@pytest.mark.long
def test_a_killed_search_repeats_no_trial_and_loses_none(within, folder, traces, shell_environ):
    output = traces.token
    heard, wanted = 0, random.randrange(1, 9)
    with subprocess.Popen(
        command(output, "--trials", "3", "--parallel", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ,
        text=True,
        start_new_session=True,
    ) as process:
        for line in process.stdout:
            heard += json.loads(line)["event"] == "trial"
            if heard == wanted:
                break
        os.killpg(process.pid, signal.SIGKILL)
    # What it had started ends by itself.
    traces.wait_for(0)
    before = state_of(folder / output / "journal.log")
    ended = {number: row for number, row in before.items() if row[0] != "RUNNING"}
    written = {
        number: (folder / output / f"trials/{number:03d}/model.keras").stat().st_mtime_ns
        for number in ended
    }
    found = tfdist.tune(
        "model.py:model_fn",
        "data",
        output,
        space=_SPACE,
        trials=3,
        parallel=2,
        resume=True,
        **_ASKED,
    )
    after = state_of(folder / output / "journal.log")
    told = f"killed after {wanted} changes: {before}"
    assert sorted(after) == [0, 1, 2], told
    assert {number: after[number] for number in ended} == ended, told
    assert {n: before[n][1] for n in before if before[n][1]}.items() <= {
        n: after[n][1] for n in after
    }.items(), told
    for number, at in written.items():
        path = folder / output / f"trials/{number:03d}/model.keras"
        assert path.stat().st_mtime_ns == at, told
    for row in found.rows:
        history = read_rows(folder / output / f"trials/{row.number:03d}/history.csv")
        assert [each["epoch"] for each in history] == list(range(1, row.epoch + 1)), told


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],
)
def test_a_search_that_is_ended_says_how_to_go_on(within, traces, number, code):
    with subprocess.Popen(
        command(traces.token, "--trials", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
        text=True,
    ) as process:
        try:
            events = (json.loads(line) for line in process.stdout)
            assert next(event for event in events if event["event"] == "trial")
            deadline = time.monotonic() + 60  # It is told before its process is there.
            while len(traces.alive()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, errors
    told = "the same command with --resume goes on with the search"
    assert errors.splitlines()[-1].endswith(told)
    traces.wait_for(0)


def test_folds_divide_the_shards_of_the_training(within, folder):
    places = folds.write("data", 3, folder / "folds")
    of_data = load_manifest(folder / "data").splits["train"].shards
    held_out = []
    for place in places:
        splits = load_manifest(place).splits
        own = splits["validation"].shards
        assert set(own) | set(splits["train"].shards) == set(of_data)
        assert not set(own) & set(splits["train"].shards)
        held_out += own
        assert tfdist.records.check(place) == []
    assert sorted(held_out, key=of_data.index) == list(of_data)
    with pytest.raises(OptionError, match=r"a shard for each fold.* found 4 shards with folds=5"):
        folds.write("data", 5, folder / "more")


@pytest.mark.long
def test_the_value_of_a_cross_validation_is_the_mean(within, folder):
    asked = {**_ASKED, "epochs": 1, "metric": "val_loss"}
    found = tfdist.tune(
        "model.py:model_fn", "data", "crossed", space=_SPACE, trials=1, folds=2, **asked
    )
    losses = [
        read_rows(found.best_folder / name / "history.csv")[-1]["val_loss"]
        for name in ("fold-0", "fold-1")
    ]
    assert losses[0] != losses[1]
    assert found.best.value == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.long
def test_a_model_that_takes_a_trial_is_found_again(within, folder):
    asked = {**_ASKED, "epochs": 1}
    found = tfdist.tune("model.py:defines", "data", "defined", trials=1, **asked)
    width = found.best.params["width"]
    assert set(found.best.params) == {"width", f"lr_of_{width}"}
    name = read_config(found.best_folder / "config.json")["model"]
    assert name == f"model.py:defines(trial={found.best.params!r})"
    (evaluated,) = tfdist.evaluate(found.best_folder, data="data/validation", strategy="single")
    assert evaluated.metrics["accuracy"] == pytest.approx(found.best.value, abs=1e-6)


def test_mistakes_are_told_in_one_line(within, folder, tmp_path):
    def tune(**given):
        asked = {**_ASKED, "space": {"width": [8]}, **given}
        return tfdist.tune(asked.pop("model", "model.py:model_fn"), "data", tmp_path / "s", **asked)

    with pytest.raises(OptionError, match="metric must say whether less or more"):
        tune(metric="val_cost")
    with pytest.raises(OptionError, match=r"option of .* must be a known one"):
        tune(epoch=3)
    with pytest.raises(OptionError, match="lr must be a number above 0"):
        tune(space={"train": {"lr": [0.1, -1.0]}})
    with pytest.raises(OptionError, match="metrics_file must be of one training"):
        tune(metrics_file="a.prom")
    with pytest.raises(OptionError, match="reduction must be a whole number of at least 2"):
        tune(reduction=1)
    with pytest.raises(OptionError, match="pruner must be a known one"):
        tune(pruner="mean")
    assert not (tmp_path / "s").exists()
    with pytest.raises(OptionError, match=r"metric must be a known one.*val_accuracy"):
        tune(metric="val_acc", space={"width": [8], "lr": [0.1]})
    assert not any((tmp_path / "s/trials").iterdir())
    assert not (tmp_path / "s/search.json").exists()
    with pytest.raises(TfdistError, match=r"a fault of the user's own.*logs/000\.log") as told:
        tune(model="model.py:breaks")
    assert "\n" not in str(told.value)
    assert "OSError" in (tmp_path / "s/logs/000.log").read_text()
    assert not (tmp_path / "s/search.json").exists()  # Another one may begin there.
