"""A Gloo job on this machine alone: ``python -m tfdist.launch.gloo_local WORKERS -- COMMAND...``.

horovodrun itself passes the whole environment in the argument of a shell, for all users to see, and
the server at which its ranks meet believes whoever calls, on all interfaces. Here ranks know each
other by a secret, on the loopback interface.
"""

from __future__ import annotations

import os
import sys

from tfdist.launch.gloo_store import GlooStore
from tfdist.launch.rank_output import TaggedProcess, asked_to_end, run_together


def main() -> int:
    workers, command = int(sys.argv[1]), sys.argv[3:]
    assert sys.argv[2] == "--", sys.argv
    asked = asked_to_end()
    store = GlooStore()
    environ = {**os.environ, **store.variables(0)}
    ranks = [
        TaggedProcess(command, environ | _place(rank, workers), rank) for rank in range(workers)
    ]
    code = run_together(ranks, asked)
    store.close()
    return code


def _place(rank: int, workers: int) -> dict[str, str]:
    return {
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(workers),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(workers),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


if __name__ == "__main__":
    sys.exit(main())
