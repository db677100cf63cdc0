"""The picture in CONTRIBUTING.md is that of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_is_up_to_date():
    command = [sys.executable, ROOT / "tools" / "house.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"```mermaid\n{done.stdout}```\n" in text, "run tools/house.py and put in what it prints"
