"""What one rank did in the steps that were traced: its executions, operations and waits."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, read_json
from tfdist.records.buckets.urls import refuse_url
from tfdist.traces import places, xplane

_MARK, _MARK_STAT = "train", "tfdist_step"
_EAGER, _STARTED, _DONE, _IN_STEP = (
    "EagerExecute",
    "ExecutorState::ProcessAsync::Start",
    "ExecutorState::ProcessAsync::Done",
    "ExecutorState::Process",
)
# A function that tf.data calls: what it computes is none of the step's.
_OF_DATA = "InstantiatedCapturedFunction::Run"
# A thread that waits for a batch of a step may go on with the step.
_THREADS_OF_DATA = re.compile(r"tf_data_(?!iterator_get_next)")
_COMMUNICATION = re.compile(r"Horovod\w+|Collective\w+|Nccl\w+|_(Host)?(Send|Recv)")
_SEND, _RECEIVE = re.compile("_(Host)?Send"), re.compile("_(Host)?Recv")
_INPUT = re.compile(r"(MultiDevice)?IteratorGetNext\w*|OptionalGetValue")
# They enclose what they call.
_FUNCTIONS = re.compile(
    r"(Stateful)?PartitionedCall|_?(Stateless)?(If|While|Case)|RemoteCall|SymbolicGradient"
)
_GPU, _STREAM, _KERNEL = "/device:GPU:", "Stream #", "kernel"
# What runs outside of a function, and what runs on a thread of tf.data in a function that had
# begun before the trace did.
_NO_CALL, _CALL_OF_DATA = 0, -1


@dataclass(frozen=True)
class Operations:
    """Some operations of a rank, by their begin.

    Attributes:
        times: float64 [n, 2], begin and end in ns of the rank's clock.
        which: int64 [n], which of ``labels`` each has.
        labels: names and kinds, such as ("dense/MatMul", "MatMul").
    """

    times: np.ndarray
    which: np.ndarray
    labels: list[tuple[str, str]]

    @property
    def names(self) -> list[str]:
        return [self.labels[number][0] for number in self.which]

    @property
    def kinds(self) -> list[str]:
        return [self.labels[number][1] for number in self.which]


@dataclass
class RankTrace:
    """The trace of a rank.

    Attributes:
        rank: its number.
        notes: what it has said itself: "ranks", "strategy", "host", "layers" and the like.
        clock_ns: when its clock began, in ns since 1970.
        executions: float64 [n, 2], when each began and ended, in ns of its clock.
        steps: of each execution, its first and last step, counted from 1.
        compute: what it computed.
        communication: from the call of a collective until it was done here.
        inputs: from the call for a batch until it was there.
    """

    rank: int
    notes: dict[str, Any]
    clock_ns: int
    executions: np.ndarray
    steps: list[tuple[int, int]]
    compute: Operations
    communication: Operations
    inputs: Operations

    @property
    def num_steps(self) -> int:
        return sum(last - first + 1 for first, last in self.steps)

    @property
    def begun(self) -> float:
        return float(self.executions[0, 0])

    @property
    def ended(self) -> float:
        return float(self.executions[-1, 1])


def read(folder: str | os.PathLike) -> list[RankTrace]:
    """Returns the traces of all ranks of a training.

    Args:
        folder: of the training, or the one that it was asked to trace in.

    Raises:
        DataError: there is none, or a file of it is missing or damaged.
    """
    refuse_url(folder, "a trace that is read")
    folder = Path(folder)
    runs = map(places.run_of, (folder / places.FOLDER, folder))
    run = next((run for run in runs if places.notes_of(run, 0).is_file()), None)
    if run is None:
        raise DataError(
            f"{folder} must be a training whose steps were traced",
            received="no trace in it" if folder.is_dir() else "no such folder",
            mend="Train with --profile steps=10:20",
        )
    return [_read_rank(run, rank) for rank in range(_notes(run, 0)["ranks"])]


def _notes(run: Path, rank: int) -> dict[str, Any]:
    path = places.notes_of(run, rank)
    try:
        notes = read_json(path.read_text(encoding="utf-8"))
        is_known = (
            notes["rank"] == rank
            and all(type(notes[name]) is int and notes[name] > 0 for name in ("ranks", "devices"))
            and all(isinstance(notes[name], str) for name in ("strategy", "host"))
            and all(type(step) is int for pair in notes["executions"] for step in pair)
            and all(first <= last for first, last in notes["executions"])
            and all(isinstance(name, str) for name in notes["layers"])
            and isinstance(notes.get("horovod_timeline") or "", str)
        )
    except FileNotFoundError:
        mend = "Copy it from the host of that rank, or trace the steps again"
        raise _lacking(path, rank, mend) from None
    except (OSError, ValueError, KeyError, TypeError):
        is_known = False
    if not is_known:
        raise DataError(
            f"{path} must be as tfdist wrote it",
            received="something else",
            mend="Trace the steps again",
        )
    return notes


def _lacking(path: Path, rank: int, mend: str) -> DataError:
    return DataError(f"the trace must have a file of rank {rank}", received=f"no {path}", mend=mend)


def _read_rank(run: Path, rank: int) -> RankTrace:
    notes = _notes(run, rank)
    path = places.events_of(run, rank)
    if not path.is_file():
        raise _lacking(path, rank, "Trace the steps again")
    reading = _Reading()
    clock_ns = 0
    with xplane.whole(path):
        for plane in xplane.planes(path):
            if plane.name == "Task Environment":
                clock_ns = int(plane.stats.get("profile_start_time") or 0)
            elif plane.name == "/host:CPU":
                reading.take_host(plane)
            elif plane.name.startswith(_GPU):
                reading.take_gpu(plane)
    marks = sorted(reading.marks)
    if not clock_ns or len(marks) != len(notes["executions"]) or not marks:
        raise DataError(
            f"{path} must have the steps that {places.notes_of(run, rank).name} names",
            received=f"{len(marks)} executions of {len(notes['executions'])}",
            mend="Trace the steps again",
        )
    executions = np.array(marks)
    with xplane.whole(path):
        results = reading.results(executions[0, 0], executions[-1, 1])
    return RankTrace(
        rank=rank,
        notes=notes,
        clock_ns=clock_ns,
        executions=executions,
        steps=[tuple(pair) for pair in notes["executions"]],
        **results,
    )


class _Reading:
    """Sorts the events of a rank."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        # Of each class times, labels, and the call of a function that each belongs to.
        self._found: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {
            "compute": [],
            "communication": [],
            "inputs": [],
        }
        self._labels: dict[tuple[str, str], int] = {}
        self._started: dict[tuple[int, str], list[tuple[float, str]]] = {}
        self._done: dict[tuple[int, str], list[float]] = {}
        self._sent: dict[tuple[int, str], float] = {}
        self._of_data: set[int] = {_CALL_OF_DATA}
        self._has_gpu = False

    def take_host(self, plane: xplane.Plane) -> None:
        for line in plane.lines(_is_told, _is_operation):
            self._take_thread(line, plane.names)

    def take_gpu(self, plane: xplane.Plane) -> None:
        """Takes the kernels of a GPU; operations of the host then only start them."""
        self._has_gpu = True
        for line in plane.lines(lambda name: False, lambda name, kind: True):
            if not line.name.startswith(_STREAM):
                continue
            names = {number: plane.names[number][0] for number in np.unique(line.numbers)}
            is_nccl = [number for number, name in names.items() if "nccl" in name.lower()]
            communicates = np.isin(line.numbers, is_nccl)
            labels = {number: (name, _KERNEL) for number, name in names.items()}
            for of, chosen in (("communication", communicates), ("compute", ~communicates)):
                self._add(of, line.times[chosen], line.numbers[chosen], labels)

    def _take_thread(self, line: xplane.Line, names: dict[int, tuple[str, str]]) -> None:
        runs: list[tuple[float, int]] = []
        is_of_data = bool(_THREADS_OF_DATA.match(line.name))
        for event in line.told:
            stats = event.stats
            if event.name == _MARK:
                if _MARK_STAT in stats:
                    self.marks.append((event.begun_ns, event.ended_ns))
            elif event.name == _IN_STEP:
                runs.append((event.begun_ns, stats.get("id", 0)))
                if is_of_data:  # Perhaps of a call that had begun before the trace did.
                    self._of_data.add(stats.get("id", 0))
            elif event.name.startswith(_OF_DATA):
                self._of_data.add(stats.get("id", 0))
            elif event.name == _EAGER:
                if not stats.get("is_func"):
                    kind = str(stats.get("eager_op", ""))
                    self._add_one(event.begun_ns, event.ended_ns, kind, kind)
            elif event.name == _STARTED:
                key = (stats["step_id"], stats["name"])
                self._started.setdefault(key, []).append((event.begun_ns, stats["kernel_type"]))
            else:
                key = (stats["step_id"], stats["name"])
                self._done.setdefault(key, []).append(event.begun_ns)
        # An operation stands within what its thread does for a call of a function.
        runs.sort()
        begun = np.array([-np.inf, *(run[0] for run in runs)])
        outside = _CALL_OF_DATA if is_of_data else _NO_CALL
        calls = np.array([outside, *(run[1] for run in runs)], np.int64)
        of = calls[np.searchsorted(begun, line.times[:, 0], side="right") - 1]
        labels = {
            int(number): (name.removesuffix(f":{kind}"), kind)
            for number in np.unique(line.numbers)
            for name, kind in [names[int(number)]]
        }
        computing = [n for n, (_, kind) in labels.items() if _class_of(kind) == "compute"]
        chosen = np.isin(line.numbers, computing)
        self._add("compute", line.times[chosen], line.numbers[chosen], labels, of[chosen])
        sending = [n for n, (_, kind) in labels.items() if _SEND.fullmatch(kind)]
        for index in np.flatnonzero(np.isin(line.numbers, sending)):
            name, _ = labels[int(line.numbers[index])]
            self._sent[int(of[index]), name] = float(line.times[index, 0])

    def _add(
        self,
        of: str,
        times: np.ndarray,
        numbers: np.ndarray,
        labels: dict[int, tuple[str, str]],
        calls: np.ndarray | None = None,
    ) -> None:
        """Adds operations of a class; ``numbers`` tell the label of each."""
        known, place = np.unique(numbers, return_inverse=True)
        own = [self._labels.setdefault(labels[int(n)], len(self._labels)) for n in known]
        if calls is None:
            calls = np.full(len(times), _NO_CALL)
        self._found[of].append((times, np.array(own, np.int64)[place], calls))

    def _add_one(
        self, begun: float, ended: float, name: str, kind: str, call: int | None = None
    ) -> None:
        of = None if call is None else np.array([call])
        times = np.array([[begun, ended]])
        self._add(_class_of(kind), times, np.zeros(1, int), {0: (name, kind)}, of)

    def results(self, begun: float, ended: float) -> dict[str, Operations]:
        """Returns what lies within the traced steps, whole or in part."""
        for (call, name), started in self._started.items():
            done = sorted(self._done.get((call, name), []))
            for (at, kind), end in zip(sorted(started), done, strict=False):
                if _RECEIVE.fullmatch(kind):
                    at = max(at, self._sent_at(call, name, end))
                if _class_of(kind) != "compute":
                    self._add_one(at, end, name, kind, call)
        labels = list(self._labels)
        kernels = [number for number, (_, kind) in enumerate(labels) if kind == _KERNEL]
        made = {}
        for of, found in self._found.items():
            nothing = (np.empty((0, 2)), np.empty(0, np.int64), np.empty(0, np.int64))
            times, which, calls = map(np.concatenate, zip(nothing, *found, strict=True))
            kept = (times[:, 1] > begun) & (times[:, 0] < ended)
            kept &= ~np.isin(calls, list(self._of_data))
            if self._has_gpu and of == "compute":
                kept &= np.isin(which, kernels)
            times, which = times[kept], which[kept]
            order = np.argsort(times[:, 0], kind="stable")
            made[of] = Operations(times[order], which[order], labels)
        return made

    def _sent_at(self, call: int, name: str, end: float) -> float:
        """Returns when a tensor was sent: whoever is to receive it asks for it at once, and waits.

        TensorFlow names the sender "tensor/_7" and the receiver "tensor/_8". What another process
        sends counts as nothing: when it did is not known here.
        """
        tensor, _, number = name.rpartition("/_")
        if not number.isdecimal():
            return end
        return self._sent.get((call, f"{tensor}/_{int(number) - 1}"), end)


def _is_told(name: str) -> bool:
    return name.startswith(_OF_DATA) or name in (_MARK, _EAGER, _STARTED, _DONE, _IN_STEP)


def _is_operation(name: str, kind: str) -> bool:
    return bool(kind) and name.endswith(f":{kind}") and not _FUNCTIONS.fullmatch(kind)


@functools.cache
def _class_of(kind: str) -> str:
    if _COMMUNICATION.fullmatch(kind):
        return "communication"
    return "inputs" if _INPUT.fullmatch(kind) else "compute"
