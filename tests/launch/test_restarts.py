"""Jobs that are started again, with real processes of plain Python."""

from __future__ import annotations

import os
import sys

import pytest

from tfdist.errors import LaunchError
from tfdist.launch import local, restarts

pytestmark = pytest.mark.timeout(60)


def run(script: str, *, max_restarts: int, **options) -> tuple[object, list[str], list[str]]:
    """Returns (outcome, restarts, lines) of ``script``, which finds its attempt in sys.argv."""
    told: list[str] = []
    lines: list[str] = []
    outcome = restarts.run(
        lambda attempt: local.job([sys.executable, "-c", script, str(attempt)], **options),
        max_restarts=max_restarts,
        on_restart=lambda number, reason: told.append(f"{number}: {reason}"),
        on_line=lambda rank, stream, text: lines.append(text),
    )
    return outcome, told, lines


KILLED_UNTIL_2 = """
import os, signal, sys
print("attempt", sys.argv[1], flush=True)
if int(sys.argv[1]) < 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lost_process_is_started_again_until_it_ends_well():
    outcome, told, lines = run(KILLED_UNTIL_2, max_restarts=3)
    assert outcome.exit_code == 0
    assert lines == ["attempt 0", "attempt 1", "attempt 2"]
    assert [line[:10] for line in told] == ["1: rank 0 ", "2: rank 0 "]
    assert "SIGKILL" in told[0]


def test_after_the_last_restart_the_failure_stays():
    outcome, told, lines = run(KILLED_UNTIL_2, max_restarts=1)
    assert outcome.exit_code == 137
    assert len(told) == 1
    assert len(lines) == 2


def test_without_restarts_a_job_runs_once():
    outcome, told, lines = run(KILLED_UNTIL_2, max_restarts=0)
    assert outcome.exit_code == 137
    assert (told, len(lines)) == ([], 1)


def test_a_mistake_of_the_users_is_not_tried_again():
    outcome, told, _ = run("raise SystemExit(2)", max_restarts=3)
    assert outcome.exit_code == 2
    assert told == []


def test_a_job_that_fell_silent_is_started_again():
    script = f"""
import sys, time
sys.path.insert(0, {os.getcwd()!r})
from tfdist.launch.events import emit
emit({{"event": "step"}})
time.sleep(600 if sys.argv[1] == "0" else 0)
"""
    outcome, told, _ = run(script, max_restarts=1, stall_timeout_s=1.0)
    assert outcome.exit_code == 0
    assert "silence" in told[0]
    with pytest.raises(LaunchError, match="silence"):
        run(script, max_restarts=0, stall_timeout_s=1.0)


def test_a_job_that_cannot_be_made_is_not_tried_again():
    told = []

    def make(attempt: int):
        raise LaunchError("workers must not exceed the slots", received="4", mend="Use 2")

    with pytest.raises(LaunchError, match="slots"):
        restarts.run(
            make,
            max_restarts=3,
            on_restart=lambda number, reason: told.append(number),
            on_line=lambda rank, stream, text: None,
        )
    assert told == []
