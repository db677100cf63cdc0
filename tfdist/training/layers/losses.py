"""What a step owns of a loss.

A replica, or a microbatch of one, computes the loss of its own rows as one device would: a mean
over rows plus terms of weights. The step multiplies it by its rows over those of the global batch
and adds up. The factors of a step add up to 1, so what depends on weights alone counts once, and
the sum is the loss of one device. That holds for every loss of that form, a user's own
``compute_loss`` included.

Nobody else may scale. So Keras' own division by its count of replicas is undone where it happens
(``AsOnOneDevice``, in Keras 3 ``keras.losses.ask_whether_undivided``), and a metric that is told
one number a batch, as in ``compute_loss`` or ``add_metric``, counts it with the same factor
(``counted_as``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.compat import is_keras
from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.collective import Collective
from tfdist.training.layers.autograph import with_autograph
from tfdist.training.layers.replica_step import running_step

_MEAN_OF_WEIGHTED = "mean_with_sample_weight"  # Of Keras 3.


class AsOnOneDevice:
    """The compiled loss of a model, which returns the mean over the rows that it is given.

    Keras divides that by its count of replicas, so that sums over replicas are right; a loss that
    ``compute_loss`` adds to it is not divided, and the two would not fit.
    """

    def __init__(self, whole: Any):
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # A copy asks before it has one.
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        loss = self.whole(*args, **options)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return loss if loss is None or replicas == 1 else loss * replicas


def as_on_one_device(binding: Binding) -> None:
    """Lets losses and metrics of a model know what a step owns; once for each compilation."""
    model = binding.model
    for name, whole in keras.losses.divided_by_replicas(model).items():
        if not isinstance(whole, AsOnOneDevice):
            binding.put(model, {name: AsOnOneDevice(whole)})
        # What layers add is told by itself where no loss is compiled.
        binding.around(keras.losses.loss_shown(model), "update_state", _count_numbers)
    compiled = {id(metric) for metric in keras.losses.row_counters(model)}
    for metric in model.metrics:
        mean = tf.keras.metrics.Mean  # Those of its kinds that compare rows update otherwise.
        is_told_numbers = (
            isinstance(metric, mean) and type(metric).update_state is mean.update_state
        )
        if id(metric) not in compiled:
            count = _count_numbers if is_told_numbers else _count_true_rows
            binding.around(metric, "update_state", count)
    for metric in keras.losses.compiled_metrics(model):
        if isinstance(metric, tf.keras.metrics.MeanMetricWrapper):
            binding.around(metric, "update_state", _count_number)


def _count_numbers(
    metric: tf.keras.metrics.Mean, count: Callable, values: Any, sample_weight: Any = None
) -> Any:
    part, step = step_context.current().part, running_step()
    if step is not None and step.loss_weights.get(id(metric)) is not None:
        return count(values, sample_weight=step.loss_weights[id(metric)])
    values = tf.convert_to_tensor(values)
    if part is None or sample_weight is not None or values.shape.rank is None:
        return count(values, sample_weight=sample_weight)
    # One number is that of the rows; of several, those of a row of padding count nothing.
    is_real = tf.cast(part > 0, values.dtype)
    weight = part if values.shape.rank == 0 else tf.ones_like(values) * is_real
    # Of no rows, a mean may be NaN.
    return count(tf.where(part > 0, values, tf.zeros_like(values)), sample_weight=weight)


def _count_true_rows(metric: Any, count: Callable, *args: Any, **options: Any) -> Any:
    """Counts what a layer tells, but of a row of padding, which a replica without rows has."""
    part = step_context.current().part
    if part is None:
        return count(*args, **options)
    with unmoved_by_padding(lambda: keras.tensors.all_raw(metric.variables), part > 0):
        return count(*args, **options)


@contextlib.contextmanager
def unmoved_by_padding(
    variables: Callable[[], list[tf.Variable]], has_rows: tf.Tensor
) -> Iterator[None]:
    """Has what is counted meanwhile count nothing where a replica has but a row of padding.

    Args:
        variables: returns what counts: what is made meanwhile begins with zeros.
        has_rows: whether the replica has true rows, bool [].
    """
    before = {id(variable): tf.identity(variable) for variable in variables()}
    yield
    for variable in variables():
        known = before.get(id(variable), tf.zeros_like(variable))
        variable.assign(tf.where(has_rows, tf.convert_to_tensor(variable), known))


def _count_number(
    metric: tf.keras.metrics.MeanMetricWrapper,
    count: Callable,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    """Counts by its rows what a function returns as one number a batch, as a mean.

    A user's own may; Keras' own do of outputs of rank 1.
    """
    part = step_context.current().part
    may_be_one = y_pred.shape.rank == 1 or not is_keras_own(metric)
    if part is not None and sample_weight is None and may_be_one:
        told = keras.losses.told_values(metric, y_true, y_pred)
        value = with_autograph(keras.losses.values_of(metric))(*told)
        sample_weight = part if tf.convert_to_tensor(value).shape.rank == 0 else None
    return count(y_true, y_pred, sample_weight=sample_weight)


def part_of(share: tf.Tensor) -> tf.Tensor:
    """Returns the part of the global batch that a share is, float []."""
    dtype = tf.as_dtype(tf.keras.backend.floatx())
    # A batch may have no row at all, as the last one of a Sequence.
    return tf.math.divide_no_nan(tf.cast(share[0], dtype), tf.cast(share[1], dtype))


def uncounted(collective: Collective) -> float:
    """Returns what a replica's part of a loss or gradient is multiplied with for the engine's sum.

    Keras adds up the gradients of the replicas that it counts; an engine takes the mean of those
    that it does not.
    """
    return collective.num_replicas / tf.distribute.get_strategy().num_replicas_in_sync


def counted_as(part: tf.Tensor) -> contextlib.AbstractContextManager:
    """Returns what encloses the work of one replica, whose losses are means of its own rows.

    Metrics count one number of these rows as ``part``, float [].
    """
    keras.losses.ask_whether_undivided()
    return step_context.within(part=part)


def has_own_compute_loss(model: tf.keras.Model) -> bool:
    return bool(keras.layers.written_anew(model, "compute_loss"))


def uses_compiled_loss(model: tf.keras.Model) -> bool:
    """Whether ``compute_loss`` comes to the compiled loss, so that Keras shows that one as "loss".

    It has to be known before the first step, which is to find all variables made.
    """
    if not has_own_compute_loss(model):
        return True
    return any(
        "compiled_loss" in names or (function == "compute_loss" and function in names)
        for function, names in own_functions(model, tf.keras.Model).items()
    )


def own_functions(instance: Any, base: type) -> dict[str, set[str]]:
    """Returns the methods that the class of ``instance`` has beside ``base`` -> names they use."""
    found: dict[str, set[str]] = {}
    for kind in type(instance).__mro__:
        if kind is base:
            break
        for name, member in vars(kind).items():
            if isinstance(member, FunctionType):
                found[name] = found.get(name, set()) | _names_in(member.__code__)
    return found


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(item) for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*inner)


def is_sum(model: tf.keras.Model) -> bool:
    """Whether the compiled losses are sums over rows (True) or means (False).

    Raises:
        ModelError: for a loss without reduction, for sums and means in one model, and for sums
            beside a compute_loss of the user's own.
    """
    kinds = {
        str(getattr(loss, "reduction", tf.keras.losses.Reduction.AUTO))
        for loss in tf.nest.flatten(keras.losses.compiled_losses(model))
        if loss is not None
    }
    if {tf.keras.losses.Reduction.NONE, "None"} & kinds:  # Keras 3 takes both.
        raise ModelError(
            "a compiled loss must reduce over the rows of a batch",
            received="a loss with reduction='none'",
            mend="Compile with reduction='sum_over_batch_size' or 'sum'",
        )
    if _MEAN_OF_WEIGHTED in kinds:
        raise ModelError(
            "a compiled loss must be a mean over the rows of a batch, or a sum, to be divided",
            received=f"a loss with reduction='{_MEAN_OF_WEIGHTED}'",
            mend="Compile with reduction='sum_over_batch_size', or use strategy 'single'",
        )
    sums = tf.keras.losses.Reduction.SUM in kinds
    if sums and len(kinds) > 1:
        raise ModelError(
            "the losses of one model must all be sums or all be means",
            received=", ".join(sorted(kinds)),
            mend="Compile all losses with the same reduction",
        )
    if sums and has_own_compute_loss(model):
        raise ModelError(
            "a compute_loss of your own must be a mean over rows, for the shares of a batch are "
            "weighted by their rows",
            received="a compiled loss with reduction='sum' beside it",
            mend="Compile with reduction='sum_over_batch_size'",
        )
    return sums


def weights_of_sum(model: tf.keras.Model, y_pred: Any, sample_weight: Any, share: tf.Tensor) -> Any:
    """Returns weights that turn the sum of a share into the mean share of the whole sum.

    Sums and means then go the same way from here on, and Keras reports the loss of one device.
    """
    rows, of = tf.cast(share[0], tf.float32), tf.cast(share[1], tf.float32)
    factor = tf.math.divide_no_nan(of, rows * keras.losses.loss_divisor())
    if isinstance(sample_weight, Mapping):  # By name, perhaps for some outputs only.
        sample_weight = {**dict.fromkeys(names_of_outputs(model, y_pred)), **sample_weight}
    return tf.nest.map_structure(
        lambda weight: factor if weight is None else tf.cast(weight, tf.float32) * factor,
        sample_weight,
    )


def is_keras_own(loss: Any) -> bool:
    """Whether a compiled loss is one of Keras' own: a name, a function or an object."""
    loss = keras.losses.function_of(loss)
    module = getattr(loss, "__module__", None) or type(loss).__module__
    return is_keras(module)


def by_output(model: tf.keras.Model, y_pred: Any) -> list[Any]:
    """Returns the compiled loss of each output, None where it has none, as tf.nest lays them flat.

    Args:
        y_pred: outputs, real or symbolic ones.
    """
    compiled, count = keras.losses.compiled_losses(model), len(tf.nest.flatten(y_pred))
    if isinstance(compiled, Mapping):
        return [compiled.get(name) for name in names_of_outputs(model, y_pred)]
    if not isinstance(compiled, (list, tuple)):
        return [compiled] * count
    return [*compiled, *[None] * count][:count]


def to_outputs(model: tf.keras.Model, structure: Any, y_pred: Any) -> list[Any]:
    """Returns the labels or weights of each output, as tf.nest lays them flat, as Keras finds them.

    One tensor is that of all outputs; of names, those that are not there are None.
    """
    if isinstance(structure, Mapping):
        structure = [structure.get(name) for name in names_of_outputs(model, y_pred)]
    if tf.nest.is_nested(structure):
        return tf.nest.flatten(structure)
    return [structure] * len(tf.nest.flatten(y_pred))


def names_of_outputs(model: tf.keras.Model, y_pred: Any) -> list[str]:
    """Returns what Keras calls the outputs, as tf.nest lays them flat."""
    if isinstance(y_pred, Mapping):
        return sorted(y_pred)
    numbers = range(1, len(tf.nest.flatten(y_pred)) + 1)  # Of a class of its own, from 1 on.
    return getattr(model, "output_names", None) or [f"output_{number}" for number in numbers]


def ignored_class(loss: Any) -> int | None:
    """Returns the class whose labels a loss of Keras' own leaves out of its mean."""
    if not isinstance(loss, tf.keras.losses.Loss) or not is_keras_own(loss):
        return None
    return loss.get_config().get("ignore_class")


def name_of(loss: Any) -> str:
    """Returns what a user calls a compiled loss: a name, a function or an object."""
    if isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", None) or getattr(loss, "name", None) or type(loss).__name__
