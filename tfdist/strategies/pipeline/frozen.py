"""The frozen leading layers of a pipeline, taken by themselves: what the other layers read of them.

Their outputs depend on the record alone, so they can be kept; where they would not, this refuses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ModelError, OptionError
from tfdist.keras.graph import CAN_FIX_TRAINING
from tfdist.keras.layers import variables_in, written_anew
from tfdist.keras.tensors import mask_of, with_mask
from tfdist.strategies.pipeline.chunks import Chunk
from tfdist.strategies.pipeline.measure import config_of
from tfdist.strategies.pipeline.plan import Plan
from tfdist.strategies.pipeline.refusals import random_layers
from tfdist.training.layers.gradients import activity_losses
from tfdist.training.model.layer_calls import Call, Graph, inputs_of
from tfdist.training.model.logits import logits_of

_NAME = "tfdist_frozen_{}"
_MASK = "tfdist_frozen_mask_{}"
# What two runs of the same layers may differ by, of the largest output.
_TOLERANCE = {tf.float16: 1e-2, tf.bfloat16: 5e-2, tf.float64: 1e-9}


class Frozen:
    """The frozen layers of a plan, and the chunks that remain when their outputs are known.

    Attributes:
        chunks: of the other layers, as many as the plan has.
        last: the name of the layer that ends the frozen part.

    Raises:
        OptionError: their outputs do not depend on the record alone.
    """

    def __init__(self, model: tf.keras.Model, plan: Plan, devices: list[str]):
        assert plan.options.freeze_until is not None
        self._model = model
        self._graph: Graph = plan.graph
        self.last = plan.options.freeze_until
        self._calls = plan.calls[: plan.num_frozen]
        self._plan, self._devices = plan, devices
        self.cut()
        made = {id(tensor) for call in self._calls for tensor in call.outputs}
        #: Tensors that the other layers, or the model's caller, read.
        self._read = _read_by(plan.calls[plan.num_frozen :], plan.graph)
        self._own: Chunk = plan.frozen_chunk([t for t in self._read if id(t) in made], devices)
        self._masked = [mask_of(t) is not None for t in self._read]
        self._check()
        self._run = tf.function(self._outputs, reduce_retracing=True)

    def cut(self) -> tuple[Chunk, ...]:
        """Returns ``chunks``, made anew."""
        self.chunks = self._plan.chunks(self._devices, self._plan.num_frozen)
        return self.chunks

    # What is read of them -----------------------------------------------------------------------

    def outputs(self, x: Any, *, training: bool) -> dict[str, np.ndarray]:
        """Returns what the other layers read, by name, for the features ``x`` of some rows.

        Raises:
            ModelError: a layer adds a loss, which would be lost with the layer.
        """
        made = self._run(inputs_of(self._model, x), training=training)
        return {name: tensor.numpy() for name, tensor in made.items()}

    def is_output(self, x: Any) -> bool:
        """Whether the features of a batch are what ``outputs`` returned."""
        return isinstance(x, Mapping) and _NAME.format(0) in x

    def values(self, x: Mapping[str, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Returns key -> tensor for a batch of what ``outputs`` returned."""
        values = {}
        for position, symbol in enumerate(self._read):
            tensor = tf.identity(x[_NAME.format(position)])
            if self._masked[position]:
                with_mask(tensor, x[_MASK.format(position)])
            values[id(symbol)] = tensor
        return values

    def _outputs(self, inputs: list[tf.Tensor], training: bool) -> dict[str, tf.Tensor]:
        known: dict[int, tf.Tensor] = dict(
            zip((id(symbol) for symbol in self._graph.inputs), inputs, strict=True)
        )
        chunk = self._own
        with tf.device(chunk.device):
            arguments = [known[key] for key in chunk.inputs]
            made = tf.nest.flatten(chunk.model(arguments, training=training))
        if activity_losses(chunk.model):
            raise ModelError(
                "frozen layers whose outputs are kept must add no loss",
                received=f"an activity loss in the layers up to '{self.last}'",
                mend="Leave frozen_cache out, or that loss",
            )
        known.update(zip(chunk.outputs, made, strict=True))
        if any(logits_of(known.get(id(symbol))) is not None for symbol in self._graph.outputs):
            raise ModelError(
                "outputs of frozen layers that are kept must not be a softmax or sigmoid that the "
                "loss reads, since it starts at the logits, which would be lost",
                received=f"an output of the model in the layers up to '{self.last}'",
                mend="Leave frozen_cache out, or let that output give logits",
            )
        found = {}
        for position, symbol in enumerate(self._read):
            found[_NAME.format(position)] = known[id(symbol)]
            if self._masked[position]:
                found[_MASK.format(position)] = mask_of(known[id(symbol)])
        return found

    # Whether they can be kept -------------------------------------------------------------------

    def _check(self) -> None:
        random = random_layers(self._calls)
        if random:
            raise OptionError(
                "frozen layers whose outputs are kept must not draw random numbers, which differ "
                "in each epoch",
                received=f"layers that draw them, {', '.join(random)}",
                mend=("Call them with training=False, or leave" if CAN_FIX_TRAINING else "Leave")
                + " frozen_cache out",
            )
        unknown = [t.name for t in self._read if None in t.shape[1:]]
        if unknown:
            raise OptionError(
                "outputs of frozen layers that are kept must have one shape for all records",
                received=f"tensor '{unknown[0]}' of unknown size",
                mend="Give keras.Input a fixed shape, or leave frozen_cache out",
            )
        if written_anew(self._model, "compute_metrics"):
            raise OptionError(
                "a model whose frozen layers' outputs are kept must have Keras' own "
                "compute_metrics",
                received=f"{type(self._model).__name__} with a compute_metrics of its own",
                mend="Give the metrics to compile(), or leave frozen_cache out",
            )

    def check_depends_on_record_alone(self, x: Any, *, training: bool) -> None:
        """Runs some rows again, and half of them in another order.

        Raises:
            OptionError: a row has other outputs then.
        """
        first = self.outputs(x, training=training)
        rows = len(tf.nest.flatten(x)[0])
        if any(np.shape(values)[:1] != (rows,) for values in first.values()):
            raise OptionError(
                "outputs of frozen layers that are kept must have a row for each record",
                received=f"one of another length, in the layers up to '{self.last}'",
                mend="Leave frozen_cache out",
            )
        again = self.outputs(x, training=training)
        half = -(-rows // 2)
        turned = tf.nest.map_structure(lambda leaf: leaf[::-1][:half], x)
        among_others = self.outputs(turned, training=training)
        for name, values in first.items():
            repeats = same(values, again[name])
            if not repeats or not same(values[::-1][:half], among_others[name]):
                cause = "among other rows" if repeats else "when they ran again"
                raise OptionError(
                    "outputs of frozen layers that are kept must depend on the record alone",
                    received=f"other outputs {cause}, in the layers up to '{self.last}'",
                    mend="Leave frozen_cache out",
                )

    # Which ones they are ------------------------------------------------------------------------

    def weights_fingerprint(self) -> str:
        """Returns a hash of the values of all weights."""
        digest = hashlib.blake2b(digest_size=16)
        for call in self._calls:
            # An operation of Keras 3 has none.
            for weight in getattr(call.layer, "get_weights", list)():
                digest.update(bytes_of(weight))
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Returns a hash of the layers and of how they are connected, without their weights."""
        sources = {id(tensor): f"input {n}" for n, tensor in enumerate(self._graph.inputs)}
        described = []
        for number, call in enumerate(self._calls):
            described.append(
                {
                    "class": f"{type(call.layer).__module__}.{type(call.layer).__qualname__}",
                    "config": config_of(call),
                    "infers": call.infers,
                    "inputs": [sources[id(tensor)] for tensor in call.inputs],
                    "weights": [
                        [w.dtype.name, w.shape.as_list()] for w in variables_in(call.layer)
                    ],
                }
            )
            sources.update({id(t): f"{number} {n}" for n, t in enumerate(call.outputs)})
        text = json.dumps(
            [described, [sources[id(tensor)] for tensor in self._read], tf.version.VERSION],
            default=str,
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def bytes_of(array: np.ndarray) -> Any:
    """Returns what tells the values of an array from others, to be hashed."""
    if array.dtype == object:  # Texts; the array itself holds their addresses.
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two outputs of the same layers are equal but for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    dtype = tf.as_dtype(one.dtype)
    if not dtype.is_floating:
        return bool(np.array_equal(one, other))
    a, b = (array.astype(np.float64) for array in (one, other))
    largest = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
    tolerance = _TOLERANCE.get(dtype, 1e-5) * max(largest, 1e-30)
    return bool(np.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True))


def _read_by(calls: tuple[Call, ...], graph: Graph) -> list[Any]:
    made = {id(tensor) for call in calls for tensor in call.outputs}
    read = [tensor for call in calls for tensor in call.inputs] + list(graph.outputs)
    return list({id(tensor): tensor for tensor in read if id(tensor) not in made}.values())
