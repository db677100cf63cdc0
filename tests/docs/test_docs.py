"""What README.md and docs/ show runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import blocks

import tfdist
from tfdist.strategies import REGISTRY

# The first page of Python waits for all of them, on a machine that may be busy.
_TIMEOUT_S = 500
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 60)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder as the pages assume it: a model, and shards of digits."""
    folder = tmp_path_factory.mktemp("docs")
    starter = blocks.ROOT / "tfdist" / "examples" / "digits.py"
    (folder / "model.py").write_text(starter.read_text())
    tfdist.records.write("digits", folder / "data" / "digits", num_shards=2)
    return folder


def _environ() -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([bin_folder, os.environ["PATH"]])
    return os.environ | {
        "PATH": path,
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        cwd=folder,
        env=_environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def of_python(project, tmp_path_factory) -> dict[str, str]:
    """Page -> the traceback of its Python; a page needs what the shell lines above it made."""
    tfdist_init = [sys.executable, "-m", "tfdist", "init", "project"]
    assert _run(tfdist_init, project).returncode == 0
    digits8 = project / "data" / "digits8"
    split = "train=8,validation=1,test=1"
    tfdist.records.write("digits", digits8, num_shards=8, split=split)
    tfdist.records.write("digits", project / "project" / "data" / "digits", split=split)
    out = tmp_path_factory.mktemp("python") / "results.json"
    done = _run([sys.executable, str(Path(__file__).with_name("run_python.py")), str(out)], project)
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("page", blocks.pages_with("python"), ids=blocks.name_of)
def test_python_runs(page, of_python):
    assert of_python[blocks.name_of(page)] == ""


#: What runs engines that other tests start just so.
_LONG = ("docs/export.md", "docs/installing.md", "docs/strategies/federated.md")
_SHELL = blocks.pages_with("sh")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if blocks.name_of(page) in _LONG else [])
        for page in _SHELL
    ],
    ids=map(blocks.name_of, _SHELL),
)
def test_shell_lines_run(page, project, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(project / "data" / "digits")
    (tmp_path / "model.py").symlink_to(project / "model.py")
    for block in blocks.blocks_of(page, "sh"):
        for line in block.code.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "tfdist", line
            done = _run([sys.executable, "-m", "tfdist", *arguments], tmp_path)
            assert done.returncode == 0, (line, done.stdout[-2000:] + done.stderr[-3000:])


def test_a_block_that_is_not_run_says_why_and_no_language_is_forgotten():
    """A block is a table of options, a picture, a text of another program, data, or it is run."""
    known = {"python", "sh", "yaml", "ini", "json"}
    for page in blocks.PAGES:
        lines = page.read_text().splitlines()
        opened = [line[3:] for line in lines if line.startswith("```") and line != "```"]
        assert {name for name in opened if not name.startswith("{")} <= known, blocks.name_of(page)


def test_a_picture_is_there_and_said_in_words():
    for page in blocks.PAGES:
        for words, file in re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text()):
            assert words, (blocks.name_of(page), file)
            assert (page.parent / file).is_file(), (blocks.name_of(page), file)


@pytest.mark.parametrize("strategy", REGISTRY)
def test_a_strategy_has_a_picture_of_what_lies_where(strategy):
    page = blocks.ROOT / "docs" / "strategies" / f"{strategy}.md"
    assert f"](../pictures/{strategy}.svg)" in page.read_text()


def test_the_gallery_has_every_notebook():
    """It is made from the table in README.md."""
    rows = re.findall(r"\((notebooks/.+)\) \| .+ \|", (blocks.ROOT / "README.md").read_text())
    there = sorted((blocks.ROOT / "notebooks").glob("*.ipynb"))
    assert rows == [blocks.name_of(path) for path in there]
