"""The pictures of the documentation are those that tools/pictures.py draws."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_up_to_date():
    drawn = runpy.run_path(str(ROOT / "tools" / "pictures.py"))["pictures"]()
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").iterdir()}
    assert kept == drawn, "run tools/pictures.py"
