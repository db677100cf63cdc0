"""The functions that Keras' loops call for each step, and what they read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import is_keras, keras_source
from tfdist.errors import OptionError
from tfdist.keras.layers import replaced
from tfdist.keras.optimizers import inner_of
from tfdist.keras.tensors import raw
from tfdist.keras.trackables import optimizers_of
from tfdist.keras.version import IS_KERAS_3

#: Whether a model can be built by its first batch, within a strategy that has taken it before.
CAN_BE_BUILT_LATE = not IS_KERAS_3


def count_step(model: tf.keras.Model, kind: str) -> None:
    """Counts a step as Keras' own do, for callbacks that ask; ``kind``: train, test or predict.

    Keras 3 has no counts.
    """
    if not IS_KERAS_3:
        getattr(model, f"_{kind}_counter").assign_add(1)


def steps_per_execution(model: tf.keras.Model) -> int:
    """Returns how many steps Keras' loop counts for one call of a step function."""
    steps = model.steps_per_execution if IS_KERAS_3 else model._steps_per_execution
    with tf.init_scope():  # Of several workers it is a variable that is no int.
        return 1 if steps is None else int(tf.convert_to_tensor(steps))


def batches_of_execution(model: tf.keras.Model, kind: str, given: Any) -> tuple[int, Iterator[Any]]:
    """Returns how many steps an execution has that Keras' loop gives ``given``, and their batches.

    Keras 3 gives a list of them to a prediction, and, as Keras 2, an iterator to all others.
    """
    if IS_KERAS_3 and kind == "predict":
        return len(given), iter(given)
    return steps_per_execution(model), given


def check_executions(model: tf.keras.Model, steps: int) -> None:
    """Raises:
    OptionError: an execution of several steps would go on into the next epoch, as in Keras 3.
    """
    if IS_KERAS_3 and steps % model.steps_per_execution:
        raise OptionError(
            "steps_per_execution must divide the steps of an epoch with Keras 3, which would take "
            "the rest from the next one",
            received=f"steps_per_execution={model.steps_per_execution} and {steps} steps",
            mend="Compile the model with another number",
        )


def trained_by(model: tf.keras.Model, take: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns what has Keras' fit call ``take`` for each execution."""

    def make_function(force: bool = False) -> Callable[[Any], Any]:
        model.train_function = take  # Where Keras 3 looks for it.
        return take

    return {"make_train_function": make_function}


@contextlib.contextmanager
def adding_at_once(model: tf.keras.Model) -> Iterator[None]:
    """Encloses a step on variables that others move meanwhile: metrics, and the count of steps.

    Keras 3 reads them and writes sums, in which what others have added since would be lost. Here
    they are read first, and what a sum has more than that is added. A metric of the user's own may
    write what is no sum, as a maximum: of those what they add themselves is added.
    """
    if not IS_KERAS_3:
        yield
        return
    metrics = _metrics_within(model.metrics)
    is_sum = {id(variable): _is_sum(metric) for metric in metrics for variable in metric.variables}
    counts = [variable for metric in metrics for variable in metric.variables]
    counts.append(inner_of(model.optimizer)._iterations)
    with contextlib.ExitStack() as read:
        for count in {id(count): count for count in counts}.values():
            held = raw(count)
            if is_sum.get(id(count), True):
                values = {"_value": tf.convert_to_tensor(held), "_direct_assign": _adding(count)}
            else:
                values = {"assign_add": held.assign_add, "assign_sub": held.assign_sub}
            read.enter_context(replaced(count, **values))
        yield


def _is_sum(metric: Any) -> bool:
    """Whether ``metric`` is one of Keras', or made of one whose rows it chooses."""
    own = next(kind for kind in type(metric).__mro__ if is_keras(kind.__module__))
    return own is not tf.keras.metrics.Metric


def _metrics_within(metrics: Sequence[Any]) -> list[Any]:
    """Returns ``metrics``, and in the place of those that consist of others these."""
    found = []
    for metric in metrics:
        found += _metrics_within(metric.metrics) if getattr(metric, "metrics", None) else [metric]
    return found


def _adding(count: Any) -> Callable[[Any], None]:
    held, graph = raw(count), tf.compat.v1.get_default_graph()

    def assign(value: Any) -> None:
        value, before = tf.cast(value, held.dtype), count._value
        if before is held:
            held.assign(value)
            return
        # Infinity stays what it is.
        held.assign_add(tf.where(value == before, tf.zeros_like(value), value - before))
        # What a branch has made is not there beside it.
        count._value = value if tf.compat.v1.get_default_graph() is graph else held

    return assign


def forget_functions(model: tf.keras.Model) -> None:
    """Has Keras trace the steps of ``model`` anew."""
    model.train_function = model.test_function = model.predict_function = None


def forget_last_fit(model: tf.keras.Model) -> None:
    """Has a fit begin where it is told to, and validate on what it is given.

    Keras 3's BackupAndRestore leaves its own place, and a fit of Keras 2 that was broken off its
    validation data.
    """
    if IS_KERAS_3:
        model._initial_epoch = None
    forget_validation(model)


def forget_validation(model: tf.keras.Model) -> None:
    """Has Keras begin the next validation anew: it keeps its data when one was broken off."""
    model._eval_data_handler = None


def training_as_compiled(model: tf.keras.Model) -> contextlib.AbstractContextManager:
    """Has trainable what was so when ``model`` was compiled: this is what Keras 2 trains."""
    if IS_KERAS_3:
        return contextlib.nullcontext()
    return keras_source("engine.training_utils").RespectCompiledTrainableState(model)


def follow_trainable(model: tf.keras.Model) -> None:
    """Has the compiled ``model`` train what is trainable now, as that of Keras 3 always does, not
    what was when it was compiled."""
    if not IS_KERAS_3:
        model._reset_compile_cache()


def trace_step(model: tf.keras.Model, iterator: Any) -> None:
    """Traces the train step of ``model``, which reads nothing; not in eager execution.

    The function of Keras 3 can be called alone, so it is traced apart, where slots are to be made.
    """
    if model.run_eagerly or (IS_KERAS_3 and all(one.built for one in optimizers_of(model))):
        return
    with model.distribute_strategy.scope():
        step = step_function(model, "train")
    if IS_KERAS_3:
        strategy = model.distribute_strategy
        step = tf.function(
            lambda batches: strategy.run(model.train_step, args=(next(batches),)), autograph=False
        )
    step.get_concrete_function(iterator)


def step_function(model: tf.keras.Model, kind: str) -> Callable[[Any], Any]:
    """Returns the function of an iterator that takes a step; ``kind``: train or test.

    Keras 3 returns none where it makes one.
    """
    return getattr(model, f"make_{kind}_function")() or getattr(model, f"{kind}_function")


def reducing_nothing(
    model: tf.keras.Model, strategy: tf.distribute.Strategy, own_rows: Callable[[Any], Any]
) -> dict[str, Any]:
    """Returns what keeps Keras' loops from reducing over workers what only this one needs.

    Results of a step are those of this worker's first replica, and predictions those of its rows.
    Keras 2 would add up the results of all workers; Keras 3 fails where it tries (keras#20585).

    Args:
        strategy: whose scope the model was made in.
        own_rows: what ``strategy.run`` has returned -> the rows of this worker.
    """
    if not IS_KERAS_3:
        return shown_once() | {"make_predict_function": _predictor_2(model, strategy, own_rows)}
    return {
        "make_train_function": _stepper_3(model, strategy, "train"),
        "make_test_function": _stepper_3(model, strategy, "test"),
        "make_predict_function": _predictor_3(model, strategy, own_rows),
    }


def _taken(model: Any, step: Callable[[Any], Any], iterator: Any) -> list[Any]:
    """Takes the steps of an execution; the last execution may find fewer, but not none."""
    found = [step(iterator)]
    for _ in range(steps_per_execution(model) - 1):
        try:
            found.append(step(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return found


def _made_once(model: Any, kind: str, make: Callable[[], Callable]) -> Callable:
    """Returns what Keras has make its function of that kind, unless there is one."""

    def make_function(force: bool = False) -> Callable:
        if force or getattr(model, f"{kind}_function") is None:
            setattr(model, f"{kind}_function", make())
        return getattr(model, f"{kind}_function")

    return make_function


def _joined(found: list[Any]) -> Any:
    return tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *found)


def _predictor_2(model: Any, strategy: Any, own_rows: Callable[[Any], Any]) -> Callable:
    def make() -> Callable:
        def predict(iterator: Any) -> Any:
            def run(data: Any) -> Any:
                outputs = model.predict_step(data)
                count_step(model, "predict")
                return outputs

            outputs = strategy.run(run, args=(next(iterator),))
            return tf.nest.map_structure(own_rows, outputs)

        one = tf.function(predict, reduce_retracing=True)
        return lambda iterator: _joined(_taken(model, one, iterator))

    return _made_once(model, "predict", make)


def _stepper_3(model: Any, strategy: Any, kind: str) -> Callable:
    def make() -> Callable:
        step = getattr(model, f"{kind}_step")

        def take(iterator: Any) -> Any:
            outputs = strategy.run(step, args=(next(iterator),))
            return tf.nest.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], outputs
            )

        take_one = take if model.run_eagerly else tf.function(take, reduce_retracing=True)
        return lambda iterator: _taken(model, take_one, iterator)[-1]

    return _made_once(model, kind, make)


def _predictor_3(model: Any, strategy: Any, own_rows: Callable[[Any], Any]) -> Callable:
    def make() -> Callable:
        def predict(data: Any) -> Any:
            outputs = strategy.run(model.predict_step, args=(data,))
            return tf.nest.map_structure(own_rows, outputs)

        one = predict if model.run_eagerly else tf.function(predict, reduce_retracing=True)
        return lambda batches: _joined([one(batch) for batch in batches])

    return _made_once(model, "predict", make)


def building_nothing_from_data() -> dict[str, Any]:
    """Returns what keeps Keras 3 from reading a batch to build a model made in a strategy's scope.

    It would take the rows of each replica for numbers to be averaged. All is built before.
    """
    if not IS_KERAS_3:
        return {}
    return {"_maybe_symbolic_build": lambda iterator=None, data_batch=None: None}


def called(model: tf.keras.Model, x: Any, *, training: bool) -> Any:
    """Calls ``model`` as Keras' own steps do: that of Keras 3 tells ``training`` to a ``call`` that
    takes it alone, and layers within others are not in training."""
    if IS_KERAS_3 and not model._call_has_training_arg:
        return model(x)
    return model(x, training=training)


def build_all(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> bool:
    """Makes what Keras 3 makes in a first step, but slots: variables of losses and metrics.

    It finds outputs and steps out by itself.

    Args:
        element_spec: of a batch, (x[, y[, sample_weight]]).

    Returns:
        Whether it has; not of Keras 2.
    """
    if not IS_KERAS_3:
        return False
    with replaced(model, optimizer=None):
        model._symbolic_build(data_batch=element_spec)
    return True


def reads_pass(number: Any, *, is_sized: bool) -> Any:
    """Returns whether Keras reads the pass of that number over a dataset that it begins.

    Keras 2 begins one before the first epoch, Keras 3 one after each.

    Args:
        is_sized: whether the dataset tells its steps, and the user does not.
    """
    if not IS_KERAS_3:
        return number > 0
    return number % 2 == 0 if is_sized else number >= 0


def begin_pass(sequence: Any, *, resets: bool) -> None:
    """Calls what Keras 3 does of a PyDataset before a pass over its batches; Keras 2 calls nothing.

    Args:
        resets: whether Keras resets its data before, and so ends an epoch that has not been.
    """
    if hasattr(getattr(tf.keras.utils, "PyDataset", None), "on_epoch_begin"):
        if resets:
            sequence.on_epoch_end()
        sequence.on_epoch_begin()


@contextlib.contextmanager
def told_steps(steps: int | None) -> Iterator[int | None]:
    """Gives what a loop of Keras over distributed batches must be told; None is all of them."""
    if IS_KERAS_3 or steps is not None:
        yield steps
        return
    logger = tf.get_logger()
    logger.addFilter(_is_not_of_endless_steps)
    try:
        yield -1
    finally:
        logger.removeFilter(_is_not_of_endless_steps)


def _is_not_of_endless_steps(record: logging.LogRecord) -> bool:
    return "will run indefinitely" not in record.getMessage()


def repeatable(batches: Any, steps: int) -> Any:
    """Returns ``batches`` such that Keras reads them once more in each validation of a fit.

    Keras 3 goes on with what it had begun unless it knows the number of steps.
    """
    return Batches(batches, steps) if IS_KERAS_3 else batches


class DistributedDataset(tf.distribute.DistributedDataset):
    """Keras 3 knows what it takes as it is by the name of its class and of its module."""

    __module__ = "tensorflow.python.distribute.input_lib"


class Batches(DistributedDataset):
    """Batches that Keras takes as they are, in a strategy's scope too.

    Args:
        batches: what gives them.
        steps: how many there are; None does not tell.
    """

    def __init__(self, batches: Any, steps: int | None = None):
        self._batches = batches
        unknown = tf.data.experimental.UNKNOWN_CARDINALITY
        self.cardinality = np.int64(unknown if steps is None else steps)

    def __iter__(self) -> Any:
        return iter(self._batches)

    @property
    def element_spec(self) -> Any:
        return self._batches.element_spec

    def reduce(self, initial_state: Any, reduce_func: Any) -> Any:
        return self._batches.reduce(initial_state, reduce_func)


def steps_shown() -> tf.keras.callbacks.ProgbarLogger:
    """Returns a bar that counts steps; that of Keras 3 counts nothing else."""
    return tf.keras.callbacks.ProgbarLogger(*(() if IS_KERAS_3 else ("steps",)))


def shown_once() -> dict[str, Any]:
    """Returns what has Keras 2 show the first replica's results of a step, not the sum of all."""
    return {} if IS_KERAS_3 else {"distribute_reduction_method": "first"}


_SHOWN = "_get_metrics_result_or_logs" if IS_KERAS_3 else "_validate_and_get_metrics_result"


def on_results(shown: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns what has Keras' loops show ``shown`` of what a user's own step has returned."""
    return {_SHOWN: shown}


def showing(model: tf.keras.Model) -> Callable[[Any], Any]:
    """Returns what makes of the results of a step of ``model`` what Keras' loops show."""
    return getattr(model, _SHOWN)


def flat(results: Any, opens: Callable[[str, dict[str, Any]], bool]) -> Any:
    """Returns what a step has returned with dicts in it opened, as Keras 3 shows it.

    There all compiled metrics are one, whose result is a dict.

    Args:
        opens: told the name of a dict and the dict, whether it is opened.
    """
    if not IS_KERAS_3 or not isinstance(results, dict):
        return results
    opened: dict[str, Any] = {}
    for name, value in results.items():
        is_opened = isinstance(value, dict) and opens(name, value)
        opened |= flat(value, opens) if is_opened else {name: value}
    return opened


def knowing_results(model: tf.keras.Model) -> dict[str, Any]:
    """Returns what has Keras 3 know the results of metrics in dicts that a step has returned."""
    if not IS_KERAS_3:
        return {}
    known = model._get_metrics_result_or_logs

    def is_of_metric(name: str, value: dict[str, Any]) -> bool:
        return any(metric.name == name for metric in model.metrics)

    return on_results(lambda results: known(flat(results, is_of_metric)))


def resolve_xla(model: tf.keras.Model) -> None:
    """Leaves ``jit_compile`` of ``model`` to what its user wishes.

    Keras 3 chooses XLA by itself on a GPU, and remembers that as if it had been asked for.
    """
    if IS_KERAS_3 and model.jit_compile and model._resolve_auto_jit_compile():
        model.jit_compile = False
