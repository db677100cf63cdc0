"""What ``plan`` predicts for the rows of a bench and for more devices, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfdist.benching.fits import Entry, Measured, called, entry_of, speed_up
from tfdist.errors import TfdistError
from tfdist.launch import hosts
from tfdist.planning.candidates import Candidate
from tfdist.planning.devices import CPU, Cluster, DeviceTable
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Row, Speed, make_rows
from tfdist.planning.step_time import fit_overlap
from tfdist.topology.gpus import visible_gpus

#: The most devices that are planned for.
MOST = 64
_ONE = Candidate("single")


@dataclass(frozen=True)
class Planned:
    """What ``plan`` says of the strategies of a bench.

    Attributes:
        global_batch_size: rows of a step.
        rows: of ``plan``: each strategy on the measured numbers of devices, and on 1, 2, 4 ... 64.
        source: what they come from, or why there are none.
        fitted: (strategy, devices) whose measurement is what they come from.
    """

    global_batch_size: int
    rows: tuple[Row, ...]
    source: str
    fitted: frozenset[tuple[str, int]] = frozenset()

    def line(self, strategy: str) -> dict[int, float]:
        """Returns devices -> samples a second."""
        return {
            row.candidate.devices: self.global_batch_size / row.step_s
            for row in self.rows
            if row.candidate.strategy == strategy
        }

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as plain values: bytes, seconds, samples a second."""
        rows = [
            {
                "strategy": row.candidate.strategy,
                "devices": row.candidate.devices,
                "fitted": (row.candidate.strategy, row.candidate.devices) in self.fitted,
                "samples_per_s": self.global_batch_size / row.step_s,
                "speed_up": row.speed_up,
                "step_s": row.step_s,
                "compute_s": row.compute_s,
                "messages_s": row.sent.seconds,
                "sent_bytes": row.sent.size,
            }
            for row in self.rows
        ]
        return {"source": self.source, "rows": rows}


def predict(
    rows: Sequence[Measured],
    find_needs: Callable[[Sequence[Candidate]], Sequence[Needs | TfdistError]],
    global_batch_size: int,
) -> Planned:
    """Returns the plan for the strategies of a bench, each on the devices that it can have.

    As ``plan --profile`` does it, one device's row tells how fast a device computes, and that of a
    strategy on the fewest of several how much of its messages is hidden behind computing.

    Args:
        rows: what was measured.
        find_needs: returns what a step of each candidate needs, or why it is refused.
        global_batch_size: rows of a step.
    """

    def nothing(why: object) -> Planned:
        return Planned(global_batch_size, (), f"nothing: {why}")

    base, _ = speed_up(rows)
    if visible_gpus():
        return nothing("of GPUs `tfdist plan --devices NAME:N --profile DIR` has to be told which")
    if base.entry.devices > 1:
        return nothing("what one device does was not measured; name 1 among --workers")
    trained = [row for row in rows if row.samples_per_s and row.entry.strategy != "federated"]
    candidates = [_candidate(row.entry) for row in trained]
    divided = {each.strategy: each for each in candidates if each.divides_model}
    try:
        one, *others = find_needs([_ONE, *divided.values()])
        found = dict(zip(divided, others, strict=True))
    except TfdistError as error:  # The rows took long, and stay.
        return nothing(error)
    if isinstance(one, TfdistError):
        return nothing(one)
    if not one.computes:
        return nothing("a step has no products, so that its time is not known")
    cluster = _cluster(max(row.entry.devices for row in rows))

    def planned(candidates: Sequence[Candidate], speed: Speed) -> list[Row]:
        asked = [_ONE, *candidates]
        # Replicas do what one device's model does, however many there are.
        needs = [found.get(each.strategy, one) for each in asked]
        return make_rows(asked, needs, cluster, global_batch_size, speed)[1:]

    (whole,) = planned([_ONE], Speed(share_of_peak=1.0))
    share = whole.compute_s * base.speed / global_batch_size
    sources, made, fitted = [f"computing from {called(base.entry)}"], [], []
    counts = {2**power for power in range(MOST.bit_length())}
    counts |= {row.entry.devices for row in trained}
    possible = [n for n in sorted(counts) if n <= min(global_batch_size, cluster.devices)]
    for name in dict.fromkeys(row.entry.strategy for row in trained):
        own = [row for row in trained if row.entry.strategy == name and row.entry.devices > 1]
        speed = Speed(share)
        if own and name not in found:
            least = min(own, key=lambda row: row.entry.devices)
            (told,) = planned([_candidate(least.entry)], speed)
            took = global_batch_size / least.speed
            speed = Speed(share, fit_overlap(told.compute_s, took, told.sent.seconds))
            sources.append(f"messages from {called(least.entry)}: {speed.overlap.describe()}")
            fitted.append((name, least.entry.devices))
        entries = (entry_of(name, count) for count in possible)
        made += planned([_candidate(entry) for entry in entries if entry is not None], speed)
    sources.append(f"{cluster.link.name} between all devices")
    return Planned(
        global_batch_size,
        tuple(row for row in made if row.needs is not None),
        "; ".join(sources),
        frozenset([(base.entry.strategy, 1), *fitted]),
    )


def _candidate(entry: Entry) -> Candidate:
    options = {name: value for name, value in entry.where.options.items() if name != "devices"}
    return Candidate(entry.strategy, options, entry.devices)


def _cluster(devices: int) -> Cluster:
    """Returns the devices of a bench: this machine's, and as many more of the same.

    Each has its cores alone, also where it is one of few; where they share all cores, there are no
    more of them.
    """
    cluster = DeviceTable.load().cluster(f"{CPU}:{devices}")
    if not hosts.shares(devices):
        return cluster
    own = replace(cluster.device, name="cores")  # Those of CPU grow where there are fewer.
    return replace(cluster, device=own, per_host=max(devices, MOST))
