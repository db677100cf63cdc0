"""Weights and optimizer slots as slices on their devices, and the whole of them on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.mesh.layout import Axes, path_of
from tfdist.strategies.mesh.operations import MeshDevices, mtf
from tfdist.strategies.mesh.optimizer import exclude_slices, without_loss_scale
from tfdist.training.keras_api import key_of, loss_scale_state
from tfdist.training.slots import build_on, set_value


class SlicedVariable:
    """One variable of the host as a slice on each device.

    Attributes:
        slices: one tf.Variable for each device of the mesh, in its order.
    """

    def __init__(self, devices: MeshDevices, shape: Sequence[int], axes: Axes):
        dims = [
            mtf.Dimension(f"d{i}@{axis}" if axis else f"d{i}", size)
            for i, (size, axis) in enumerate(zip(shape, axes, strict=True))
        ]
        whole = mtf.Shape(dims)
        self._shape = tuple(shape)
        self._size = len(devices.devices)
        self._places = [
            tuple(
                slice(begin, begin + size)
                for begin, size in zip(
                    devices.slice_begin(whole, place), devices.slice_shape(whole), strict=True
                )
            )
            for place in range(self._size)
        ]
        self.slices: list[tf.Variable] = []
        #: For each device the first one that holds the same slice.
        self.first_places = [self._places.index(place) for place in self._places]

    def repeat_first(self) -> None:
        """Gives each device the slice of the first one that holds the same."""
        for place, first in enumerate(self.first_places):
            if place != first:
                self.slices[place].assign(self.slices[first])

    @property
    def replication(self) -> float:
        """How many devices hold the same slice."""
        part = self.slices[0].shape.num_elements()
        return self._size * part / max(1, int(np.prod(self._shape)))

    def create(self, devices: MeshDevices, variable: tf.Variable) -> None:
        value = variable.numpy()
        for device, place in zip(devices.devices, self._places, strict=True):
            with tf.device(device):
                # The weight's own name: an optimizer chooses by it what does not decay.
                self.slices.append(
                    tf.Variable(
                        value[place],
                        trainable=variable.trainable,
                        name=path_of(variable),
                        dtype=variable.dtype,
                    )
                )

    def scatter(self, value: np.ndarray) -> None:
        for place, part in zip(self._places, self.slices, strict=True):
            part.assign(value[place])

    def gather(self) -> np.ndarray:
        value = np.empty(self._shape, self.slices[0].dtype.as_numpy_dtype)
        done = set()
        for place, part in zip(self._places, self.slices, strict=True):
            key = tuple((s.start, s.stop) for s in place)
            if key not in done:
                done.add(key)
                value[place] = part.numpy()
        return value


class SlicedState:
    """All weights of a model, and the slots of its optimizer, on a mesh.

    Args:
        axes: weight id -> the mesh axis of each of its dimensions.
    """

    def __init__(self, model: tf.keras.Model, devices: MeshDevices, axes: dict[int, Axes]):
        self._model = model
        self._devices = devices
        self._axes = axes
        self.weights: dict[int, SlicedVariable] = {}
        for variable in model.weights:
            sliced = self._sliced(variable)
            sliced.create(devices, variable)
            self.weights[id(variable)] = sliced
        self._attached: Any = None
        self.attach_optimizer()

    def _sliced(self, variable: Any) -> SlicedVariable:
        return SlicedVariable(self._devices, variable.shape, self._axes[id(variable)])

    def of(self, variable: Any) -> SlicedVariable:
        return self.weights[id(variable)]

    def all_slices(self) -> list[tf.Variable]:
        """Returns the slices of all weights, which steps train."""
        return [part for sliced in self.weights.values() for part in sliced.slices]

    # The optimizer ------------------------------------------------------------------------------

    def attach_optimizer(self) -> None:
        """Builds the optimizer that the model is compiled with on the slices.

        One that was built on whole weights, as that of a loaded model, goes on where it is.
        """
        given = self._model.optimizer
        if given is self._attached:  # Compiled anew with the same one.
            return
        fresh = type(given).from_config(given.get_config())
        is_built = len(given.variables) > len(fresh.variables)
        if is_built:
            self._model.optimizer = fresh
        self._attached = self._model.optimizer
        self._build_optimizer()
        if is_built:
            host = self.host_optimizer()
            pairs = zip(_state_of(host), _state_of(given), strict=True)
            for variable, value in pairs:
                variable.assign(value)
            self.scatter_optimizer()

    def _build_optimizer(self) -> None:
        optimizer = without_loss_scale(self._model.optimizer)
        owners = {}
        keys = {}
        for variable in self._model.trainable_variables:
            slices = self.of(variable).slices
            keys[key_of(optimizer, variable)] = slices
            owners |= {id(part): id(variable) for part in slices}
        exclude_slices(optimizer, keys)
        parts = [part for slices in keys.values() for part in slices]
        slots = build_on(optimizer, parts)
        #: (id of the weight, name of the slot) -> slices.
        self.slots: dict[tuple[int, str], SlicedVariable] = {}
        for part, name, slot in slots:
            key = (owners[id(part)], name)
            if key not in self.slots:
                variable = next(v for v in self._model.weights if id(v) == key[0])
                self.slots[key] = self._sliced(variable)
            self.slots[key].slices.append(slot)
        self._host_optimizer: Any = None

    def host_optimizer(self) -> Any:
        """Returns an optimizer of the same kind, built on the whole weights of the host."""
        if self._host_optimizer is None:
            optimizer = self._model.optimizer
            host = type(optimizer).from_config(optimizer.get_config())
            slots = build_on(without_loss_scale(host), self._model.trainable_variables)
            self._host_slots = {(id(v), name): slot for v, name, slot in slots}
            self._host_optimizer = host
        return self._host_optimizer

    def _scalars(self) -> list[tuple[Any, Any]]:
        """Returns the pairs (sliced optimizer's, host optimizer's) of variables without slices."""
        own_slots = {id(part) for sliced in self.slots.values() for part in sliced.slices}
        host_slots = {id(slot) for slot in self._host_slots.values()}
        optimizers = (self._model.optimizer, self._host_optimizer)
        own, host = map(_state_of, optimizers)
        own = [v for v in own if id(v) not in own_slots]
        host = [v for v in host if id(v) not in host_slots]
        return list(zip(own, host, strict=True))

    def slots_of(self, variable: Any) -> list[SlicedVariable]:
        return [sliced for (key, _), sliced in self.slots.items() if key == id(variable)]

    # Between host and devices -------------------------------------------------------------------

    def gather_weights(self) -> None:
        for variable in self._model.weights:
            set_value(variable, self.of(variable).gather())

    def scatter_weights(self) -> None:
        for variable in self._model.weights:
            self.of(variable).scatter(variable.numpy())

    def gather_optimizer(self) -> None:
        self.host_optimizer()
        for key, slot in self._host_slots.items():
            set_value(slot, self.slots[key].gather())
        for own, host in self._scalars():
            host.assign(own)

    def scatter_optimizer(self) -> None:
        for key, slot in self._host_slots.items():
            self.slots[key].scatter(slot.numpy())
        for own, host in self._scalars():
            own.assign(host)

    # Memory -------------------------------------------------------------------------------------

    def bytes_per_device(self) -> dict[str, int]:
        """Returns what the variables that lie on each device hold: device -> bytes.

        Read from the variables themselves, not computed from the layout.
        """
        held: dict[str, int] = {}
        for sliced in [*self.weights.values(), *self.slots.values()]:
            for part in sliced.slices:
                held[part.device] = held.get(part.device, 0) + part.numpy().nbytes
        return held

    def release_host(self) -> None:
        """Frees the memory of the host's weights; the next ``gather_weights`` makes it anew."""
        host = self._host_slots.values() if self._host_optimizer is not None else []
        for variable in [*self._model.weights, *host]:
            set_value(variable, tf.zeros([0], variable.dtype))


def _state_of(optimizer: Any) -> list[Any]:
    return [*optimizer.variables, *loss_scale_state(optimizer)]
