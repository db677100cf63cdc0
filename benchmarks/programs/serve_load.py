"""Load by locust: ``serve_load.py URL BODY_FILE CLIENTS SECONDS``, each client asks again at once.

Runs in locust's own environment, so it imports nothing of this project. Prints the seconds of each
request that was answered with 200, the number of the others, and the seconds that it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import gevent
from locust import FastHttpUser, task
from locust.env import Environment

_URL, _BODY, _CLIENTS, _SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
_CONTENT = Path(_BODY).read_bytes()


class Client(FastHttpUser):
    host = _URL.rpartition("/")[0]

    @task
    def ask(self) -> None:
        self.client.post(_URL, data=_CONTENT, headers={"Content-Type": "application/json"})


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
    found.clear()
    begun = time.perf_counter()
    gevent.sleep(_SECONDS)
    seconds, answered = time.perf_counter() - begun, list(found)
    runner.quit()
    print(json.dumps({"latencies": answered, "failed": len(failed), "seconds": seconds}))


if __name__ == "__main__":
    main()
