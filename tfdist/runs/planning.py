"""``tfdist.plan``: what a model needs on some devices, before it is trained on them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.compat import check_versions, follow_program
from tfdist.errors import OptionError, TfdistError, spelt
from tfdist.launch.jobs import Where, of_several
from tfdist.planning import messages
from tfdist.planning.candidates import candidates
from tfdist.planning.devices import CPU, Cluster, DeviceTable
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Row, Speed
from tfdist.planning.report import Plan, make_plan
from tfdist.planning.step_time import fit_overlap
from tfdist.runs import largest_batch, ranks
from tfdist.runs.choosing import started
from tfdist.runs.needs import ONE_PROCESS, find_needs
from tfdist.runs.progress import Silent
from tfdist.runs.settings import Settings, Start
from tfdist.runs.training import carry_out, find_splits, training_config
from tfdist.strategies import spec_of
from tfdist.topology.gpus import visible_gpus
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count

_RANK = "tfdist.runs.made_up_rank"
# Of a short training: the first epoch traces; of the others the median counts.
_EPOCHS, _STEPS = 4, 12


def plan(
    model: str | Callable[[], Any],
    devices: str,
    *,
    global_batch_size: int = 128,
    device_file: str | os.PathLike | None = None,
    profile: str | os.PathLike | None = None,
    find_batch: bool = False,
    on_event: Callable[[int, dict[str, Any]], None] = lambda rank, event: None,
) -> Plan:
    """Returns what a model needs on some devices, and which strategy to take, without training it.

    Args:
        model: "FILE.py:NAME", "MODULE:NAME", or a function of a file or module that other processes
            can import; it returns a compiled Keras model.
        devices: "h100:8", eight on one host; "a10g:4x2", four hosts with two each; "cpu:2", two
            halves of this machine; or hosts of AWS, as "p4d.24xlarge:2".
        global_batch_size: rows in one step, over all devices.
        device_file: YAML of devices, links and instances of your own, in the form of tfdist's.
        profile: shards as ``tfdist.train`` takes them: short trainings here, on one process and on
            two, measure how fast a device computes, what rows do not change, and what is done at
            the same time. None: defaults.
        find_batch: whether to try the largest batch of the row that is recommended, on the devices
            here: ``found_batch``. Each try is a short training in processes that may die.
        on_event: is told what the processes say.

    Returns:
        The plan: ``rows``, ``advice``, ``scaling``, ``sources``, ``found_batch``, ``not_found``.

    Raises:
        TfdistError: a mistake of the user's.
        LaunchError: a process that traces a step died, or fell silent.
    """
    ranks.refuse_within_rank("tfdist.plan")
    check_count("global_batch_size", global_batch_size)
    named = model_path.of(model)
    model_path.check(named)
    cluster = DeviceTable.load(device_file).cluster(devices)
    follow_program(os.environ, model_path.parts(named)[0])
    check_versions()
    train = None
    if profile is not None:
        _check_is_here(cluster, "profile", 2)
        train = find_splits(os.fspath(profile))["train"]
    if find_batch:
        _check_is_here(cluster, "find_batch", cluster.devices)
    several = of_several()
    asked = candidates(cluster, global_batch_size, several=several)
    frames: list[str] = []

    def take(number: int, event: dict[str, Any]) -> None:
        if (own := event.get("traceback")) and own != frames:  # Once, for all rows.
            frames[:] = own
            print(*own, sep="\n", file=sys.stderr, flush=True)
        on_event(number, event)

    found = find_needs(
        named,
        [each.traced for each in asked],
        rows=global_batch_size,
        on_gpus=cluster.device.name != CPU,
        on_event=take,
    )
    first = found[0]
    if isinstance(first, TfdistError) and all(str(each) == str(first) for each in found):
        raise first  # What the model itself lacks is no row's.
    speed, measured = Speed(), None
    if train is not None and isinstance(found[0], Needs) and found[0].computes:
        speed, measured = _measure(named, train, found[0], cluster, global_batch_size, several)
    made = make_plan(
        asked,
        found,
        cluster,
        global_batch_size,
        speed=speed,
        several=several,
        measured=measured,
    )
    if not find_batch or made.advice.row is None:
        return made
    where = started(made.advice.row.candidate)
    try:
        found_batch = largest_batch.find_batch(
            named,
            where.strategy,
            where.options,
            workers=where.workers,
            on_try=lambda tried: on_event(0, {"event": "tried", "text": str(tried)}),
        )
        return replace(made, found_batch=found_batch)
    except TfdistError as error:  # The plan took minutes, and holds.
        return replace(made, not_found=str(error))


# Two short trainings, on one process and on two, in place of defaults of a plan ------------------


def _check_is_here(cluster: Cluster, option: str, least: int) -> None:
    """Raises OptionError: the devices are not those of this machine, on which ``option`` runs.

    Args:
        least: devices that it runs on.
    """
    here = least if cluster.device.name == CPU else len(visible_gpus())
    if cluster.hosts > 1 or here < least:
        raise OptionError(
            f"{spelt(option)} must run on a machine with the devices that are planned for",
            received=cluster.describe()
            + ("" if here >= least else f", and {here or 'no'} GPU here, of {least} that it takes"),
            mend="Leave it out, or plan for the devices that are here",
        )


def _measure(
    model: str, train: str, needs: Needs, cluster: Cluster, rows: int, several: str
) -> tuple[Speed, str]:
    """Returns how fast a device computes and what it does at the same time, and how that was found.

    On GPUs a process has one, and half of a global batch where there are two. On CPUs one process
    has all cores, of which two have half each: both take whole global batches. One process alone
    takes a quarter of its rows as well: what a row adds is computing, the rest of a step is fixed.

    Args:
        train: the split that is trained on, see ``find_splits``.
        needs: of a step on one device.
        cluster: devices of the kind that is here.
        rows: of a global batch.
        several: the strategy of two processes.
    """
    is_cpu = cluster.device.name == CPU
    of_one = rows if is_cpu else max(1, rows // 2)
    of_two = rows if is_cpu else 2 * of_one
    few = max(1, of_one // 4)
    one = Where(strategy="single", options={}, workers=1)
    alone, least = (_step_seconds(model, train, count, one) for count in (of_one, few))
    together = _step_seconds(model, train, of_two, Where(strategy=several, options={}, workers=2))
    peak = Speed(share_of_peak=1.0).of(cluster.of(1), needs.half)
    fixed = fixed_seconds({few: least, of_one: alone})
    share = (needs.flops + needs.flops_per_row * of_one) / (alone - fixed) / peak
    sending = messages.ring(needs.gradients, 2, cluster.link)
    told = (
        f"{few:,} and {of_one:,} rows on one process in {least * 1e3:.3g} and "
        f"{alone * 1e3:.3g} ms, {of_two:,} on two of {several} in {together * 1e3:.3g} ms"
    )
    return Speed(share, fit_overlap(alone, together, sending), fixed), told


def fixed_seconds(measured: Mapping[int, float]) -> float:
    """Returns the seconds of a step that its rows do not change, at least 0.

    Args:
        measured: rows -> seconds of a step, of few rows and of many. Where these take no longer,
            as noise can have it, nothing tells the two apart, and all of it counts as computing.
    """
    few, many = sorted(measured)[0], sorted(measured)[-1]
    of_row = (measured[many] - measured[few]) / max(1, many - few)
    return max(0.0, measured[few] - of_row * few) if of_row > 0 else 0.0


def _step_seconds(model: str, train: str, rows: int, where: Where) -> float:
    with tempfile.TemporaryDirectory(prefix="tfdist-plan-") as folder:
        config = training_config(
            where,
            model=model,
            data=train,
            output=Path(folder, "run"),
            settings=Settings(epochs=_EPOCHS, global_batch_size=rows, limit_steps=_STEPS),
        )
        run = carry_out(config, where, Silent(_EPOCHS), Start(), tell=lambda text: None)
    assert run is not None, "a plan is made by one process"
    return rows / run.summary["samples_per_s"] * (1 - (run.summary["data_wait"] or 0.0))


# What it tells of a step's memory, beside what the step then takes on this machine ---------------


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
        ranks.run(_RANK, config, ONE_PROCESS, take)
    except TfdistError as error:  # The other rows hold.
        why = str(error)
    return Check(name=row.name, told=row.peak, measured=measured[0] if measured else None, why=why)
