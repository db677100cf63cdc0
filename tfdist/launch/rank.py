"""Runs one rank: ``python -m tfdist.launch.rank [--cores=CPUS] -- COMMAND...``.

Reports "started" to the supervisor first, so that a rank that never came up can be named, and
"serving" where it is a task that a chief directs, and that tells nothing itself. Asks the kernel
for SIGHUP when its launcher dies: a script without MPI would not notice. Imports little: every
rank pays for it.

CPUS (numbers and commas) are those that it has for itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from tfdist import topology
from tfdist.launch import events
from tfdist.launch.cleanup import Guard, die_with_parent

_CORES = "--cores="


def main() -> None:
    split = sys.argv.index("--")
    options, command = sys.argv[1:split], sys.argv[split + 1 :]
    die_with_parent(signal.SIGHUP)
    for option in options:
        with contextlib.suppress(OSError):  # This machine's cores may be others by now.
            os.sched_setaffinity(0, map(int, option.removeprefix(_CORES).split(",")))
    where = {"host": os.uname().nodename, "pid": os.getpid()}
    events.emit({"event": "started", **where, "long": True})
    place = topology.current()
    serves = "ps" in place.roles and place.role != "chief"
    if serves:
        events.emit({"event": "serving"})
    guard = Guard(command, lifeline=None, hears_sigterm=not serves, orphan_signal=signal.SIGKILL)
    sys.exit(guard.watch())


if __name__ == "__main__":
    main()
