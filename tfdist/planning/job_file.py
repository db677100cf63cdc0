"""A file of trainings and of the hosts that they may run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfdist.errors import DataError
from tfdist.planning.devices import Cluster, DeviceTable
from tfdist.planning.placement import Job
from tfdist.planning.yaml_file import read_yaml

_GIB = 2**30
_NEEDED, _FIELDS = {"devices", "memory_gib"}, {"devices", "memory_gib", "busy"}
_FORM = """{hosts: {a: "v100:4"}, jobs: {one: {devices: 2, memory_gib: 5, busy: 0.4}}}"""


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
