"""Without extras tfdist does all but draw charts, read images and score models, and says so."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.aws import evaluation
from tfdist.errors import EngineMissingError
from tfdist.records import charts
from tfdist.runs.curves import draw
from tfdist.runs.folder import RunFolder

_RUN = """
import json, sys

from importlib.machinery import PathFinder

ABSENT = {"matplotlib", "PIL", "sklearn", "scipy", "pandas", "joblib", "boto3"}

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in ABSENT:
            return super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from tfdist.cli.main import main

codes = []
for line in sys.argv[1:]:
    sys.argv = ["tfdist", *line.split()]
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps(codes))
"""


def run(folder: Path, *lines: str) -> tuple[list[int], list[str]]:
    """Runs lines of ``tfdist`` without the packages of extras; returns exit codes and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *lines],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr.splitlines()


def test_records_need_no_extra(tmp_path):
    lines = (
        "init --sagemaker",
        "shard digits.npz data",
        "shard digits fed --clients 10",
        "inspect data --check",
        "inspect fed",
    )
    assert run(tmp_path, *lines) == ([0] * len(lines), [])


def test_what_needs_an_extra_names_it(tmp_path):
    picture = tmp_path / "photos" / "cat" / "1.png"
    picture.parent.mkdir(parents=True)
    picture.touch()
    codes, errors = run(
        tmp_path,
        "shard digits fed --clients 10",
        "inspect fed --plot skew.png",
        "shard photos shards",
        "aws pipeline --dry-run --config config.yaml",
    )
    assert codes == [0, 2, 2, 2]
    assert errors == [
        "tfdist: matplotlib must be installed for charts, but found an error: No module named "
        "'matplotlib'. Run pip install 'tfdist[plots]'.",
        "tfdist: Pillow must be installed for files of images, but found an error: No module named "
        "'PIL'. Run pip install 'tfdist[images]'.",
        "tfdist: boto3 must be installed for tfdist aws, but found an error: No module named "
        "'boto3'. Run pip install 'tfdist[sagemaker]'.",
    ]
    assert not (tmp_path / "shards").exists()


@pytest.fixture
def without_matplotlib(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_training_says_that_it_draws_no_curves(without_matplotlib, tmp_path):
    folder = RunFolder(tmp_path)
    row = {"epoch": 1, "seconds": 1.0, "samples_per_s": 1.0, "loss": 0.5}
    with folder.history.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    told = draw(folder, "single", ["loss"])
    assert told.startswith("none: matplotlib must be installed for charts")
    assert "'tfdist[plots]'" in told
    assert not folder.curves.exists()


def test_a_figure_asks_for_matplotlib(without_matplotlib):
    with pytest.raises(EngineMissingError, match=r"pip install 'tfdist\[plots\]'"):
        charts.figure(1, 1)


def test_scores_ask_for_scikit_learn(monkeypatch):
    for name in ("sklearn", "sklearn.metrics"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineMissingError, match=r"pip install 'tfdist\[sagemaker\]'"):
        evaluation._sklearn_metrics()
