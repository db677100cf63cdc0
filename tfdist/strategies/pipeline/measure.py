"""What each layer call really costs: time on a microbatch, and bytes kept for the way back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import OptionError
from tfdist.keras.layers import trained_in, variables_in
from tfdist.training.model.layer_calls import Call, Graph, model_of

_REPEATS = 5
# A layer that takes longer is timed less often.
_ENOUGH_S = 0.5


@dataclass(frozen=True)
class Cost:
    """One call, measured on a microbatch.

    Attributes:
        forward_s, backward_s: seconds; the shortest of some runs. Backward is 0 where nothing
            is trained up to here.
        kept_bytes: of the activations that backward passes read, as the traced step holds them:
            of the inside of this call and of its outputs; each once, without weights.
    """

    forward_s: float
    backward_s: float
    kept_bytes: int


@dataclass(frozen=True)
class Measured:
    """All calls of a model.

    Attributes:
        rows: of the microbatch that was measured.
        costs: of the calls, in the order of the graph.
    """

    rows: int
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class _Alone:
    """One call by itself.

    Attributes:
        inside_bytes: that its backward pass reads, beside inputs and outputs.
        inputs, outputs: that its backward pass reads, by number.
    """

    forward_s: float
    backward_s: float
    inside_bytes: int = 0
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


def measure(graph: Graph, rows: int) -> Measured:
    """Runs every call of a model some times, alone, forward and backward.

    Equal layers on equal shapes are measured once.

    Args:
        rows: of a microbatch.

    Raises:
        OptionError: an input has no fixed shape.
    """
    values = {id(symbol): _made_up(symbol, rows) for symbol in graph.inputs}
    known: dict[str, _Alone] = {}
    flowing: set[int] = set()  # Tensors that gradients have to reach.
    alone = []
    for call in graph.calls:
        inputs = _read_by(call)
        model = model_of([call], inputs, call.outputs)
        given = [values[id(symbol)] for symbol in inputs]
        sources = [n for n, symbol in enumerate(inputs) if id(symbol) in flowing]
        key = _key(call, given, sources)
        if key not in known:
            known[key] = _run_alone(call, model, given, sources)
        alone.append(known[key])
        made = tf.nest.flatten(model(given, training=False))
        values.update((id(s), tensor) for s, tensor in zip(call.outputs, made, strict=True))
        if sources or trained_in(call.layer):
            flowing.update(id(s) for s in call.outputs if tf.as_dtype(s.dtype).is_floating)
    kept = _kept_bytes(graph, alone, values)
    times = zip(alone, kept, strict=True)
    return Measured(rows, tuple(Cost(one.forward_s, one.backward_s, b) for one, b in times))


def _kept_bytes(graph: Graph, alone: list[_Alone], values: dict[int, tf.Tensor]) -> list[int]:
    """Returns what each call keeps; what several read counts where it was made, and once."""
    read: set[int] = set()
    for call, one in zip(graph.calls, alone, strict=True):
        inputs = _read_by(call)
        read |= {id(inputs[n]) for n in one.inputs}
        read |= {id(call.outputs[n]) for n in one.outputs}
    return [
        one.inside_bytes + sum(_bytes(values[id(s)]) for s in call.outputs if id(s) in read)
        for call, one in zip(graph.calls, alone, strict=True)
    ]


def _read_by(call: Call) -> list[Any]:
    """Returns what a call reads, each once: attention to itself reads one tensor twice."""
    return list({id(symbol): symbol for symbol in call.inputs}.values())


def _bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _made_up(symbol: Any, rows: int) -> tf.Tensor:
    """Returns a batch for an input: numbers around 0, or ids that every vocabulary has."""
    if None in symbol.shape[1:]:
        raise OptionError(
            "balance='measured' must have inputs of a fixed shape",
            received=f"input '{symbol.name}' of shape {list(symbol.shape[1:])}",
            mend="Give keras.Input a fixed shape, or choose balance='estimated'",
        )
    shape = (rows, *symbol.shape[1:])
    if tf.as_dtype(symbol.dtype) == tf.string:
        return tf.fill(shape, "")
    if not tf.as_dtype(symbol.dtype).is_floating:
        return tf.zeros(shape, symbol.dtype)
    return tf.cast(np.random.default_rng(0).normal(size=shape), symbol.dtype)


def config_of(call: Call) -> dict[str, Any] | None:
    """Returns that of the layer, but for its name: Keras counts the unnamed ones on."""
    try:
        return {name: value for name, value in call.layer.get_config().items() if name != "name"}
    except NotImplementedError:  # A layer of the user's own; its class and weights tell it.
        return None


def _key(call: Call, given: list[tf.Tensor], sources: list[int]) -> str:
    config = config_of(call)
    if config is None:
        config = {"only": call.name}
    shapes = [[list(tensor.shape), tensor.dtype.name] for tensor in given]
    weights = [list(weight.shape) for weight in variables_in(call.layer)]
    trained = len(trained_in(call.layer))
    kind = f"{type(call.layer).__module__}.{type(call.layer).__qualname__}"
    return json.dumps([kind, config, shapes, weights, trained, sources], default=str)


def _run_alone(
    call: Call, model: tf.keras.Model, given: list[tf.Tensor], sources: list[int]
) -> _Alone:
    variables = trained_in(call.layer)
    kept: dict[str, Any] = {}

    def forward(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return tf.nest.flatten(model(inputs, training=True))

    def both(inputs: list[tf.Tensor]) -> list[Any]:
        flowing = [inputs[number] for number in sources]
        with tf.GradientTape() as tape:
            tape.watch(flowing)
            outputs = forward(inputs)
            targets = [tensor for tensor in outputs if tensor.dtype.is_floating]
        graph = tf.compat.v1.get_default_graph()
        before = set(graph.get_operations())
        found = tape.gradient(targets, [*flowing, *variables])
        kept.update(_read_back(graph, before, inputs, outputs))
        return [gradient for gradient in found if gradient is not None]

    trained = {variable.ref() for variable in variables}
    beside = [weight for weight in variables_in(call.layer) if weight.ref() not in trained]
    statistics = [(weight, weight.numpy()) for weight in beside]
    forward_s = _shortest(tf.function(forward), given)
    both_s = _shortest(tf.function(both), given) if sources or variables else forward_s
    for weight, value in statistics:  # Such as those that BatchNormalization moves.
        weight.assign(value)
    return _Alone(forward_s, max(both_s - forward_s, 0.0), **kept)


def _read_back(
    graph: tf.Graph, forward: set[tf.Operation], inputs: list[Any], outputs: list[Any]
) -> dict[str, Any]:
    """Returns what operations outside of ``forward`` read of those inside; see ``_Alone``."""
    read = {}
    for operation in graph.get_operations():
        if operation not in forward:
            read.update({t.ref(): t for t in operation.inputs if t.op in forward})
    known = {tensor.ref() for tensor in (*inputs, *outputs)}
    inside = (
        tensor
        for ref, tensor in read.items()
        if ref not in known
        and tensor.op.type not in ("Placeholder", "ReadVariableOp", "Const", "Shape")
        and tensor.dtype not in (tf.resource, tf.variant)
    )
    return {
        "inside_bytes": sum(map(_bytes, inside)),
        "inputs": frozenset(n for n, tensor in enumerate(inputs) if tensor.ref() in read),
        "outputs": frozenset(n for n, tensor in enumerate(outputs) if tensor.ref() in read),
    }


def _shortest(function: Callable, given: list[tf.Tensor]) -> float:
    """Returns seconds."""
    _wait_for(function(given))  # Traced, and the kernels loaded.
    shortest, total = float("inf"), 0.0
    for _ in range(_REPEATS):
        start = time.perf_counter()
        _wait_for(function(given))
        seconds = time.perf_counter() - start
        shortest, total = min(shortest, seconds), total + seconds
        if total > _ENOUGH_S:
            break
    return shortest


def _wait_for(results: list[Any]) -> None:
    for tensor in results:
        if isinstance(tensor, tf.IndexedSlices):
            tensor = tensor.values
        tensor.numpy()
