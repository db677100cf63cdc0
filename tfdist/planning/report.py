"""A plan as a whole: its rows, what to take of them, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.planning.advice import Advice, advise
from tfdist.planning.candidates import Candidate
from tfdist.planning.devices import CPU, Cluster
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Row, Speed, make_rows
from tfdist.planning.scaling import Scaling, scale


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a model needs on some devices, and what to train it with.

    Attributes:
        cluster: the devices.
        global_batch_size: rows of a step.
        rows: a row for each strategy with its options, the simplest first.
        advice: which of them to take (``advice.row``), and why (``advice.reason``).
        scaling: replicas on 1 to 1024 devices; None where the model is refused on one device, or
            has no products, so that the time is not known.
        sources: where each kind of number comes from: measured, the device file, or a default.
        found_batch: rows of the largest global batch of ``advice.row`` that was tried and fits;
            None where none was tried, or that failed.
        not_found: why trying failed; None where it did not.
    """

    cluster: Cluster
    global_batch_size: int
    rows: tuple[Row, ...]
    advice: Advice
    scaling: Scaling | None
    sources: tuple[str, ...]
    found_batch: int | None = None
    not_found: str | None = None

    def __str__(self) -> str:
        return self.advice.reason

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as plain values: bytes, seconds, rows."""
        chosen, cluster = self.advice.row, self.cluster
        scaling = self.scaling
        return {
            "devices": cluster.describe(),
            "global_batch_size": self.global_batch_size,
            "rows": [_row(row, self.global_batch_size) for row in self.rows],
            "advice": {
                "strategy": chosen and chosen.candidate.strategy,
                "options": chosen and dict(chosen.candidate.options),
                "reason": self.advice.reason,
            },
            "scaling": [vars(point) for point in scaling.points] if scaling else [],
            "last_that_pays": scaling and scaling.last_that_pays,
            "found_batch": self.found_batch,
            "not_found": self.not_found,
            "sources": list(self.sources),
        }


def make_plan(
    asked: Sequence[Candidate],
    found: Sequence[Needs | Exception],
    cluster: Cluster,
    rows: int,
    *,
    speed: Speed,
    several: str,
    measured: str | None = None,
) -> Plan:
    """Returns the plan for what each candidate needs.

    Args:
        asked: see ``candidates``; the first one is one device without options.
        found: what each needs, or why it refuses.
        rows: of a global batch.
        speed: of a device.
        several: the strategy of several processes.
        measured: what ``speed`` was measured with; None where it was not.
    """
    table = tuple(make_rows(asked, found, cluster, rows, speed))
    one = table[0].needs
    return Plan(
        cluster=cluster,
        global_batch_size=rows,
        rows=table,
        advice=advise(table, rows),
        scaling=scale(one, cluster, rows, speed, several) if one and one.computes else None,
        sources=tuple(_sources(cluster, speed, measured, one)),
    )


def _sources(cluster: Cluster, speed: Speed, measured: str | None, one: Needs | None) -> list[str]:
    device = cluster.device
    of_memory = "measured here" if device.name == CPU else "device file"
    lines = [
        "bytes and operations: the traced step of each row",
        f"memory: {of_memory}, {cluster.usable_memory:.0%} of {device.memory / 2**30:.3g} GiB; "
        f"the rest is a default for what engines keep ({device.source})",
    ]
    if one is not None and not one.computes:
        lines.append("computing: not known, as the step has no products; a step is its messages")
    elif measured is None:
        rates = device.flops_per_s["float32"] / 1e12, device.flops_per_s["mixed"] / 1e12
        lines += [
            f"computing: device file, {rates[0]:.4g} TFLOP/s in float32, {rates[1]:.4g} mixed, "
            f"times {cluster.share_of_peak:.0%}, a default: --profile measures it",
            "at the same time: a default, horovod's messages of 128 MiB while the way back "
            "computes, all others after it (g = 1): --profile measures it",
        ]
    else:
        lines += [
            f"computing: measured, {measured}: {speed.share_of_peak or 0:.3g} of what the "
            f"device file says, and {speed.fixed_s * 1e3:.3g} ms of a step that rows do not change",
            f"at the same time: measured, {speed.overlap.describe()}",
        ]
    links = [cluster.link] + [cluster.network] * (cluster.hosts > 1)
    lines += [
        f"messages: device file, {link.name}, {1e-9 / link.seconds_per_byte:.4g} GB/s, "
        f"{link.latency_s * 1e6:.3g} µs ({link.source})"
        for link in links
    ]
    return lines


def _row(row: Row, batch: int) -> dict[str, Any]:
    asked = row.candidate
    named = {"strategy": asked.strategy, "options": dict(asked.options), "devices": asked.devices}
    if row.needs is None:
        return {**named, "refusal": row.refusal}
    return {
        **named,
        "peak_bytes": row.peak,
        "room_bytes": row.room,
        "fits": row.fits,
        "largest_batch": row.largest_batch,
        "sent_bytes": row.sent.size,
        "messages_s": row.sent.seconds,
        "compute_s": row.compute_s,
        "step_s": row.step_s,
        "rows_per_s": batch / row.step_s if row.step_s else None,
        "speed_up": row.speed_up or None,  # One device alone may be refused.
    }
