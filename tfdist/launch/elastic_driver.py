"""Drives an elastic Horovod job: ``python -m tfdist.launch.elastic_driver SETTINGS -- COMMAND...``.

Horovod's own ``ElasticDriver`` decides who works and starts workers anew, as ``horovodrun`` has it
do. What differs from ``horovodrun`` is around it: each slot stands for itself (``Slots``), nothing
passes through a shell, the rendezvous listens on loopback, and the supervisor hears of every loss.

Events (see ``launch.events``): "world" with the rank of each worker by its number, "lost", "unfit"
when a worker ends before it could join, "waiting" when one waits for the others to meet it, and "no
discovery" when the slots cannot be learnt. A worker's number tags its output; it is its first rank,
or a new one for a worker that joins.

Those that meet wait for each other, and Horovod aborts all when one does not come. So a worker
that joins first gets ready apart from them, TensorFlow imported, and its slot is offered then.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
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

from tfdist.errors import TfdistError
from tfdist.launch import discovery, events
from tfdist.launch.guard import GIVE_UP_S, TERM_GRACE_S
from tfdist.launch.hosts import Host

_LOOPBACK, _ADDRESS = "lo", "127.0.0.1"
_POLL_S = 0.1
_LONGEST_TEXT = 2000


class Workers:
    """The processes of the job, by number."""

    def __init__(self, command: list[str], slots: discovery.Slots, ended: threading.Event):
        self._command = command
        self._slots = slots
        self._ended = ended
        self._standing_by: dict[str, _Process] = {}
        self._writing = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._ranks: dict[str, int] = {}
        self._dismissed: set[str] = set()
        self._complaint = ""
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

    # Of ``horovod.runner.elastic.discovery.HostDiscovery``; Horovod calls it every second.
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the slots that Horovod can use: name -> 1."""
        try:
            self._slots.ask()
        except TfdistError as error:  # Those that there were are still there.
            self._complain(str(error))
        names = self._slots.names
        for name in set(self._standing_by).difference(names):
            withdrawn = self._standing_by.pop(name, None)
            if withdrawn is not None:
                withdrawn.end()
        return {name: 1 for name in names if self._is_ready(name)}

    def _complain(self, text: str) -> None:
        if text != self._complaint:  # Not every second.
            self._complaint = text
            self.tell({"event": "no discovery", "text": text[:_LONGEST_TEXT]})

    def _is_ready(self, name: str) -> bool:
        if not self._ranks or (name in self._numbers and name not in self._standing_by):
            return True
        if name not in self._standing_by:
            self._numbers[name] = len(self._numbers)
            self._standing_by[name] = self._start(name, {}, stands_by=True)
        code = self._standing_by[name].code
        if code is not None:
            del self._standing_by[name]
            self._slots.lose(name)
            self.tell({"event": "unfit", "host": discovery.host_of(name), "code": code})
            return False
        return self._standing_by[name].is_ready()

    def _start(self, name: str, more: dict[str, str], stands_by: bool = False) -> _Process:
        local_rank = {"TFDIST_LOCAL_RANK": str(discovery.local_rank(name))}
        env = {**self.env, **more, **local_rank}
        number = self._numbers[name]
        return _Process(self._command, env, number, self._writing, stands_by=stands_by)

    def run(self, slot: Any, stops: list[threading.Event]) -> tuple[int, float]:
        """Runs one worker to its end; returns its exit code and when that was."""
        name = slot.hostname
        process = self._standing_by.pop(name, None)
        if process is None:
            process = self._start(name, create_slot_env_vars(slot))
        else:
            process.give_turn(create_slot_env_vars(slot))
        while process.code is None:
            if name in self._dismissed or any(stop.is_set() for stop in (*stops, self._ended)):
                process.end()
            time.sleep(_POLL_S)
        code = process.code
        if name in self._ranks:
            self._exits.append((name, code))
        if code != 0 and name not in self._dismissed and not self._ended.is_set():
            self._slots.lose(name)
            lost = {"number": self._numbers[name], "rank": self._ranks.get(name), "code": code}
            self.tell({"event": "lost", "host": discovery.host_of(name), **lost})
        process.finish_output()
        return code, time.time()

    def end_standing_by(self) -> None:
        """Ends the workers that never joined."""
        for process in self._standing_by.values():
            process.end()

    def exit_code(self) -> int:
        """Returns the job's: 0 where some of the last world did their work and no other failed.

        A worker that a signal ended is one that the others could do without.
        """
        codes = [code for _, code in self._exits]
        if 0 in codes:
            codes = [code for code in codes if code < 128]
        return next((code for code in codes if code), 0 if codes else 1)


class _Process:
    """One worker's process; its lines go on, tagged with its number.

    One that stands by has two pipes: on one it tells that it is ready, on the other it gets the
    variables of its rank (``strategies.horovod_elastic.await_turn``).
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        number: int,
        writing: threading.Lock,
        *,
        stands_by: bool,
    ):
        self._writing = writing
        self._has_told = False
        theirs: tuple[int, ...] = ()
        if stands_by:
            self._ready, ready = os.pipe()
            turn, self._turn = os.pipe()
            theirs = (ready, turn)
            env = {**env, "TFDIST_STAND_BY": f"{ready},{turn}"}
        self._process = subprocess.Popen(
            command,
            env=env,
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for fd in theirs:
            os.close(fd)
        pipes = [(self._process.stdout, 1, "stdout"), (self._process.stderr, 2, "stderr")]
        self._readers = [
            in_thread(self._forward, (pipe, fd, f"[{number}]<{stream}>:".encode()))
            for pipe, fd, stream in pipes
        ]

    @property
    def code(self) -> int | None:
        """The exit code (128 + n for signal n); None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def is_ready(self) -> bool:
        """Whether a process that stands by is ready to join."""
        if not self._has_told and select.select([self._ready], [], [], 0)[0]:
            self._has_told = bool(os.read(self._ready, 1))
        return self._has_told

    def give_turn(self, variables: dict[str, str]) -> None:
        """Lets a process that stands by join."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._turn, "w") as pipe:
            pipe.write(json.dumps(variables) + "\n")
        os.close(self._ready)

    def end(self) -> None:
        self._process.terminate()  # A rank's guard, which ends all that is below it.
        try:
            self._process.wait(TERM_GRACE_S + GIVE_UP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def finish_output(self) -> None:
        """Waits until all its lines have gone on."""
        for reader in self._readers:
            reader.join()

    def _forward(self, pipe: Any, fd: int, tag: bytes) -> None:
        for line in pipe:
            ending = b"" if line.endswith(b"\n") else b"\n"
            with self._writing, contextlib.suppress(BrokenPipeError):
                _write(fd, tag + line + ending)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


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
    offered = (lambda: here) if script is None else (lambda: discovery.run(script))
    slots = discovery.Slots(offered, settings["max_workers"])
    workers = Workers(sys.argv[3:], slots, register_shutdown_event())
    _drive(workers, settings)
    sys.exit(workers.exit_code())


def _drive(workers: Workers, settings: dict[str, Any]) -> None:
    """Runs the job to its end."""
    rendezvous = _Rendezvous(workers)
    driver = _Driver(
        workers,
        rendezvous,
        workers,
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
    workers.end_standing_by()


if __name__ == "__main__":
    main()
