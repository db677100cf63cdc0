"""Activations of blocks that are made once more on the way back: ``recompute`` on a mesh.

A block is a run of operations of the Mesh-TensorFlow graph, those of a segment of the model. Each
of its operations that a batch flows through is there a second time, on the tensors that the block
was given, and its gradient is taken there; of the first time nothing is kept. The second time waits
for the gradients of what the block has made. An operation's function knows its own random numbers,
so it draws the same ones, and the moving statistics are those of the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.strategies.mesh.context import Context, has_batch
from tfdist.strategies.mesh.conversion import convert
from tfdist.strategies.mesh.operations import LocalOperation, MeshDevices, mtf
from tfdist.training.memory import segments
from tfdist.training.memory.recompute import refuse_side_effects
from tfdist.training.model.layer_calls import graph_of


@dataclass(frozen=True, eq=False)
class Block:
    """A run of operations.

    Attributes:
        operations: in their order.
        name: for people.
    """

    operations: Sequence[Any]
    name: str


@dataclass(frozen=True)
class Segments:
    """A model in segments.

    Attributes:
        parts: in their order.
        inputs, outputs: of the model, by the keys of the segments.
    """

    parts: Sequence[segments.Segment]
    inputs: Sequence[int]
    outputs: Sequence[int]

    @classmethod
    def of(cls, model: tf.keras.Model, names: Sequence[str] | None) -> Segments:
        """Cuts a model.

        Args:
            names: of layers and nested models, each computed again as a whole; None chooses.

        Raises:
            OptionError: there is no layer of a name.
        """
        graph = graph_of(model, needed_by="recompute", otherwise="leave recompute out")
        bounds = segments.chosen(graph) if names is None else segments.named(graph, names)
        return cls(
            segments.segments_of(graph, bounds),
            [id(tensor) for tensor in graph.inputs],
            [id(tensor) for tensor in graph.outputs],
        )

    def convert(self, context: Context, inputs: list[Any]) -> tuple[list[Any], list[Block]]:
        """Returns the outputs of the model on the mesh, as ``conversion.convert``, and blocks."""
        values = dict(zip(self.inputs, inputs, strict=True))
        operations, blocks = context.mesh.graph.operations, []
        for segment in self.parts:
            start = len(operations)
            given = [values[key] for key in segment.inputs]
            made = convert(segment.model, context, given)
            values.update(zip(segment.outputs, made, strict=True))
            if segment.repeats:
                blocks.append(Block(operations[start:], segment.name))
        return [values[key] for key in self.outputs], blocks


def differentiated(
    ys: Sequence[Any], xs: Sequence[Any], grad_ys: Sequence[Any], blocks: Sequence[Block]
) -> list[Any]:
    """Returns the gradients of ``ys`` with respect to ``xs``, as ``mtf.gradients`` does.

    Args:
        grad_ys: those of ``ys``, None where there is none.
        blocks: what is made again, in the order of the graph.
    """
    operations = list(ys[0].graph.operations)
    flowing = set(xs)
    for operation in operations:
        if operation.has_gradient and flowing.intersection(operation.inputs):
            flowing.update(operation.outputs)
    found: dict[Any, Any] = {}

    def add(tensor: Any, gradient: Any) -> None:
        if gradient is not None:
            found[tensor] = found[tensor] + gradient if tensor in found else gradient

    for y, gradient in zip(ys, grad_ys, strict=True):  # Two outputs may be one tensor.
        add(y, gradient)
    block_of = {operation: block for block in blocks for operation in block.operations}
    again: dict[Block, dict[Any, Any]] = {}
    for operation in reversed(operations):
        of_outputs = [found.get(output) for output in operation.outputs]
        is_reached = any(gradient is not None for gradient in of_outputs)
        if not (is_reached and operation.has_gradient and flowing.intersection(operation.inputs)):
            continue
        block, repeated = block_of.get(operation), operation
        if block is not None:
            if block not in again:
                again[block] = _repeated(block, found, flowing)
            repeated = again[block].get(operation, operation)
        of_inputs = repeated.gradient(of_outputs)
        for tensor, gradient in zip(operation.inputs, of_inputs, strict=True):
            if tensor in flowing:
                add(tensor, gradient)
    return [found.get(x) for x in xs]


def _repeated(block: Block, found: dict[Any, Any], flowing: set[Any]) -> dict[Any, Any]:
    """Repeats what the gradients of a block need; returns operation -> the same once more.

    Args:
        found: the gradients of what the block has made.
        flowing: tensors that gradients flow through.
    """
    own = dict.fromkeys(output for operation in block.operations for output in operation.outputs)
    # Of what has no batch little is to be gained.
    given = dict.fromkeys(
        tensor
        for operation in block.operations
        for tensor in operation.inputs
        if tensor not in own and has_batch(tensor)
    )
    if not given:
        return {}
    needed = _needed(block, found, flowing)
    begin = _Begin(list(given), [found[tensor] for tensor in own if tensor in found], block)
    tensors = dict(zip(given, begin.outputs, strict=True))
    made = {}
    for operation in block.operations:
        if operation in needed and tensors.keys() & set(operation.inputs):
            inputs = [tensors.get(tensor, tensor) for tensor in operation.inputs]
            repeat = _REPEATS.get(type(operation))
            if repeat is None:  # Of what is not known the first one is kept.
                continue
            made[operation] = repeat(operation, inputs)
            tensors.update(zip(operation.outputs, made[operation].outputs, strict=True))
    _End(begin)
    return made


def _needed(block: Block, found: dict[Any, Any], flowing: set[Any]) -> set[Any]:
    """Returns the operations of a block that gradients flow through, and what those are given."""
    reached, read, needed = set(found), set(), set()
    for operation in reversed(block.operations):
        outputs = set(operation.outputs)
        through = flowing.intersection(operation.inputs)
        if operation.has_gradient and through and outputs & reached:
            reached |= through
        elif not outputs & read:
            continue
        read.update(operation.inputs)
        needed.add(operation)
    return needed


def _as_shaped(operation: Any, inputs: list[Any]) -> Any:
    return type(operation)(*inputs, operation.outputs[0].shape)


#: Kind of an operation -> what makes it on other inputs, which lie as its own do.
_REPEATS: dict[type, Callable[[Any, list[Any]], Any]] = {
    LocalOperation: LocalOperation.on,
    mtf.ReshapeOperation: _as_shaped,
    mtf.BroadcastOperation: _as_shaped,
}


class _Begin(mtf.Operation):
    """Gives a block its inputs a second time, when the gradients of its outputs are there."""

    def __init__(self, given: Sequence[Any], upstream: Sequence[Any], block: Block):
        super().__init__([*given, *upstream], name="again")
        self._given = list(given)
        self._upstream = list(upstream)
        self._local = [op for op in block.operations if isinstance(op, LocalOperation)]
        self._outputs = [
            mtf.Tensor(self, tensor.shape, tensor.dtype, index=i) for i, tensor in enumerate(given)
        ]
        self.block_name = block.name
        #: Of the TensorFlow graph, before the block is made again; known when it is lowered.
        self.num_operations = 0

    def lower(self, lowering: Any) -> None:
        devices: MeshDevices = lowering.mesh_impl(self)
        graph = tf.compat.v1.get_default_graph()
        self.num_operations = len(graph.get_operations())
        upstream = [lowering.tensors[t].to_laid_out_tensor().tensor_list for t in self._upstream]
        # Where the loss starts at the logits, the gradient of the output itself is a constant.
        upstream += [op.gradients_of_logits for op in self._local if op.gradients_of_logits]
        numbers = list(range(devices.size))

        def wait(place: int, part: tf.Tensor) -> tf.Tensor:
            # Without waiting, TensorFlow would compute it at once and keep it all the same.
            places = numbers if devices.share_memory else [place]
            with tf.control_dependencies([of[other] for of in upstream for other in places]):
                return tf.identity(part)

        for tensor, output in zip(self._given, self.outputs, strict=True):
            slices = lowering.tensors[tensor].to_laid_out_tensor().tensor_list
            parts = devices.run(wait, [numbers, slices], devices.first_places([slices]))
            lowering.set_tensor_lowering(output, devices.LaidOutTensor(parts))


class _End(mtf.Operation):
    """Stands behind the last operation of a block that is made again.

    Raises:
        OptionError: when it is lowered; the block draws numbers that it has not drawn before.
        ModelError: it changes variables a second time.
    """

    def __init__(self, begin: _Begin):
        super().__init__([], begin.mesh, name="again_end")
        self._begin = begin

    def lower(self, lowering: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        made = graph.get_operations()[self._begin.num_operations :]
        refuse_side_effects(graph, made, self._begin.block_name)
