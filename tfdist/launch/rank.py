"""Becomes the command of one rank: ``python -m tfdist.launch.rank -- COMMAND...``.

Reports "started" to the supervisor first, so that a rank that never came up can be named, and asks
the kernel to end it when mpirun dies: a script without MPI would not notice. Imports little: it is
paid by every rank.
"""

from __future__ import annotations

import os
import signal
import sys

from tfdist.launch import events, linux


def main() -> None:
    command = sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    linux.die_with_parent(signal.SIGKILL)
    events.emit({"event": "started"})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"tfdist: cannot run '{command[0]}': {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
