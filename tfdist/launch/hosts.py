"""Where ranks can run: hosts, their slots, and the cores of this one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import LaunchError, OptionError

# A machine with a single core may still try two ranks.
_MIN_LOCAL_SLOTS = 2


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that it takes."""

    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        return self.name in {"localhost", "127.0.0.1", "::1", socket.gethostname()}


def parse(text: str | None) -> list[Host]:
    """Reads "a:2,b:2" (a host without a number has one slot); None is this machine.

    This machine has one slot for each core, but at least two.

    Raises:
        OptionError: not of that form.
    """
    if text is None:
        return [Host("localhost", max(_MIN_LOCAL_SLOTS, physical_cores()))]
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":")
        if not colon:
            name, slots = slots, "1"
        is_host = name and not name.startswith("-")
        if not (is_host and slots.isascii() and slots.isdigit() and int(slots) > 0):
            raise OptionError(
                "hosts must be names with their slots, separated by commas",
                received=repr(text),
                mend="Write them as host1:2,host2:2",
            )
        hosts.append(Host(name, int(slots)))
    return hosts


def listed(hosts: list[Host]) -> str:
    """Returns hosts as ``parse`` reads them."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def are_local(hosts: list[Host]) -> bool:
    return all(host.is_local for host in hosts)


def check_slots(workers: int, hosts: list[Host]) -> None:
    """Raises LaunchError when ``workers`` do not fit on the hosts."""
    slots = sum(host.slots for host in hosts)
    if workers > slots:
        raise LaunchError(
            "workers must not exceed the slots of the hosts",
            received=f"{workers} workers for {slots} slots ({listed(hosts)})",
            mend=f"Use at most {slots} workers, or name more slots with --hosts",
        )


def physical_cores() -> int:
    """Returns the number of cores that this process may use, hyper-threads counted once."""
    return len(cores_here()) or os.cpu_count() or 1


def shares(ranks: int) -> list[list[int]]:
    """Returns the numbers of the CPUs that each of ``ranks`` has for itself: whole cores.

    Empty where there is not a core for each, and where this system cannot bind processes.
    """
    cores = cores_here()
    each = len(cores) // ranks
    parts = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)] if each else []
    return [sorted(cpu for core in part for cpu in core) for part in parts]


def cores_here() -> list[list[int]]:
    """Returns the CPUs of each core that this process may use; none where it cannot be told."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_siblings(cpu), []).append(cpu)
    return list(cores.values())


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)
