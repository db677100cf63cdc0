"""tfdist.train: the same training as `tfdist train`, from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError, ModelError, OptionError, TfdistError
from tfdist.runs.training import Run
from tfdist.training.engine import model_path

pytestmark = pytest.mark.timeout(280)
_MODEL = """
def model_fn():
    from tensorflow import keras

    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model
"""
_PROGRAM = """
import tfdist

{model}
{guard}
run = tfdist.train(model_fn, "data", "from_main", epochs=1, verbose=False)
print(run.summary["train"]["accuracy"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    tfdist.records.write("digits", folder / "data", num_shards=2)
    (folder / "model.py").write_text(_MODEL)
    return folder


@pytest.fixture
def within(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_it_trains_goes_on_and_gives_what_the_folder_holds(within, capfd):
    asked = {"strategy": "mirrored", "options": {"devices": 2}, "checkpoint_every": 5}
    run = tfdist.train("model.py:model_fn", "data", "runs/a", epochs=1, **asked)
    # Where tracing takes long, lines of their own say so.
    told = [line for line in capfd.readouterr().out.splitlines() if line[:8] != "tfdist: "]
    assert [line.split()[:2] for line in told] == [["epoch", "1/1"]]
    assert run.has_trained
    assert (run.summary["strategy"], run.summary["replicas"]) == ("mirrored", 2)
    assert [row["epoch"] for row in run.history] == [1]
    assert run.history[-1]["val_accuracy"] == run.summary["validation"]["accuracy"]
    again = tfdist.train("model.py:model_fn", "data", "runs/a", epochs=2, resume=True, **asked)
    assert [row["epoch"] for row in again.history] == [1, 2]
    assert again.history[0] == run.history[0]
    assert again.load_model().predict(np.zeros((3, 8, 8, 1)), verbose=0).shape == (3, 10)
    done = tfdist.train("model.py:model_fn", "data", "runs/a", epochs=2, resume=True, **asked)
    assert not done.has_trained
    with pytest.raises(OptionError, match="must be a new folder"):
        tfdist.train("model.py:model_fn", "data", "runs/a", **asked)


def test_a_loaded_model_knows_the_buckets_that_it_adapted_to(tmp_path):
    x = np.arange(8, dtype=np.float32)[:, None]
    layer = tf.keras.layers.Discretization(num_bins=4)
    layer.adapt(x)
    model = tf.keras.Sequential([tf.keras.Input((1,)), layer])
    model.save(tmp_path / "model.keras")
    run = Run(tmp_path, history=[], summary={}, has_trained=True, curves="")
    np.testing.assert_array_equal(run.load_model()(x), model(x))


@pytest.mark.long
def test_epochs_to_come_may_have_another_batch(within, tmp_path):
    """They are those of one device at that batch; an epoch that was begun keeps its own."""
    mirrored = {"strategy": "mirrored", "options": {"devices": 2}}
    ways = (tmp_path / "here", mirrored), (tmp_path / "one", {"strategy": "single"})
    for out, asked in ways:
        tfdist.train("model.py:model_fn", "data", out, epochs=1, global_batch_size=64, **asked)
        more = {"epochs": 2, "global_batch_size": 100, "resume": True} | asked
        with pytest.raises(OptionError, match="must have the global_batch_size"):
            tfdist.train("model.py:model_fn", "data", out, **more)
        run = tfdist.train("model.py:model_fn", "data", out, rescale=True, **more)
        assert json.loads((out / "config.json").read_text())["global_batch_size"] == 100
        assert [row["epoch"] for row in run.history] == [1, 2]
    found, expected = (tf.keras.models.load_model(out / "model.keras") for out, _ in ways)
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.long
def test_an_epoch_that_was_begun_keeps_its_batch(within, tmp_path):
    out, asked = tmp_path / "run", {"strategy": "single", "checkpoint_every": 5, "epochs": 1}
    tfdist.train("model.py:model_fn", "data", out, **asked)
    kept = (out / "config.json").read_bytes()
    newest = max(out.glob("checkpoints/*.index"), key=lambda path: int(path.stem[5:]))
    for path in out.glob(f"checkpoints/{newest.stem}.*"):
        path.unlink()  # That of the end: the one before it lies within the last epoch.
    more = asked | {"resume": True, "rescale": True, "global_batch_size": 100}
    with pytest.raises(TfdistError, match="must have the data of the fit that wrote it"):
        tfdist.train("model.py:model_fn", "data", out, **more)
    assert (out / "config.json").read_bytes() == kept
    with pytest.raises(OptionError, match="--rescale must go with --resume"):
        tfdist.train("model.py:model_fn", "data", tmp_path / "new", rescale=True, **asked)
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_workers_are_started_and_the_choice_is_told(within, capfd):
    run = tfdist.train("model.py:model_fn", "data", "runs/two", workers=2, epochs=1)
    assert run.summary["workers"] == 2
    told = capfd.readouterr().out.splitlines()[0]
    assert told.startswith(f"strategy '{run.summary['strategy']}', because 2 workers")


def _run(folder: Path, guard: str) -> subprocess.CompletedProcess:
    (folder / "program.py").write_text(_PROGRAM.format(model=_MODEL, guard=guard))
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_function_of_the_program_itself(folder):
    done = _run(folder, "if __name__ != '__main__': raise SystemExit('imported')")
    assert "must not end the training, but found sys.exit('imported')" in done.stderr
    done = _run(folder, "")
    assert "must be called by the program, not when its file is imported" in done.stderr
    assert "tfdist-run" not in "".join(os.listdir(folder))
    guarded = _PROGRAM.replace("run = ", "if __name__ == '__main__':\n    run = ")
    guarded = guarded.replace("\nprint(", "\n    print(")
    (folder / "guarded.py").write_text(guarded.format(model=_MODEL, guard=""))
    done = subprocess.run(
        [sys.executable, "guarded.py"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout.splitlines()[-1]) < 1


def _nested():
    def model_fn():
        """Of no module."""

    return model_fn


@pytest.mark.parametrize("model", [lambda: None, _nested(), 3])
def test_a_model_that_no_process_can_import(model):
    with pytest.raises(ModelError, match="must stand in a file or module"):
        model_path.of(model)


def test_a_function_of_a_module_is_known_by_it():
    from tfdist.examples import digits

    assert model_path.of(digits.model_fn) == "tfdist.examples.digits:model_fn"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"strategy": "mirored"}, OptionError, "Did you mean 'mirrored'"),
        ({"strategy": "mirrored", "options": {"device": 2}}, OptionError, "but found 'device'"),
        ({"model": "nowhere.py:model_fn"}, ModelError, "no file nowhere.py"),
        ({"data": "nowhere"}, DataError, "nowhere"),
        ({"epochs": 0}, OptionError, "epochs must be a whole number"),
        ({"workers": "2"}, OptionError, "workers must be a whole number"),
        ({"options": "a=1"}, OptionError, "options must be a dict, but found 'a=1'"),
        ({"min_workers": 0}, OptionError, "min_workers must be a whole number of at least 1"),
        ({"max_restarts": -1}, OptionError, "max_restarts must be a whole number of at least 0"),
        ({"keep": None}, OptionError, "keep must be a whole number of at least 1, but found None"),
        ({"augment": 5}, OptionError, "augment must be text or a list, but found 5"),
        ({"augment": [5]}, OptionError, "one or more of flip.* but found '5'"),
        ({"init_weights": Path("none.keras")}, OptionError, "no file none.keras"),
        ({"stall_timeout_s": 0}, OptionError, "stall_timeout_s must be a number of seconds"),
        ({"resume": True, "overwrite": True}, OptionError, "resume and --overwrite"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(changed, error, message, within, folder):
    asked = {"model": "model.py:model_fn", "data": "data", "output": "runs/never"} | changed
    with pytest.raises(error, match=message):
        tfdist.train(**asked)
    assert not (folder / "runs" / "never").exists()
