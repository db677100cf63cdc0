"""Trials on a Ray cluster: a trial's process runs on a node that has the cores, or GPUs, for it.

The folder of the search lies on a file system that all nodes have at the same path. What a trial
tells comes back through the actor that has started it. Ray ends the actors of a search that is
killed, and the processes of trials end with their actors.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import LaunchError, OptionError, extra_module, spelt
from tfdist.launch import programs
from tfdist.topology.gpus import VISIBLE
from tfdist.tuning import slots
from tfdist.tuning.slots import LONGEST_READ, Running, Slot

ADDRESS = "RAY_ADDRESS"
# An actor answers so often, whether its trial has told something or not, and hears signals between.
_TURN_S = 1.0
# Ray itself notices a lost node after 30 s. This is the limit of what it does not notice.
_SILENCE_S = 120.0
_KNOCK_S = 10.0


@dataclass(frozen=True)
class Share:
    """What Ray keeps for a trial."""

    cpus: int
    gpus: int = 0


@contextlib.contextmanager
def connected(start_timeout_s: float) -> Iterator[Cluster]:
    """Encloses a connection to the cluster at RAY_ADDRESS, else a cluster of this machine alone.

    Raises:
        EngineMissingError: Ray is not installed.
        OptionError: there is no cluster at RAY_ADDRESS.
    """
    ray = imported()
    address = os.environ.get(ADDRESS)
    is_own = not ray.is_initialized()
    if is_own:
        with _signals_kept():
            _connect(ray, address)
    try:
        yield Cluster(ray, start_timeout_s)
    finally:
        if is_own:
            ray.shutdown()


def imported() -> Any:
    """Returns Ray. Raises EngineMissingError: it is not installed."""
    return extra_module("ray", "ray", "trials on a Ray cluster", "ray")


def _connect(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Nobody else is to reach it: Ray asks for no password.
        alone = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(address="local", **alone, **quiet)
        return
    try:
        _knock(address)
        ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"{ADDRESS} must name a Ray cluster that runs",
            received=f"{address}, and an error: {(str(error).splitlines() or ['none told'])[0]}",
            mend=f"Start one with `ray start --head`, or unset {ADDRESS} for one of this machine",
        ) from None


def _knock(address: str) -> None:
    """Raises OSError or ValueError: nobody listens there, which Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:  # Others, as "auto", name a cluster that Ray looks for on this machine.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Encloses what puts its own handler of SIGTERM, which would keep tfdist's from a last line."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class Cluster:
    """A cluster that this process is connected to, as ``Searching`` uses ``slots`` of a machine."""

    def __init__(self, ray: Any, start_timeout_s: float):
        self._ray = ray
        self._start_timeout_s = start_timeout_s

    def divided(self, parallel: int, workers: int) -> list[Share]:
        """Returns the same share for each of so many trials at a time; see ``shares``."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return shares(nodes, parallel, workers)

    def start(self, number: int, request: dict[str, Any], slot: Share, log: Path) -> Running:
        """Starts a process of a trial on a node, see ``slots.start``."""
        environ = programs.exported(os.environ)
        environ.pop(VISIBLE, None)  # Ray says which of a node's GPUs these are.
        of_node = self._ray.remote(
            num_cpus=slot.cpus, num_gpus=slot.gpus, runtime_env={"env_vars": environ}
        )
        actor = of_node(Starter).remote()
        asked = (number, request, os.getcwd(), str(log.absolute()))
        return Running(number, slot, OnNode(self._ray, actor, asked, self._start_timeout_s))


def shares(nodes: Sequence[dict[str, float]], parallel: int, workers: int) -> list[Share]:
    """Returns a share for each trial: the largest with which all run at the same time.

    Args:
        nodes: their resources, as Ray tells them: "CPU" and "GPU".
        workers: processes of a trial, which has a core for each of them at least.

    Raises:
        OptionError: so many do not fit.
    """
    kind = "GPU" if any(node.get("GPU") for node in nodes) else "CPU"
    have = [int(node.get(kind, 0)) for node in nodes]
    least = 1 if kind == "GPU" else workers
    fitting = [
        each
        for each in range(least, max(have, default=0) + 1)
        if sum(one // each for one in have) >= parallel
    ]
    if not fitting:
        most = sum(one // least for one in have)
        raise OptionError(
            f"each trial must have {least} {kind}{'s' if least > 1 else ''} of one node",
            received=f"{spelt('parallel', parallel)} on nodes of {', '.join(map(str, have))}",
            mend=f"Give {spelt('parallel', most)}" if most else "Give fewer workers, or add nodes",
        )
    share = Share(workers, fitting[-1]) if kind == "GPU" else Share(fitting[-1])
    return [share] * parallel


class Starter:
    """An actor of Ray's, on a node: the parent of a trial's process.

    Ray calls its methods one after the other on its main thread, which the process ends with.
    """

    def begin(self, number: int, request: dict[str, Any], folder: str, log: str) -> str | None:
        """Starts the process in ``folder``; returns why not."""
        if not os.path.isdir(folder) or not os.path.isdir(os.path.dirname(log)):
            return f"{os.uname().nodename} does not have {folder}, or {os.path.dirname(log)}"
        os.chdir(folder)
        # Ray blocks it in what it starts, and a process that is started has it so, too.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        self._running = slots.start(number, request, Slot(), Path(log))
        return None

    def hear(self) -> bytes | int:
        """Returns what the process has told, nothing after a while, its exit code at the end."""
        told = self._running.process.stdout
        if not select.select([told], [], [], _TURN_S)[0]:
            return b""
        return os.read(told.fileno(), LONGEST_READ) or self._running.process.wait()

    def send_signal(self, number: int) -> None:
        self._running.process.send_signal(number)


class OnNode:
    """A trial's process on a node: what ``Running`` and ``slots.end`` use of a ``Popen``.

    Args:
        actor: a ``Starter``.
        asked: what it is to begin.

    Attributes:
        stdout: what the process tells.
    """

    def __init__(self, ray: Any, actor: Any, asked: tuple[Any, ...], start_timeout_s: float):
        self._ray = ray
        self._actor = actor
        self._code: int | None = None
        self._has_begun = False
        reader, self._writer = os.pipe()
        self.stdout = os.fdopen(reader, "rb")
        self._thread = threading.Thread(
            target=self._listen, args=(asked, start_timeout_s), daemon=True
        )
        self._thread.start()

    def _listen(self, asked: tuple[Any, ...], start_timeout_s: float) -> None:
        """Writes what the process tells to ``stdout``, until its end or that of its node."""
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        with open(self._writer, "wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            try:
                problem = self._ray.get(self._actor.begin.remote(*asked), timeout=start_timeout_s)
                if problem is None:
                    self._relay(pipe)
                else:
                    _tell_failed(pipe, _not_shared(problem))
            except GetTimeoutError:
                if not self._has_begun:
                    _tell_failed(pipe, _no_room(start_timeout_s))
            except RayTaskError as error:
                _tell_failed(pipe, _cannot_start(error))
            except RayError:
                pass  # Its node is lost, or Ray has ended the actor: there is no exit code.
            finally:
                self.kill()  # Which gives its cores back at once.

    def _relay(self, pipe: Any) -> None:
        self._has_begun = True
        while self._code is None:
            told = self._ray.get(self._actor.hear.remote(), timeout=_SILENCE_S)
            if isinstance(told, int):
                self._code = told
            else:
                pipe.write(told)

    def wait(self) -> int | None:
        """Returns the exit code; None: its node was lost."""
        self._thread.join()
        return self._code

    def send_signal(self, number: int) -> None:
        if self._has_begun:
            self._actor.send_signal.remote(int(number))
        else:
            self.kill()  # It waits for a node, or has just come to one.

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def communicate(self, timeout: float | None = None) -> None:
        """Reads what is told, and forgets it, until the process has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a trial", timeout)
            if not os.read(self.stdout.fileno(), LONGEST_READ):
                return


def _tell_failed(pipe: Any, error: Exception) -> None:
    """Tells it as a trial's process does."""
    pipe.write(json.dumps({"event": "failed", "text": str(error)}).encode() + b"\n")


def _not_shared(problem: str) -> OptionError:
    return OptionError(
        "the search must lie on a file system that all nodes have at the same path",
        received=problem,
        mend="Start it, with --output, in a folder that is mounted on all nodes",
    )


def _no_room(seconds: float) -> LaunchError:
    longer = spelt("start_timeout_s", 3600, flag="--start-timeout 3600")
    return LaunchError(
        f"Ray must find a node for a trial within {seconds:g} s",
        received="none that has its cores, or GPUs, free",
        mend=f"Wait until others have ended, or give {longer}",
    )


def _cannot_start(error: Exception) -> LaunchError:
    return LaunchError(
        "each node must have the same Python with tfdist",
        received=f"an error: {str(error).strip().splitlines()[-1]}",
        mend="Install the same tfdist on all nodes",
    )
