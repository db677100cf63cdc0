"""``tfdist train`` as a user runs it, with real processes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest

pytestmark = pytest.mark.timeout(180)

FILES = {
    "checkpoints",
    "config.json",
    "curves.png",
    "history.csv",
    "metrics.json",
    "model.keras",
}


@pytest.fixture
def train(run_cli, shards, model_file, tmp_path):
    def run(*options: str, model: str = "mlp", data=shards, output: str = "run"):
        where = tmp_path / output
        done = run_cli(
            "train",
            *("--model", f"{model_file}:{model}", "--data", data, "--output", where),
            *("--global-batch-size", 64, *options),
        )
        return done, where

    return run


def history(folder) -> list[dict[str, str]]:
    with (folder / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def weights(folder) -> list[np.ndarray]:
    """The weights in a Keras file, read without Keras."""
    found: list[np.ndarray] = []
    with zipfile.ZipFile(folder / "model.keras") as archive:
        path = archive.extract("model.weights.h5", folder / "extracted")
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: found.append(item[()]) if isinstance(item, h5py.Dataset) else None
        )
    return found


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [("single", 1), ("mirrored", 2), ("horovod", 2), ("parameter_server", 2)],
)
def test_a_training_leaves_its_results(train, strategy, replicas):
    done, folder = train("--strategy", strategy, "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == FILES
    assert [row["epoch"] for row in history(folder)] == ["1", "2", "3"]
    summary = json.loads((folder / "metrics.json").read_text())
    assert summary["strategy"] == strategy
    assert summary["replicas"] == replicas
    assert summary["epochs"] == 3
    for part in ("train", "validation", "test"):
        assert set(summary[part]) == {"loss", "accuracy"}
    assert summary["validation"]["accuracy"] > 0.6
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [line[:9] for line in done.stdout.splitlines()[:3]] == [
        f"epoch {n}/3" for n in (1, 2, 3)
    ]
    assert "Traceback" not in done.stderr


def test_an_existing_output_is_resumed_or_overwritten_only_when_asked(train):
    done, folder = train("--strategy", "single", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    before = (folder / "history.csv").read_bytes()

    done, _ = train("--strategy", "single", "--epochs", "2")
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "--overwrite" in done.stderr
    assert (folder / "history.csv").read_bytes() == before

    done, _ = train("--strategy", "single", "--epochs", "3", "--resume")
    assert done.returncode == 0, done.stderr
    assert [row["epoch"] for row in history(folder)] == ["1", "2", "3"]

    done, _ = train("--strategy", "single", "--epochs", "3", "--resume")
    assert done.returncode == 0, done.stderr
    assert "nothing left to train" in done.stdout

    done, _ = train("--strategy", "single", "--epochs", "1", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert [row["epoch"] for row in history(folder)] == ["1"]

    done, _ = train("--strategy", "single", "--resume", "--seed", "1")
    assert done.returncode == 2
    assert "seed" in done.stderr


def test_a_killed_horovod_training_resumes_to_the_weights_of_an_unbroken_one(
    train, shards, model_file, tmp_path
):
    options = ("--strategy", "horovod", "--checkpoint-every", "1", "--epochs", "6")
    unbroken, expected = train(*options, model="slow", output="unbroken")
    assert unbroken.returncode == 0, unbroken.stderr

    folder = tmp_path / "broken"
    command = [sys.executable, "-m", "tfdist", "train", *options, "--global-batch-size", "64"]
    command += ["--model", f"{model_file}:slow", "--data", str(shards), "--output", str(folder)]
    environ = {**os.environ, "STEP_SECONDS": "0.3"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        for line in process.stdout:
            if line.startswith("epoch 2/"):
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.read()
    assert process.returncode == -signal.SIGKILL

    assert 2 <= len(history(folder)) <= 4, "the kill came too late to show anything"
    resumed, folder = train(*options, "--resume", model="slow", output="broken")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["epoch"] for row in history(folder)] == ["1", "2", "3", "4", "5", "6"]
    for mine, theirs in zip(weights(folder), weights(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    for mine, theirs in zip(history(folder), history(expected), strict=True):
        assert float(mine["loss"]) == pytest.approx(float(theirs["loss"]), abs=1e-5)
        assert float(mine["val_loss"]) == pytest.approx(float(theirs["val_loss"]), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--strategy", "horvod"), ["horvod", "single, mirrored, horovod", "auto"]),
        (("--strategy", "mirrored", "-o", "devces=2"), ["devces", "devices"]),
        (("--strategy", "mirrored", "-o", "devices"), ["key=value"]),
        (("--strategy", "mirrored", "--workers", "2"), ["one process", "horovod"]),
        (("--strategy", "horovod", "--workers", "999"), ["999 workers", "slots"]),
        (("--resume", "--overwrite"), ["exclude each other"]),
        (("--epochs", "0"), ["0"]),
    ],
)
def test_a_mistake_in_the_options_is_one_line(train, options, words):
    done, folder = train(*options)
    _assert_one_line(done, words)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("nothing_there", (), ["must define nothing_there", "mlp"]),
        ("a_number", (), ["function", "int"]),
        ("returns_nothing", (), ["returns_nothing must return a compiled Keras model", "NoneType"]),
        ("not_compiled", (), ["compiled"]),
        ("mlp", ("-o", "devices=3", "--global-batch-size", "2"), ["at least", "3"]),
        ("mlp", ("-o", "devices=none", "-o", "lr_scaling=cubic"), ["lr_scaling", "linear, sqrt"]),
    ],
)
def test_a_mistake_that_a_rank_finds_is_one_line_too(train, model, options, words):
    done, folder = train("--strategy", "mirrored", *options, model=model)
    _assert_one_line(done, words)
    assert not folder.exists()


def test_a_fault_in_the_users_code_is_shown_as_it_is(train):
    done, folder = train("--strategy", "single", model="breaks")
    assert done.returncode == 1
    assert "RuntimeError: a fault of the user's own" in done.stderr
    assert not folder.exists()


def test_paths_that_cannot_be(train, shards, tmp_path):
    _assert_one_line(train(data=tmp_path / "nowhere")[0], ["nowhere", "tfdist shard"])
    _assert_one_line(train(data=shards / "trian")[0], ["trian", "train, validation, test"])
    (tmp_path / "file").write_text("")
    _assert_one_line(train(output="file/run")[0], ["--output"])
    assert (tmp_path / "file").read_text() == ""
    _assert_one_line(train(output="shards")[0], ["shards", "something else"])


def test_a_missing_mpirun_is_named(shards, model_file, tmp_path):
    """A copy of the interpreter's folder without mpirun beside it, and an empty PATH."""
    launcher = tmp_path / "bin" / "python"
    launcher.parent.mkdir()
    launcher.symlink_to(sys.executable)
    code = (
        f"import sys; sys.executable = {str(launcher)!r}\nfrom tfdist.cli.main import main; main()"
    )
    options = ["--model", f"{model_file}:mlp", "--data", str(shards), "--strategy", "horovod"]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *options, "--output", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    _assert_one_line(done, ["mpirun", "make setup"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["single", "horovod"])
def test_a_corrupt_shard_is_named_with_its_record(train, shards, strategy):
    shard = sorted(shards.glob("train-*"))[1]
    content = bytearray(shard.read_bytes())
    record_bytes = len(content) // 67  # 200 records in 3 shards: 67, 67, 66, of one size
    content[2 * record_bytes + record_bytes // 2] ^= 0xFF
    shard.write_bytes(content)
    done, folder = train("--strategy", strategy)
    _assert_one_line(done, [shard.name, "record 2"])
    assert not folder.exists()


def _assert_one_line(done: subprocess.CompletedProcess, words: list[str]) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("tfdist: ")
    for word in words:
        assert word in lines[0]
