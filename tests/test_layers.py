"""The rules of the house are really checked by `make lint`: see pyproject.toml."""

from __future__ import annotations

import re
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


def test_a_circle_fails(copy):
    with open(copy / "tfdist" / "records" / "clients" / "stores.py", "a") as file:
        file.write("\nfrom tfdist.records.clients import collection\n")
    done = lint_imports(copy)
    assert done.returncode == 1
    assert "No cycles are allowed in tfdist.records.clients" in done.stdout


def test_a_new_room_must_be_given_its_place(copy):
    (copy / "tfdist" / "attic").mkdir()
    (copy / "tfdist" / "attic" / "__init__.py").touch()
    done = lint_imports(copy)
    assert done.returncode == 1
    assert "attic" in done.stdout


def lint(folder: Path, file: str) -> str:
    ruff = str(Path(sys.executable).parent / "ruff")
    done = subprocess.run(
        [ruff, "check", "--no-cache", "--output-format", "concise", file],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("file", "is_refused"),
    [("training/graph", True), ("strategies/single", True), ("keras/layers", False)],
)
def test_private_names_of_keras_stand_in_one_folder(copy, file, is_refused):
    path = f"tfdist/{file}.py"
    with open(copy / path, "a") as source:
        source.write("\n\ndef nodes(model: object) -> object:\n    return model._nodes_by_depth\n")
    assert ("SLF001" in lint(copy, path)) == is_refused


def test_nor_are_they_reached_by_getattr():
    """Which ruff does not look at."""
    private = re.compile(r'(get|set|has)attr\((?!self)[^"\n]*, "_(?!tfdist|_)')
    allowed = "records/reading/dataset_graph.py"
    found = [
        str(path.relative_to(ROOT / "tfdist"))
        for path in (ROOT / "tfdist").rglob("*.py")
        if private.search(path.read_text())
    ]
    assert [path for path in found if not path.startswith("keras/")] == [allowed]


def test_which_keras_it_is_stands_in_its_port():
    names = re.compile(r"\bIS_KERAS_3\b|\bkeras\.version\b")
    asking = {path for path in (ROOT / "tfdist").rglob("*.py") if names.search(path.read_text())}
    assert {path.parent.relative_to(ROOT / "tfdist") for path in asking} == {Path("keras")}
