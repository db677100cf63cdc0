"""Which device does what when: schedules of a pipeline as data. Nothing here knows TensorFlow.

GPipe, Huang et al. 2019, arXiv:1811.06965; 1F1B, Narayanan et al. 2019 (PipeDream); interleaved
chunks, Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.errors import OptionError, unknown_choice
from tfdist.training.engine.options import check_count

NAMES = ("gpipe", "1f1b", "interleaved")

#: Stands where the number of a microbatch may: all of the batch at once.
WHOLE = -1

# A backward pass multiplies two matrices where a forward pass multiplies one.
_BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True)
class Task:
    """One microbatch, or a ``WHOLE`` batch, through one chunk of the model, forward or backward."""

    is_forward: bool
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Slot:
    """A task on its device, from ``start`` to ``end``."""

    task: Task
    device: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The order of tasks on each device.

    Attributes:
        name: one of ``NAMES``.
        num_microbatches: parts of a global batch.
        device_of: chunk -> device. Chunks are numbered in the order of the model.
        orders: device -> its tasks, one after the other.
        whole: chunks that take a batch whole, since statistics of all of it are taken in them.
    """

    name: str
    num_microbatches: int
    device_of: tuple[int, ...]
    orders: tuple[tuple[Task, ...], ...]
    whole: frozenset[int] = frozenset()

    @property
    def num_devices(self) -> int:
        return len(self.orders)

    @property
    def num_chunks(self) -> int:
        return len(self.device_of)

    def timeline(self, forward_costs: Sequence[float] | None = None) -> tuple[Slot, ...]:
        """Returns all tasks in the order of their start, each begun as early as it can be.

        Args:
            forward_costs: chunk -> cost of one microbatch forward; a backward pass costs twice as
                much. All chunks cost 1 when None.
        """
        costs = [
            cost * self._microbatches_at_once(chunk)
            for chunk, cost in enumerate(forward_costs or [1.0] * self.num_chunks)
        ]
        ends: dict[Task, float] = {}
        position = [0] * self.num_devices
        free_at = [0.0] * self.num_devices
        slots = []
        while any(p < len(order) for p, order in zip(position, self.orders, strict=True)):
            moved = False
            for device, order in enumerate(self.orders):
                while position[device] < len(order):
                    task = order[position[device]]
                    needs = self._needs(task)
                    if any(need not in ends for need in needs):
                        break
                    start = max([free_at[device], *(ends[need] for need in needs)])
                    cost = costs[task.chunk] * (1.0 if task.is_forward else _BACKWARD_OVER_FORWARD)
                    slots.append(Slot(task, device, start, start + cost))
                    ends[task] = free_at[device] = start + cost
                    position[device] += 1
                    moved = True
            assert moved, f"schedule {self.name} waits for itself"
        return tuple(sorted(slots, key=lambda slot: (slot.start, slot.end, slot.device)))

    def _needs(self, task: Task) -> list[Task]:
        """Returns the tasks whose results ``task`` reads."""
        chunk = task.chunk
        if task.is_forward:
            return [] if chunk == 0 else self._parts_for(task, chunk - 1)
        if chunk == self.num_chunks - 1:
            return [Task(True, task.microbatch, chunk)]
        return self._parts_for(task, chunk + 1)

    def _parts_for(self, task: Task, chunk: int) -> list[Task]:
        """Returns the tasks of a neighbouring ``chunk`` that ``task`` waits for."""
        if chunk in self.whole:
            needed = [WHOLE]
        elif task.microbatch == WHOLE:
            needed = list(range(self.num_microbatches))
        else:
            needed = [task.microbatch]
        return [Task(task.is_forward, microbatch, chunk) for microbatch in needed]

    def _microbatches_at_once(self, chunk: int) -> int:
        return self.num_microbatches if chunk in self.whole else 1

    def bubble_fraction(self, forward_costs: Sequence[float] | None = None) -> float:
        """Returns the part of the devices' time that they wait, in [0, 1)."""
        slots = self.timeline(forward_costs)
        makespan = max(slot.end for slot in slots)
        busy = sum(slot.end - slot.start for slot in slots)
        return 1.0 - busy / (makespan * self.num_devices)

    def most_in_flight(self, device: int) -> int:
        """Returns the most (microbatch, chunk) whose activations a device keeps at one time."""
        most = now = 0
        for task in self.orders[device]:
            kept = self._microbatches_at_once(task.chunk)
            now += kept if task.is_forward else -kept
            most = max(most, now)
        return most


def make(
    name: str, *, stages: int, microbatches: int, chunks_per_stage: int | None = None
) -> Schedule:
    """Returns the schedule called ``name``.

    Args:
        stages: devices.
        microbatches: parts of a global batch.
        chunks_per_stage: for "interleaved", the chunks of the model on each device; 2 when None.

    Raises:
        OptionError: the name is unknown, or the numbers do not fit it.
    """
    check(name, stages=stages, microbatches=microbatches, chunks_per_stage=chunks_per_stage)
    if name == "gpipe":
        return gpipe(tuple(range(stages)), microbatches)
    if name == "1f1b":
        return one_forward_one_backward(stages, microbatches)
    return interleaved(stages, microbatches, chunks_per_stage or 2)


def check(name: str, *, stages: int, microbatches: int, chunks_per_stage: int | None) -> None:
    """Checks a schedule. Raises OptionError: there is no such one, or the numbers do not fit it."""
    if name not in NAMES:
        raise unknown_choice("schedule", name, NAMES)
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        check_count(what, number)
    if name != "interleaved":
        if chunks_per_stage is not None:
            raise OptionError(
                "chunks_per_stage must go with schedule='interleaved'",
                received=f"schedule={name!r}",
                mend="Leave chunks_per_stage out, or choose schedule='interleaved'",
            )
        return
    if chunks_per_stage is not None and (
        not isinstance(chunks_per_stage, int) or chunks_per_stage < 2
    ):
        raise OptionError(
            "chunks_per_stage must be a whole number of at least 2",
            received=repr(chunks_per_stage),
            mend="Choose schedule='1f1b' for one chunk for each stage",
        )
    if microbatches % stages:
        raise OptionError(
            "microbatches of schedule='interleaved' must be a multiple of stages",
            received=f"stages={stages}, microbatches={microbatches}",
            mend=f"Choose microbatches={-(-microbatches // stages) * stages}, or schedule='1f1b'",
        )


def gpipe(
    device_of: tuple[int, ...], microbatches: int, whole: frozenset[int] = frozenset()
) -> Schedule:
    """All microbatches forward, then all backward; several chunks may follow on one device."""
    orders = []
    for device in range(max(device_of) + 1):
        own = [chunk for chunk, of in enumerate(device_of) if of == device]
        orders.append(
            tuple(
                Task(is_forward, microbatch, chunk)
                for is_forward, chunks in ((True, own), (False, own[::-1]))
                for chunk in chunks
                for microbatch in ([WHOLE] if chunk in whole else range(microbatches))
            )
        )
    return Schedule("gpipe", microbatches, device_of, tuple(orders), whole)


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """After a warm-up each stage goes back once for each step forward, and so keeps little."""
    orders = []
    for stage in range(stages):
        warmup = min(microbatches, stages - 1 - stage)
        forward = [Task(True, microbatch, stage) for microbatch in range(microbatches)]
        backward = [Task(False, microbatch, stage) for microbatch in range(microbatches)]
        orders.append(_alternate(forward, backward, warmup))
    return Schedule("1f1b", microbatches, tuple(range(stages)), tuple(orders))


def interleaved(stages: int, microbatches: int, chunks_per_stage: int) -> Schedule:
    """1F1B with several chunks of the model on each device: a bubble as many times smaller."""
    assert microbatches % stages == 0, "check() comes first"
    total, round_size = microbatches * chunks_per_stage, stages * chunks_per_stage
    orders = []
    for device in range(stages):

        def task(number: int, is_forward: bool, device: int = device) -> Task:
            turn = number % round_size // stages
            if not is_forward:
                turn = chunks_per_stage - 1 - turn
            microbatch = number // round_size * stages + number % stages
            return Task(is_forward, microbatch, turn * stages + device)

        warmup = (stages - device - 1) * 2 + (chunks_per_stage - 1) * stages
        forward = [task(number, True) for number in range(total)]
        backward = [task(number, False) for number in range(total)]
        orders.append(_alternate(forward, backward, min(warmup, total)))
    device_of = tuple(chunk % stages for chunk in range(round_size))
    return Schedule("interleaved", microbatches, device_of, tuple(orders))


def _alternate(forward: list[Task], backward: list[Task], warmup: int) -> tuple[Task, ...]:
    order = forward[:warmup]
    for step, done in enumerate(backward):
        order += [*forward[warmup + step : warmup + step + 1], done]
    return tuple(order)


def theoretical_bubble(
    name: str, *, stages: int, microbatches: int, chunks_per_stage: int | None = None
) -> float:
    """Returns the bubble fraction of equal stages by the papers' formula.

    The bubble takes (S - 1) / (V M) of the busy time, with S stages, M microbatches and V chunks
    on each stage: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2.
    """
    chunks = (chunks_per_stage or 2) if name == "interleaved" else 1
    return (stages - 1) / (chunks * microbatches + stages - 1)
