"""The two tiers: `make test` runs what is not ``long``, `make test-all` all."""

from __future__ import annotations

import os
from typing import Any

import pytest

#: Set by the short tier, for what it starts.
_SHORT = "TFDIST_TESTS_SHORT"


def tell(config: pytest.Config) -> None:
    """Tells the tests of this run, and what they start, which tier they are."""
    if config.option.markexpr == "not long":
        os.environ[_SHORT] = "1"


def is_short() -> bool:
    """Returns whether this process is one of `make test`, or was started by one."""
    return _SHORT in os.environ


def long(*cases: Any) -> list[Any]:
    """Returns cases of ``parametrize`` (a tuple each where it has several names) as long ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
