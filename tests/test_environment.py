"""The environment of `make setup` holds what is pinned. That its engines work: test_doctor.py."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements"


def pins() -> dict[str, str]:
    found = {}
    for path in REQUIREMENTS.glob("*.txt"):
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                name, version = line.split("==")
                assert name not in found, f"{name} is pinned twice"
                found[name] = version
    return found


def test_what_is_installed_is_what_is_pinned():
    installed = {name: importlib.metadata.version(name) for name in pins()}
    assert installed == pins()


def test_a_pin_is_a_name_and_a_version_only():
    for path in REQUIREMENTS.glob("*.txt"):
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line), line
