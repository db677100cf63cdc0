"""The command line where the user has chosen Keras 3: what trains, and what is refused first."""

from __future__ import annotations

import json
import zipfile

import pytest

from tfdist.compat.keras import VARIABLE

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def run(run_cli, shell_environ):
    def run_with_keras_3(*arguments: object, **more: str):
        return run_cli(*arguments, env=shell_environ | {VARIABLE: "0"} | more)

    return run_with_keras_3


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "replicas"),
    [(("horovod", "--workers", 2), 2), (("pipeline", "-o", "microbatches=4"), 1)],
    ids=("horovod", "pipeline"),
)
def test_a_training_is_resumed(run, shards, model_file, tmp_path, options, replicas):
    where = ("--model", f"{model_file}:mlp", "--data", shards, "--output", tmp_path / "run")
    how = ("--strategy", *options, "--global-batch-size", 64)
    done = run("train", *where, *how, "--epochs", 2)
    assert done.returncode == 0, done.stderr
    done = run("train", *where, *how, "--epochs", 3, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 3/3")
    summary = json.loads((tmp_path / "run/metrics.json").read_text())
    assert (summary["epochs"], summary["replicas"]) == (3, replicas)
    for part in ("train", "validation", "test"):
        assert set(summary[part]) == {"loss", "accuracy"}

    # A checkpoint of Keras 3 is none of Keras 2.
    done = run("train", *where, *how, "--epochs", 4, "--resume", **{VARIABLE: "1"})
    assert done.returncode == 2
    assert "must be resumed by the model that wrote it" in done.stderr


def test_another_backend_is_refused(run):
    done = run("inspect", "nowhere", KERAS_BACKEND="jax")
    assert done.returncode == 2
    assert "Keras 3 must run on TensorFlow, but found KERAS_BACKEND=jax" in done.stderr


@pytest.mark.honest_start  # Which has one of the two imported already.
@pytest.mark.parametrize(("package", "keras"), [("keras", "3"), ("tf_keras", "2")])
def test_a_model_is_of_the_keras_that_its_file_imports(
    run_cli, shell_environ, shards, tmp_path, package, keras
):
    """Whatever the variable says; in the file of the model, or in one beside it."""
    (tmp_path / "parts.py").write_text(f"import {package} as keras\n")
    (tmp_path / "net.py").write_text(
        "from parts import keras\n"
        "def model_fn():\n"
        "    layers = [keras.Input((8,)), keras.layers.Dense(10, 'softmax')]\n"
        "    model = keras.Sequential(layers)\n"
        "    model.compile('adam', 'sparse_categorical_crossentropy')\n"
        "    return model\n"
    )
    other = shell_environ | {VARIABLE: "1" if keras == "3" else "0"}
    where = ("--model", f"{tmp_path}/net.py:model_fn", "--data", shards, "--epochs", 1)
    done = run_cli("train", *where, "--output", tmp_path / "run", env=other)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "run/model.keras") as file:
        assert json.loads(file.read("metadata.json"))["keras_version"].startswith(f"{keras}.")
