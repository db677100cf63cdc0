"""Becomes one task of a TensorFlow cluster: ``python -m tfdist.launch.task TASKS -- COMMAND...``.

TASKS is JSON, (role, "host:port") of each rank. The rank is mpirun's; TF_CONFIG is there before the
command, and TensorFlow in it, starts.

Reports "serving" where the task is one that a chief directs, and that tells nothing itself.
"""

from __future__ import annotations

import json
import os
import sys

from tfdist import topology
from tfdist.launch import events


def main() -> None:
    assert sys.argv[2] == "--", sys.argv
    tasks = [(role, address) for role, address in json.loads(sys.argv[1])]
    rank = topology.from_environ({**os.environ, "TF_CONFIG": ""}).rank
    os.environ["TF_CONFIG"] = topology.tf_config(tasks, rank)
    if any(role == "ps" for role, _ in tasks) and tasks[rank][0] != "chief":
        events.emit({"event": "serving"})
    command = sys.argv[3:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"tfdist: cannot run '{command[0]}': {error.strerror}")


if __name__ == "__main__":
    main()
