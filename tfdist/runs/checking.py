"""What a plan tells of a step's memory, beside what the step then takes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist.errors import OptionError, TfdistError
from tfdist.planning.devices import CPU
from tfdist.planning.plan import Row
from tfdist.planning.report import Plan
from tfdist.runs import ranks
from tfdist.runs.choosing import started
from tfdist.runs.needs import ONE_PROCESS
from tfdist.strategies import spec_of
from tfdist.training.engine import model_path

RANK = "tfdist.runs.made_up_rank"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of a plan that was run.

    Attributes:
        name: the strategy, and its options as the shell has them.
        told: bytes on the device that holds most, as the plan has them.
        measured: bytes there in a step; None where it failed.
        why: why it did; empty where it did not.
    """

    name: str
    told: float
    measured: int | None
    why: str = ""


def check_plan(
    model: str | Callable[[], Any],
    made: Plan,
    on_event: Callable[[int, dict[str, Any]], None] = lambda number, event: None,
) -> list[Check]:
    """Runs a step of each row of a plan that one process of this machine can run.

    Each is a training of its own, in a process of its own, with made-up rows.

    Args:
        model: that was planned for.
        made: for devices "cpu:N".
        on_event: is told what the processes say.

    Raises:
        OptionError: it is for other devices.
    """
    refuse_other_devices(made.cluster.device.name)
    named = model_path.of(model)
    return [
        _checked(named, made.global_batch_size, row, on_event)
        for row in made.rows
        if row.fits and not spec_of(row.candidate.strategy, row.candidate.options).launchers
    ]


def refuse_other_devices(device: str) -> None:
    """Raises OptionError: the bytes of a step can be measured on a CPU alone."""
    if device != CPU:
        raise OptionError(
            "--check must be of a plan for this machine's CPU, whose steps it runs",
            received=f"devices of {device}",
            mend="Write --devices cpu:2, or leave --check out",
        )


def _checked(
    model: str, rows: int, row: Row, on_event: Callable[[int, dict[str, Any]], None]
) -> Check:
    own = started(row.candidate)
    config = {"model": model, "asked": (own.strategy, own.options), "rows": rows}
    measured: list[int] = []

    def take(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "measured":
            measured.append(event["most"])
        on_event(rank, event)

    why = ""
    try:
        ranks.run(RANK, config, ONE_PROCESS, take)
    except TfdistError as error:  # The other rows hold.
        why = str(error)
    return Check(name=row.name, told=row.peak, measured=measured[0] if measured else None, why=why)
