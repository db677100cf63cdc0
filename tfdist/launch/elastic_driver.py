"""Drives an elastic Horovod job: ``python -m tfdist.launch.elastic_driver SETTINGS -- COMMAND...``.

Horovod's own ``ElasticDriver`` decides who works and starts workers anew, as ``horovodrun`` has it
do. What differs from ``horovodrun`` is around it: each slot stands for itself (``Slots``), nothing
passes through a shell, the rendezvous listens on loopback, and the supervisor hears of every loss.

Events (see ``launch.events``): "world" with the rank of each worker by its number, "lost", and
"waiting" when a worker waits for the others to meet it. A worker's number tags its output; it is
its first rank, or a new one for a worker that joins.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.gloo_run import (
    create_run_env_vars,
    create_slot_env_vars,
    register_shutdown_event,
)
from horovod.runner.http.http_server import RendezvousHTTPServer, RendezvousServer
from horovod.runner.util.network import find_port
from horovod.runner.util.threads import in_thread

from tfdist.launch import discovery, events
from tfdist.launch.guard import GIVE_UP_S, TERM_GRACE_S
from tfdist.launch.hosts import Host

_LOOPBACK, _ADDRESS = "lo", "127.0.0.1"
_POLL_S = 0.1


class Workers:
    """The processes of the job, by number."""

    def __init__(self, command: list[str], slots: discovery.Slots, ended: threading.Event):
        self._command = command
        self._slots = slots
        self._ended = ended
        self._writing = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._ranks: dict[str, int] = {}
        self._dismissed: set[str] = set()
        self._exits: list[tuple[str, int]] = []
        self.env: dict[str, str] = {}

    def assign(self, assignments: list[Any]) -> None:
        """Takes Horovod's plan of a new world: who has which rank."""
        for slot in assignments:
            first = slot.rank if not self._ranks else len(self._numbers)
            self._numbers.setdefault(slot.hostname, first)
        self._ranks = {slot.hostname: slot.rank for slot in assignments}
        self._exits.clear()
        ranks = {str(self._numbers[name]): rank for name, rank in self._ranks.items()}
        self.tell({"event": "world", "ranks": ranks})

    def dismiss(self, name: str) -> None:
        """Ends a worker that has no rank in the new world."""
        self._dismissed.add(name)

    def tell(self, event: dict) -> None:
        with self._writing:
            events.emit(event)

    def run(self, slot: Any, stops: list[threading.Event]) -> tuple[int, float]:
        """Runs one worker to its end; returns its exit code and when that was."""
        name = slot.hostname
        env = {
            **self.env,
            **create_slot_env_vars(slot),
            "TFDIST_LOCAL_RANK": str(discovery.local_rank(name)),
        }
        number = self._numbers[name]
        process = subprocess.Popen(
            self._command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        pipes = [(process.stdout, 1, "stdout"), (process.stderr, 2, "stderr")]
        readers = [
            in_thread(self._forward, (pipe, fd, f"[{number}]<{stream}>:".encode()))
            for pipe, fd, stream in pipes
        ]
        while process.poll() is None:
            if name in self._dismissed or any(stop.is_set() for stop in (*stops, self._ended)):
                _end(process)
            time.sleep(_POLL_S)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if name in self._ranks:
            self._exits.append((name, code))
        if code != 0 and name not in self._dismissed and not self._ended.is_set():
            self._slots.lose(name)
            lost = {"number": number, "rank": self._ranks.get(name), "code": code}
            self.tell({"event": "lost", "host": discovery.host_of(name), **lost})
        for reader in readers:
            reader.join()
        return code, time.time()

    def exit_code(self) -> int:
        """Returns the job's: 0 where some of the last world did their work and no other failed.

        A worker that a signal ended is one that the others could do without.
        """
        codes = [code for _, code in self._exits]
        if 0 in codes:
            codes = [code for code in codes if code < 128]
        return next((code for code in codes if code), 0 if codes else 1)

    def _forward(self, pipe: Any, fd: int, tag: bytes) -> None:
        for line in pipe:
            ending = b"" if line.endswith(b"\n") else b"\n"
            with self._writing, contextlib.suppress(BrokenPipeError):
                _write(fd, tag + line + ending)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _end(process: subprocess.Popen) -> None:
    process.terminate()  # A rank's guard, which ends all that is below it.
    try:
        process.wait(TERM_GRACE_S + GIVE_UP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Rendezvous(RendezvousServer):
    """Horovod's server of assignments, on loopback."""

    def __init__(self, workers: Workers):
        super().__init__()
        self._workers = workers

    def start(self, handler_cls: type) -> int:
        self._httpd, port = find_port(
            lambda address: RendezvousHTTPServer((_ADDRESS, address[1]), handler_cls, False)
        )
        self._listen_thread = in_thread(target=self._httpd.serve_forever)
        return port

    def init(self, host_alloc_plan: list[Any]) -> None:
        self._workers.assign(host_alloc_plan)
        super().init(host_alloc_plan)


class _Driver(ElasticDriver):
    """Horovod's driver; tells of workers that wait, and ends those without a rank."""

    def __init__(self, workers: Workers, *arguments: Any, **options: Any):
        self._workers = workers
        super().__init__(*arguments, **options)

    def record_ready(self, host: str, slot: int) -> None:
        self._workers.tell({"event": "waiting"})
        super().record_ready(host, slot)

    def get_slot_info(self, host: str, slot: int) -> Any:
        if not self.has_rank_assignment(host, slot):
            self._workers.dismiss(host)
        return super().get_slot_info(host, slot)


def main() -> None:
    settings = json.loads(sys.argv[1])
    assert sys.argv[2] == "--", sys.argv
    script = settings["host_discovery"]
    here = [Host("localhost", settings["workers"])]
    slots = discovery.Slots((lambda: here) if script is None else (lambda: discovery.run(script)))
    ended = register_shutdown_event()
    workers = Workers(sys.argv[3:], slots, ended)
    rendezvous = _Rendezvous(workers)
    driver = _Driver(
        workers,
        rendezvous,
        slots,
        settings["min_workers"],
        settings["max_workers"],
        timeout=settings["timeout_s"],
    )
    port = rendezvous.start(create_rendezvous_handler(driver))
    run_env = create_run_env_vars(_ADDRESS, [_LOOPBACK], port, elastic=True)
    workers.env = {**os.environ, **{name: str(value) for name, value in run_env.items()}}
    driver.wait_for_available_slots(settings["workers"])
    driver.start(settings["workers"], workers.run)
    driver.get_results()
    driver.stop()
    sys.exit(workers.exit_code())


if __name__ == "__main__":
    main()
