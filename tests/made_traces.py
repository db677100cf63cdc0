"""Traces whose every number is known, as files of TensorFlow's profiler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.traces import places, xplane

_CALL = 77


@dataclass
class Made:
    """What a rank does; times are (begin, end) in milliseconds of its clock.

    Attributes:
        executions: begin, end, first and last step of each.
        compute: name, kind, begin, end.
        collectives, inputs: name, kind, begin, end; asynchronous, as Horovod's and tf.data's.
        kernels: of a GPU: name, begin, end.
        clock_ms: when its clock began.
    """

    executions: Sequence[tuple[float, float, int, int]]
    compute: Sequence[tuple[str, str, float, float]] = ()
    collectives: Sequence[tuple[str, str, float, float]] = ()
    inputs: Sequence[tuple[str, str, float, float]] = ()
    kernels: Sequence[tuple[str, float, float]] = ()
    clock_ms: float = 1_000_000.0
    layers: Sequence[str] = field(default_factory=list)


def write(folder: Path, ranks: Sequence[Made], strategy: str = "horovod") -> Path:
    """Writes a trace as a training in ``folder`` does; returns the folder."""
    run = places.run_of(folder / places.FOLDER)
    run.mkdir(parents=True, exist_ok=True)
    for rank, made in enumerate(ranks):
        notes = {
            "strategy": strategy,
            "devices": 1,
            "rank": rank,
            "ranks": len(ranks),
            "host": f"node{rank}",
            "executions": [each[2:] for each in made.executions],
            "layers": list(made.layers),
        }
        places.notes_of(run, rank).write_text(json.dumps(notes))
        places.events_of(run, rank).write_bytes(_space(made).SerializeToString())
    return folder


class _Plane:
    """A plane that names are added to as events need them."""

    def __init__(self, plane: Any, name: str):
        self._plane = plane
        plane.name = name
        self._names: dict[tuple[str, str], int] = {}

    def number(self, name: str, kind: str = "") -> int:
        if (name, kind) not in self._names:
            number = self._names[name, kind] = len(self._names) + 1
            entry = self._plane.event_metadata.add(key=number)
            entry.value.name, entry.value.display_name = name, kind
        return self._names[name, kind]

    def add_stats(self, to: Any, stats: dict[str, int | str]) -> None:
        for name, value in stats.items():
            known = {entry.value.name: entry.key for entry in self._plane.stat_metadata}
            if name not in known:
                known[name] = len(known) + 1
                self._plane.stat_metadata.add(key=known[name]).value.name = name
            stat = to.stats.add(metadata_id=known[name])
            setattr(stat, "str_value" if isinstance(value, str) else "int64_value", value)

    def add_line(self, name: str) -> Any:
        return self._plane.lines.add(name=name, timestamp_ns=500)

    def add(
        self, line: Any, name: str, kind: str, begun: float, ended: float, /, **stats: int | str
    ) -> None:
        offset, duration = round(begun * 1e9) - 500_000, round((ended - begun) * 1e9)
        number = self.number(name, kind)
        event = line.events.add(metadata_id=number, offset_ps=offset, duration_ps=duration)
        self.add_stats(event, stats)


def _space(made: Made) -> Any:
    space = xplane.messages()["Space"]()
    host = _Plane(space.planes.add(), "/host:CPU")
    python, compute = host.add_line("python"), host.add_line("tf_Compute/1")
    for begun, ended, first, _ in made.executions:
        host.add(python, "train", "", begun, ended, tfdist_step=first, step_num=first - 1)
    host.add(compute, "ExecutorState::Process", "", 0.001, 0.002, id=_CALL)
    for name, kind, begun, ended in made.compute:
        host.add(compute, f"{name}:{kind}", kind, begun, ended)
    for name, kind, begun, ended in (*made.collectives, *made.inputs):
        about = {"name": name, "kernel_type": kind, "step_id": _CALL}
        host.add(compute, "ExecutorState::ProcessAsync::Start", "", begun, begun, **about)
        host.add(compute, "ExecutorState::ProcessAsync::Done", "", ended, ended, **about)
    if made.kernels:
        device = _Plane(space.planes.add(), "/device:GPU:0")
        stream = device.add_line("Stream #7(Compute)")
        for name, begun, ended in made.kernels:
            device.add(stream, name, "", begun, ended)
    environment = _Plane(space.planes.add(), "Task Environment")
    plane = space.planes[-1]
    environment.add_stats(plane, {"profile_start_time": round(made.clock_ms * 1e6)})
    return space
