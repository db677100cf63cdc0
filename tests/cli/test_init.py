"""tfdist init: what it writes trains as its README says, and nothing of the user's is replaced."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import yaml

PROJECT = {"README.md", "model.py", "script.py", "digits.npz"}
ENTRY_POINTS = {"train.py", "evaluate.py", "shard.py", "inference.py", "pipeline.py"}
ROOT = Path(__file__).parents[2]


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def lines_to_run(readme):
    """The lines between fences."""
    blocks = readme.read_text().split("\n```\n")[1::2]
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.timeout(400)
@pytest.mark.long
def test_every_line_of_its_readme_runs(tfdist, shell_environ, monkeypatch, tmp_path):
    assert tfdist("init", "mine")[0] == 0
    project = tmp_path / "mine"
    monkeypatch.chdir(project)
    lines = lines_to_run(project / "README.md")
    assert len(lines) == 7
    bin_folder = str(Path(sys.executable).parent)
    # As in a user's shell: pytest's own process has it from `import tfdist`.
    shell_environ.pop("TF_USE_LEGACY_KERAS", None)
    environ = shell_environ | {"PATH": os.pathsep.join([bin_folder, shell_environ["PATH"]])}
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "tfdist" and arguments[0] in ("shard", "inspect"):
            code, _, err = tfdist(*arguments)
            assert code == 0, err
            continue
        command = [sys.executable, *(["-m", "tfdist"] * (program == "tfdist")), *arguments]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (line, done.stderr[-3000:])
    for run in ("single", "mirrored", "workers"):
        summary = json.loads((project / "runs" / run / "metrics.json").read_text())
        assert summary["test"]["accuracy"] > 0.9, run
    assert summary["workers"] == 2
    assert (project / "digits.keras").is_file()
    assert (project / "digits.tflite").is_file()


def test_what_is_written(tfdist, tmp_path):
    code, out, _ = tfdist("init", "a/mine")
    assert code == 0
    assert names(tmp_path / "a" / "mine") == PROJECT
    assert out.splitlines()[-1] == "next: the lines of a/mine/README.md"
    with np.load(tmp_path / "a" / "mine" / "digits.npz") as arrays:
        assert arrays["image"].shape == (1797, 8, 8, 1)


def test_the_folder_for_sagemaker_trains_the_model_of_the_project(tfdist, tmp_path):
    assert tfdist("init", "--sagemaker")[0] == 0
    written = {path.name for path in (tmp_path / "sagemaker").iterdir()}
    ours = {path.name for path in (ROOT / "sagemaker").iterdir() if path.is_file()}
    assert written == ours | {"README.md"}
    assert written > ENTRY_POINTS
    config = yaml.safe_load((tmp_path / "sagemaker" / "config.yaml").read_text())
    assert config["model"] == "model.py:model_fn"
    dry_run = "aws", "pipeline", "--dry-run", "--config", "sagemaker/config.yaml"
    assert " ".join(["tfdist", *dry_run]) in lines_to_run(tmp_path / "sagemaker" / "README.md")
    code, out, err = tfdist(*dry_run)
    assert code == 0, err
    assert "tfdist-digits" in out


def test_what_it_wrote_may_be_written_again_and_completed(tfdist, tmp_path):
    tfdist("init", "mine")
    (tmp_path / "mine" / "notes.txt").write_text("the user's")
    assert tfdist("init", "mine")[1].splitlines() == ["next: the lines of mine/README.md"]
    code, out, _ = tfdist("init", "mine", "--sagemaker")
    assert code == 0
    assert "README.md" not in out.splitlines()[0]
    assert (tmp_path / "mine" / "sagemaker" / "train.py").is_file()
    assert (tmp_path / "mine" / "notes.txt").read_text() == "the user's"


@pytest.mark.parametrize("taken", ["model.py", "digits.npz", "sagemaker/config.yaml"])
def test_a_file_of_the_users_is_never_replaced(tfdist, tmp_path, taken):
    path = tmp_path / taken
    path.parent.mkdir(exist_ok=True)
    path.write_text("the user's")
    before = names(tmp_path)
    code, _, err = tfdist("init", "--sagemaker")
    assert code == 2
    assert f"a new project must replace no file, but found {taken}, which is there already." in err
    assert (names(tmp_path), path.read_text()) == (before, "the user's")


@pytest.mark.parametrize("taken", ["mine", "mine/sagemaker"])
def test_a_file_where_a_folder_must_be(tfdist, tmp_path, taken):
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("the user's")
    before = names(tmp_path)
    code, _, err = tfdist("init", "mine", "--sagemaker")
    assert code == 2
    assert "must replace no file" in err
    assert names(tmp_path) == before


def test_a_link_that_leads_nowhere_is_left(tfdist, tmp_path):
    (tmp_path / "model.py").symlink_to("elsewhere.py")
    assert tfdist("init")[0] == 2
    assert names(tmp_path) == {"model.py"}


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_it_is_written_whole_or_not_at_all(tfdist, tmp_path, monkeypatch, failure):
    link = os.link

    def fail_at_the_third(source, target):
        if Path(source).name == "2":
            raise failure
        link(source, target)

    monkeypatch.setattr(os, "link", fail_at_the_third)
    code, _, err = tfdist("init", "a/mine")
    assert code == (2 if isinstance(failure, OSError) else 130)
    assert len(err.strip().splitlines()) == 1
    assert names(tmp_path) == set()


def test_a_file_system_without_links(tfdist, tmp_path, monkeypatch):
    assert tfdist("init", "with")[0] == 0

    def refuse(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert tfdist("init", "without")[0] == 0
    assert names(tmp_path / "without") == names(tmp_path / "with")
    assert tfdist("init", "without")[0] == 0


def test_the_files_lie_in_the_package():
    # As links in the checkout, as files in the wheel; nothing is there twice.
    package = resources.files("tfdist")
    for inner, outer in (("examples", "examples"), ("aws/scripts", "sagemaker")):
        assert Path(str(package / inner)).resolve() == ROOT / outer
