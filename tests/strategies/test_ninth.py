"""A strategy of another package: one file and an entry point, and everything knows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfdist.records import write

pytestmark = pytest.mark.timeout(280)
_ROOT = Path(__file__).parents[2]

_NINTH = '''
from tfdist.strategies.single import Single
from tfdist.strategies.spec import Spec

SPEC = Spec(name="ninth", path="ninth:Ninth", summary="one device, said louder")


class Ninth(Single):
    """One device.

    Args:
        loudness: how loud
            it is, in dB.
        shared: see ``Single``.
    """

    name = "ninth"

    def __init__(self, *, loudness: int = 1, **shared):
        super().__init__(**shared)
        print(f"loudness {loudness}")
'''
_MODEL = """
def model_fn():
    from tensorflow import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ninth")
    (folder / "ninth.py").write_text(_NINTH)
    info = folder / "ninth-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ninth\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tfdist.strategies]\nninth = ninth:SPEC\n")
    (folder / "model.py").write_text(_MODEL)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), rng.integers(0, 2, 12)
    write((x, y), folder / "data", split="train=1")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_it_is_shown_with_its_options(run):
    assert "ninth" in run("-m", "tfdist", "train", "--help").stdout
    assert "one device, said louder" in run("-m", "tfdist", "options").stdout
    options = json.loads(run("-m", "tfdist", "options", "ninth", "--json").stdout)
    assert options[0] == {
        "name": "loudness",
        "type": "int",
        "default": 1,
        "meaning": "how loud it is, in dB.",
    }
    assert "warmup_epochs" in [option["name"] for option in options]


def test_it_trains_and_is_verified(run, folder):
    where = ("--model", "model.py:model_fn", "--data", "data", "--strategy", "ninth")
    done = run("-m", "tfdist", "train", *where, "-o", "loudness=3", "--global-batch-size", "4",
               "--output", "out")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loudness 3" in done.stdout
    assert (folder / "out" / "model.keras").is_file()
    done = run("-m", "tfdist", "verify", *where)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_launched_in_one_process(run):
    program = ("--", sys.executable, "-c", "print('here')")
    done = run("-m", "tfdist", "launch", "--strategy", "ninth", *program)
    assert done.returncode == 0, done.stderr
    assert "here" in done.stdout
    done = run("-m", "tfdist", "launch", "--strategy", "ninth", "--workers", "2", *program)
    assert done.returncode == 2
    assert "strategy 'ninth' must run in one process" in done.stderr


@pytest.mark.long
def test_doctor_takes_a_step_of_it(run):
    done = run(
        "-c",
        "from tfdist.launch import engines\n"
        "ninth = engines.all_engines()[-1]\n"
        "print(ninth.name, engines.probe(ninth, run=True))",
    )
    assert done.stdout.startswith("ninth "), done.stderr
    assert "runs=True" in done.stdout
    assert "one step; replicas: 1" in done.stdout


def test_the_suite_demands_its_conformance_row(run):
    wanted = "tests/conformance/test_conformance.py::test_every_registered_strategy_has_a_row"
    done = run("-m", "pytest", "--rootdir", str(_ROOT), "-c", str(_ROOT / "pyproject.toml"),
               str(_ROOT / wanted))  # fmt: skip
    assert done.returncode == 1
    assert "ninth" in done.stdout


def test_an_entry_point_that_gives_something_else_is_one_line(run, folder):
    info = folder / "tenth-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tenth\nVersion: 1.0\n")
    points = info / "entry_points.txt"
    for value, received in (("ninth:Ninth", "an object of type"), ("nowhere:SPEC", "Module")):
        points.write_text(f"[tfdist.strategies]\ntenth = {value}\n")
        done = run("-m", "tfdist", "train", "--help")
        assert done.returncode == 2
        assert "must give a Spec" in done.stderr
        assert received in done.stderr
        assert "Traceback" not in done.stderr
    for file in info.iterdir():
        file.unlink()
    info.rmdir()
