"""The asynchronous steps of a fit: the chief reads, workers compute, parameter servers update."""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.compat import uses_keras_3
from tfdist.errors import LaunchError
from tfdist.keras import step_context
from tfdist.keras.layers import replaced
from tfdist.strategies.parameter_server.connections import Watch
from tfdist.strategies.parameter_server.refusals import refuse_model
from tfdist.strategies.parameter_server.twin import Twin
from tfdist.strategies.single import Alone
from tfdist.training.engine.binding import Binding, Engine, Saving
from tfdist.training.engine.metrics import state_of
from tfdist.training.layers.autograph import with_autograph
from tfdist.training.layers.randomness import Draws
from tfdist.training.memory.emptied_variable import listen
from tfdist.training.steps.custom_steps import meeting

# Each worker computes one step and finds the next one waiting.
_STEPS_PER_WORKER = 2
_READERS = (
    *("evaluate", "predict", "test_on_batch", "predict_on_batch"),
    *("get_weights", "save", "save_weights", "export"),
)
# What TensorFlow says where a task is gone; it says the same of other causes.
_MAYBE_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
# A fit too: whatever has changed the chief's weights before it, it begins with them.
_WRITERS = ("set_weights", "load_weights", "reset_metrics", "fit", "train_on_batch")


class _Newer(enum.Enum):
    """Who has values that the other has not."""

    CHIEF = enum.auto()
    SERVERS = enum.auto()
    NEITHER = enum.auto()


class AsynchronousSteps:
    """The train function of the chief's model: a call hands a batch to a free worker.

    The batch travels with the step, so that each is computed once, whichever worker takes it, and
    again elsewhere if that worker is lost. At most two steps for each worker are on their way, and
    they are waited for in order: no step begins before the one that far behind it has ended.

    Whatever reads the chief's model (an epoch's end, a checkpoint, a file, a layer that is called)
    waits for all of them first, and brings the values over; what is written goes to the servers.

    Args:
        num_workers: that compute.
    """

    def __init__(
        self, model: tf.keras.Model, twin: Twin, coordinator: Any, watch: Watch, num_workers: int
    ):
        self._model = model
        self._twin = twin
        self._coordinator = coordinator
        self._watch = watch
        self._most = _STEPS_PER_WORKER * num_workers
        self._idle = Idle(num_workers)
        #: Is told how long workers waited for the batch of a step; see ``Collective.tell_waits``.
        self.note_wait: Callable[[float], None] = lambda _: None
        self._newer = _Newer.CHIEF
        #: Steps on their way: result, number in the training, and whether it is traced for it.
        self._flying: deque[tuple[Future, int, bool]] = deque()
        self._logs: dict[str, Any] = {}
        self._step: Any = None
        self._metric_state: list[np.ndarray] = []
        self._binding: Binding | None = None
        #: Variables of the chief that tell who reads and writes them, by reference.
        self._heard: dict[Any, tf.Variable] = {}
        self._is_carrying = False  # Values, between the chief and the servers.

    def heard_by(self, binding: Binding) -> None:
        """Hears of whatever reads and writes the chief's variables, once there are all of them."""
        self._binding = binding

    def engine(self) -> Engine:
        """Returns what makes the model train so, and read what is trained."""
        return Engine(
            within=(
                (_READERS, self._after_settling),
                (_WRITERS, functools.partial(self._after_settling, writes=True)),
            ),
            programs={
                **keras.steps.trained_by(self._model, self._train),
                **keras.steps.on_results(self._shown_by(keras.steps.showing(self._model))),
            },
            saving=Saving(written=self._settled),
        )

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        self.settle()
        yield

    def _after_settling(self, method: Callable, *, writes: bool = False) -> Callable:
        @functools.wraps(method)
        def settled(*args: Any, **options: Any) -> Any:
            self.settle()
            if writes:
                self._newer = _Newer.CHIEF
            return method(*args, **options)

        return settled

    # Keras' loop calls this ---------------------------------------------------------------------

    def _train(self, iterator: Any) -> dict[str, Any]:
        """Takes as many steps as Keras counts in one execution; returns the newest results."""
        with self._tidied():
            for _ in range(keras.steps.steps_per_execution(self._model)):
                self._begin(self._next(iterator))
        return self._logs

    def _shown_by(self, known: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``known`` of the results of the last step, which may be on its way by then."""

        def shown(logs: Any) -> Any:
            if self._newer is _Newer.SERVERS:
                self.settle()
                logs = tf.nest.map_structure(keras.tensors.as_number, self._logs)
            return known(logs)

        return shown

    def _next(self, iterator: Any) -> Any:
        # While a batch is read, the steps on their way go on: only who has none waits for it.
        idle_before = self._idle.seconds()
        batch = next(iterator)
        self.note_wait(self._idle.seconds() - idle_before)
        return batch

    def _begin(self, batch: Any) -> None:
        optimizer = self._model.optimizer
        self._watch.check()
        if not self._twin.is_ready():
            self._prepare(batch)
        begins = self._newer is _Newer.CHIEF  # A fit, whose data may have other parts.
        if begins:
            self._carry(self._twin.push, "sending the weights to the parameter servers")
            self._newer = _Newer.NEITHER
            self._logs = {}  # An epoch's results are its own.
        keras.rates.evaluate_schedule(optimizer)
        number = int(optimizer.iterations) + 1
        while len(self._flying) >= self._most:
            self._land()
        is_first = self._step.experimental_get_tracing_count() == 0
        arguments = (batch, tf.identity(optimizer.learning_rate))

        def schedule() -> Any:
            if begins and keras.losses.COUNTS_KNOWN_ROWS:
                specs = tf.nest.map_structure(_of_any_rows, arguments)
                with self._coordinator.strategy.scope():
                    self._step.get_concrete_function(*specs)  # As Keras' loop knows batches.
            return self._coordinator.schedule(self._step, args=arguments)

        remote = self._watch.call(schedule, f"the start of step {number}", is_first=is_first)
        optimizer.iterations.assign_add(1)
        self._newer = _Newer.SERVERS
        self._idle.begin()
        fetched = self._watch.fetch(remote.fetch)
        fetched.add_done_callback(lambda _: self._idle.end())
        self._flying.append((fetched, number, is_first))
        while self._flying and (not self._logs or self._flying[0][0].done()):
            self._land()

    def _land(self) -> None:
        fetched, number, is_first = self._flying.popleft()
        try:
            logs = self._watch.result(fetched, f"step {number}", is_first=is_first)
        except tf.errors.UnavailableError as error:
            if self._watch.explain(error) is not None or not self._watch.has_lost_a_worker:
                raise
            return  # The step is taken: its results went with the worker that took it.
        names = self._twin.metric_names
        self._logs.update({names.get(name, name): value for name, value in logs.items()})

    def _prepare(self, batch: Any) -> None:
        refuse_model(self._model)
        self.settle()  # It was compiled anew within an epoch.
        # Like all of the twin, in another thread: here is the scope of the chief's own strategy.
        self._carry(lambda: self._twin.prepare(batch), "making the optimizer's variables")
        self._newer = _Newer.CHIEF
        for whole in self._twin.wholes():
            variable = keras.tensors.uncast(whole)
            if variable.ref() not in self._heard:
                self._heard[variable.ref()] = variable
                listen(
                    self._binding,
                    variable,
                    before_read=self._before_read,
                    after_write=self._after_write,
                )
        twin, engine = self._twin.twin, self._coordinator.strategy

        train_step = meeting(with_autograph(twin.train_step))
        if uses_keras_3():
            train_step = Draws(self._binding).told()(train_step)
        keras.losses.ask_whether_undivided()

        def run(batch: Any, learning_rate: tf.Tensor) -> Any:
            twin.optimizer.learning_rate.assign(learning_rate)
            # A worker has the whole batch.
            with step_context.within(part=1.0), keras.steps.adding_at_once(twin):
                return train_step(batch)

        @tf.function(reduce_retracing=True)
        def step(batch: Any, learning_rate: tf.Tensor) -> Any:
            return engine.run(run, args=(batch, learning_rate))

        self._step = step

    # Bringing the values over -------------------------------------------------------------------

    def _carry(self, values: Callable[[], None], what: str) -> None:
        with replaced(self, _is_carrying=True):
            self._watch.call(values, what)

    def _before_read(self) -> None:
        if not self._is_carrying:
            with tf.init_scope():  # A function may be traced.
                self.settle()

    def _after_write(self) -> None:
        if not self._is_carrying:
            self._newer = _Newer.CHIEF

    def settle(self) -> None:
        """Waits for all steps on their way, and gives the chief what they have made."""
        if self._newer is not _Newer.SERVERS:
            return
        with self._tidied():
            while self._flying:
                self._land()
            self._carry(self._twin.pull, "reading the weights of the parameter servers")
        self._newer = _Newer.NEITHER
        self._metric_state = [variable.numpy() for variable in state_of(self._model)]

    def finish(self) -> None:
        """Brings over what can still be read, before the cluster ends."""
        if self._watch.broken is None:
            with contextlib.suppress(tf.errors.OpError, LaunchError):
                self.settle()

    def metric_state(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the state of the metrics of this epoch; ``values`` is the chief's own."""
        self.settle()
        return self._metric_state if self._newer is _Newer.NEITHER else values

    @contextlib.contextmanager
    def _tidied(self) -> Iterator[None]:
        """Leaves nothing under way when a step fails, and explains why it did."""
        try:
            yield
        except LaunchError:
            self._give_up()
            raise
        except tf.errors.OpError as error:
            lost = self._watch.explain(error) if isinstance(error, _MAYBE_LOST) else None
            if lost is not None:
                self._give_up()
                raise lost from error
            self._flying.clear()
            with contextlib.suppress(tf.errors.OpError):
                self._watch.call(self._coordinator.join, "the end of the steps under way")
            raise

    def _give_up(self) -> None:
        """The cluster is gone; what the chief has read last is all there is."""
        self._flying.clear()
        self._newer = _Newer.NEITHER


def _of_any_rows(value: Any) -> tf.TypeSpec:
    spec = tf.type_spec_from_value(value)
    has_rows = isinstance(spec, tf.TensorSpec) and spec.shape.rank
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if has_rows else spec


class Servers(Alone):
    """The ``Collective`` of the chief, which is alone in its program: each global batch goes to one
    worker, so nothing in a step is shared. The steps watch themselves, and explain their errors."""

    steps_await_batches = False

    def __init__(self, steps: AsynchronousSteps):
        self._steps = steps

    def tell_waits(self, note: Callable[[float], None]) -> None:
        self._steps.note_wait = note

    def merge(self, values: list[Any]) -> list[Any]:
        return self._steps.metric_state(values)


class Idle:
    """Adds up the time in which workers have no step.

    Args:
        num_workers: that take steps; of more steps than that, some wait for a worker.
        clock: tells the seconds.
    """

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.monotonic):
        self._num_workers = num_workers
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = 0
        self._seconds = 0.0
        self._counted_at = clock()

    def begin(self) -> None:
        """Tells that a step is on its way."""
        self._count(1)

    def end(self) -> None:
        """Tells that a step has ended; from any thread."""
        self._count(-1)

    def seconds(self) -> float:
        """Returns the seconds that a worker had no step until now, on average of all workers."""
        self._count(0)
        return self._seconds

    def _count(self, more_steps: int) -> None:
        with self._lock:
            now = self._clock()
            idle = max(0, self._num_workers - self._steps)
            self._seconds += (now - self._counted_at) * idle / self._num_workers
            self._counted_at = now
            self._steps += more_steps
