"""Several trainings on a pool of hosts: where each runs, and what to move when one ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import DataError
from tfdist.planning.devices import Cluster, DeviceTable
from tfdist.planning.yaml_file import read_yaml

_GIB = 2**30
_NEEDED, _FIELDS = {"devices", "memory_gib"}, {"devices", "memory_gib", "busy"}
_FORM = """{hosts: {a: "v100:4"}, jobs: {one: {devices: 2, memory_gib: 5, busy: 0.4}}}"""


@dataclass(frozen=True)
class Job:
    """A training, as far as its place depends on it.

    Attributes:
        devices: how many it runs on.
        memory: bytes that it takes of each.
        busy: the share of the time in which it computes on a device, as was measured; 1 where that
            is not known, so that nothing shares a device with it.
    """

    name: str
    devices: int
    memory: float
    busy: float = 1.0


@dataclass(frozen=True)
class Slot:
    """A device of a host."""

    host: str
    number: int


@dataclass(frozen=True)
class Placement:
    """Which devices each training has.

    Attributes:
        slots: name of a job -> its devices; jobs that wait are not among them.
        waiting: names of jobs for which there is no room.
    """

    slots: Mapping[str, tuple[Slot, ...]]
    waiting: tuple[str, ...]

    def hosts_of(self, job: str) -> dict[str, int]:
        """Returns host -> how many of its devices a job has."""
        hosts = [slot.host for slot in self.slots[job]]
        return {host: hosts.count(host) for host in dict.fromkeys(hosts)}

    def shared_with(self, job: str) -> list[str]:
        """Returns the jobs that have a device in common with ``job``."""
        own = set(self.slots[job])
        return [name for name, slots in self.slots.items() if name != job and own & set(slots)]


@dataclass(frozen=True)
class Ending:
    """What to do when a job ends.

    Attributes:
        job: the one that ends.
        starts: jobs that waited, and can begin.
        moves: job -> host -> devices: jobs that would then span fewer hosts.
    """

    job: str
    starts: Mapping[str, Mapping[str, int]]
    moves: Mapping[str, Mapping[str, int]]


def place(jobs: Sequence[Job], pool: Mapping[str, Cluster]) -> Placement:
    """Returns where jobs run: each on as few hosts as possible, the largest first.

    A device is shared only where both fit in its memory, and are busy together for no more than all
    of the time, so that neither slows the other; and only where too few devices are free.

    Args:
        pool: name of a host -> its devices.
    """
    slots: dict[str, tuple[Slot, ...]] = {}
    by_name = {job.name: job for job in jobs}
    for job in sorted(jobs, key=lambda each: -each.devices):
        found = _find(job, pool, _held(slots, by_name))
        if found is not None:
            slots[job.name] = found
    return Placement(slots, tuple(job.name for job in jobs if job.name not in slots))


def when_ended(
    job: str, placed: Placement, jobs: Sequence[Job], pool: Mapping[str, Cluster]
) -> Ending:
    """Returns what to do when ``job`` ends: first who waits begins, then who spans hosts moves."""
    by_name = {each.name: each for each in jobs}
    slots = {name: found for name, found in placed.slots.items() if name != job}
    starts, moves = {}, {}
    for name in sorted(placed.waiting, key=lambda each: -by_name[each].devices):
        found = _find(by_name[name], pool, _held(slots, by_name))
        if found is not None:
            slots[name] = found
            starts[name] = Placement(slots, ()).hosts_of(name)
    for name in list(slots):
        others = {other: found for other, found in slots.items() if other != name}
        found = _find(by_name[name], pool, _held(others, by_name))
        if found is not None and _count_hosts(found) < _count_hosts(slots[name]):
            slots[name] = found
            moves[name] = Placement(slots, ()).hosts_of(name)
    return Ending(job, starts, moves)


def _held(
    slots: Mapping[str, Iterable[Slot]], by_name: Mapping[str, Job]
) -> dict[Slot, tuple[float, float]]:
    """Returns slot -> the bytes and the time that are taken of it."""
    held: dict[Slot, tuple[float, float]] = {}
    for name, found in slots.items():
        job = by_name[name]
        for slot in found:
            memory, busy = held.get(slot, (0.0, 0.0))
            held[slot] = memory + job.memory, busy + job.busy
    return held


def _find(
    job: Job, pool: Mapping[str, Cluster], held: Mapping[Slot, tuple[float, float]]
) -> tuple[Slot, ...] | None:
    """Returns the devices that a job gets: on the fewest hosts, free ones before others; None where
    there is no room. All are of one kind."""
    kinds = dict.fromkeys(host.device.name for host in pool.values())
    found = [_find_kind(job, pool, held, kind) for kind in kinds]
    usable = [each for each in found if each is not None]
    return min(usable, key=lambda each: (_count_hosts(each), _shared(each, held)), default=None)


def _find_kind(
    job: Job,
    pool: Mapping[str, Cluster],
    held: Mapping[Slot, tuple[float, float]],
    kind: str,
) -> tuple[Slot, ...] | None:
    usable: dict[str, list[Slot]] = {}
    for name, host in pool.items():
        slots = [Slot(name, number) for number in range(host.devices)]
        open_ones = [slot for slot in slots if _takes(job, host, held.get(slot, (0.0, 0.0)))]
        if host.device.name == kind and open_ones:
            usable[name] = sorted(open_ones, key=lambda slot: slot in held)
    chosen: list[Slot] = []
    while usable and len(chosen) < job.devices:
        missing = job.devices - len(chosen)
        enough = [name for name, slots in usable.items() if len(slots) >= missing]
        # The host that has the fewest too many; or, where one is not enough, the largest.
        name = (
            min(enough, key=lambda each: (_shared(usable[each][:missing], held), len(usable[each])))
            if enough
            else max(usable, key=lambda each: len(usable[each]))
        )
        chosen += usable.pop(name)[:missing]
    return tuple(chosen) if len(chosen) == job.devices else None


def _takes(job: Job, host: Cluster, taken: tuple[float, float]) -> bool:
    memory, busy = taken
    # Shares of time are sums of rounded numbers.
    return memory + job.memory <= host.room and busy + job.busy <= 1 + 1e-9


def _count_hosts(slots: Iterable[Slot]) -> int:
    return len({slot.host for slot in slots})


def _shared(slots: Iterable[Slot], held: Mapping[Slot, tuple[float, float]]) -> int:
    return sum(slot in held for slot in slots)


def read_jobs(path: Path, table: DeviceTable) -> tuple[list[Job], dict[str, Cluster]]:
    """Returns the jobs of a YAML file, and host -> devices.

    Raises:
        OptionError: it cannot be read, or a device is not known. DataError: not of this form.
    """
    value = read_yaml(path)
    if not isinstance(value, dict) or set(value) != {"hosts", "jobs"}:
        raise _wrong(path, "the whole", "have hosts and jobs", value)
    hosts, jobs = value["hosts"], value["jobs"]
    for part, rows in (("hosts", hosts), ("jobs", jobs)):
        if not isinstance(rows, dict) or not rows:
            raise _wrong(path, part, "map names to rows", rows)
        if len({*map(str, rows)}) < len(rows):
            raise _wrong(path, part, "have each name once", [*rows])
    pool = {str(name): _host(path, name, text, table) for name, text in hosts.items()}
    return [_job(path, str(name), row) for name, row in jobs.items()], pool


def _host(path: Path, name: str, text: Any, table: DeviceTable) -> Cluster:
    cluster = table.cluster(str(text))
    if cluster.hosts != 1:
        raise _wrong(path, f"hosts.{name}", "be one host, as v100:4", text)
    return cluster


def _job(path: Path, name: str, row: Any) -> Job:
    where = f"jobs.{name}"
    if not isinstance(row, dict) or not _NEEDED <= set(row) <= _FIELDS:
        raise _wrong(path, where, "have devices and memory_gib, and may have busy", row)
    devices, memory, busy = row["devices"], row["memory_gib"], row.get("busy", 1.0)
    if type(devices) is not int or devices < 1:
        raise _wrong(path, f"{where}.devices", "be a whole number of at least 1", devices)
    for field, number, most in (("memory_gib", memory, 1e6), ("busy", busy, 1)):
        if type(number) not in (int, float) or not 0 < number <= most:
            raise _wrong(path, f"{where}.{field}", f"be above 0 and at most {most:g}", number)
    return Job(name, devices, float(memory) * _GIB, float(busy))


def _wrong(path: Path, where: str, rule: str, received: object) -> DataError:
    return DataError(
        f"{where} of {path} must {rule}",
        received=repr(received)[:120],
        mend=f"Write it as {_FORM}",
    )
