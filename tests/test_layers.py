"""The rule that an import never climbs is really checked by `make lint`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "tfdist", tmp_path / "tfdist", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_no_import_climbs(copy):
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("topology/slurm", "tfdist.records"),
        ("records/climb", "tfdist.strategies"),
        ("strategies/climb", "tfdist.launch.mpi"),
        ("launch/climb", "tfdist.cli.main"),
    ],
)
def test_an_import_that_climbs_fails(copy, lower, upper):
    with open(copy / "tfdist" / f"{lower}.py", "a") as file:
        file.write(f"\nimport {upper}\n")
    done = lint_imports(copy)
    assert done.returncode == 1
    assert f"tfdist.{lower.replace('/', '.')} -> {upper}" in done.stdout


def test_a_new_room_must_be_given_its_place(copy):
    (copy / "tfdist" / "attic").mkdir()
    (copy / "tfdist" / "attic" / "__init__.py").touch()
    done = lint_imports(copy)
    assert done.returncode == 1
    assert "attic" in done.stdout
