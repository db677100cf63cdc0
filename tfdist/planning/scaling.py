"""Speed on 1, 2, 4 ... devices, and where another one stops to pay."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.planning.candidates import Candidate
from tfdist.planning.devices import CPU, Cluster
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Speed, compute_seconds, summed
from tfdist.planning.step_time import HOROVOD_BUCKET

#: The most devices that are looked at.
MOST = 1024
#: An added device that gives less than this share of the first one's speed does not pay.
PAYS = 0.5


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Replicas of a model on a number of devices.

    Attributes:
        devices, hosts: how many.
        step_s: seconds of a step of the same global batch, which gives the same weights; None where
            it has fewer rows than there are devices.
        speed_up: over one device, of that step.
        efficiency: ``speed_up`` over ``devices``.
        grown_rows_per_s: rows a second where each device keeps the rows that one has, so that the
            global batch grows.
        grown_efficiency: of these, over as many single devices.
    """

    devices: int
    hosts: int
    step_s: float | None
    speed_up: float | None
    efficiency: float | None
    grown_rows_per_s: float
    grown_efficiency: float


@dataclass(frozen=True)
class Scaling:
    """Replicas on 1 to 1024 devices.

    Attributes:
        points: by number of devices, powers of two.
        last_that_pays: devices of the same global batch, of which each adds at least half of the
            speed of the first.
    """

    points: tuple[Scale, ...]
    last_that_pays: int


def scale(needs: Needs, cluster: Cluster, rows: int, speed: Speed, several: str) -> Scaling:
    """Returns what replicas of one device's model do on more and more devices.

    Args:
        needs: of a step on one device.
        cluster: devices as they stand; more of them are more such hosts.
        rows: of a global batch, on one device too where it grows.
        several: the strategy of several processes.
    """
    if cluster.device.name == CPU:  # One process has all of a host, so a device is one here.
        cluster = cluster.of(1)
    bucket = HOROVOD_BUCKET if several == "horovod" else None

    def seconds(devices: int, of: int) -> float:
        own = cluster.of(devices)
        replicas = Candidate("single", devices=devices)
        compute = compute_seconds(needs, replicas, own, of, speed)
        # One process sends all of its gradients together.
        sent = summed(needs.gradients, own, bucket if own.hosts > 1 else None)
        return speed.overlap.step_seconds(compute, sent.seconds, sent.buckets)

    one = seconds(1, rows)

    def point(devices: int) -> Scale:
        same = seconds(devices, rows) if devices <= rows else None
        speed_up = None if same is None else one / same
        grown = seconds(devices, rows * devices)
        return Scale(
            devices=devices,
            hosts=cluster.of(devices).hosts,
            step_s=same,
            speed_up=speed_up,
            efficiency=None if speed_up is None else speed_up / devices,
            grown_rows_per_s=rows * devices / grown,
            grown_efficiency=one / grown,
        )

    counts = [2**power for power in range(MOST.bit_length())]
    last, before = 1, 1.0
    per_host = cluster.per_host
    for devices in [*range(2, per_host + 1), *range(2 * per_host, MOST + 1, per_host)]:
        if devices > rows:
            break
        speed_up = one / seconds(devices, rows)
        if speed_up - before < PAYS * (devices - last):
            break
        last, before = devices, speed_up
    return Scaling(tuple(point(count) for count in counts), last)
