"""Activations that are computed once more on the way back, instead of being kept.

Chen et al. 2016, arXiv:1604.06174. A Functional or Sequential model is cut into segments; of those
that are computed again only inputs and outputs are kept. The same numbers are drawn again, and
BatchNormalization uses the statistics it had. Weights of a segment may be gathered for each pass,
see ``weight_blocks``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.keras.graph import nested_outputs
from tfdist.keras.seeds import keeping_seeds
from tfdist.keras.tensors import mask_of, with_mask
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import batch_norm, randomness
from tfdist.training.layers.gradients import all_at_once
from tfdist.training.memory import segments
from tfdist.training.memory.sharded_weights import ShardedWeights
from tfdist.training.memory.weight_blocks import Block
from tfdist.training.model.layer_calls import graph_of, inputs_of
from tfdist.training.model.logits import logits_of

# How types of operations begin that change a variable.
_ASSIGNING = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")


class Recomputation:
    """Takes the place of a model's ``call`` in training; anywhere else nothing changes.

    Args:
        names: of layers and nested models, each computed again as a whole; None chooses.
        divided: the weights, where replicas divide those of what is computed again.

    Raises:
        ModelError: the model is neither Functional nor Sequential.
        OptionError: it has no layer of a given name.
    """

    def __init__(
        self,
        binding: Binding,
        names: Sequence[str] | None,
        divided: ShardedWeights | None = None,
    ):
        model = binding.model
        option = "recompute" if divided is None else "shard='weights'"
        otherwise = "leave recompute out" if divided is None else "choose shard='optimizer'"
        graph = graph_of(model, needed_by=option, otherwise=otherwise)
        choose = segments.chosen if divided is None else segments.to_divide
        bounds = choose(graph) if names is None else segments.named(graph, names)
        self._model = model
        self._segments = segments.segments_of(graph, bounds)
        self._divided = divided
        self._blocks: dict[int, Block] = {}
        if divided is not None:
            self._blocks = divided.take_blocks(self._segments)
        self._outputs = [id(tensor) for tensor in graph.outputs]
        self._seeds = randomness.StepSeeds(model)
        randomness.put_on(binding)
        binding.call_by(model, self._call)

    @property
    def blocks(self) -> list[str]:
        """What is computed again."""
        return [segment.name for segment in self._segments if segment.repeats]

    def of(self, replica: Any, microbatch: int) -> contextlib.AbstractContextManager:
        """Returns what encloses the forward pass of a microbatch on one replica, in training."""
        seed = tf.random.experimental.stateless_fold_in(self._seeds.of_step(), replica)
        return step_context.within(repeatable=(seed, microbatch))

    def _call(self, whole: Callable[..., Any], inputs: Any, training: Any, mask: Any) -> Any:
        if training is True and step_context.current().repeatable is not None:
            return self._run(inputs, functools.partial(self._forward, reduced=[]))
        if self._divided is not None and self._divided.are_apart:
            return self._run(inputs, functools.partial(self._in_passing, training=training))
        return whole(inputs, training=training, mask=mask)

    def _run(self, inputs: Any, run: Callable[..., list[tf.Tensor]]) -> Any:
        """Returns the outputs of the model; ``run`` those of a segment, given tensors."""
        keys = [id(tensor) for tensor in self._model.inputs]
        values = dict(zip(keys, inputs_of(self._model, inputs), strict=True))
        before: list[tf.Tensor] = []  # What the last block of divided weights was given.
        for number, segment in enumerate(self._segments):
            given = [values[key] for key in segment.inputs]
            values.update(zip(segment.outputs, run(number, given, before), strict=True))
            before = given if number in self._blocks else before
        outputs = [values[key] for key in self._outputs]
        return tf.nest.pack_sequence_as(nested_outputs(self._model), outputs)

    def _forward(
        self,
        number: int,
        given: list[tf.Tensor],
        before: list[tf.Tensor],
        *,
        reduced: list[list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Runs a segment on one microbatch; whenever it is computed, it draws the same numbers.

        Args:
            before: what must be known before the weights of a block are gathered the first time.
            reduced: gradients of the parts of blocks whose way back is over.
        """
        segment, block = self._segments[number], self._blocks.get(number)
        seed, microbatch = step_context.current().repeatable
        first = iter([(f"shard.first.{microbatch}", before)])

        def gathered(parts: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager:
            if block is None:
                return contextlib.nullcontext()
            # The second time. Few blocks are whole at once, however slow the way.
            again = f"shard.again.{microbatch}", reduced[-2] if len(reduced) > 1 else ()
            return block.gathered(parts, *next(first, again), reduced)

        def forward(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            own, parts = tensors[: len(given)], tensors[len(given) :]
            with randomness.microbatch(seed, microbatch, number), gathered(parts):
                return tf.nest.flatten(segment.model(own, training=True))

        if not segment.repeats:
            return forward(given)
        parts = [] if block is None else block.parts()
        return _computed_again(forward, [*given, *parts], segment.name)

    def _in_passing(
        self, number: int, given: list[tf.Tensor], before: list[tf.Tensor], *, training: Any
    ) -> list[tf.Tensor]:
        block = self._blocks.get(number)
        with contextlib.nullcontext() if block is None else block.in_passing(before):
            return tf.nest.flatten(self._segments[number].model(given, training=training))


def _computed_again(
    forward: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: list[tf.Tensor], name: str
) -> list[tf.Tensor]:
    """Returns ``forward(tensors)`` of what is called ``name``; for the gradients it runs again."""
    flowing = [number for number, tensor in enumerate(tensors) if tensor.dtype.is_floating]
    statistics = batch_norm.Repeatable()
    seeds: list[tf.Tensor] = []
    first: list[tf.Tensor] = []

    def with_logits(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what gradients come back to: the loss may go around an output to its logits."""
        flows = [tensor for tensor in outputs if tensor.dtype.is_floating]
        behind = (logits_of(tensor) for tensor in flows)
        return [*flows, *(logits.tensor for logits in behind if logits is not None)]

    # Layers may add losses: what those need stays on the caller's tape, and is right as it is.
    @tf.custom_gradient
    def checkpoint(*_: tf.Tensor) -> Any:
        with statistics.first(), keeping_seeds(seeds):
            first.extend(forward(tensors))

        def back(*upstream: Any, variables: Sequence[tf.Variable] | None = None) -> Any:
            trained = [v for v in variables or () if v.trainable]
            drawn = iter(seeds)
            upstream = [tf.convert_to_tensor(gradient) for gradient in upstream]
            # Without waiting, TensorFlow would compute it at once and keep it all the same.
            with tf.control_dependencies(upstream), tf.GradientTape() as tape:
                again = [with_mask(tf.identity(tensor), mask_of(tensor)) for tensor in tensors]
                sources = [again[number] for number in flowing]
                tape.watch([*sources, *trained])
                with (
                    statistics.again(),
                    step_context.within(seeds=lambda _: next(drawn)),
                    _without_side_effects(name),
                ):
                    outputs = with_logits(forward(again))
            found = tape.gradient(outputs, [*sources, *trained], output_gradients=upstream)
            found = all_at_once(found)
            of_inputs, of_trained = found[: len(sources)], found[len(sources) :]
            if variables is None:
                return of_inputs
            of = {v.ref(): gradient for v, gradient in zip(trained, of_trained, strict=True)}
            return of_inputs, [of.get(v.ref()) for v in variables]

        return with_logits(first), back

    results = iter(tf.nest.flatten(checkpoint(*(tensors[number] for number in flowing))))
    outputs = [with_mask(next(results), mask_of(t)) if t.dtype.is_floating else t for t in first]
    behind = [logits_of(tensor) for tensor in first]
    return [
        output if logits is None else logits.behind(output, next(results))
        for output, logits in zip(outputs, behind, strict=True)
    ]


@contextlib.contextmanager
def _without_side_effects(segment_name: str) -> Iterator[None]:
    """Encloses the second pass through a segment; it raises as ``refuse_side_effects`` does."""
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    refuse_side_effects(graph, graph.get_operations()[before:], segment_name)


def refuse_side_effects(
    graph: tf.Graph, operations: Sequence[tf.Operation], segment_name: str
) -> None:
    """Checks the ``operations`` of ``graph`` that make a segment again.

    Raises:
        OptionError: they draw numbers that the first pass has not drawn.
        ModelError: they change variables a second time.
    """
    randomness.refuse_unseeded(graph, operations)
    assigning = randomness.of_types(graph, operations, lambda kind: kind.startswith(_ASSIGNING))
    if assigning:
        raise ModelError(
            "layers that recompute runs twice must not change variables when they are called",
            received=f"operation '{assigning[0]}' in {segment_name}",
            mend="Give recompute the names of other layers",
        )
