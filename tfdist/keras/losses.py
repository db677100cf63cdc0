"""Compiled losses and metrics, and how Keras counts replicas in them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat import keras_source
from tfdist.keras import step_context
from tfdist.keras.layers import replaced
from tfdist.keras.version import IS_KERAS_3

#: Whether what is shown of an output counts a batch by its rows where their number is known.
COUNTS_KNOWN_ROWS = IS_KERAS_3
#: Whether the loss of a batch of which a mask leaves nothing is NaN.
NAN_WHERE_ALL_IS_MASKED = not IS_KERAS_3


def compiled_losses(model: tf.keras.Model) -> Any:
    """Returns the losses that ``model`` was compiled with, as they were given; None without.

    Without, ``model.loss`` is a method in Keras 3.
    """
    return None if IS_KERAS_3 and model._compile_loss is None else model.loss


def compiled_loss(model: tf.keras.Model) -> Any:
    """Returns what computes the compiled losses of ``model``; None without (Keras 3)."""
    return model._compile_loss if IS_KERAS_3 else model.compiled_loss


def compiled_loss_of(model: tf.keras.Model, part: Any) -> Callable[..., tf.Tensor]:
    """Returns what computes the compiled losses of ``model`` as Keras 2 does, with those that
    layers add; and counts each in the metric that it is shown by, of several.

    Args:
        part: of a global batch that the rows are, as which Keras 3 is to count such a loss.
    """
    if not IS_KERAS_3:
        return model.compiled_loss
    compiled = model._compile_loss

    def loss(y: Any, y_pred: Any, sample_weight: Any, *, regularization_losses: list[Any]) -> Any:
        losses = [tf.zeros([])]
        if compiled is not None:
            assert compiled.built  # Else it would make those metrics now.
            counting = [_CountingParts(metric, part) for metric in compiled._metrics]
            with replaced(compiled, _metrics=counting):
                own = compiled(y, y_pred, sample_weight)
            losses = losses if own is None else [own]
        return tf.add_n(
            [*losses, *(tf.cast(loss, losses[0].dtype) for loss in regularization_losses)]
        )

    return loss


def compilation_of(model: tf.keras.Model) -> Any:
    """Returns what is another one whenever ``model`` is compiled."""
    return model._compile_config if IS_KERAS_3 else model.compiled_loss


def loss_shown(model: tf.keras.Model) -> Any:
    """Returns the metric that the compiled losses of ``model``, of Keras 2, are shown by."""
    # Its public name, metrics[0], comes with the first call.
    return model.compiled_loss._total_loss_mean


def divided_by_replicas(model: tf.keras.Model) -> dict[str, Any]:
    """Returns the compiled loss of ``model`` by its attribute, where Keras 2 divides it as a whole.

    Keras 3 divides each loss: see ``ask_whether_undivided``.
    """
    return {} if IS_KERAS_3 else {"compiled_loss": model.compiled_loss}


def listed_metrics(model: tf.keras.Model) -> list[Any]:
    """Returns the metrics that ``model`` was compiled with, as they were given."""
    compiled = _container(model)
    return tf.nest.flatten(
        [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    )


def _container(model: tf.keras.Model) -> Any:
    """Returns what has the compiled metrics of ``model``; None without."""
    return model._compile_metrics if IS_KERAS_3 else model.compiled_metrics


def unlisted_metrics(model: tf.keras.Model) -> list[Any]:
    """Returns the metrics of ``model`` that have their variables, and which Keras 2 lists late.

    They are the one of the loss, and those that were compiled as objects: it calls them first.
    """
    if IS_KERAS_3:
        return []
    given = [loss_shown(model), *listed_metrics(model)]
    return [metric for metric in given if isinstance(metric, tf.keras.metrics.Metric)]


def metrics_in_files(model: tf.keras.Model) -> list[Any]:
    """Returns the metrics that read their state from Keras' files of weights: those of Keras 2."""
    return [] if IS_KERAS_3 else model.metrics


def in_order(model: tf.keras.Model, results: dict[str, Any]) -> Any:
    """Returns results as ``train_on_batch`` of Keras 3 lists them; the only one by itself."""
    return model._flatten_metrics_in_order(results)


def told_names(model: tf.keras.Model) -> list[str] | None:
    """Returns the names of the results of ``model``; None of Keras 3, which tells none."""
    return None if IS_KERAS_3 else model.metrics_names


def other_compiled_loss(
    model: tf.keras.Model, other: Any
) -> contextlib.AbstractContextManager[None]:
    """Has ``other`` compute the compiled losses of ``model``."""
    return replaced(model, **{"_compile_loss" if IS_KERAS_3 else "compiled_loss": other})


def loss_anew(compiled: Any, output_names: list[str] | None) -> Any:
    """Returns the compiled loss with metrics of its own.

    No public way leads from a compiled model to its loss weights as they were given.
    """
    given = compiled._user_loss if IS_KERAS_3 else compiled._user_losses
    return type(compiled)(given, compiled._user_loss_weights, output_names=output_names)


def untold_loss(model: tf.keras.Model) -> Callable[..., Any]:
    """Returns what computes the compiled losses of ``model``, of parts of a batch, for no metric.

    In Keras 2 it has metrics of its own, and their variables from here on.
    """
    if not IS_KERAS_3:
        own = loss_anew(model.compiled_loss, model.output_names)
        own.build(model.output)
        return own
    compiled = model._compile_loss

    def loss(y: Any, y_pred: Any, sample_weight: Any) -> Any:
        if compiled is None:
            return None
        num_losses = len(tf.nest.flatten([compiled._user_loss, y_pred]))  # Or fewer.
        with replaced(compiled, _metrics=[None] * num_losses):
            return compiled(y, y_pred, sample_weight)

    return loss


def show_losses(
    model: tf.keras.Model,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    added: list[Any],
    *,
    rows: tf.Tensor,
    part: Any,
) -> None:
    """Counts the compiled losses of a batch, and what layers have ``added``, in what is shown.

    Args:
        rows: of the batch.
        part: of a global batch that they are, as which Keras 3 is to count the loss of an output.
    """
    if not IS_KERAS_3:
        model.compiled_loss(y, y_pred, sample_weight, regularization_losses=added or None)
        return
    compiled = model._compile_loss
    losses = [tf.cast(tf.reduce_sum(loss), tf.keras.backend.floatx()) for loss in added]
    if compiled is not None:
        if not compiled.built:  # As of test_on_batch, before which no loss has been computed.
            untold_loss(model)(y, y_pred, sample_weight)
        counting = [_Counting(metric, part) for metric in compiled._metrics]
        with replaced(compiled, _metrics=counting):
            losses.append(compiled(y, y_pred, sample_weight))
    losses = [loss for loss in losses if loss is not None]  # As of outputs without a loss.
    show_loss(model, tf.add_n(losses) if losses else tf.zeros([]), rows)


class _Counting(NamedTuple):
    """The metric of a loss, for which a batch of unknown size is a part of one, not one."""

    metric: Any
    part: Any

    def update_state(self, value: Any, sample_weight: Any = None) -> Any:
        return self.metric.update_state(
            value, self.part if sample_weight is None else sample_weight
        )


class _CountingParts(_Counting):
    """The same where Keras knows the rows of each batch, which as a rule it does not."""

    def update_state(self, value: Any, sample_weight: Any = None) -> Any:
        return self.metric.update_state(value, self.part)


def function_of(part: Any) -> Any:
    """Returns the function that a loss or metric was made from, itself without one.

    That of the name of a loss, too, as Keras finds it: a user may have registered his own.
    """
    if isinstance(part, str):
        with contextlib.suppress(ValueError):  # Keras says so itself.
            part = tf.keras.losses.get(part)
    return getattr(part, "_fn", getattr(part, "fn", part))


def values_of(metric: Any) -> Callable[[Any, Any], Any]:
    """Returns what a ``MeanMetricWrapper`` takes the mean of: its function, and what it is told."""
    return functools.partial(function_of(metric), **metric._fn_kwargs)


def told_values(metric: Any, y: Any, y_pred: Any) -> list[Any]:
    """Returns labels and outputs as the function of a ``MeanMetricWrapper`` gets them.

    Keras 2 makes them of the metric's dtype: labels may be whole numbers.
    """
    return [y, y_pred] if IS_KERAS_3 else [tf.cast(each, metric.dtype) for each in (y, y_pred)]


@contextlib.contextmanager
def unmerged_results(model: tf.keras.Model) -> Iterator[None]:
    """Encloses what reads the metrics of ``model`` in a step: as this replica alone has counted.

    Keras 2 would have all replicas meet there, for each variable of each metric.
    """
    found = [] if IS_KERAS_3 else [(vars(metric), metric.result) for metric in model.metrics]
    # What a step of one's own has put around a result notes it: there all meet.
    merging = [(of, result) for of, result in found if hasattr(result, "__wrapped__")]

    def unmerged(result: Any) -> Callable[[], Any]:
        return lambda: tf.nest.map_structure(tf.identity, result.__wrapped__())

    for attributes, result in merging:
        attributes["result"] = unmerged(result)
    try:
        yield
    finally:
        for attributes, result in merging:
            attributes["result"] = result


def build_metrics(model: tf.keras.Model, y_pred: Any, y: Any) -> None:
    """Makes the variables of compiled metrics of Keras 2, where they are not made.

    Keras chooses metrics called "accuracy" by the shapes of outputs and labels.
    """
    metrics = None if IS_KERAS_3 else model.compiled_metrics
    if metrics is not None and not metrics.built:
        metrics.build(y_pred, metrics._conform_to_outputs(y_pred, y))


def build_loss(model: tf.keras.Model, y_pred: Any) -> None:
    """Makes the variables of compiled losses of Keras 2, where they are not made."""
    if not IS_KERAS_3 and not model.compiled_loss.built:
        model.compiled_loss.build(y_pred)


def have_loss(model: tf.keras.Model, y: Any, y_pred: Any) -> list[bool]:
    """Whether each output has a loss and labels for it."""
    if IS_KERAS_3:
        return _have_loss(model._compile_loss, y, y_pred)
    build_loss(model, y_pred)
    compiled = model.compiled_loss
    labels = tf.nest.flatten(compiled._conform_to_outputs(y_pred, y))
    pairs = itertools.zip_longest(compiled._losses, labels[: len(compiled._losses)])
    return [loss is not None and label is not None for loss, label in pairs]


def _have_loss(compiled: Any, y: Any, y_pred: Any) -> list[bool]:
    outputs = range(len(tf.nest.flatten(y_pred)))
    if compiled is None:
        return [False for _ in outputs]
    if not compiled.built:
        compiled.build(y, y_pred)
    numbers = tf.nest.pack_sequence_as(compiled._y_pred_build_structure, list(outputs))
    with_loss = [
        functools.reduce(operator.getitem, each.path, numbers) for each in compiled._flat_losses
    ]
    return [number in tf.nest.flatten(with_loss) for number in outputs]


def labels_without_weights(y: Any, weights: Any) -> list[str]:
    """Returns the labels by name for which Keras 3 would look for weights that are not there."""
    if not IS_KERAS_3 or not isinstance(y, Mapping) or not isinstance(weights, Mapping):
        return []
    return [name for name in y if name not in weights]


def compiled_metrics(model: tf.keras.Model) -> list[Any]:
    """Returns the metrics that ``model`` was compiled with, as far as they are made."""
    compiled = _container(model)
    return [] if compiled is None else compiled.metrics


def name_alike(copy: tf.keras.Model, model: tf.keras.Model) -> None:
    """Has ``copy`` name the results of compiled metrics as ``model`` does: Keras 3 counts up the
    names of those without one. All are made."""
    if IS_KERAS_3:
        for theirs, ours in zip(compiled_metrics(copy), compiled_metrics(model), strict=True):
            theirs.name = ours.name


def compiled_as_one(model: tf.keras.Model) -> list[Any]:
    """Returns what tells all compiled metrics, and makes them, where Keras does not list it."""
    container = None if IS_KERAS_3 else model.compiled_metrics
    return [] if container is None else [container]


def metrics_by_output(model: tf.keras.Model, names: Sequence[str]) -> list[list[Any]]:
    """Returns the compiled metrics of each output, in the order of the flat outputs.

    Args:
        names: of the flat outputs.

    Returns:
        None of them where they are not made.
    """
    compiled = _container(model)
    if compiled is None or not compiled.built:
        return []
    if not IS_KERAS_3:
        pairs = zip(compiled._metrics, compiled._weighted_metrics, strict=True)
        return [tf.nest.flatten(pair) for pair in pairs]
    pairs = zip(compiled._flat_metrics, compiled._flat_weighted_metrics, strict=True)
    each = ([m for part in pair if part is not None for m in part.metrics] for pair in pairs)
    by_name = dict(zip(compiled._resolved_output_names or names, each, strict=True))
    return [by_name[name] for name in names]


def weighed_metrics(model: tf.keras.Model) -> list[Any]:
    """Returns the compiled metrics that sample weights weigh; none of Keras 3.

    It refuses those that this is for, of one number for all rows.
    """
    return [] if IS_KERAS_3 else tf.nest.flatten(model.compiled_metrics._weighted_metrics)


def row_counters(model: tf.keras.Model) -> list[Any]:
    """Returns the compiled metrics, and those of losses that Keras tells how many rows they have.

    Keras 3 counts the loss of an output by batches, where their size is not known beforehand. It
    lists what tells all compiled metrics as a metric, too.
    """
    found = compiled_metrics(model)
    if IS_KERAS_3:
        return [*found, model._compile_metrics]
    return [*model.compiled_loss.metrics, *found]


def update_metrics(model: tf.keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Tells the compiled metrics of a batch."""
    metrics = _container(model)
    if metrics is not None:
        metrics.update_state(y, y_pred, sample_weight)


def compute_loss(
    model: tf.keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
) -> Any:
    """Returns what ``compute_loss`` of ``model`` does; since Keras 3.3 it may take ``training``."""
    if not IS_KERAS_3:
        return model.compute_loss(x, y, y_pred, sample_weight)
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def show_loss(model: tf.keras.Model, loss: tf.Tensor, rows: tf.Tensor) -> None:
    """Counts ``loss``, a mean over ``rows``, in what ``model`` shows as "loss".

    A step of Keras 3 does so; in Keras 2 ``compute_loss`` does.
    """
    if IS_KERAS_3 and model._loss_tracker is not None:
        # Of no rows, a mean may be NaN.
        known = tf.where(rows > 0, loss, tf.zeros_like(loss))
        model._loss_tracker.update_state(known, sample_weight=rows)


def loss_divisor() -> int:
    """Returns what divides a compiled loss that is a sum over rows, too, in a step of tfdist's."""
    return 1 if IS_KERAS_3 else tf.distribute.get_strategy().num_replicas_in_sync


def ask_whether_undivided() -> None:
    """Has Keras ask the step whether the losses of one replica are to be left as they are.

    Keras 3 would divide them by all replicas: in every loss object, those that a user's
    compute_loss calls included, and in what layers add. In Keras 2 ``losses.AsOnOneDevice`` undoes
    it where a loss was compiled; other loss objects refuse to take a mean among replicas, but here.
    """
    if IS_KERAS_3:
        _replace_division()
    else:
        _allow_means()


def _allow_means() -> None:
    """Has loss objects of Keras 2 ask the thread that they are in; once for each process.

    They take no mean in a step on replicas (tensorflow#58938).
    """
    given = tf.keras.losses.Loss._get_reduction
    if hasattr(given, "of_keras"):
        return

    def reduction(loss: tf.keras.losses.Loss) -> Any:
        kinds = tf.keras.losses.Reduction
        is_mean = loss.reduction in (kinds.AUTO, kinds.SUM_OVER_BATCH_SIZE)
        is_undivided = step_context.current().part is not None
        return kinds.SUM_OVER_BATCH_SIZE if is_mean and is_undivided else given(loss)

    reduction.of_keras = given
    tf.keras.losses.Loss._get_reduction = reduction


def _replace_division() -> None:
    """Has Keras 3 ask the thread that it is in; once for each process.

    It divides each loss by the replicas, whoever reduces it (keras#16285).
    """
    module = keras_source("losses.loss")
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        given = getattr(module, name)
        if not hasattr(given, "of_keras"):
            setattr(module, name, _asking(given))


def _asking(given: Any) -> Any:
    def scale(value: Any) -> Any:
        return given(value) if step_context.current().part is None else value

    scale.of_keras = given
    return scale
