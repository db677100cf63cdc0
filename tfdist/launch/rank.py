"""Runs the command of one rank: ``python -m tfdist.launch.rank -- COMMAND...``.

Reports "started" to the supervisor first, so that a rank that never came up can be named. Asks the
kernel for SIGTERM when mpirun dies: a script without MPI would not notice. Imports little: every
rank pays for it.
"""

from __future__ import annotations

import os
import signal
import sys

from tfdist.launch import events, linux
from tfdist.launch.guard import Guard


def main() -> None:
    assert sys.argv[1] == "--", sys.argv
    linux.die_with_parent(signal.SIGTERM)
    where = {"host": os.uname().nodename, "pid": os.getpid()}
    events.emit({"event": "started", **where, "long": True})
    guard = Guard(sys.argv[2:], lifeline=None, orphan_signal=signal.SIGKILL)
    sys.exit(guard.watch())


if __name__ == "__main__":
    main()
