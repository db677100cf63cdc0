"""The same training on several strategies, in turn: epoch seconds, throughput, speed-up."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.errors import LaunchError, OptionError, RankFailedError, TfdistError, unknown_choice
from tfdist.launch import hosts
from tfdist.launch.jobs import Where
from tfdist.runs.progress import Silent
from tfdist.runs.settings import Settings, Start
from tfdist.runs.training import carry_out, training_config
from tfdist.strategies import REGISTRY


@dataclass(frozen=True)
class Entry:
    """A row of the bench: a strategy, on so many devices."""

    strategy: str
    devices: int
    where: Where


@dataclass
class Measured:
    """What the trainings of an entry took, of all rounds, without each one's first epoch.

    Attributes:
        replicas: that share a global batch.
        epoch_seconds, samples_per_s: of each epoch that counts.
        metrics: of the last epoch, on validation where there is one.
        refused: why the strategy does not train this, or how a process of it failed; None where it
            trains.
    """

    entry: Entry
    replicas: int = 1
    epoch_seconds: list[float] = field(default_factory=list)
    samples_per_s: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    refused: TfdistError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a process failed, otherwise than by a mistake of the user's."""
        return isinstance(self.refused, RankFailedError)

    @property
    def speed(self) -> float:
        """Samples a second: the median of the epochs."""
        return statistics.median(self.samples_per_s)

    @property
    def spread(self) -> float:
        """How far the epochs lie apart: (fastest - slowest) / median."""
        return (max(self.samples_per_s) - min(self.samples_per_s)) / self.speed


def entries(strategies: Sequence[str], devices: Sequence[int]) -> list[Entry]:
    """Returns the rows for strategies by name, each on those of ``devices`` that it can have.

    "single" has one device; one whose processes are started has a worker for each device; one that
    divides the devices of a process has the options of its example, which divides two.

    Raises:
        OptionError: there is no such strategy, or it has none of these numbers of devices.
    """
    found = []
    for name in dict.fromkeys(strategies):  # Each trains in a folder of its name.
        if name not in REGISTRY:
            raise unknown_choice("strategy", name, list(REGISTRY))
        own = [one for number in devices if (one := entry_of(name, number)) is not None]
        if not own:
            raise OptionError(
                f"strategy '{name}' must be given a number of devices that it can divide",
                received=f"--workers {','.join(map(str, devices))}",
                mend="Name 2 among them, or 1 for 'single'",
            )
        found += own
    return found


def entry_of(name: str, devices: int) -> Entry | None:
    """Returns the row of a strategy on so many devices; None where it cannot have as many."""
    spec, options, workers = REGISTRY[name], {}, None
    if spec.launchers:
        workers = devices
    elif "devices" in spec.example:
        options = {"devices": devices}
    elif spec.example:
        if devices != 2:
            return None
        options = dict(spec.example)
    elif devices != 1:
        return None
    return Entry(name, devices, Where(strategy=name, options=options, workers=workers))


def check(settings: Settings) -> None:
    """Raises OptionError: no epoch would count."""
    if settings.epochs < 2:
        raise OptionError(
            "epochs must be at least 2, of which the first, that traces the step, does not count",
            received=settings.epochs,
            mend="Give --epochs 2",
        )


def run(
    found: Sequence[Entry],
    *,
    model: str,
    data: str,
    settings: Settings,
    rounds: int,
    folder: Path,
    cores: int | None = None,
    on_event: Callable[[str, dict[str, Any]], None] = lambda row, event: None,
) -> list[Measured]:
    """Trains each entry ``rounds`` times in turn, so that what else the machine does meets all.

    Each has as many cores as devices, ``cores`` to a device, and so is on one device what it is on
    several; where there are fewer, all have all.

    Args:
        model: "FILE.py:NAME".
        data: shards.
        settings: of each training, see ``check``.
        folder: the trainings' folders are made there.
        cores: of a device; None divides the machine's by the most devices of an entry.
        on_event: is called with the name of a row and each event of its training.

    Raises:
        TfdistError: a mistake or failure that all entries meet.
        LaunchError: processes could not be started.
    """
    measured = [Measured(entry) for entry in found]
    shares = _shares(max(entry.devices for entry in found), cores)
    for number in range(rounds):
        for row in measured:
            if row.refused is None:
                with _on_cores(shares[: row.entry.devices]):
                    place = folder / f"{row.entry.strategy}-{row.entry.devices}-{number + 1}"
                    _train(row, model, data, settings, place, on_event)
        if (error := measured[0].refused) and all(row.refused for row in measured):
            raise error
    return measured


def _train(
    row: Measured,
    model: str,
    data: str,
    settings: Settings,
    folder: Path,
    on_event: Callable[[str, dict[str, Any]], None],
) -> None:
    name = called(row.entry)
    where = row.entry.where
    try:
        config = training_config(where, model=model, data=data, output=folder, settings=settings)
        progress = Silent(settings.epochs, on_event=lambda event: on_event(name, event))
        run = carry_out(config, where, progress, Start(), tell=lambda text: None)
    except TfdistError as error:
        # A rank that failed spoils its own row: the others took long, and stay.
        if isinstance(error, LaunchError) and not isinstance(error, RankFailedError):
            raise
        row.refused = error
        return
    assert run is not None
    row.replicas = run.summary["replicas"]
    row.epoch_seconds += [epoch["seconds"] for epoch in run.history[1:]]
    row.samples_per_s += [epoch["samples_per_s"] for epoch in run.history[1:]]
    row.metrics = run.summary["validation"] or run.summary["train"]


def called(entry: Entry) -> str:
    """Returns the name of a row: "horovod on 2"."""
    return f"{entry.strategy} on {entry.devices}"


def speed_up(rows: Sequence[Measured]) -> tuple[Measured, dict[int, float]]:
    """Returns the row that others are compared with, and each row's place -> speed-up over it.

    It is the first on one device; else the first of all.
    """
    known = [row for row in rows if row.refused is None and row.samples_per_s]
    base = next((row for row in known if row.entry.devices == 1), known[0])
    return base, {place: row.speed / base.speed for place, row in enumerate(rows) if row in known}


# Cores -------------------------------------------------------------------------------------------


def _shares(devices: int, cores: int | None) -> list[list[int]]:
    """Returns the CPUs of each device; empty where they have all of them together."""
    shares = hosts.shares(devices)
    if cores is not None and (not shares or len(shares[0]) < cores):
        raise OptionError(
            f"{devices} devices must have cores of their own",
            received=f"{hosts.physical_cores()} cores, {cores} for each device",
            mend="Give fewer --workers or --cores",
        )
    return [share[:cores] for share in shares]


@contextlib.contextmanager
def _on_cores(shares: Sequence[Sequence[int]]) -> Iterator[None]:
    """Encloses what runs on those CPUs alone, and whatever it starts."""
    if not shares:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number for share in shares for number in share})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def notes(rows: Sequence[Measured], load: float) -> list[str]:
    """Returns what to know of a table: what is shared, and what else the machine does.

    Args:
        load: processes that wanted a core before the first training began.
    """
    found = []
    cores, most = hosts.physical_cores(), max(row.entry.devices for row in rows)
    if most > cores:
        found.append(
            f"{most} devices share {cores} cores: speed-up over more than {cores} of them is that "
            "of a machine that does not have them"
        )
    if load > 0.5:
        found.append(
            f"others wanted {load:.1f} cores of this machine before it began: measure again when "
            "it is quiet"
        )
    wide = [called(row.entry) for row in rows if row.samples_per_s and row.spread > 0.2]
    if wide:
        found.append(f"epochs of {', '.join(wide)} differ by more than 20 %")
    return found
