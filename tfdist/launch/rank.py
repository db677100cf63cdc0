"""Runs one rank: ``python -m tfdist.launch.rank [--may-be-lost RANKS] -- COMMAND...``.

Reports "started" to the supervisor first, so that a rank that never came up can be named. Asks the
kernel for SIGTERM when mpirun dies: a script without MPI would not notice. Imports little: every
rank pays for it.

mpirun ends a job with the first rank that fails. One of RANKS (numbers and commas) may be killed,
and the others go on: workers of parameter servers, whose steps others take over.
"""

from __future__ import annotations

import os
import signal
import sys

from tfdist import topology
from tfdist.launch import events, linux
from tfdist.launch.guard import Guard

# Exit codes above it are signals.
_KILLED = 128


def main() -> None:
    split = sys.argv.index("--")
    options, command = sys.argv[1:split], sys.argv[split + 1 :]
    linux.die_with_parent(signal.SIGTERM)
    where = {"host": os.uname().nodename, "pid": os.getpid()}
    events.emit({"event": "started", **where, "long": True})
    guard = Guard(command, lifeline=None, orphan_signal=signal.SIGKILL)
    code = guard.watch()
    sys.exit(0 if code > _KILLED and _may_be_lost(options) else code)


def _may_be_lost(options: list[str]) -> bool:
    if not options:
        return False
    assert options[0] == "--may-be-lost", options
    rank = topology.from_environ({**os.environ, "TF_CONFIG": ""}).rank
    return str(rank) in options[1].split(",")


if __name__ == "__main__":
    main()
