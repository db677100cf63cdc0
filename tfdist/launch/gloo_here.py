"""A Gloo job on this machine alone: ``python -m tfdist.launch.gloo_here WORKERS -- COMMAND...``.

horovodrun itself passes the whole environment in the argument of a shell, for all users to see, and
the server at which its ranks meet believes whoever calls, on all interfaces. Here ranks know each
other by a secret, on the loopback interface.

The first rank that fails is told as horovodrun tells it (``verdict.GlooVerdict``), and ends all.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from tfdist.launch.gloo_store import GlooStore
from tfdist.launch.tagged import TaggedProcess

_TICK_S = 0.05


def main() -> int:
    workers, command = int(sys.argv[1]), sys.argv[3:]
    assert sys.argv[2] == "--", sys.argv
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    store = GlooStore()
    environ = {**os.environ, **store.variables(0)}
    ranks = [
        TaggedProcess(command, environ | _place(rank, workers), rank) for rank in range(workers)
    ]
    failed = None
    while failed is None and any(rank.code is None for rank in ranks) and not ended.is_set():
        time.sleep(_TICK_S)
        failed = next((rank for rank in ranks if rank.code), None)
    for rank in ranks:
        rank.ask_to_end()
    code = 128 + signal.SIGTERM if ended.is_set() else 0
    for rank in ranks:
        rank.end()
        rank.finish_output()
    store.close()
    if failed is not None:
        code = failed.code
        print(f"Process name: {failed.number}\nExit code: {code}", file=sys.stderr, flush=True)
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
