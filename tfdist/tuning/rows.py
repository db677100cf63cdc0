"""What a search tells of its trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: What a search tells of a trial, by Optuna's name of its state.
STATES = {"RUNNING": "running", "COMPLETE": "done", "PRUNED": "ended early", "FAIL": "failed"}


@dataclass(frozen=True)
class TrialRow:
    """A trial, as a table has it.

    Attributes:
        state: "running", "done", "ended early" or "failed".
        epoch: that it has come to; None before the first one has ended.
        value: of the metric then; of folds the mean.
        params: what was chosen.
        reason: why it has failed.
    """

    number: int
    state: str
    epoch: int | None
    value: float | None
    params: dict[str, Any]
    reason: str | None = None
