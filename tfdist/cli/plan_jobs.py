"""``tfdist plan --jobs``: which of several trainings runs on which hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tfdist.cli import voice
from tfdist.cli.console import stdout
from tfdist.planning.devices import DeviceTable
from tfdist.planning.job_file import read_jobs
from tfdist.planning.placement import Ending, Placement, place, when_ended
from tfdist.records.report_text import table_of


def show(path: Path, device_file: Path | None) -> None:
    """Prints where each job of a file runs, and what to do when one ends."""
    jobs, pool = read_jobs(path, DeviceTable.load(device_file))
    placed = place(jobs, pool)
    endings = [when_ended(name, placed, jobs, pool) for name in placed.slots]
    voice.result(
        jobs={
            name: {"hosts": placed.hosts_of(name), "shares_with": placed.shared_with(name)}
            for name in placed.slots
        },
        waiting=list(placed.waiting),
        endings=[{"job": e.job, "starts": e.starts, "moves": e.moves} for e in endings],
    )
    titles = ("job", "devices", "runs on", "shares devices with", "when it ends")
    table = table_of(None, titles, ())
    for job in jobs:
        table.add_row(job.name, str(job.devices), *_cells(job.name, placed, endings))
    console = stdout()
    console.print(table)
    console.print(
        "a device is shared where both fit in its memory, and are busy together for at most all of "
        "the time; memory and busy: as the file says, busy 1 where it does not"
    )


def _cells(name: str, placed: Placement, endings: list[Ending]) -> tuple[str, str, str]:
    if name in placed.waiting:
        return "waits: no room", "", ""
    (ending,) = (each for each in endings if each.job == name)
    after = [f"{other} starts on {_listed(hosts)}" for other, hosts in ending.starts.items()]
    after += [f"move {other} to {_listed(hosts)}" for other, hosts in ending.moves.items()]
    return _listed(placed.hosts_of(name)), ", ".join(placed.shared_with(name)), "; ".join(after)


def _listed(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{host}: {count}" for host, count in hosts.items())
