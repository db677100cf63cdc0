"""The two tiers: `make test` runs what is not ``long``, `make test-all` all."""

from __future__ import annotations

from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """Returns cases of ``parametrize`` (a tuple each where it has several names) as long ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
