"""Activations that are computed once more on the way back, instead of being kept.

Chen et al. 2016, arXiv:1604.06174. A Functional or Sequential model is cut into segments; of those
that are computed again only inputs and outputs are kept. The same numbers are drawn again, and
BatchNormalization uses the statistics it had.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError, unknown_choice
from tfdist.training import batch_norm, randomness, step_context
from tfdist.training.balanced_cuts import balance
from tfdist.training.binding import Binding
from tfdist.training.keras_api import layers_in, mask_of, with_mask
from tfdist.training.layer_calls import Call, Graph, crossing_bytes, graph_of, inputs_of
from tfdist.training.logits import logits_of

_ASSIGNING = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive layer calls, as a model of their own that shares the layers.

    Tensors of the whole model are known by a key, the ``id`` of the symbolic tensor.

    Attributes:
        model: inputs -> outputs, both lists.
        inputs, outputs: keys.
        repeats: whether it is computed once more.
        name: for people.
    """

    model: tf.keras.Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    repeats: bool
    name: str


class Recomputation:
    """Takes the place of a model's ``call`` in training; anywhere else nothing changes.

    Args:
        names: of layers and nested models, each computed again as a whole; None chooses.

    Raises:
        ModelError: the model is neither Functional nor Sequential.
        OptionError: it has no layer of a given name.
    """

    def __init__(self, binding: Binding, names: Sequence[str] | None):
        model = binding.model
        graph = graph_of(model, needed_by="recompute", otherwise="leave recompute out")
        bounds = _chosen(graph) if names is None else _named(graph, names)
        self._model = model
        self._segments = _segments(graph, bounds)
        self._outputs = [id(tensor) for tensor in graph.outputs]
        self._seeds = randomness.StepSeeds(model)
        randomness.put_on(binding)
        self._call_whole = model.call
        # A method of the model: Keras' writer of SavedModels traces nothing else.
        binding.put(model, "call", types.MethodType(self._as_method(), model))

    @property
    def blocks(self) -> list[str]:
        """What is computed again."""
        return [segment.name for segment in self._segments if segment.repeats]

    def of(self, replica: Any, microbatch: int) -> contextlib.AbstractContextManager:
        """Returns what encloses the forward pass of a microbatch on one replica, in training."""
        seed = tf.random.experimental.stateless_fold_in(self._seeds.of_step(), replica)
        return step_context.within(repeatable=(seed, microbatch))

    def _as_method(self) -> Callable:
        def call(_model: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            if training is True and step_context.current().repeatable is not None:
                return self._run(inputs)
            return self._call_whole(inputs, training=training, mask=mask)

        return call

    def _run(self, inputs: Any) -> Any:
        seed, microbatch = step_context.current().repeatable
        keys = [id(tensor) for tensor in self._model.inputs]
        values = dict(zip(keys, inputs_of(self._model, inputs), strict=True))
        for number, segment in enumerate(self._segments):
            given = [values[key] for key in segment.inputs]
            forward = _Forward(segment, seed, microbatch, number)
            outputs = _computed_again(forward, given) if segment.repeats else forward(given)
            values.update(zip(segment.outputs, outputs, strict=True))
        outputs = [values[key] for key in self._outputs]
        return tf.nest.pack_sequence_as(self._model.output, outputs)


class _Forward:
    """A forward pass of one microbatch through one segment; it draws the same numbers each time."""

    def __init__(self, segment: Segment, seed: tf.Tensor, microbatch: int, number: int):
        self.segment = segment
        self._place = seed, microbatch, number

    def __call__(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        with randomness.microbatch(*self._place):
            return tf.nest.flatten(self.segment.model(tensors, training=True))


def _computed_again(forward: _Forward, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns ``forward(tensors)``; for the gradients it is called once more."""
    flowing = [number for number, tensor in enumerate(tensors) if tensor.dtype.is_floating]
    statistics = batch_norm.Repeatable()
    first: list[tf.Tensor] = []

    def with_logits(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what gradients come back to: the loss may go around an output to its logits."""
        flows = [tensor for tensor in outputs if tensor.dtype.is_floating]
        behind = (logits_of(tensor) for tensor in flows)
        return [*flows, *(logits.tensor for logits in behind if logits is not None)]

    # Layers may add losses: what those need stays on the caller's tape, and is right as it is.
    @tf.custom_gradient
    def checkpoint(*_: tf.Tensor) -> Any:
        with statistics.first():
            first.extend(forward(tensors))

        def back(*upstream: Any, variables: Sequence[tf.Variable] | None = None) -> Any:
            trained = [v for v in variables or () if v.trainable]
            upstream = [tf.convert_to_tensor(gradient) for gradient in upstream]
            # Without waiting, TensorFlow would compute it at once and keep it all the same.
            with tf.control_dependencies(upstream), tf.GradientTape() as tape:
                again = [_like(tensor) for tensor in tensors]
                sources = [again[number] for number in flowing]
                tape.watch([*sources, *trained])
                with statistics.again(), _without_side_effects(forward.segment):
                    outputs = with_logits(forward(again))
            found = tape.gradient(outputs, [*sources, *trained], output_gradients=upstream)
            of_inputs, of_trained = found[: len(sources)], found[len(sources) :]
            if variables is None:
                return of_inputs
            of = {v.ref(): gradient for v, gradient in zip(trained, of_trained, strict=True)}
            return of_inputs, [of.get(v.ref()) for v in variables]

        return with_logits(first), back

    results = iter(tf.nest.flatten(checkpoint(*(tensors[number] for number in flowing))))
    outputs = [_masked(next(results), t) if t.dtype.is_floating else t for t in first]
    behind = [logits_of(tensor) for tensor in first]
    return [
        output if logits is None else logits.behind(output, next(results))
        for output, logits in zip(outputs, behind, strict=True)
    ]


def _like(tensor: tf.Tensor) -> tf.Tensor:
    return _masked(tf.identity(tensor), tensor)


def _masked(tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return with_mask(tensor, mask_of(like))


@contextlib.contextmanager
def _without_side_effects(segment: Segment) -> Iterator[None]:
    """Encloses the second pass through a segment.

    Raises:
        OptionError: it draws numbers that the first pass has not drawn.
        ModelError: it changes variables a second time.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    made = graph.get_operations()[before:]
    randomness.refuse_unseeded(graph, made)
    assigning = [op.name for op in made if op.type in _ASSIGNING]
    if assigning:
        raise ModelError(
            "layers that recompute runs twice must not change variables when they are called",
            received=f"operation '{assigning[0]}' in {segment.name}",
            mend="Give recompute the names of other layers",
        )


# Which calls -------------------------------------------------------------------------------------

Bounds = list[tuple[int, int, bool]]  # (first call, the one after the last, computed again)


def _named(graph: Graph, names: Sequence[str]) -> Bounds:
    calls = graph.calls
    block_of: dict[int, int] = {}
    for number, name in enumerate(names):
        found = [index for index, call in enumerate(calls) if call.is_called(name)]
        if not found:
            known = ["none", "blocks", *dict.fromkeys(graph.names)]
            raise unknown_choice("layer in recompute", name, known)
        for index in found:
            block_of.setdefault(index, number)
    bounds, start = [], 0
    for block, items in itertools.groupby(range(len(calls)), block_of.get):
        stop = start + len(list(items))
        bounds.append((start, stop, block is not None))
        start = stop
    return bounds


def _chosen(graph: Graph) -> Bounds:
    """Returns the blocks of a model that is made of blocks, else about as many as their layers."""
    calls = graph.calls
    runs = _runs_of_blocks(calls)
    sizes = [_bytes(calls[start:stop]) for start, stop, is_block in runs if is_block]
    if len(sizes) > 1 and max(sizes) <= sum(sizes) / 2 and 2 * sum(sizes) >= _bytes(calls):
        bounds = runs
    else:
        parts = max(1, round(math.sqrt(len(calls))))
        costs = [float(call.row_bytes) for call in calls]
        crossing = [crossing_bytes(calls, cut) for cut in range(len(calls))]
        cuts = [0, *balance(costs, crossing, parts), len(calls)]
        bounds = [(start, stop, True) for start, stop in itertools.pairwise(cuts)]
    # The way back begins with the last calls: nothing is gained by dropping what it needs at once.
    start, stop, _ = bounds[-1]
    bounds[-1] = (start, stop, False)
    return bounds


def _runs_of_blocks(calls: Sequence[Call]) -> Bounds:
    def block_of(index: int) -> Any:
        call = calls[index]
        if len(call.path) > 1:
            return call.path[0]
        return index if len(layers_in(call.layer)) > 1 else None

    bounds, start = [], 0
    for block, items in itertools.groupby(range(len(calls)), block_of):
        stop = start + len(list(items))
        bounds.append((start, stop, block is not None))
        start = stop
    return bounds


def _bytes(calls: Sequence[Call]) -> int:
    """Returns an estimate of what calls leave behind: a layer made of layers leaves of each."""
    return sum(call.row_bytes * len(layers_in(call.layer)) for call in calls)


def _segments(graph: Graph, bounds: Bounds) -> list[Segment]:
    calls, results = graph.calls, {id(tensor) for tensor in graph.outputs}
    segments = []
    for start, stop, repeats in bounds:
        own = calls[start:stop]
        made = {id(tensor): tensor for call in own for tensor in call.outputs}
        read = {id(t): t for call in own for t in call.inputs if id(t) not in made}
        wanted = results | {id(tensor) for call in calls[stop:] for tensor in call.inputs}
        given = {key: tensor for key, tensor in made.items() if key in wanted}
        augments = any(randomness.augments(part) for call in own for part in layers_in(call.layer))
        segments.append(
            Segment(
                model=tf.keras.Model(list(read.values()), list(given.values())),
                inputs=tuple(read),
                outputs=tuple(given),
                repeats=repeats and not augments,
                name=own[0].name if len(own) == 1 else f"{own[0].name} to {own[-1].name}",
            )
        )
    return segments
