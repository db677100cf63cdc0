"""``--strategy auto`` on GPUs: what does not fit on one of them is not given to mirrored."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tfdist import topology
from tfdist.errors import TfdistError
from tfdist.launch.jobs import Where, of_several
from tfdist.planning.advice import advise, fits_on_one, gigabytes
from tfdist.planning.candidates import Candidate, candidates
from tfdist.planning.devices import Cluster, DeviceTable
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Speed, make_rows
from tfdist.runs.needs import find_needs
from tfdist.strategies import spec_of
from tfdist.topology.gpus import kind_and_memory, visible_gpus


def fitting(where: Where, model: str, rows: int, tell: Callable[[str], None]) -> Where:
    """Returns where a training is to run whose strategy is left open.

    That is as it was, for its rank to choose, where its step fits on each GPU of this machine, and
    where there is none; else what ``tfdist plan`` recommends.

    Args:
        where: any; a named strategy stays, and so does the choice under a launcher.
        model: "FILE.py:NAME", as ``tfdist train`` takes it.
        rows: of a global batch.
        tell: is told in a line what was chosen, or why nothing was.

    Raises:
        TfdistError: no job can be started so.
    """
    is_evaluator = topology.is_evaluator(os.environ)  # It has no place among the others.
    if where.strategy != "auto" or is_evaluator or where.place is not None or not visible_gpus():
        return where
    where.job([])  # What cannot be started is refused before anything is traced.
    try:
        cluster = DeviceTable.load().of_driver(*kind_and_memory(), len(visible_gpus()))
        one = _needs(model, [Candidate("single", where.options or {})], rows)[0]
        if isinstance(one, TfdistError):
            raise one
        if fits_on_one(one, cluster, rows):
            return where
        tell(
            f"a step of {rows:,} rows does not fit on {cluster.describe()} as replicas: "
            f"planning what does, with {gigabytes(cluster.room)} each"
        )
        asked = _startable(cluster, rows, where)
        found = [one, *_needs(model, asked[1:], rows)]
        advice = advise(make_rows(asked, found, cluster, rows, Speed()), rows)
    except TfdistError as error:
        tell(f"strategy 'auto' cannot tell whether a step fits: {error}")
        return where
    if advice.row is None:
        tell(f"strategy 'auto' stays with its own choice: {advice.reason}")
        return where
    tell(f"strategy {advice.reason}")
    chosen = started(advice.row.candidate)
    return replace(where, strategy=chosen.strategy, options=chosen.options, workers=chosen.workers)


def started(candidate: Candidate) -> Where:
    """Returns how a row of a plan is started on this machine."""
    name, options = candidate.strategy, dict(candidate.options)
    if name == "mirrored":
        options["devices"] = candidate.devices
    has_ranks = bool(spec_of(name, options).launchers)
    return Where(strategy=name, options=options, workers=candidate.replicas if has_ranks else None)


def _needs(model: str, asked: Sequence[Candidate], rows: int) -> list[Needs | TfdistError]:
    return find_needs(model, [each.traced for each in asked], rows=rows, on_gpus=True)


def _startable(cluster: Cluster, rows: int, where: Where) -> list[Candidate]:
    """Returns what ``plan`` compares, with the options that were given, and as many processes."""
    options: Mapping[str, Any] = where.options or {}
    every = (
        replace(each, options={**each.options, **options})
        for each in candidates(cluster, rows, several=of_several())
        if not spec_of(each.strategy).is_asynchronous  # Which is never recommended.
    )
    return [each for each in every if where.workers is None or started(each).workers is None]
