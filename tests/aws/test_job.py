"""A whole training job, in this process: it trains as `tfdist train` does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.aws import job
from tfdist.errors import DivergedError, LaunchError
from tfdist.launch import events, programs
from tfdist.launch.jobs import Where
from tfdist.records.writing.writer import write
from tfdist.runs import trackers
from tfdist.runs.folder import RunFolder
from tfdist.runs.settings import Settings
from tfdist.runs.training import training_config

SCRIPTS = Path(__file__).parents[2] / "sagemaker"
_SETTINGS = {"epochs": 2, "global_batch_size": 16, "seed": 3, "lr": 0.05, "checkpoint_every": 2}
_MODEL = """
from tensorflow import keras


def model_fn():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    return model
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = (rng.normal(size=(60, 8)) + y[:, None]).astype(np.float32)
    write((x, y), folder / "data", split="train=4,validation=1", num_shards=1)
    (folder / "own.py").write_text(_MODEL)
    return folder


@pytest.fixture
def fit(folder, tmp_path):
    """Runs a job; returns the folder that would be /opt/ml/model."""

    def run(data: Path = folder / "data", **settings) -> Path:
        given = {"model": f"{folder / 'own.py'}:model_fn", "strategy": "single", **settings}
        arguments = [
            text
            for name, value in given.items()
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]
        made = SimpleNamespace(
            source=lambda split, place: str(data / split),
            manifest_folder=data,
            model_dir=tmp_path / "model",
            output_data_dir=tmp_path / "output",
            hosts=["algo-1"],
        )
        made.model_dir.mkdir()
        made.output_data_dir.mkdir()
        options = job.parse(arguments)
        with job.strategy_of(options) as strategy:
            job.fit(strategy, options, made, SCRIPTS)
        return made.model_dir

    return run


def trained(folder: Path, output: Path, **changes) -> list[np.ndarray]:
    """Returns the weights to which one rank of `tfdist train` comes."""
    from tfdist.runs import train_rank

    config = training_config(
        Where(strategy="single", options={}),
        model=f"{folder / 'own.py'}:model_fn",
        data=str(folder / "data"),
        output=output,
        settings=Settings(**_SETTINGS | changes),
    )
    with RunFolder(output).taken(config):
        train_rank.train(config)
    return tf.keras.models.load_model(output / "model.keras").get_weights()


def test_a_job_comes_to_the_weights_of_tfdist_train(fit, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(events.VARIABLE, "1")
    model = fit(**_SETTINGS, checkpoint_dir=tmp_path / "checkpoints")
    lines = capfd.readouterr().out.split("\n")
    told = [event["event"] for _, event in map(events.split, lines) if event is not None]
    # Two checkpoints in each epoch of three steps, and the model.
    assert told == ["data", *["writing", "written"] * 4, "trained", "writing", "written"]
    assert [line.split()[:2] for line in lines if line.startswith("tfdist ")] == [
        ["tfdist", "strategy=single"],
        ["tfdist", "epoch=1"],
        ["tfdist", "epoch=2"],
    ]
    history = json.loads((tmp_path / "output" / "history.json").read_text())
    assert [row["epoch"] for row in history] == [1, 2]
    assert {"loss", "val_accuracy"} < history[0].keys()
    found = tf.saved_model.load(str(model / "1")).variables
    found = {tuple(v.shape): v.numpy() for v in found}
    for weight in trained(folder, tmp_path / "run"):
        np.testing.assert_allclose(found[weight.shape], weight, atol=1e-6)


_CALLBACKS = """
from tensorflow import keras


class Own(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("own", epoch)


def callbacks():
    return [Own()]
"""


def test_best_model_callbacks_and_trackers(fit, folder, tmp_path, monkeypatch, capfd):
    """What a spot instance that is lost must not take along lies where SageMaker keeps it."""
    logged = []
    tracker = SimpleNamespace(
        log=lambda numbers, step: logged.append((step, numbers)), end=lambda failed: None
    )
    monkeypatch.setitem(trackers._TRACKERS, "mlflow", lambda *place: tracker)
    (tmp_path / "mine.py").write_text(_CALLBACKS)
    best = {"save_best": "val_accuracy", "callbacks": f"{tmp_path / 'mine.py'}:callbacks"}
    kept = tmp_path / "checkpoints"
    model = fit(**_SETTINGS, **best, mlflow="http://tracker", checkpoint_dir=kept)
    assert (kept / "best.keras").read_bytes() == (model / "best.keras").read_bytes()
    assert tf.keras.models.load_model(model / "best.keras").count_params() == 27
    assert [step for step, _ in logged] == [1, 2]
    assert {"loss", "val_accuracy", "samples_per_s"} < logged[0][1].keys()
    assert "own 0\n" in capfd.readouterr().out


def test_the_model_may_be_built_by_the_data(fit, folder, tmp_path):
    (tmp_path / "unbuilt.py").write_text(_MODEL.replace("keras.Input((8,)), ", ""))
    found = kept_weights(fit(**_SETTINGS, model=f"{tmp_path / 'unbuilt.py'}:model_fn"))
    for weight in trained(folder, tmp_path / "run"):
        np.testing.assert_allclose(found[weight.shape], weight, atol=1e-6)


def kept_weights(model: Path) -> dict[tuple, np.ndarray]:
    return {tuple(v.shape): v.numpy() for v in tf.saved_model.load(str(model / "1")).variables}


def test_a_job_whose_time_ends_within_an_epoch_goes_on_from_there(fit, tmp_path, monkeypatch):
    settings = _SETTINGS | {"checkpoint_every": 100, "checkpoint_dir": tmp_path / "kept"}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Of a command that ran in this process.
    monkeypatch.setattr(job, "_seconds_left", lambda max_run_s: max_run_s - 4)
    with pytest.raises(LaunchError, match=r"within training\.max_run_s, but found 4 s that"):
        fit(**settings, max_run_s=4)
    assert [path.name for path in (tmp_path / "kept").glob("*.index")] == ["ckpt-1.index"]
    (tmp_path / "model").rmdir()
    (tmp_path / "output").rmdir()
    resumed = kept_weights(fit(**settings, max_run_s=1000))
    (tmp_path / "model").rename(tmp_path / "resumed")
    (tmp_path / "output").rename(tmp_path / "before")
    unbroken = kept_weights(fit(**_SETTINGS))
    for shape, weight in unbroken.items():
        np.testing.assert_array_equal(resumed[shape], weight)


def test_a_job_begins_with_the_weights_of_a_file(fit, folder, tmp_path):
    first = fit(**_SETTINGS, save_best="loss")
    shutil.copyfile(first / "best.keras", tmp_path / "first.keras")
    shutil.rmtree(first)
    (tmp_path / "output").rename(tmp_path / "before")
    model = fit(**_SETTINGS | {"lr": 1e-9}, init_weights=tmp_path / "first.keras")
    found = {tuple(v.shape): v.numpy() for v in tf.saved_model.load(str(model / "1")).variables}
    for weight in tf.keras.models.load_model(tmp_path / "first.keras").get_weights():
        np.testing.assert_allclose(found[weight.shape], weight, atol=1e-6)


def test_a_loss_that_is_no_number_ends_a_job_without_a_model(fit, tmp_path):
    with pytest.raises(DivergedError, match=r"must stay finite, but found (nan|inf)"):
        fit(**_SETTINGS | {"lr": 1e38})
    assert not list((tmp_path / "model").iterdir())


def mpi_driver(tmp_path: Path, *additional: str) -> list[str]:
    """Returns the command of SDK 3.27's MPI driver on the first of two hosts, but for the script.

    Their network is loopback, and the second one is this machine, too.
    """
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    options = (
        "btl_tcp_if_include lo oob_tcp_if_include lo plm_rsh_no_tree_spawn 1 pml ob1 btl ^openib "
        "orte_abort_on_non_zero_status 1 btl_vader_single_copy_mechanism none "
        f"plm_rsh_num_concurrent 2 plm_rsh_agent {ssh}"
    ).split()
    command = [str(programs.find("mpirun", "this test", os.environ))]
    command += ["--host", f"{socket.gethostname()},algo-2", "-np", "1", "--allow-run-as-root"]
    command += [
        "--tag-output",
        *(t for pair in zip(options[::2], options[1::2], strict=True) for t in ("-mca", *pair)),
    ]
    command += ["-x", "NCCL_SOCKET_IFNAME=lo", "-x", "LD_LIBRARY_PATH", "-x", "PATH"]
    return [*command, *additional, sys.executable, "-m", "mpi4py"]


@pytest.mark.long
@pytest.mark.honest_start
@pytest.mark.timeout(120)
def test_the_mpi_driver_of_sdk_3(folder, tmp_path):
    """It starts the ranks of one host, whatever the number of hosts; the last -np counts."""
    places = {name: tmp_path / name.lower() for name in ("MODEL_DIR", "OUTPUT_DIR")}
    places |= {"OUTPUT_DATA_DIR": tmp_path / "output_dir" / "data"}
    splits = dict.fromkeys(("manifest", "train", "validation"), folder / "data")
    for place in places.values():
        place.mkdir()
    environ = {f"SM_{name}": str(place) for name, place in places.items()}
    environ |= {f"SM_CHANNEL_{name.upper()}": str(place) for name, place in splits.items()}
    environ |= {
        **os.environ,
        "SM_HOSTS": '["algo-1", "algo-2"]',
        "SM_INPUT_DATA_CONFIG": json.dumps(
            {name: {"TrainingInputMode": "File"} for name in splits}
        ),
        "CUDA_VISIBLE_DEVICES": "-1",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
    }
    whole = {"global_batch_size": 48}  # Ranks read the records in another order than one process.
    model = f"{folder / 'own.py'}:model_fn"
    given = _SETTINGS | whole | {"model": model, "strategy": "horovod"}
    script = [str(SCRIPTS / "train.py")]
    script += [t for k, v in given.items() for t in (f"--{k.replace('_', '-')}", str(v))]

    def run(*additional: str) -> subprocess.CompletedProcess:
        command = [*mpi_driver(tmp_path, *additional), *script]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)

    alone = run()
    assert alone.returncode == 1
    assert "1 in all, of 1 on a host, for 2. SDK 3's MPI starts those of one" in alone.stderr
    done = run("-np", "2")
    assert done.returncode == 0, done.stderr
    assert "hosts=2 replicas=2 records=48" in done.stdout
    found = kept_weights(places["MODEL_DIR"])
    for weight in trained(folder, tmp_path / "run", **whole):
        np.testing.assert_allclose(found[weight.shape], weight, atol=1e-6)
