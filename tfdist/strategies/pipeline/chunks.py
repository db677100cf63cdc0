"""Chunks: the parts of a model that a pipeline runs as one, each with its variables on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.layers import trained_in
from tfdist.keras.optimizers import variables_of
from tfdist.keras.seeds import unshared_seed
from tfdist.keras.settings import uncounted_names
from tfdist.keras.tensors import uncast
from tfdist.training.model.layer_calls import Call, model_of


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive layer calls, as a model of their own that shares the layers.

    Tensors of the whole model are known by a key, the ``id`` of the symbolic tensor.

    Attributes:
        calls: what it runs.
        device: where.
        model: inputs -> outputs, both lists.
        inputs, outputs: keys of what it reads from, and gives to, others.
        differentiable: inputs through which gradients flow back.
        learns: whether it has to go backward at all.
    """

    calls: tuple[Call, ...]
    device: str
    model: tf.keras.Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    differentiable: frozenset[int]
    learns: bool

    @cached_property
    def variables(self) -> list[tf.Variable]:
        """Trainable ones, each once."""
        unique = {v.ref(): v for call in self.calls for v in trained_in(call.layer)}
        return list(unique.values())


def make_chunks(
    calls: Sequence[Call],
    results: Sequence[Any],
    cuts: Sequence[int],
    devices: Sequence[str],
) -> tuple[Chunk, ...]:
    """Cuts ``calls`` into chunks.

    Args:
        results: symbolic tensors that all calls together are to give.
        cuts: the first call of each chunk but the first one.
        devices: of each chunk.
    """
    starts = [0, *cuts]
    stops = [*cuts, len(calls)]
    result_keys = [id(tensor) for tensor in results]
    chunks: list[Chunk] = []
    flowing: set[int] = set()  # Keys that gradients have to reach.
    for start, stop, device in zip(starts, stops, devices, strict=True):
        own = tuple(calls[start:stop])
        made = {id(tensor): tensor for call in own for tensor in call.outputs}
        read: dict[int, Any] = {
            id(tensor): tensor for call in own for tensor in call.inputs if id(tensor) not in made
        }
        read_later = {id(tensor) for call in calls[stop:] for tensor in call.inputs}
        given = {k: t for k, t in made.items() if k in read_later or k in result_keys}
        has_weights = any(trained_in(call.layer) for call in own)
        is_last = stop == len(calls)  # There the loss reads all outputs.
        reaches = [*read, *result_keys] if is_last else read
        differentiable = frozenset(key for key in reaches if key in flowing)
        learns = has_weights or bool(differentiable)
        if learns:
            flowing.update(key for key, t in given.items() if tf.as_dtype(t.dtype).is_floating)
        chunks.append(
            Chunk(
                calls=own,
                device=device,
                model=model_of(own, list(read.values()), list(given.values())),
                inputs=tuple(read),
                outputs=tuple(given),
                differentiable=differentiable,
                learns=learns,
            )
        )
    return tuple(chunks)


class _Creator:
    """Counts variables as they are made, and puts each on its device.

    Args:
        devices: number of a variable -> device; others go where TensorFlow puts them.
    """

    def __init__(self, devices: dict[int, str]):
        self._devices = devices
        self.numbers: dict[Any, int] = {}
        self.count = 0

    def __call__(self, make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        with tf.device(self._devices.get(self.count)):
            variable = make(**options)
        self.numbers[variable.ref()] = self.count
        self.count += 1
        return variable


def place(
    make_model: Callable[[], tf.keras.Model],
    devices_of: Callable[[tf.keras.Model], dict[Any, str]],
) -> tf.keras.Model:
    """Makes a model twice: once to see what it consists of, once on its devices.

    Args:
        make_model: returns the same model whenever it is called.
        devices_of: model -> ``variable.ref()`` -> device.

    Raises:
        ModelError: two calls made different models.
    """
    seen = _Creator({})
    # The second is the user's: its names, of metrics too, are to be those of a model made once.
    with tf.variable_creator_scope(seen), uncounted_names(), unshared_seed():
        probe = make_model()
    devices = {}
    for ref, device in devices_of(probe).items():
        variable = uncast(ref.deref())
        if variable.ref() not in seen.numbers:
            raise _not_the_same(f"variable '{variable.name}', made before model_fn was called")
        devices[seen.numbers[variable.ref()]] = device
    weights = probe.get_weights()
    placed = _Creator(devices)
    with tf.variable_creator_scope(placed):
        model = make_model()
    if placed.count != seen.count or [w.shape for w in weights] != [
        w.shape for w in model.get_weights()
    ]:
        raise _not_the_same(f"{seen.count} variables, then {placed.count}")
    model.set_weights(weights)
    # Slots that model_fn has made may have begun as the weights, as averages do.
    optimizers = [getattr(each, "optimizer", None) for each in (model, probe)]
    if None not in optimizers:
        for own, other in zip(*map(variables_of, optimizers), strict=True):
            own.assign(other)
    return model


def _not_the_same(received: str) -> ModelError:
    return ModelError(
        "model_fn, which a pipeline calls twice, must return the same model each time",
        received=received,
        mend="Make all layers inside model_fn, each time anew",
    )
