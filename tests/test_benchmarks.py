"""The benchmarks run and keep their contract. What they measure is asserted nowhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

_SHARED = {"__main__", "apart", "machine", "pairs", "steps_in_turn"}
_ALL = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - _SHARED)

_CONTRACT = """
import importlib, inspect
from benchmarks.__main__ import MODULES
for name in MODULES:
    run = inspect.signature(importlib.import_module(f"benchmarks.{name}").run)
    print(name, [(p.name, p.default) for p in run.parameters.values()])
"""


@pytest.fixture
def run_python(tmp_path):
    """Runs Python beside a copy of the benchmarks, which writes its results there."""
    ignored = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=ignored)

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"COLUMNS": "200"},  # No name of a row is broken.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        ).stdout

    return run


@pytest.mark.timeout(60)
def test_every_module_can_be_run_quickly_or_in_full(run_python):
    lines = run_python("-c", _CONTRACT).splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["[('quick', False)]"] * len(lines)
    modules = {line.partition(" ")[0] for line in lines}
    assert modules == set(_ALL)


@pytest.mark.long
@pytest.mark.timeout(620)
@pytest.mark.parametrize("name", _ALL)
def test_a_quick_run_prints_a_table_and_writes_json(run_python, tmp_path, name):
    printed = run_python("-m", "benchmarks", "--quick", "--only", name)
    [path] = (tmp_path / "benchmarks" / "results").glob("*")
    result = json.loads(path.read_text())
    assert result["machine"]["cores"] >= 1
    assert {"load_before", "load_after"} <= set(result["machine"])
    for row in result["rows"]:
        if name == "survival":  # Its rows are faults.
            assert row["weights_equal"], row
            continue
        assert {"work", "baseline", "ours", "ratio", "target"} <= set(row)
        assert row["baseline"] > 0
        assert row["ours"] > 0
        assert row["work"].split(",")[0] in printed
