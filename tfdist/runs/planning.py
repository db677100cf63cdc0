"""``tfdist.plan``: what a model needs on some devices, before it is trained on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tfdist.compat import check_versions, follow_program
from tfdist.errors import TfdistError
from tfdist.launch.jobs import of_several
from tfdist.planning.candidates import candidates
from tfdist.planning.devices import CPU, DeviceTable
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Speed
from tfdist.planning.report import Plan, make_plan
from tfdist.runs import largest_batch, ranks, short_runs
from tfdist.runs.choosing import started
from tfdist.runs.needs import find_needs
from tfdist.runs.training import find_splits
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count


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
        short_runs.check_is_here(cluster, "profile", 2)
        train = find_splits(os.fspath(profile))["train"]
    if find_batch:
        short_runs.check_is_here(cluster, "find_batch", cluster.devices)
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
        speed, measured = short_runs.measure(
            named, train, found[0], cluster, global_batch_size, several
        )
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
