"""The ranks of a Horovod job as a ``Collective``."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import LaunchError
from tfdist.strategies.replica_sum import flat_sum
from tfdist.strategies.step_watch import StepWatch, WatchedSteps
from tfdist.training.engine.elastic_collective import ProcessLost
from tfdist.training.layers.gradients import with_gradient

# For Horovod's own deadline, whose error says more, to come first.
_MARGIN_S = 5.0
# Signs of life within that deadline: the time of a busy machine counts, too.
_TICKS = 5
# What Gloo meets reaches TensorFlow with the line of its source alone, or within Horovod's words.
_SOURCE_LINE = re.compile(r"^\[\S*/gloo/\S*:\d+\] ")
_OF_HOROVOD = re.compile(rf"Horovod|{_SOURCE_LINE.pattern}")


@dataclass
class World:
    """The number of ranks and this one, as Horovod last said: after a loss it no longer does."""

    size: int
    rank: int


class Ring(WatchedSteps):
    """The ranks of a Horovod job: one replica in each process."""

    steps_await_batches = True

    def __init__(
        self, hvd: Any, world: World, *, op: str, compression: str, stall_timeout_s: float
    ):
        self._hvd = hvd
        self._world = world
        self._op = {"average": hvd.Average, "adasum": hvd.Adasum}[op]
        self._compression = getattr(hvd.Compression, compression)
        self._stall_timeout_s = stall_timeout_s

    @property
    def num_replicas(self) -> int:
        return self._world.size

    @property
    def num_processes(self) -> int:
        return self._world.size

    @property
    def process(self) -> int:
        return self._world.rank

    # Ranks find each other's tensors by name. Horovod's own names are made of layer names, which
    # differ as soon as one rank has made a model more than another: so all are given here.

    def sum(self, tensor: Any, name: str) -> Any:
        def all_sum(value: Any, name: str) -> Any:
            return self._hvd.allreduce(value, op=self._hvd.Sum, name=name, ignore_name_scope=True)

        total = all_sum(tf.stop_gradient(tensor), f"tfdist.{name}")
        return with_gradient(total, of=tensor, back=lambda g: all_sum(g, f"tfdist.{name}.gradient"))

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        return [
            None if gradient is None else self._reduce_one(gradient, f"tfdist.{name}.{index}")
            for index, gradient in enumerate(gradients)
        ]

    def _reduce_one(self, gradient: Any, name: str) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            if self._op == self._hvd.Average:
                return self._gather_slices(gradient, name)
            gradient = tf.convert_to_tensor(gradient)
        return self._hvd.allreduce(
            gradient,
            op=self._op,
            compression=self._compression,
            name=name,
            ignore_name_scope=True,
        )

    def _gather_slices(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        """Returns the mean of an embedding's gradients, which are the rows that were looked up."""

        def gather(tensor: tf.Tensor, what: str) -> tf.Tensor:
            return self._hvd.allgather(tensor, name=f"{name}.{what}", ignore_name_scope=True)

        values = gather(slices.values, "values") / self.num_replicas
        return tf.IndexedSlices(values, gather(slices.indices, "indices"), slices.dense_shape)

    def reduce_scatter(self, rows: Any, name: str) -> Any:
        row = self._hvd.reducescatter(
            rows,
            op=self._op,
            compression=self._compression,
            name=f"tfdist.{name}",
            ignore_name_scope=True,
        )
        return tf.reshape(row, [-1])

    def all_gather(self, row: Any, name: str) -> Any:
        return self._hvd.allgather(row[None], name=f"tfdist.{name}", ignore_name_scope=True)

    def explain(self, error: Exception) -> Exception | None:
        lines = [line.strip() for line in str(error).splitlines() if _OF_HOROVOD.search(line)]
        if not lines:
            return None
        said = _SOURCE_LINE.sub("Gloo: ", lines[-1])
        # Horovod's word for a rank that has gone; ranks that disagree get another kind of error.
        kind = ProcessLost if isinstance(error, tf.errors.UnknownError) else LaunchError
        return kind(
            "all ranks must take every step together",
            received=f"rank {self.process} left waiting: {said}",
            mend="Look for the first rank that failed or stopped; its last lines name the cause",
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[StepWatch]]:
        before = self._watch
        try:
            with super().watched() as watch:
                yield watch
        finally:
            self._watch = before  # A callback may go on after the error of a loop of its own.

    def new_watch(self) -> StepWatch:
        """Horovod's own stall deadline is blind to a process that hangs as a whole: MPI waits."""
        return StepWatch(
            timeout_s=self._stall_timeout_s,
            first_timeout_s=2 * self._stall_timeout_s + _MARGIN_S,
            on_stall=self._give_up,
            margin_s=_MARGIN_S,
        )

    @contextlib.contextmanager
    def apart(self, place: str, more_s: float = 0.0) -> Iterator[None]:
        """See ``Collective``. Horovod's own deadline, which is of steps, sees ranks that tick."""
        if self.num_processes == 1:
            yield
            return
        # The user may have set another one; 0 is none.
        own = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0))
        deadline = min(own or self._stall_timeout_s, self._stall_timeout_s)
        ticks = Ticks(self._hvd, deadline / _TICKS)
        with ticks.running():
            yield
        with self.waiting(place, more_s):
            ticks.until_all_are_done()

    def _give_up(self, place: str, limit_s: float) -> None:
        text = (
            "tfdist: all ranks must take every step together, but found "
            f"{self.told_wait(place, limit_s)}. Look for the first rank that failed or stopped"
        )
        print(text, file=sys.stderr, flush=True)
        os._exit(1)  # Nothing else ends a wait within MPI.

    def merge(self, values: list[Any]) -> list[Any]:
        if self.num_processes == 1:
            return values

        def total_of(flat: np.ndarray) -> np.ndarray:
            return self._hvd.allreduce(flat, op=self._hvd.Sum, name="tfdist.metrics").numpy()

        return flat_sum(values, total_of)

    def gather(self, value: Any) -> list[Any]:
        if self.num_processes == 1:
            return [value]
        return self._hvd.allgather_object(value, name="tfdist.gather")

    def broadcast(self, variables: Sequence[Any]) -> None:
        if self.num_processes > 1:
            for number, variable in enumerate(variables):
                name = f"tfdist.broadcast.{number}"
                value = self._hvd.broadcast(variable, 0, name=name, ignore_name_scope=True)
                variable.assign(value)


class Ticks:
    """Signs of life of ranks that wait for one which is busy alone: sums, which all make together.

    Horovod ends a job in which one rank has asked for a sum and another one has not, within a
    deadline that is of steps. A rank that writes a file takes longer, and is well. So a thread of
    each rank asks for sums meanwhile, one after the other, of the ranks that are still busy: the
    last one is zero.

    Args:
        hvd: Horovod, which runs.
        interval_s: a rank that is busy gives a sign so often.
    """

    def __init__(self, hvd: Any, interval_s: float):
        self._hvd = hvd
        self._interval_s = interval_s
        self._is_done = threading.Event()
        self._is_lost = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Encloses what this rank does by itself."""
        self._thread.start()
        try:
            yield
        except BaseException:
            self._is_lost = True  # Others wait for it until their deadline, as for any rank.
            raise
        finally:
            self._is_done.set()

    def until_all_are_done(self) -> None:
        """Waits for the other ranks.

        Raises:
            Exception: of Horovod, where a rank was lost meanwhile.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        num_busy = 1
        try:
            while num_busy and not self._is_lost:
                self._is_done.wait(self._interval_s)
                num_busy = self._sum(0 if self._is_done.is_set() else 1)
        except Exception as error:  # Whatever Horovod says of a rank that was lost.
            self._error = error

    def _sum(self, own: int) -> int:
        with tf.device("CPU:0"):
            told = tf.constant(own, tf.int32)
            return int(self._hvd.allreduce(told, op=self._hvd.Sum, name="tfdist.ticks"))
