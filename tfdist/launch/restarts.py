"""Runs a job again when one of its processes is lost: all of it, from its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tfdist.errors import LaunchError
from tfdist.launch import supervisor
from tfdist.launch.supervisor import Job, Outcome

_USER_ERROR = 2


def run(
    make_job: Callable[[int], Job],
    *,
    max_restarts: int,
    on_restart: Callable[[int, str], None],
    on_line: Callable[[int | None, str, str], None],
    on_event: Callable[[int, dict], None] | None = None,
) -> Outcome:
    """Runs a job to its end, and again after a failure, at most ``max_restarts`` times.

    A user's mistake (exit code 2) is not tried again, nor is what Ctrl-C or SIGTERM ended.

    Args:
        make_job: attempt, counted from 0 -> the job. Made anew each time: ports may be taken.
        max_restarts: how often to start again.
        on_restart: called with the number of the restart and the reason for it.
        on_line: see ``supervisor.run``.
        on_event: see ``supervisor.run``.

    Raises:
        LaunchError: the job cannot be made; or the last attempt did not start in time, or fell
            silent.
    """
    first = make_job(0)  # What cannot be made now, as for want of slots, cannot be made later.
    for attempt in range(max_restarts + 1):
        is_last = attempt == max_restarts
        try:
            job = make_job(attempt) if attempt else first
            outcome = supervisor.run(job, on_line=on_line, on_event=on_event)
        except LaunchError as error:
            if is_last:
                raise
            reason = str(error)
        else:
            if is_last or outcome.exit_code in (0, _USER_ERROR):
                break
            reason = outcome.reason
        on_restart(attempt + 1, reason)
    return outcome


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
