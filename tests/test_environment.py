"""The environment of `make setup` holds what is pinned. That its engines work: test_doctor.py."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.markers import Marker

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
LANES = sorted((REQUIREMENTS / "lanes").glob("*.txt"))


def holds_here(condition: str) -> bool:
    return not condition or Marker(condition).evaluate()


def pins(lane: Path) -> dict[str, str]:
    found = {}
    for path in (*REQUIREMENTS.glob("*.txt"), lane):
        for line in path.read_text().splitlines():
            pin, _, condition = line.partition("; ")
            if not line.startswith("#") and holds_here(condition):
                name, version = pin.split("==")
                assert name not in found, f"{name} is pinned twice"
                found[name] = version
    return found


def test_what_is_installed_is_what_is_pinned():
    tensorflow = importlib.metadata.version("tensorflow")
    (wanted,) = (found for lane in LANES if (found := pins(lane))["tensorflow"] == tensorflow)
    installed = {name: importlib.metadata.version(name) for name in wanted}
    assert installed == wanted


def test_what_both_lanes_have_alike_is_pinned_once():
    classic, modern = (set(lane.read_text().splitlines()) for lane in LANES)
    assert {line for line in classic & modern if "==" in line} == set()


def test_a_pin_is_a_name_and_a_version_and_for_which_python():
    pin = r"[a-z0-9-]+==[0-9a-z.]+(; python_version (<|>=) \"3\.1[1-3]\")?"
    for path in REQUIREMENTS.rglob("*.txt"):
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(pin, line), line
