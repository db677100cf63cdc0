"""Where the workers of an elastic job can run: slot by slot, as a user's script prints them."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tfdist.errors import LaunchError, OptionError
from tfdist.launch import hosts
from tfdist.launch.hosts import Host

_SCRIPT_TIMEOUT_S = 30.0


def check(script: str) -> None:
    """Runs a discovery script once, before anything else is started.

    Raises:
        OptionError: no such file, not one that can be run, or it prints something else than hosts.
        LaunchError: it fails, or takes too long.
    """
    path = Path(script)
    mend = "Give an executable file that prints one host:slots on each line, such as localhost:2"
    if not path.is_file():
        raise OptionError(
            "--host-discovery must name a file", received=f"no file {script}", mend=mend
        )
    if not os.access(path, os.X_OK):
        raise OptionError(
            "--host-discovery must name an executable file",
            received=f"{script}, which is not",
            mend=f"Run chmod +x {script}, and begin it with a line such as #!/bin/sh",
        )
    if not run(script):
        raise OptionError(
            "a discovery script must print the hosts that there are",
            received=f"nothing from {script}",
            mend=mend,
        )


def run(script: str) -> list[Host]:
    """Returns what a discovery script prints; see ``check``."""
    try:
        done = subprocess.run(
            [os.path.abspath(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SCRIPT_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise LaunchError(
            "a discovery script must run",
            received=f"{script}: {error.strerror}",
            mend="Begin it with a line such as #!/bin/sh",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"a discovery script must end within {_SCRIPT_TIMEOUT_S:g} s",
            received=script,
            mend="Have it print the hosts at once: it is run again and again",
        ) from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise LaunchError(
            "a discovery script must end with exit code 0",
            received=f"exit code {done.returncode} of {script}"
            + (f": {words[-1]}" if words else ""),
            mend="Run it in a shell, and mend what it says there",
        )
    return read(done.stdout)


def read(text: str) -> list[Host]:
    """Returns the hosts of a script's output, one "host" or "host:slots" on each line.

    Raises:
        OptionError: a line of another form, or a host that is not this machine.
    """
    found = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        try:
            (host,) = hosts.parse(line)
        except (OptionError, ValueError):
            raise OptionError(
                "a discovery script must print one host or host:slots on each line",
                received=repr(line),
                mend="Print lines such as localhost:2",
            ) from None
        if not host.is_local:
            # Horovod's rendezvous unpickles what it is sent: here it listens on loopback alone.
            raise OptionError(
                "the workers of an elastic job must run on this machine",
                received=f"host {host.name}",
                mend="Print localhost:SLOTS, or use --hosts with --max-restarts on several "
                "machines",
            )
        found.append(host)
    return found


class Slots:
    """Gives every slot a name of its own, which no later slot gets again.

    Horovod gives up a whole host, for good, when one of its processes fails. So each slot is a
    host to it. A lost slot counts as taken for as long as it is offered: a script brings a new
    worker by printing fewer slots and then more again, or more than before.

    Args:
        offered: returns the slots of each host, as they are now.
        max_workers: names that are in use at a time.
    """

    def __init__(self, offered: Callable[[], list[Host]], max_workers: int):
        self._offered = offered
        self._max_workers = max_workers
        self._names: dict[str, list[str]] = {}
        self._lost: set[str] = set()
        self._number = itertools.count()

    def lose(self, name: str) -> None:
        """Notes that the worker of a slot has ended."""
        self._lost.add(name)

    @property
    def names(self) -> list[str]:
        """Those that can be used, as they were when last asked for."""
        known = [name for names in self._names.values() for name in names]
        return [name for name in known if name not in self._lost][: self._max_workers]

    def ask(self) -> None:
        """Asks for the slots that there are now."""
        slots: dict[str, int] = {}
        for host in self._offered():
            slots[host.name] = slots.get(host.name, 0) + host.slots
        for host in {*self._names, *slots}:
            names = self._names.setdefault(host, [])
            names.sort(key=lambda name: name in self._lost)
            del names[slots.get(host, 0) :]
            while len(names) < slots.get(host, 0):
                names.append(self._new_name(host, names))

    def _new_name(self, host: str, names: list[str]) -> str:
        taken = {local_rank(name) for name in names if name not in self._lost}
        free = next(index for index in itertools.count() if index not in taken)
        return f"{host}.slot{free}.{next(self._number)}"


def host_of(name: str) -> str:
    """Returns the host of a slot's name."""
    return name.rsplit(".", 2)[0]


def local_rank(name: str) -> int:
    """Returns which of its host's slots a name is of, counted from 0: it chooses the GPU."""
    return int(name.rsplit(".", 2)[1].removeprefix("slot"))
