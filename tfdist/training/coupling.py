"""What sees the rows of a batch together, so that parts of it give other numbers.

A contrastive loss compares rows with each other, and a sum over rows is no mean: on parts of a
batch neither is that of one device. It is tried before the first step, on a few of the user's own
rows where they can be had, and on made-up ones: what all of them give must be the mean of what
their two parts give, each by its rows. Losses, metrics, layers and what they add are tried one by
one, so that they can be named, and then the whole model. What cannot be tried is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import is_keras
from tfdist.training import (
    alike_look_ups,
    coupling_layers,
    coupling_steps,
    early_variables,
    loss_masks,
    moved_state,
    own_steps,
    randomness,
)
from tfdist.training.keras_api import (
    compiled_loss,
    compiled_losses,
    compiled_metrics,
    compute_loss,
    function_of,
    layers_in,
    loss_anew,
    metrics_by_output,
    other_compiled_loss,
)
from tfdist.training.losses import (
    AsOnOneDevice,
    has_own_compute_loss,
    is_keras_own,
    is_sum,
    name_of,
    own_functions,
)

#: Rows that are tried, in parts of 6 and 2: of equal parts a mean of means would pass.
ROWS, _FIRST = 8, 6
_SLICES = slice(0, _FIRST), slice(_FIRST, None)
_TOLERANCE = 1e-4  # Another order of summation is 1e-6 of a float32.
_OF_16_BITS = 0.05
_UNKNOWN_SIZE = 4
_MOST_ELEMENTS = 10_000_000  # Of a weight whose gradient is looked at.
_DRAWS = 4  # Of rows: of some, parts may make up the whole by chance, as where a mask is even.
_PADDINGS = (-1, -100)  # Labels that a loss may leave out.
_DRAWS_PADDED = 4
_OTHER_ROWS = 1000  # Added to a seed: labels that are the outputs have no loss.


def coupled(
    model: tf.keras.Model, element_spec: tuple[Any, ...], rows: tuple[Any, ...] | None = None
) -> list[str]:
    """Returns the losses and metrics of ``model`` that look at several rows, as a user knows them.

    Args:
        model: compiled; its state stays as it is.
        element_spec: of a batch, (x[, y[, sample_weight]]).
        rows: ROWS of the user's own in the same structure, where they can be had.
    """
    found = []
    if len(element_spec) > 1:
        with contextlib.suppress(Exception):  # Whatever a user's function does with such rows.
            for x, y, y_pred in _tries(model, model.output, element_spec, rows):
                with contextlib.suppress(Exception):
                    found += _losses(model, x, y, y_pred)
        with contextlib.suppress(Exception):
            outputs = _outputs_measured(model, element_spec)
            for _, y, y_pred in _tries(model, outputs, element_spec, rows):
                with contextlib.suppress(Exception):
                    found += _metrics(model, y, y_pred)
    with contextlib.suppress(Exception):
        found += _added(model, element_spec)
    return list(dict.fromkeys(found))


def filled_up(rows: Any) -> Any:
    """Returns ROWS rows, of fewer some again, as tensors; None of none."""
    if rows is None or not len(tf.nest.flatten(rows)[0]):
        return None
    numbers = np.arange(ROWS) % len(tf.nest.flatten(rows)[0])
    return tf.nest.map_structure(lambda rows: tf.gather(rows, numbers), rows)


def _tries(
    model: tf.keras.Model, outputs: Any, element_spec: tuple[Any, ...], rows: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields inputs, labels and outputs: of the user's own rows, and made-up ones.

    Args:
        outputs: real or symbolic ones of the model; of None nothing is tried.
    """
    if outputs is None:
        return
    given = None
    # A model may have its weights elsewhere.
    with contextlib.suppress(Exception), coupling_layers.state_kept(model):
        given = rows and (rows[0], rows[1], model(rows[0], training=False))
    for seed in range(_DRAWS) if given else ():
        # Parts of one order may make up the whole by chance.
        order = np.random.default_rng(seed).permutation(ROWS)
        yield tf.nest.map_structure(lambda tensor, order=order: tf.gather(tensor, order), given)
    for seed in range(_DRAWS + _DRAWS_PADDED):
        yield _made_up(element_spec[0], seed=seed), *_made_up_results(outputs, element_spec, seed)


def coupling_layers_of(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[str]:
    """Returns the names of the user's own layers in ``model`` that look at several rows."""
    with contextlib.suppress(Exception):  # Whatever a user's layer does with made-up rows.
        x = _made_up(element_spec[0])
        tried = coupling_layers.own_layers(model)
        found = coupling_layers.parted(model, x, _SLICES, tried)
        return [layer.name for layer in found]
    return []


def step_explained(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[str]:
    """Returns a clause where a train_step of the user's own couples rows.

    Args:
        model: as of ``coupled``, but that its metrics move: the step runs.
    """
    with contextlib.suppress(Exception):  # Whatever a user's step does with made-up rows.
        if coupling_steps.parted(model, _made_up(element_spec), _SLICES):
            return [_no_mean("the gradient of train_step")]
    return []


def moved_by(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[moved_state.Moved]:
    """Returns what the user's own layers in ``model`` change in a step beside their weights."""
    with contextlib.suppress(Exception):  # Whatever a user's layer does with made-up rows.
        return moved_state.found(model, _made_up(element_spec[0]), _SLICES)
    return []


def looked_up_alike(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> frozenset[Any]:
    """Returns references of the tables that all rows look up alike: see ``alike_look_ups``."""
    with contextlib.suppress(Exception):  # Whatever a user's layer does with made-up rows.
        return alike_look_ups.found(model, _made_up(element_spec[0]), _SLICES)
    return frozenset()


def explained(
    model: tf.keras.Model, element_spec: tuple[Any, ...], rows: tuple[Any, ...] | None = None
) -> list[str]:
    """Returns a clause for each thing of ``model`` that couples rows; arguments: of ``coupled``."""
    found = [_no_mean(name) for name in coupled(model, element_spec, rows)]
    found += [_looks_at_rows(name) for name in coupling_layers_of(model, element_spec)]
    tried = [_made_up(element_spec[0]), *(_made_up(s, seed=_OTHER_ROWS) for s in element_spec[1:2])]
    for batch in (rows, tried):
        if batch is not None and not found:
            with contextlib.suppress(Exception):  # Whatever a user's model does with such rows.
                found = _of_whole_model(model, *batch)
    return found


def _looks_at_rows(layer: str) -> str:
    return (
        f"layer '{layer}' looks at several rows of a batch, which are divided here, so its outputs "
        "are not those of one device"
    )


def _no_mean(name: str) -> str:
    return (
        f"{name} is no mean over the rows of a batch, which are divided here, so it is not that of "
        "one device"
    )


# What is tried -----------------------------------------------------------------------------------


def _losses(model: tf.keras.Model, x: Any, y: Any, y_pred: Any) -> list[str]:
    if has_own_compute_loss(model):
        with _without_metrics(model):
            couples = _couples(
                lambda *part: compute_loss(model, *part, None, training=True), x, y, y_pred
            )
        return ["the loss of compute_loss"] if couples else []
    return [
        f"loss '{name_of(loss)}'"
        for loss, truth, prediction in _pairs(model, y, y_pred)
        if not is_keras_own(loss) and _couples(getattr(loss, "call", loss), truth, prediction)
    ]


def _outputs_measured(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> Any:
    """Returns outputs of ``model``, symbolic ones too, whose compiled metrics are made by now.

    None for a class of the user's own with steps of its own, which may show other metrics, and must
    find none that it has not made.
    """
    early_variables.make_known_metrics(model, element_spec)
    symbolic = getattr(model, "output", None)
    if symbolic is not None or not early_variables.steps_are_keras_own(model):
        return symbolic
    outputs = model(_made_up(element_spec[0]), training=False)
    with model.distribute_strategy.scope():
        early_variables.make_metrics(model, outputs, element_spec[1])
    return outputs


def _metrics(model: tf.keras.Model, y: Any, y_pred: Any) -> list[str]:
    by_output = metrics_by_output(model)
    if not by_output and len(tf.nest.flatten(y_pred)) == 1:
        by_output = [compiled_metrics(model)]
    each = zip(by_output, tf.nest.flatten(y), tf.nest.flatten(y_pred), strict=True)
    return [
        f"metric '{metric.name}'"
        for metrics, truth, prediction in each
        for metric in metrics
        if metric is not None and not is_keras_own(metric) and _is_no_sum(metric, truth, prediction)
    ]


def _is_no_sum(metric: Any, truth: Any, prediction: Any) -> bool:
    """Whether what replicas have counted, added up, is not what one device has counted."""
    if isinstance(metric, tf.keras.metrics.MeanMetricWrapper):
        return _couples(function_of(metric), truth, prediction)
    fresh = type(metric).from_config(metric.get_config())

    def count(y: Any, y_pred: Any) -> list[np.ndarray]:
        fresh.reset_state()
        fresh.update_state(y, y_pred)
        return [np.array(variable) for variable in fresh.variables]

    whole, *parts = (count(*part) for part in _parts(truth, prediction))
    again = count(truth, prediction)
    expected = np.array(fresh.result())
    if any(not np.array_equal(*pair) for pair in zip(whole, again, strict=True)):
        return False  # It draws random numbers.
    for variable, *of_parts in zip(fresh.variables, *parts, strict=True):
        variable.assign(sum(of_parts))
    return not np.allclose(np.array(fresh.result()), expected, rtol=_TOLERANCE, equal_nan=True)


def _of_whole_model(
    model: tf.keras.Model, x: Any, y: Any = None, sample_weight: Any = None
) -> list[str]:
    """Returns a clause where outputs or losses of rows are others beside other rows.

    What is between layers, in a class of the user's own, or a regularizer of activity: all that
    cannot be tried by itself. Layers run as in training but for those that draw, and for
    BatchNormalization, whose statistics are the engine's; where something draws all the same, as in
    inference.
    """
    if "train_step" in own_steps.own_steps(model):
        return []
    stilled = [i for layer in randomness.drawing_layers(model) for i in layers_in(layer)]
    stilled += [i for i in layers_in(model) if isinstance(i, tf.keras.layers.BatchNormalization)]
    loud = [layer for layer in layers_in(model) if all(layer is not i for i in stilled)]
    most = coupling_layers.tolerance_of(model)
    for in_training in (loud, []):
        forward = _Forward(model, in_training, (x, y, sample_weight))
        whole, again = forward.of(slice(None)), forward.of(slice(None))
        if not _part(whole.values, again.values, slice(None), most):
            break
    else:
        return []  # It draws random numbers.
    parts = [forward.of(rows, counted=whole.counted) for rows in _SLICES]
    if any(
        _part(whole.outputs, part.outputs, rows, most)
        for part, rows in zip(parts, _SLICES, strict=True)
    ):
        seeing = coupling_layers.parted(model, x, _SLICES, loud)
        if seeing:
            return [_looks_at_rows(layer.name) for layer in seeing[:1]]
        return [
            "the model looks at several rows of a batch, which are divided here, so its outputs "
            "are not those of one device"
        ]
    if _differ([seen.added for seen in (whole, *parts)], most / 10):
        return [_no_mean("what layers add to the loss (add_loss, activity_regularizer)")]
    if _differ([seen.loss for seen in (whole, *parts)], most / 10):
        return [_no_mean("the compiled loss")]
    gradients = [seen.gradient for seen in (whole, *parts)]
    if any(gradient is None for gradient in gradients):
        return []
    joined = gradients[1] * _FIRST / ROWS + gradients[2] * (ROWS - _FIRST) / ROWS
    off = np.max(np.abs(gradients[0] - joined), initial=0.0)
    if off > most * np.max(np.abs(gradients[0]), initial=1e-6):
        return [_no_mean("the gradient of the losses")]
    return []


def _part(wholes: Sequence[Any], of_parts: Sequence[Any], rows: slice, most: float) -> bool:
    """Whether tensors of these rows are others than those rows of the tensors of all."""
    pairs = zip(wholes, of_parts, strict=True)
    return any(coupling_layers.difference(*pair, rows) > most for pair in pairs)


@dataclass(frozen=True)
class _Seen:
    """What some rows give.

    Attributes:
        outputs: of the model.
        added: what layers add to the loss, which is beside it.
        loss: the mean over the rows.
        gradient: of both, all weights laid flat; None where it cannot be had.
        counted: positions that the losses of outputs count.
    """

    outputs: list[tf.Tensor]
    added: tf.Tensor
    loss: tf.Tensor
    gradient: np.ndarray | None
    counted: list[tf.Tensor | None]

    @property
    def values(self) -> list[tf.Tensor]:
        return [*self.outputs, tf.reshape(self.added, [-1])]


class _Forward:
    """Takes rows of a batch through a model and its loss, as a replica takes its share.

    Args:
        in_training: layers that run so.
        batch: (x, y, sample_weight) of ROWS rows.
    """

    def __init__(self, model: tf.keras.Model, in_training: Sequence[Any], batch: tuple):
        self._model = model
        self._batch = batch
        self._walk = coupling_layers.Walk(model, in_training)

    def of(self, rows: slice, counted: Sequence[Any] | None = None) -> _Seen:
        """Returns what these rows give; ``counted``: what the losses of all rows count."""
        share = tf.constant([len(range(ROWS)[rows]), ROWS], tf.int64)
        with tf.GradientTape() as tape:
            seen = self._seen(rows, share, counted)
            total = seen.loss + seen.added
        gradient = None
        if total.shape.rank == 0:
            with contextlib.suppress(Exception):  # Weights may lie elsewhere.
                gradient = _flat(tape, total, self._model)
        return replace(seen, gradient=gradient)

    def _seen(self, rows: slice, share: tf.Tensor, counted: Sequence[Any] | None) -> _Seen:
        model = self._model
        x, y, weight = tf.nest.map_structure(lambda t: None if t is None else t[rows], self._batch)
        y_pred = self._walk.run(x, lambda layer, call, outputs: outputs)
        outputs = tf.nest.flatten(y_pred)
        added = tf.add_n([tf.cast(loss, tf.float32) for loss in model.losses] or [tf.zeros([])])
        if not has_own_compute_loss(model) and not is_sum(model):
            masks, labels = loss_masks.found(model, y, y_pred)
            if counted is None:
                counted = loss_masks.counted(masks, y_pred, lambda tensor, _: tensor)
            else:
                weight = loss_masks.as_weights(masks, y_pred, weight, share, counted)
                y, y_pred = labels, loss_masks.without_masks(y_pred)
        with _without_metrics(model):
            loss = compute_loss(model, x, y, y_pred, weight, training=True)
        loss = tf.cast(loss, tf.float32) - added
        if is_sum(model):
            loss /= tf.cast(share[0], loss.dtype)
        return _Seen(outputs, added, loss, None, list(counted or ()))


def _flat(tape: tf.GradientTape, loss: tf.Tensor, model: tf.keras.Model) -> np.ndarray:
    variables = [v for v in model.trainable_variables if v.shape.num_elements() <= _MOST_ELEMENTS]
    found = [g for g in tape.gradient(loss, variables) if g is not None]
    return np.concatenate([np.zeros(0), *(np.ravel(tf.convert_to_tensor(g)) for g in found)])


def _pairs(model: tf.keras.Model, y: Any, y_pred: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields each compiled loss with its labels and outputs."""
    outputs = dict(zip(model.output_names, tf.nest.flatten(y_pred), strict=True))
    if isinstance(y_pred, Mapping):
        outputs = dict(y_pred)
    if isinstance(y, Mapping):
        labels = dict(y)
    else:
        labels = dict(zip(outputs, tf.nest.flatten(y), strict=False))
    compiled = compiled_losses(model)
    if not isinstance(compiled, Mapping):
        each = compiled if isinstance(compiled, (list, tuple)) else [compiled] * len(outputs)
        compiled = dict(zip(outputs, each, strict=False))
    for name, loss in compiled.items():
        if loss is not None and name in labels:
            yield loss, labels[name], outputs[name]


def _added(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[str]:
    """Returns what layers add by ``add_loss`` and ``add_metric``."""
    adding = [layer for layer in layers_in(model) if _adds(layer)]
    if not adding:
        return []
    x = _made_up(element_spec[0])
    metrics = {id(m): m for layer in adding for m in layer.metrics}.values()
    told: dict[str, Any] = {}

    def run(*part: Any) -> dict[str, Any]:
        told.clear()
        model(part[0], training=False)
        for layer in adding:
            if layer.losses:
                told[f"add_loss of layer '{layer.name}'"] = tf.add_n(layer.losses)
        return dict(told)

    def tell(metric: Any) -> Callable[..., None]:
        def update_state(values: Any, *_: Any, **__: Any) -> None:
            told[f"metric '{metric.name}'"] = values

        return update_state

    with _updates_replaced(metrics, tell):
        parts = [run(*part) for part in _parts(x)]
    most = coupling_layers.tolerance_of(model)
    return [name for name in parts[0] if _differ([part[name] for part in parts], most)]


def _adds(layer: Any) -> bool:
    if type(layer).__name__ in ("AddLoss", "AddMetric"):
        return True
    if isinstance(layer, tf.keras.Model) and not own_functions(layer, tf.keras.Model):
        return False
    names = own_functions(layer, tf.keras.layers.Layer).values()
    is_own = not is_keras(type(layer).__module__)
    return is_own and any({"add_loss", "add_metric"} & used for used in names)


# How it is tried ---------------------------------------------------------------------------------


def _couples(function: Callable, *tensors: Any) -> bool:
    values = [function(*part) for part in _parts(*tensors)]
    sizes = [leaf.dtype.size for leaf in tf.nest.flatten(tensors) if leaf.dtype.is_floating]
    if not _differ(values, _OF_16_BITS if 2 in sizes else _TOLERANCE):
        return False
    # A loss that draws random numbers has another value each time.
    again = function(*next(iter(_parts(*tensors))))
    return not _differ([values[0], again, again])


def _parts(*tensors: Any) -> Iterator[list[Any]]:
    """Yields all rows, then those of the two parts."""
    for rows in (slice(None), *_SLICES):
        yield [tf.nest.map_structure(lambda t, rows=rows: t[rows], item) for item in tensors]


def _differ(values: list[Any], most: float = _TOLERANCE) -> bool:
    """Whether a value of all rows is another one than the mean of those of the parts.

    Args:
        most: what they may differ by, as a part of the larger.
    """
    whole, first, second = (float(tf.reduce_mean(value)) for value in values)
    joined = (_FIRST * first + (ROWS - _FIRST) * second) / ROWS
    if not np.isfinite([whole, joined]).all():
        return False
    return abs(whole - joined) > most * max(abs(whole), abs(joined), 1e-6)


def _made_up_results(outputs: Any, element_spec: tuple[Any, ...], seed: int) -> tuple[Any, Any]:
    """Returns labels and outputs; ``outputs``: real or symbolic ones of a model."""
    outputs = _made_up(outputs, probabilities=True, seed=seed)
    labels = _made_up(element_spec[1], seed=seed + _OTHER_ROWS)
    if seed >= _DRAWS:
        padding = _PADDINGS[seed % len(_PADDINGS)]
        labels = tf.nest.map_structure(
            lambda leaf: tf.where(leaf == 0, padding, leaf) if _is_signed(leaf) else leaf, labels
        )
    return labels, outputs


def _is_signed(leaf: Any) -> bool:
    return leaf.dtype.is_integer and not leaf.dtype.is_unsigned and leaf.dtype.size > 1


def _made_up(spec: Any, *, probabilities: bool = False, seed: int = 0) -> Any:
    """Returns rows of any values of a structure of specs [batch, ...]."""
    rng = np.random.default_rng(seed)

    def rows(leaf: Any) -> tf.Tensor:
        shape = [ROWS, *(size or _UNKNOWN_SIZE for size in leaf.shape[1:])]
        dtype = tf.as_dtype(leaf.dtype)
        if not dtype.is_floating:
            numbers = rng.integers(0, 2, shape)
            return tf.strings.as_string(numbers) if dtype == tf.string else tf.cast(numbers, dtype)
        # What counts by a threshold looks the same on values that are all on one side of it.
        values = rng.choice([0.05, 0.95], shape) if seed % 2 else rng.uniform(0.1, 0.9, shape)
        if probabilities and len(shape) > 1 and shape[-1] > 1:
            values /= values.sum(-1, keepdims=True)
        return tf.cast(values, leaf.dtype)

    return tf.nest.map_structure(rows, spec)


@contextlib.contextmanager
def _without_metrics(model: tf.keras.Model) -> Iterator[None]:
    """Encloses a call of ``compute_loss`` that leaves no trace in a metric."""
    compiled = compiled_loss(model)
    keras = compiled.whole if isinstance(compiled, AsOnOneDevice) else compiled
    anew = None if keras is None else loss_anew(keras, getattr(model, "output_names", None))
    with (
        other_compiled_loss(model, anew),
        _updates_replaced(model.metrics, lambda _: lambda *args, **options: None),
    ):
        yield


@contextlib.contextmanager
def _updates_replaced(metrics: Any, replaced: Callable[[Any], Callable]) -> Iterator[None]:
    metrics = list(metrics)
    before = [metric.update_state for metric in metrics]
    try:
        for metric in metrics:
            metric.update_state = replaced(metric)
        yield
    finally:
        for metric, update_state in zip(metrics, before, strict=True):
            metric.update_state = update_state
