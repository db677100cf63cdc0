"""A step of the user's own that gives what is no mean over the rows of a batch.

A sum over rows, or a loss that compares them, gives others when the batch is divided. The step is
traced, and what it gives to its optimizers and returns is computed of a whole batch and of its
parts. Nothing is applied, and no variable moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.keras import step_context
from tfdist.training.engine.collective import OneProcess
from tfdist.training.layers import losses, randomness
from tfdist.training.layers.replica_step import JOINS, RunningStep
from tfdist.training.steps import custom_steps
from tfdist.training.steps.autograph import with_autograph
from tfdist.training.steps.row_probe_layers import ASKS_ALL, Walk, tolerance_of
from tfdist.training.steps.row_probe_model import (
    loud_layers,
    updates_replaced,
    without_metrics,
)


@dataclass(frozen=True)
class Tried:
    """What a step of the user's own gives.

    Attributes:
        is_parted: whether its gradients are others than the mean of those of the parts, by rows.
        joins: name of a number, or of several in one shape, that it returns -> "mean", or one of
            ``replica_step.JOINS``, or None.
        unknown: names of those that were 0, or no number, on all rows.
    """

    is_parted: bool
    joins: Mapping[str, str | None]
    unknown: Sequence[str]


def tried(
    model: tf.keras.Model,
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    parts: Sequence[slice],
) -> Tried | None:
    """Tries ``step``; None where it draws random numbers, or exchanges something with replicas.

    Args:
        model: built and compiled.
        batches: as the step takes them, tensors [rows, ...] of one structure.
        parts: of the rows, each row in one of them.
    """
    used = losses.own_functions(model, tf.keras.Model).values()
    if any(ASKS_ALL & names for names in used):
        return None
    traced = _Traced(model, step, batches[0])
    if traced.draws:
        return None
    most = tolerance_of(model)
    is_parted, unknown = False, traced.of_rows - _names_of_metrics(model)
    fitting = {name: ["mean", *JOINS] for name in traced.names}
    for batch in batches:
        rows = len(tf.nest.flatten(batch)[0])
        weights = [len(range(rows)[part]) / rows for part in parts]
        whole, *each = (traced.of(batch, part) for part in (slice(None), *parts))
        is_parted |= not _near(whole[0], np.average([p[0] for p in each], 0, weights), most)
        for name, value, *values in zip(traced.names, whole[1], *(p[1] for p in each), strict=True):
            if np.isfinite([value, *values]).all() and np.any([value, *values]):
                joined = {join: of(values, 0).numpy() for join, (of, _) in JOINS.items()}
                joined["mean"] = np.average(values, 0, weights)
                fitting[name] = [j for j in fitting[name] if _near(value, joined[j], most)]
                unknown.discard(name)
    joins = {name: next(iter(fit), None) for name, fit in fitting.items()}
    return Tried(is_parted, joins, sorted(unknown))


def _near(value: Any, other: Any, most: float) -> bool:
    """Whether numbers are the same up to ``most``, as a part of the largest."""
    off = np.max(np.abs(value - other), initial=0.0)
    return not off > most * max(
        np.max(np.abs(value), initial=0.0), np.max(np.abs(other), initial=0.0)
    )


def _names_of_metrics(model: tf.keras.Model) -> set[str]:
    """Returns the names of metrics, whose results are 0 where nobody tells them of a batch."""
    known = [*keras.losses.unlisted_metrics(model), *keras.losses.compiled_metrics(model)]
    return {metric.name for metric in (*model.metrics, *known)}


class _Alone(OneProcess):
    """A replica that cannot reach the other one: what asks for it is not tried."""

    num_replicas = 2

    def sum(self, tensor: Any, name: str) -> Any:
        raise NotImplementedError(name)

    apply = merge = distribute = sum


class _Traced:
    """A step as a function of rows: what it gives to its optimizers, laid flat, and its numbers.

    BatchNormalization, whose statistics are the engine's, and layers that draw run as in inference.

    Attributes:
        names: of the floats that it returns, but for results of metrics.
        of_rows: those of them that are computed of rows; others are alike on all replicas.
        draws: whether something draws random numbers.
    """

    def __init__(self, model: tf.keras.Model, step: Callable[[Any], Any], batch: Any):
        self._model = model
        self.names: list[str] = []
        specs = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), batch)

        def given(share: tf.Tensor, *rows: tf.Tensor) -> list[tf.Tensor]:
            return self._given(with_autograph(step), share, tf.nest.pack_sequence_as(batch, rows))

        signature = [tf.TensorSpec([2], tf.int64), *tf.nest.flatten(specs)]
        # What it assigns does not run unless outputs ask for it. To prune the graph copies it all.
        self._function = tf.compat.v1.wrap_function(given, signature)
        graph = self._function.graph
        rows = {tensor.op for tensor in self._function.inputs[: len(signature)]}
        numbers = self._function.outputs[1:]
        self.of_rows = {n for n, of in zip(self.names, numbers, strict=True) if _is_of(rows, of)}
        changed = {
            op.inputs[0].ref(): op.get_attr("dtype")
            for op in graph.get_operations()
            if op.type.startswith(("Assign", "ResourceScatter"))
        }
        refs = [(handle, inner.ref()) for handle, inner in graph.captures]
        self._changed = [(handle, changed[ref]) for handle, ref in refs if ref in changed]
        self.draws = bool(randomness.unseeded(graph, graph.get_operations()))

    def of(self, batch: Any, rows: slice) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the gradients [elements] and the numbers that some rows of a batch give."""
        own = [tensor[rows] for tensor in tf.nest.flatten(batch)]
        share = tf.constant([len(own[0]), len(tf.nest.flatten(batch)[0])], tf.int64)
        read = tf.raw_ops.ReadVariableOp
        before = [(handle, read(resource=handle, dtype=dtype)) for handle, dtype in self._changed]
        gradients, *numbers = self._function(share, *own)
        for handle, value in before:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return gradients.numpy(), [np.asarray(number, np.float64) for number in numbers]

    def _given(self, step: Callable[[Any], Any], share: tf.Tensor, batch: Any) -> list[tf.Tensor]:
        running = RunningStep(_Alone(), losses.part_of(share), share)
        told = keras.losses.told_of_batches(self._model)
        with (
            self._in_training(),
            without_metrics(self._model),
            updates_replaced(told, lambda _: lambda *args, **options: None),
            losses.counted_as(running.part),
            step_context.within(results_are_local=True, own_step=running),
            _caught(custom_steps.optimizers_of(self._model)) as gradients,
        ):
            returned = step(batch)
        numbers = {
            name: keras.tensors.raw(value)
            for name, value in (returned if isinstance(returned, Mapping) else {}).items()
            if id(value) not in running.results
        }
        numbers = {name: v for name, v in numbers.items() if custom_steps.can_be_mean(v)}
        self.names = list(numbers)
        flat = [tf.cast(tf.reshape(g, [-1]), tf.float32) for g in gradients]
        return [tf.concat([tf.zeros([0]), *flat], 0), *numbers.values()]

    def _in_training(self) -> contextlib.AbstractContextManager:
        walk = Walk(self._model, loud_layers(self._model))
        return walk.calls_replaced(lambda layer, call, outputs: outputs)


def _is_of(given: set[tf.Operation], number: tf.Tensor) -> bool:
    """Whether ``number`` is computed of what is ``given``."""
    seen, waiting = set(), [number.op]
    while waiting and not seen & given:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
    return bool(seen & given)


@contextlib.contextmanager
def _caught(optimizers: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the gradients that optimizers are given meanwhile, of which they apply none."""
    given: list[Any] = []
    before = {id(optimizer): vars(optimizer).get(custom_steps.APPLY) for optimizer in optimizers}

    def catch(gradients: Any, *_: Any, **__: Any) -> None:
        pairs = [item if isinstance(item, tuple) else (item, None) for item in gradients]
        given.extend(tf.convert_to_tensor(g) for g, _ in pairs if g is not None)

    try:
        for optimizer in optimizers:
            setattr(optimizer, custom_steps.APPLY, tf.autograph.experimental.do_not_convert(catch))
        yield given
    finally:
        for optimizer in optimizers:
            delattr(optimizer, custom_steps.APPLY)
            if before[id(optimizer)] is not None:
                setattr(optimizer, custom_steps.APPLY, before[id(optimizer)])
