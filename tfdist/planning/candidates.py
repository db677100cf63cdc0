"""What a plan compares: each strategy with its sensible options, on the devices that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.planning.devices import CPU, Cluster

_RECOMPUTE = {"recompute": "blocks"}
_ACCUMULATE = {"accumulate_steps": 4}


@dataclass(frozen=True)
class Candidate:
    """A strategy, its options, and over how many devices it divides model and batch."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 1

    @property
    def model_devices(self) -> int:
        """Devices that hold one model together."""
        if self.strategy == "mesh":
            return self.options.get("batch", 1) * self.options["model"]
        return self.options["stages"] if self.strategy == "pipeline" else 1

    @property
    def replicas(self) -> int:
        """Copies of a model that is divided, or of one that is not."""
        return self.devices // self.model_devices

    @property
    def divides_model(self) -> bool:
        return self.strategy in ("mesh", "pipeline")

    @property
    def traced(self) -> tuple[str, dict[str, Any], int]:
        """What is traced of it: strategy, options, devices; of a divided model one copy."""
        if not self.divides_model:
            return self.strategy, dict(self.options), self.devices
        options = {name: value for name, value in self.options.items() if name != "replicas"}
        return self.strategy, options, self.model_devices

    def describe(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options.items())


def candidates(cluster: Cluster, rows: int, *, several: str) -> list[Candidate]:
    """Returns what to compare, the simplest first.

    Args:
        rows: of a global batch.
        several: the strategy of several processes, "horovod" or "multi_worker".
    """
    found = [*_on_one(cluster)]
    if cluster.devices > 1:
        found += _replicated(cluster, several)
    if cluster.per_host > 1:
        found += _divided(cluster, rows, several)
    return found


def _on_one(cluster: Cluster) -> Iterator[Candidate]:
    options: list[Mapping[str, Any]] = [{}, _ACCUMULATE, _RECOMPUTE, {**_RECOMPUTE, **_ACCUMULATE}]
    if cluster.device.name != CPU:  # Whose memory is the host's already.
        options += [{"offload": "optimizer"}, {"offload": "activations"}]
    for each in options:
        yield Candidate("single", each)


def _replicated(cluster: Cluster, several: str) -> Iterator[Candidate]:
    count = cluster.devices
    name = "mirrored" if cluster.hosts == 1 else several
    for options in ({}, _ACCUMULATE, _RECOMPUTE, {"shard": "optimizer"}):
        yield Candidate(name, options, count)
    yield Candidate(several, {"shard": "weights"}, count)
    yield Candidate("parameter_server", {}, count)


def _divided(cluster: Cluster, rows: int, several: str) -> Iterator[Candidate]:
    """Models in parts: over a host's devices, or half of them each; replicas of it beside."""
    for parts in dict.fromkeys((cluster.per_host, 2)):
        if cluster.per_host % parts:
            continue
        replicas = cluster.devices // parts
        with_replicas = {"replicas": several} if replicas > 1 else {}
        if parts < cluster.per_host and cluster.hosts == 1:
            yield Candidate("mesh", {"batch": replicas, "model": parts}, cluster.devices)
        else:
            yield Candidate("mesh", {"model": parts, **with_replicas}, cluster.devices)
        microbatches = _microbatches(rows // replicas, parts)
        if microbatches is not None:
            options = {"stages": parts, "microbatches": microbatches, "schedule": "1f1b"}
            yield Candidate("pipeline", {**options, **with_replicas}, cluster.devices)


def _microbatches(rows: int, stages: int) -> int | None:
    """Returns the most microbatches, up to four for each stage, that divide a replica's rows."""
    counts = (count * stages for count in (4, 2, 1))
    return next((count for count in counts if rows and rows % count == 0), None)
