"""Load by locust: ``serve_load.py URL BODY_FILE CLIENTS SECONDS PID...``, without a pause.

Runs in locust's own environment, so it imports nothing of this project. Prints, from when all
clients ask, the seconds of each request, how long that was, and the processor time of the server's
processes. A request that is answered with anything but 200 is an error.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import gevent
import psutil
from locust import FastHttpUser, task
from locust.env import Environment

_URL, _BODY, _CLIENTS, _SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
_SERVER = [psutil.Process(int(pid)) for pid in sys.argv[5:]]
_CONTENT = Path(_BODY).read_bytes()


class Client(FastHttpUser):
    host = _URL.rpartition("/")[0]

    @task
    def ask(self) -> None:
        self.client.post(_URL, data=_CONTENT, headers={"Content-Type": "application/json"})


def _cpu_s() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _SERVER)


def main() -> None:
    found: list[float] = []
    failed: list[str] = []

    def note(response_time: float, exception: Any, response: Any, **_: Any) -> None:
        if exception is None and response.status_code == 200:
            found.append(response_time / 1000)
        else:
            failed.append(str(exception))

    environment = Environment(user_classes=[Client])
    environment.events.request.add_listener(note)
    runner = environment.create_local_runner()
    runner.start(_CLIENTS, spawn_rate=_CLIENTS)
    while runner.user_count < _CLIENTS or not found:
        assert not failed, failed[0]
        gevent.sleep(0.01)
    # Connections are made now.
    before, begun, cpu_s = len(found), time.perf_counter(), _cpu_s()
    gevent.sleep(_SECONDS)
    while len(found) == before:
        gevent.sleep(0.01)
    took = {"seconds": time.perf_counter() - begun, "cpu_s": _cpu_s() - cpu_s}
    latencies = found[before:]
    assert not failed, failed[0]
    runner.quit()
    print(json.dumps({"latencies": latencies, **took}))


if __name__ == "__main__":
    main()
