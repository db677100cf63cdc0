"""What a type checker finds in a user's script, where the wheel is all that there is of tfdist."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import tfdist

GOOD = """
import tfdist
from tfdist.errors import TfdistError

def train(model_fn, x, y) -> None:
    with tfdist.strategy("auto", lr_scaling="linear") as strategy:
        model = strategy.build(model_fn)
        data = strategy.dataset((x, y), global_batch_size=32, training=False)
        keep = tfdist.Checkpoints("checkpoints", resume=True, every_steps=10)
        model.fit(data, epochs=5, callbacks=[keep])
        strategy.save(model, "digits.keras")
        report = tfdist.verify(model_fn, (x, y), strategy, steps=3)
        print(report is None or report.exact)
    with tfdist.strategy("federated", clients_per_round=10) as clients:
        clients.dataset((x, y), clients=30, partition="iid")
        clients.personalize(model, (x, y), epochs=2)
    with tfdist.strategy("mesh", batch=2) as mesh:
        print(mesh.describe(mesh.build(model_fn)))
    with tfdist.strategy("pipeline", stages=2) as pipeline:
        pipeline.describe(pipeline.build(model_fn)).draw("schedule.png")
    try:
        tfdist.records.write("digits", "data", num_shards=4)
        tfdist.export.tflite(model, "digits.tflite", quantize="int8", data="data")
        tfdist.notebook_launch(model_fn, workers=2)
    except TfdistError as error:
        print(error.rule, tfdist.__version__)
"""

#: line -> what is told of it.
BAD = {
    'tfdist.strateegy("single")': 'Module has no attribute "strateegy"',
    'tfdist.strategy("single").datasett("x")': '"Strategy" has no attribute "datasett"',
    'tfdist.strategy("single").dataset("x", global_batch_size="32")': 'incompatible type "str"',
    'tfdist.strategy("single").dataset("x")': 'Missing named argument "global_batch_size"',
    'tfdist.strategy("mesh").describe(1).draw("a")': '"Description" has no attribute "draw"',
    'tfdist.strategy("federated").personalise(1, 2)': 'has no attribute "personalise"',
    "tfdist.strategy(3)": 'No overload variant of "strategy" matches argument type "int"',
    'tfdist.Checkpoints("c", keep="3")': 'Argument "keep" to "Checkpoints" has incompatible type',
    'tfdist.verify(print, "x", 3)': 'Argument 3 to "verify" has incompatible type "int"',
    'tfdist.records.wirte("digits", "x")': 'Module has no attribute "wirte"',
    'tfdist.records.write("digits", "x", num_shards="4")': 'Argument "num_shards" to "write"',
    'tfdist.export.tflight(1, "x")': 'Module has no attribute "tflight"',
    'tfdist.errors.OptoinError("a")': 'Module has no attribute "OptoinError"',
}


@pytest.fixture(scope="module")
def check(wheel, tmp_path_factory):
    """Returns what mypy prints of a script, in an environment that holds the wheel alone."""
    folder = tmp_path_factory.mktemp("types")
    venv.create(folder / "venv", symlinks=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)

    def run(script: str) -> str:
        (folder / "script.py").write_text(script)
        command = [sys.executable, "-m", "mypy", "--python-executable", folder / "venv/bin/python"]
        done = subprocess.run(
            [*command, "--check-untyped-defs", "--cache-dir", folder / "cache", "script.py"],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode in (0, 1), done.stderr
        return done.stdout

    return run


def test_a_script_without_mistakes(check):
    assert check(GOOD).startswith("Success")


def test_each_mistake_is_found(check):
    found = dict(
        re.findall(
            r"^script\.py:(\d+): error: (.*)$", check("\n".join(["import tfdist", *BAD])), re.M
        )
    )
    for number, (line, told) in enumerate(BAD.items(), start=2):
        assert told in found.get(str(number), ""), line


def test_a_type_checker_knows_every_name_and_no_other():
    for package in (tfdist, tfdist.records, tfdist.export):
        text = Path(package.__file__).with_suffix(".pyi").read_text()
        known = re.findall(r"^from .* import (\w+) as \1$|^(\w+): ", text, re.M)
        assert sorted(a or b for a, b in known) == sorted(package.__all__)
