"""What sees the rows of a batch together, so that parts of it give other numbers.

A contrastive loss compares rows with each other, and a sum over rows is no mean: on parts of a
batch neither is that of one device. It is tried before the first step, on a few of the user's own
rows where they can be had, and on made-up ones: what all of them give must be the mean of what
their two parts give, each by its rows. Losses, metrics, layers and what they add are tried one by
one, so that they can be named, and then the whole model. What cannot be tried is left alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import is_keras
from tfdist.keras.layers import layers_in
from tfdist.keras.losses import (
    compiled_losses,
    compiled_metrics,
    compute_loss,
    function_of,
    metrics_by_output,
    told_values,
    values_of,
    weighed_metrics,
)
from tfdist.training.layers import eager_variables, shared_embedding_rows
from tfdist.training.layers.losses import (
    has_own_compute_loss,
    is_keras_own,
    name_of,
    names_of_outputs,
    own_functions,
    to_outputs,
)
from tfdist.training.steps import layer_state, row_probe_layers, row_probe_steps
from tfdist.training.steps.row_probe_model import (
    clauses_of,
    looks_at_rows,
    loss_of,
    no_mean,
    replaced_in,
    without_metrics,
)
from tfdist.training.steps.row_probe_rows import (
    DRAWS,
    OTHER_ROWS,
    SLICES,
    TOLERANCE,
    couples,
    differ,
    made_up,
    parts_of,
    tried,
    with_outputs,
)


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
        # What has a step of its own, and no graph, is not called: nothing would be tried of it.
        is_tried = getattr(model, "output", None) is not None
        is_tried = is_tried or eager_variables.steps_are_keras_own(model)
        given = with_outputs(model, rows) if is_tried else None
        # Whatever a user's function does with such rows.
        with contextlib.suppress(Exception), row_probe_layers.state_kept(model):
            for x, y, y_pred in tried(model.output, element_spec, given):
                with contextlib.suppress(Exception):
                    found += _losses(model, x, y, y_pred)
        with contextlib.suppress(Exception), row_probe_layers.state_kept(model):
            outputs = _outputs_measured(model, element_spec)
            for _, y, y_pred in tried(outputs, element_spec, given):
                with contextlib.suppress(Exception):
                    found += _metrics(model, y, y_pred, is_weighed=len(rows or element_spec) > 2)
    with contextlib.suppress(Exception), row_probe_layers.state_kept(model):
        for spread in (False, True):
            found += _added(model, made_up(element_spec[0], spread=spread))
    return list(dict.fromkeys(found))


def coupling_layers_of(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[str]:
    """Returns the names of the user's own layers in ``model`` that look at several rows."""
    found: dict[str, None] = {}
    with contextlib.suppress(Exception):  # Whatever a user's layer does with made-up rows.
        own = row_probe_layers.own_layers(model)
        for spread in (False, True):
            x = made_up(element_spec[0], spread=spread)
            seeing = row_probe_layers.parted(model, x, SLICES, own)
            found |= {layer.name: None for layer in seeing}
    return list(found)


def step_explained(
    model: tf.keras.Model, element_spec: tuple[Any, ...], rows: tuple[Any, ...] | None = None
) -> list[str]:
    """Returns a clause where a train_step of the user's own couples rows.

    Args:
        model, element_spec, rows: of ``coupled``.
    """
    with contextlib.suppress(Exception):  # Whatever a user's step does with such rows.
        if row_probe_steps.parted(model, made_up(element_spec) if rows is None else rows, SLICES):
            return [
                f"{no_mean('the gradient of train_step')}: have the optimizer clip "
                "(global_clipnorm, clipnorm, clipvalue), take a mean over rows for the loss, and "
                "bring rows that are compared together with tfdist.all_gather"
            ]
    return []


def moved_by(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[layer_state.Moved]:
    """Returns what the user's own layers and loss change in a step beside the weights."""
    found: dict[Any, layer_state.Moved] = {}
    has_loss = has_own_compute_loss(model)
    with contextlib.suppress(Exception):  # Whatever a user's layer does with made-up rows.
        for seed in range(DRAWS):  # Of some, parts may move a state alike by chance.
            x = made_up(element_spec[0], seed=seed, spread=seed >= DRAWS // 2)
            batch = (x, *made_up(tuple(element_spec[1:]), seed=seed + OTHER_ROWS))

            def lose(rows: slice, outputs: Any, training: bool, batch: Any = batch) -> None:
                x, y, weight = (*tf.nest.map_structure(lambda t: t[rows], batch), None, None)[:3]
                # Whatever it does with such rows.
                with contextlib.suppress(Exception), without_metrics(model):
                    compute_loss(model, x, y, outputs, weight, training=training)

            of_loss = [lose] if has_loss else []
            for moved in layer_state.found(model, x, SLICES, *of_loss):
                ref = moved.variable.ref()
                found[ref] = moved.beside(found.get(ref, moved))
    return list(found.values())


def looked_up_alike(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> frozenset[Any]:
    """Returns references of tables that all rows look up alike: see ``shared_embedding_rows``."""
    # Whatever a user's layer does with made-up rows.
    with contextlib.suppress(Exception), row_probe_layers.state_kept(model):
        return shared_embedding_rows.found(model, made_up(element_spec[0]), SLICES)
    return frozenset()


def explained(
    model: tf.keras.Model,
    element_spec: tuple[Any, ...],
    rows: tuple[Any, ...] | None = None,
    *,
    gradients: bool = True,
) -> list[str]:
    """Returns a clause for each thing of ``model`` that couples rows.

    Args:
        model, element_spec, rows: of ``coupled``.
        gradients: whether to look at those of the whole model, for which activations are kept.
    """
    named, seeing = coupled(model, element_spec, rows), coupling_layers_of(model, element_spec)
    found = [*map(no_mean, named), *map(looks_at_rows, seeing)]
    untried = _untried(model)
    is_told = bool(seeing) or not _are_metrics(named)
    x, *others = (*element_spec, tf.TensorSpec([None]))[: len(rows or element_spec)]
    x, others = made_up(x), made_up(others, seed=OTHER_ROWS)
    for batch in (rows, (x, *others)):
        if batch is not None and not is_told:
            # Whatever a user's model does with such rows.
            with contextlib.suppress(Exception), row_probe_layers.state_kept(model):
                of_model = clauses_of(model, *batch, gradients=gradients)
                found, is_told = found + of_model, bool(of_model)
    return [*found, *untried]


def explained_of_pass(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> list[str]:
    """Returns what ``explained`` does, where nothing is trained.

    Args:
        element_spec: of a batch, (x[, y[, sample_weight]]); of x alone where outputs count.
    """
    named = coupled(model, element_spec)
    found = [no_mean(name) for name in named]
    rows = made_up(element_spec[0]), *made_up(element_spec[1:], seed=OTHER_ROWS)
    if _are_metrics(named):
        # Whatever a user's model does with such rows.
        with contextlib.suppress(Exception), row_probe_layers.state_kept(model):
            found += clauses_of(model, *rows, gradients=False, training=False)
    return found


def _are_metrics(named: list[str]) -> bool:
    """Whether ``coupled`` names metrics alone: they tell nothing of the model and its loss, of
    which Keras' own are tried with the whole model."""
    return all(name.startswith("metric ") for name in named)


# What is tried -----------------------------------------------------------------------------------


def _losses(model: tf.keras.Model, x: Any, y: Any, y_pred: Any) -> list[str]:
    if has_own_compute_loss(model):
        is_coupled = couples(lambda *part: loss_of(model, *part), x, y, y_pred)
        return ["the loss of compute_loss"] if is_coupled else []
    return [
        f"loss '{name_of(loss)}'"
        for loss, truth, prediction in _pairs(model, y, y_pred)
        if not is_keras_own(loss)
        and couples(getattr(loss, "call", function_of(loss)), truth, prediction)
    ]


def _outputs_measured(model: tf.keras.Model, element_spec: tuple[Any, ...]) -> Any:
    """Returns outputs of ``model``, symbolic ones too, whose compiled metrics are made by now.

    None for a class of the user's own with steps of its own, which may show other metrics, and must
    find none that it has not made.
    """
    eager_variables.make_known_metrics(model, element_spec)
    symbolic = getattr(model, "output", None)
    if symbolic is not None or not eager_variables.steps_are_keras_own(model):
        return symbolic
    outputs = model(made_up(element_spec[0]), training=False)
    with model.distribute_strategy.scope():
        eager_variables.make_metrics(model, outputs, element_spec[1])
    return outputs


def _metrics(model: tf.keras.Model, y: Any, y_pred: Any, *, is_weighed: bool) -> list[str]:
    names = names_of_outputs(model, y_pred)
    labels = [*to_outputs(model, y, y_pred), *[None] * len(names)]  # The last may have none.
    weighed = weighed_metrics(model) if is_weighed else []
    outputs = zip(labels[: len(names)], tf.nest.flatten(y_pred), strict=True)
    each = zip(metrics_by_output(model, names), outputs, strict=True)
    found = []
    for metrics, (truth, prediction) in each:
        for metric in metrics:
            if metric is None or truth is None or not _may_see_rows(metric):
                continue
            is_weighed = any(metric is m for m in weighed)
            with contextlib.suppress(Exception):  # Whatever a user's function does with such rows.
                if _is_no_sum(metric, truth, prediction, is_weighed=is_weighed):
                    found.append(f"metric '{metric.name}'")
    return found


def _may_see_rows(metric: Any) -> bool:
    """Whether it is the user's own, or a mean of Keras', which may be told another axis."""
    return isinstance(metric, tf.keras.metrics.MeanMetricWrapper) or not is_keras_own(metric)


def _is_no_sum(metric: Any, truth: Any, prediction: Any, *, is_weighed: bool) -> bool:
    """Whether what replicas have counted, added up, is not what one device has counted."""
    if isinstance(metric, tf.keras.metrics.MeanMetricWrapper):
        function, told = values_of(metric), told_values(metric, truth, prediction)
        # The sum of the weights would weigh it.
        as_one = is_weighed and not tf.convert_to_tensor(function(*told)).shape.rank
        return as_one or couples(function, *told)
    fresh = _another(metric)

    def count(y: Any, y_pred: Any) -> list[np.ndarray]:
        fresh.reset_state()
        fresh.update_state(y, y_pred)
        return [np.array(variable) for variable in fresh.variables]

    whole, *parts = (count(*part) for part in parts_of(truth, prediction))
    again = count(truth, prediction)
    expected = np.array(fresh.result())
    if any(not np.array_equal(*pair) for pair in zip(whole, again, strict=True)):
        return False  # It draws random numbers.
    for variable, *of_parts in zip(fresh.variables, *parts, strict=True):
        variable.assign(sum(of_parts))
    return not np.allclose(np.array(fresh.result()), expected, rtol=TOLERANCE, equal_nan=True)


def _untried(model: tf.keras.Model) -> list[str]:
    """Returns a clause for each compiled metric of the user's own that is not tried."""
    found, metrics = [], []
    with contextlib.suppress(AttributeError):  # Of a model that is not compiled.
        metrics = compiled_metrics(model)
    for metric in metrics:
        if not is_keras_own(metric) and not isinstance(metric, tf.keras.metrics.MeanMetricWrapper):
            try:
                _another(metric)
            except Exception as error:  # Whatever a user's class does.
                found.append(
                    f"metric '{metric.name}' is not tried on rows, as its get_config does not make "
                    f"another one ({type(error).__name__}): what replicas count in its state is "
                    "added up"
                )
    return found


def _another(metric: Any) -> Any:
    """Returns a metric like ``metric``, which need not take all that Keras' own config has."""
    kind, config = type(metric), metric.get_config()
    with contextlib.suppress(TypeError):
        return kind.from_config(config)
    known = vars(metric) | config
    parameters = inspect.signature(kind).parameters
    return kind(**{name: known[name] for name in parameters if name in known})


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


def _added(model: tf.keras.Model, x: Any) -> list[str]:
    """Returns what layers add by ``add_loss`` and ``add_metric``."""
    adding = [layer for layer in layers_in(model) if _adds(layer)]
    if not adding:
        return []
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
        def update_state(*values: Any, **named: Any) -> None:
            told[f"metric '{metric.name}'"] = next(iter((*values, *named.values())))

        return update_state

    with replaced_in(metrics, tell):
        parts = [run(*part) for part in parts_of(x)]
    most = row_probe_layers.tolerance_of(model)
    return [name for name in parts[0] if differ([part[name] for part in parts], most)]


def _adds(layer: Any) -> bool:
    if type(layer).__name__ in ("AddLoss", "AddMetric"):
        return True
    if isinstance(layer, tf.keras.Model) and not own_functions(layer, tf.keras.Model):
        return False
    names = own_functions(layer, tf.keras.layers.Layer).values()
    is_own = not is_keras(type(layer).__module__)
    return is_own and any({"add_loss", "add_metric"} & used for used in names)
