"""What is told of a job: each line of its output with its rank, restarts, the first failure."""

from __future__ import annotations

import sys

from tfdist.launch import supervisor


def show(rank: int | None, stream: str, text: str) -> None:
    """Prints one line with its rank; the launcher's own words without one, on stderr."""
    prefix = "" if rank is None else f"[{rank}] "
    _print(f"{prefix}{text}", to_stderr=rank is None or stream == "stderr")


def announce_restart(number: int, of: int, reason: str) -> None:
    """Says on stderr that a job starts again, and why."""
    _print(f"tfdist: {reason}; starting all again, restart {number} of {of}", to_stderr=True)


def complain(outcome: supervisor.Outcome) -> None:
    """Says on stderr which rank failed first, with its last lines."""
    _print(f"tfdist: {outcome.reason}; its last lines:", to_stderr=True)
    for line in outcome.last_lines:
        show(outcome.failed_rank, "stderr", line)


def _print(text: str, *, to_stderr: bool) -> None:
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)
