"""The table of a plan: what each strategy needs, whether it fits, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tfdist.planning import messages
from tfdist.planning.candidates import Candidate
from tfdist.planning.devices import Cluster
from tfdist.planning.messages import hierarchical
from tfdist.planning.needs import Needs
from tfdist.planning.step_time import HOROVOD_BUCKET, Overlap, bubble, buckets_of


@dataclass(frozen=True)
class Speed:
    """What is known of the speed of a device, and of what it does at the same time.

    Attributes:
        share_of_peak: what was measured that a device reaches of its data sheet; None: what is
            usual.
        overlap: of computing and messages.
        fixed_s: what was measured of a step that neither more rows nor more devices change: its
            start, and the update of the weights.
    """

    share_of_peak: float | None = None
    overlap: Overlap = field(default_factory=Overlap)
    fixed_s: float = 0.0

    def of(self, cluster: Cluster, half: float) -> float:
        """Returns operations a second of one device, of which the share ``half`` is in 16 bits."""
        rates = cluster.device.flops_per_s
        share = cluster.share_of_peak if self.share_of_peak is None else self.share_of_peak
        return share / (half / rates["mixed"] + (1 - half) / rates["float32"])


@dataclass(frozen=True)
class Sent:
    """The messages of a step.

    Attributes:
        size: bytes that the device sends which sends most.
        seconds: that all take alone.
        buckets: in which they follow each other.
    """

    size: float = 0.0
    seconds: float = 0.0
    buckets: int = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy with its options, for one global batch.

    Attributes:
        needs: of its step; None where the strategy refuses the model or the options.
        refusal: why it does.
        peak: bytes on the device that holds most.
        room: bytes that a step may fill there.
        largest_batch: rows of the largest global batch that fits; 0: none does; None: this one
            does, and bytes do not grow with the rows as far as they were traced.
        sent: its messages.
        compute_s, step_s: seconds of computing alone, and of a step.
        speed_up: how many times as fast as one device without options is.
    """

    candidate: Candidate
    needs: Needs | None = None
    refusal: str | None = None
    peak: float = 0.0
    room: float = 0.0
    largest_batch: int | None = 0
    sent: Sent = field(default_factory=Sent)
    compute_s: float = 0.0
    step_s: float = 0.0
    speed_up: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the device that holds most has room for a step."""
        return self.needs is not None and self.peak <= self.room

    @property
    def name(self) -> str:
        """The strategy, and its options as the shell has them."""
        return f"{self.candidate.strategy} {self.candidate.describe()}".strip()


def make_rows(
    asked: Sequence[Candidate],
    found: Sequence[Needs | Exception],
    cluster: Cluster,
    rows: int,
    speed: Speed,
) -> list[Row]:
    """Returns a row for each candidate, in their order.

    Args:
        found: what is ``Candidate.traced`` of each needs, or why it refuses. The first candidate is
            one device without options.
        rows: of a global batch.
    """
    whole = found[0] if isinstance(found[0], Needs) else None
    made = []
    for candidate, needs in zip(asked, found, strict=True):
        if isinstance(needs, Exception):
            made.append(Row(candidate=candidate, refusal=str(needs)))
        else:
            needs = of_all_copies(needs, candidate, whole)
            made.append(_row(candidate, needs, cluster, rows, speed, whole))
    one = made[0].step_s
    return [replace(row, speed_up=one / row.step_s if row.step_s else 0.0) for row in made]


def of_all_copies(needs: Needs, candidate: Candidate, whole: Needs | None) -> Needs:
    """Returns what a candidate needs, of whose divided model one copy was traced.

    Args:
        whole: what one device needs; its gradients are what copies add up, each a part where
            weights are divided.
    """
    gradients = needs.summed if whole is None else whole.gradients
    copies = candidate.replicas
    if not candidate.divides_model:
        return replace(needs, summed=gradients if copies > 1 else 0)
    return replace(
        needs,
        devices=candidate.devices,
        per_row=needs.per_row / copies,
        flops=needs.flops * copies,
        crossing=needs.crossing * copies,
        summed=gradients if copies > 1 else 0,
    )


def _row(
    candidate: Candidate,
    needs: Needs,
    cluster: Cluster,
    rows: int,
    speed: Speed,
    whole: Needs | None,
) -> Row:
    own = cluster.of(candidate.devices)
    compute = compute_seconds(needs, candidate, own, rows, speed)
    sent = messages_of(needs, candidate, own, rows)
    if "offload" in candidate.options and whole is not None:
        # What has gone from the device travels there and back, and nothing is computed meanwhile.
        moved = 2 * max(0.0, whole.peak(rows) - needs.peak(rows))
        sent = Sent(moved, messages.point_to_point(moved, cluster.bus))
    return Row(
        candidate=candidate,
        needs=needs,
        peak=needs.peak(rows),
        room=own.room,
        largest_batch=needs.largest_batch(own.room),
        sent=sent,
        compute_s=compute,
        step_s=speed.overlap.step_seconds(compute, sent.seconds, sent.buckets),
    )


def compute_seconds(
    needs: Needs, candidate: Candidate, cluster: Cluster, rows: int, speed: Speed
) -> float:
    """Returns the seconds of computing of a step: operations over those that all devices do in a
    second; of a pipeline, with the time in which its stages wait; and what is fixed."""
    rate = speed.of(cluster, needs.half)
    seconds = (needs.flops + needs.flops_per_row * rows) / candidate.devices / rate
    if candidate.strategy == "pipeline":
        options = candidate.options
        seconds /= 1 - bubble(options["stages"], options["microbatches"])
    return speed.fixed_s + seconds


def messages_of(needs: Needs, candidate: Candidate, cluster: Cluster, rows: int) -> Sent:
    """Returns the messages of a step.

    Args:
        cluster: of the candidate's devices.
    """
    crossing = needs.crossing + needs.crossing_per_row * rows
    if candidate.strategy == "parameter_server":
        # A global batch goes to one worker, which alone pulls weights and pushes gradients for it.
        # tfdist starts one server unless it is told otherwise.
        one_way = messages.point_to_point(needs.summed, cluster.slowest)
        return Sent(2.0 * needs.summed, 2 * one_way)
    if candidate.options.get("shard") == "weights":
        # Weights are gathered for the way forward and for the way back, and gradients scattered.
        seconds = 1.5 * hierarchical(needs.summed, cluster)
        return Sent(3 * needs.summed * _others(cluster.devices), seconds)
    if candidate.strategy == "mesh":
        return _of_mesh(needs, candidate, cluster, crossing)
    if candidate.strategy == "pipeline":
        return _of_pipeline(needs, candidate, cluster, crossing)
    bucket = HOROVOD_BUCKET if candidate.strategy == "horovod" else None
    return summed(needs.summed, cluster, bucket)


def summed(size: float, cluster: Cluster, bucket: float | None) -> Sent:
    """Returns the messages of a sum of ``size`` bytes over all devices.

    Args:
        bucket: bytes of one message; None: all in one.
    """
    count = buckets_of(size, bucket)
    seconds = count * hierarchical(size / count, cluster)
    return Sent(2 * size * _others(cluster.devices), seconds, count)


def _of_mesh(needs: Needs, candidate: Candidate, cluster: Cluster, crossing: float) -> Sent:
    """All devices send their part of what crosses at once, the sums along both axes of the mesh;
    then its copies add up their gradients."""
    each = crossing / candidate.devices
    within = messages.point_to_point(each, cluster.link) if each else 0.0
    among = _among_copies(needs, candidate, cluster)
    return Sent(each + among.size, within + among.seconds)


def _of_pipeline(needs: Needs, candidate: Candidate, cluster: Cluster, crossing: float) -> Sent:
    """All boundaries of stages pass microbatches on at once, each in a message, there and back."""
    options = candidate.options
    each = crossing / candidate.replicas / (options["stages"] - 1)
    latencies = 2 * options["microbatches"] * cluster.link.latency_s
    seconds = latencies + each * cluster.link.seconds_per_byte
    among = _among_copies(needs, candidate, cluster)
    return Sent(each + among.size, seconds + among.seconds)


def _among_copies(needs: Needs, candidate: Candidate, cluster: Cluster) -> Sent:
    """Returns the sum of gradients over the copies of a model that is divided.

    Within a host each part has a ring of its own; a host's network carries all parts.
    """
    copies, parts = candidate.replicas, candidate.model_devices
    hosts = min(copies, cluster.hosts)
    within = messages.ring(needs.summed / parts, copies // hosts, cluster.link)
    between = messages.ring(needs.summed, hosts, cluster.network)
    return Sent(2 * needs.summed / parts * _others(copies), within + between)


def _others(devices: int) -> float:
    return (devices - 1) / devices
