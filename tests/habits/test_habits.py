"""What Keras' users do, in plain Keras on one device and on each strategy: the same numbers.

Each habit is equal, equal by its own batches, trained on other random numbers, or refused in one
line. The habits stand in *_habits.py, and ``run_habits.py`` runs all of them in one process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scenario_plugin import selected

# The first habit of a strategy waits for all: ten minutes on two ranks, where the machine is busy.
_TIMEOUT_S = 1800
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)
TOLERANCE = 1e-5
OF_THEIR_OWN = (
    ("mesh", {"batch": 2, "model": 1}),
    ("pipeline", {"stages": 2, "microbatches": 2}),
    ("parameter_server", {}),
)
_FOLDER = Path(__file__).parent
_PROGRAM = re.compile(r"^@habit\(.*?\)\ndef (\w+)", re.MULTILINE | re.DOTALL)
NAMES = [
    name
    for file in sorted(_FOLDER.glob("*_habits.py"))
    for name in _PROGRAM.findall(file.read_text())
]


@dataclass
class Runs:
    """The habits that were selected, on each strategy that was asked for."""

    folder: Path
    names: list[str]
    _found: dict[str, list[dict[Any, dict]]] = field(default_factory=dict)

    def of(self, where: str, options: dict, ranks: int = 1) -> list[dict[Any, dict]]:
        """Returns for each rank (habit, parts) -> its line; see ``run_habits.py``."""
        if where not in self._found:
            # A job that failed is not run once more for each habit: without a line, each fails.
            self._found[where] = [{}] * ranks
            out = self.folder / where
            launch = f"-m tfdist launch --strategy {where} --workers {ranks} --"
            is_job = ranks > 1 or where == "parameter_server"
            launcher = [sys.executable, *launch.split()] if is_job else []
            program = [_FOLDER / "run_habits.py", where, json.dumps(options), out, *self.names]
            done = subprocess.run(
                [*launcher, sys.executable, *program],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
            for rank in range(ranks):
                lines = map(json.loads, out.with_suffix(f".{rank}.jsonl").open())
                self._found[where][rank] = {(line["habit"], line["parts"]): line for line in lines}
        return self._found[where]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("habits"), selected(request, "name"))


def leaves(numbers: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns (where it stands, number) of all numbers."""
    if not isinstance(numbers, (dict, list)):
        return [(path, numbers)]
    pairs = numbers.items() if isinstance(numbers, dict) else enumerate(numbers)
    return [leaf for name, value in pairs for leaf in leaves(value, f"{path}/{name}")]


def assert_equal(found: dict, expected: dict) -> None:
    ours, theirs = leaves(found["numbers"]), leaves(expected["numbers"])
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, value), (_, right) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(right, abs=TOLERANCE, nan_ok=True), path


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "options"), OF_THEIR_OWN)
def test_steps_of_their_own_have_most_habits(strategy, options, runs):
    (found,) = runs.of(strategy, options)
    refused = [line for line in found.values() if "refused" in line]
    assert len(refused) <= len(found) / 3


def test_there_are_as_many_as_were_tried():
    assert len(set(NAMES)) == len(NAMES) >= 66


@pytest.mark.parametrize(
    ("strategy", "options", "ranks"),
    [
        pytest.param("single", {}, 1, marks=pytest.mark.long, id="single"),
        pytest.param("mirrored", {"devices": 2}, 1, id="mirrored"),
        pytest.param(
            *("horovod", {"stall_timeout_s": 60}, 2), marks=pytest.mark.long, id="horovod"
        ),
        pytest.param("multi_worker", {}, 2, marks=pytest.mark.long, id="multi_worker"),
        *(pytest.param(*each, 1, marks=pytest.mark.long, id=each[0]) for each in OF_THEIR_OWN),
    ],
)
@pytest.mark.parametrize(
    "name",
    # Those that resemble each other stand side by side: the short tier has a few of all.
    [pytest.param(n, marks=() if i % 24 == 0 else pytest.mark.long) for i, n in enumerate(NAMES)],
)
def test_habit(name, strategy, options, ranks, runs):
    (plain,) = runs.of("plain", {})
    for found in runs.of(strategy, options, ranks):
        line = found[name, 0]
        verdict = line["verdicts"][strategy]
        if strategy in dict(OF_THEIR_OWN) and "refused" in line:
            assert "\n" not in line["refused"]
            continue
        if verdict.startswith("refused: "):
            assert verdict.removeprefix("refused: ") in line["refused"]
            assert "\n" not in line["refused"]
            continue
        assert "numbers" in line, line.get("refused", line.get("failed"))
        expected = plain[name, ranks if verdict == "equal by its own batches" else 0]
        assert "numbers" in expected, expected
        if verdict.startswith("other "):
            assert len(leaves(line["numbers"])) == len(leaves(expected["numbers"]))
            assert np.isfinite([value for _, value in leaves(line["numbers"])]).all()
        else:
            assert_equal(line, expected)
