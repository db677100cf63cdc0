"""The picture in CONTRIBUTING.md is that of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_is_up_to_date():
    command = [sys.executable, ROOT / "tools" / "house.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"```mermaid\n{done.stdout}```\n" in text, "run tools/house.py and put in what it prints"


def test_the_tour_passes_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tour = text.partition("### From `fit` to the optimizer")[2].partition("\n\nPrivate names")[0]
    named = re.findall(r"\d+\. `([\w/]+\.py)`", tour)
    assert len(named) == 15
    assert [file for file in named if not (ROOT / "tfdist" / file).is_file()] == []
