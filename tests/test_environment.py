"""The environment of `make setup` holds what is pinned. That its engines work: test_doctor.py."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
LANES = sorted((REQUIREMENTS / "lanes").glob("*.txt"))


def test_what_is_installed_is_what_is_pinned(pinned):
    tensorflow = importlib.metadata.version("tensorflow")
    lists = [pinned(lane.stem) for lane in LANES]
    (wanted,) = (pins for pins in lists if pins["tensorflow"] == tensorflow)
    installed = {name: importlib.metadata.version(name) for name in wanted}
    assert installed == wanted


def test_what_both_lanes_have_alike_is_pinned_once():
    modern, oldest = (set(lane.read_text().splitlines()) for lane in LANES)
    assert {line for line in modern & oldest if "==" in line} == set()


def test_a_pin_is_a_name_and_a_version_and_for_which_python():
    pin = r"[a-z0-9-]+==[0-9a-z.]+(; python_version (<|>=) \"3\.1[1-3]\")?"
    for path in REQUIREMENTS.rglob("*.txt"):
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(pin, line), line
