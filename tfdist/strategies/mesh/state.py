"""Weights and optimizer slots as slices on their devices, and the whole of them on the host.

Logical CPUs share their memory: a slice that several of them hold alike is there once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.loss_scale import loss_scale_state
from tfdist.keras.optimizer_copies import decay_alike
from tfdist.keras.optimizers import build_around, inner_of, key_of, variables_of
from tfdist.keras.rates import rate_variables_of
from tfdist.keras.tensors import raw
from tfdist.strategies.mesh.layout import Axes
from tfdist.strategies.mesh.operations import MeshDevices, mtf
from tfdist.strategies.mesh.optimizer import exclude_slices
from tfdist.strategies.mesh.ranks import RankParts
from tfdist.training.memory.slots import build_on, set_value


class SlicedVariable:
    """One variable of the host as a slice on each device.

    Attributes:
        held: a tf.Variable for each device of the mesh, in its order, or where memory is shared for
            each different slice; this rank's part of the slice, where ranks divide them.
        holders: for each of ``held`` the place of the device that it lies on.
        first_places: for each device the first one that holds the same slice.

    Args:
        ranks: those that divide the slices; None: each holds all of them.
    """

    def __init__(
        self,
        devices: MeshDevices,
        shape: Sequence[int],
        axes: Axes,
        ranks: RankParts | None = None,
    ):
        dims = [
            mtf.Dimension(f"d{i}@{axis}" if axis else f"d{i}", size)
            for i, (size, axis) in enumerate(zip(shape, axes, strict=True))
        ]
        whole = mtf.Shape(dims)
        self._shape = tuple(shape)
        self._size = len(devices.devices)
        self._ranks = ranks
        self._slice_shape = tuple(devices.slice_shape(whole))
        self._places = [
            tuple(
                slice(begin, begin + size)
                for begin, size in zip(
                    devices.slice_begin(whole, place), devices.slice_shape(whole), strict=True
                )
            )
            for place in range(self._size)
        ]
        self.held: list[tf.Variable] = []
        self.first_places = [self._places.index(place) for place in self._places]
        of_each = self.first_places if devices.share_memory else list(range(self._size))
        self.holders = sorted(set(of_each))
        self._numbers = [self.holders.index(place) for place in of_each]

    @property
    def slices(self) -> list[tf.Variable]:
        """What each device of the mesh works with, in its order."""
        return [self.held[number] for number in self._numbers]

    def repeat_first(self) -> None:
        """Gives each device the slice of the first one that holds the same."""
        for place, part in zip(self.holders, self.held, strict=True):
            first = self.first_places[place]
            if place != first:
                part.assign(self.slices[first])

    @property
    def replication(self) -> float:
        """How many devices hold the same slice."""
        part = self.held[0].shape.num_elements()
        return self._size * part / max(1, int(np.prod(self._shape)))

    def create(self, devices: MeshDevices, variable: tf.Variable, value: np.ndarray) -> None:
        """Makes the slices of ``variable``, whose whole value may be released on the host."""
        for place in self.holders:
            with tf.device(devices.devices[place]):
                # The weight's own name: an optimizer chooses by it what does not decay.
                self.held.append(
                    tf.Variable(
                        self._own(value[self._places[place]]),
                        trainable=variable.trainable,
                        name=raw(variable).name.partition(":")[0],
                        dtype=variable.dtype,
                    )
                )

    def look_ups_of(self, ids: tf.Tensor, values: tf.Tensor) -> list[tf.IndexedSlices]:
        """Returns rows of a whole table as those of each device's slice: ids [n], values [n, m]."""
        parts = {}
        for place in set(self.first_places):
            rows, columns = self._places[place]
            is_own = (ids >= rows.start) & (ids < rows.stop)
            own = tf.boolean_mask(values, is_own)[:, columns]
            shape = tf.constant(self._slice_shape, tf.int64)
            parts[place] = tf.IndexedSlices(own, tf.boolean_mask(ids, is_own) - rows.start, shape)
        return [parts[place] for place in self.first_places]

    def scatter(self, value: np.ndarray) -> None:
        for place, part in zip(self.holders, self.held, strict=True):
            part.assign(self._own(value[self._places[place]]))

    def _own(self, value: np.ndarray) -> Any:
        return value if self._ranks is None else self._ranks.cut(value)

    def gather(self) -> np.ndarray:
        """Returns the whole; where ranks divide it, all of them call it together."""
        value = np.empty(self._shape, self.held[0].dtype.as_numpy_dtype)
        places = sorted(set(self.first_places))
        parts = [self.slices[place].numpy() for place in places]
        if self._ranks is not None:
            parts = self._ranks.joined(parts, self._slice_shape)
        for place, part in zip(places, parts, strict=True):
            value[self._places[place]] = part
        return value


class SlicedState:
    """All weights of a model, and the slots of its optimizer, on a mesh.

    Args:
        axes: weight id -> the mesh axis of each of its dimensions.
        ranks: those that divide the slots; None: each holds all of them.

    Attributes:
        parts: weight id -> what the optimizer updates in the place of its slices, where ranks
            divide them: their own parts.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        devices: MeshDevices,
        axes: dict[int, Axes],
        ranks: RankParts | None = None,
    ):
        self.ranks = ranks
        self.parts: dict[int, SlicedVariable] = {}
        self.model = model
        self.devices = devices
        self._axes = axes
        self.weights: dict[int, SlicedVariable] = {}
        for variable in model.weights:
            sliced = SlicedVariable(devices, variable.shape, axes[id(variable)])
            sliced.create(devices, variable, variable.numpy())
            self.weights[id(variable)] = sliced
        #: Ids of the host's weights that are older than their slices.
        self.behind: set[int] = set()
        self._attached: Any = None
        #: All that were attached: their slots are slices, which no later one is read from.
        self._known: weakref.WeakSet = weakref.WeakSet()
        #: Whether the host has whole slots that were loaded here, and perhaps on no other rank.
        self._holds_loaded = False
        self.attach_optimizer()

    def _divided(self, variable: Any) -> SlicedVariable:
        return SlicedVariable(self.devices, variable.shape, self._axes[id(variable)], self.ranks)

    def of(self, variable: Any) -> SlicedVariable:
        return self.weights[id(variable)]

    def trained(self, variable: Any) -> SlicedVariable:
        """Returns what the optimizer updates: the slices of a weight, or this rank's parts."""
        return self.parts.get(id(variable)) or self.weights[id(variable)]

    def held_for(self, variable: Any) -> list[SlicedVariable]:
        """Returns a weight, its part that this rank updates beside it, and its slots."""
        part = [self.parts[id(variable)]] if id(variable) in self.parts else []
        return [self.of(variable), *part, *self.slots_of(variable)]

    def all_slices(self) -> list[tf.Variable]:
        """Returns the slices of all weights, which steps train."""
        return [part for sliced in self.weights.values() for part in sliced.held]

    # The optimizer ------------------------------------------------------------------------------

    def attach_optimizer(self) -> None:
        """Builds the optimizer that the model is compiled with on the slices.

        One that was built on whole weights, as that of a loaded model, goes on where it is.

        Raises:
            ModelError: it was compiled before, and another one since.
        """
        given = self.model.optimizer
        if given is self._attached:  # Compiled anew with the same one.
            return
        if given in self._known:
            raise ModelError(
                "an optimizer that a mesh was compiled with before another one must not come back",
                received=f"the {type(given).__name__} of an earlier compile",
                mend="Make a new one",
            )
        fresh = type(given).from_config(given.get_config())
        is_built = self.came_built = len(given.variables) > len(fresh.variables)
        if is_built:
            decay_alike(given, fresh, [(v, v) for v in self.model.trainable_variables])
            self.model.optimizer = fresh
        self._attached = self.model.optimizer
        self._known.add(self._attached)
        self._build_optimizer()
        if is_built:
            host = self.host_optimizer()
            pairs = zip(_state_of(host), _state_of(given), strict=True)
            for variable, value in pairs:
                variable.assign(value)
            self.scatter_optimizer()
        self._holds_loaded = is_built and self.ranks is not None

    def _build_optimizer(self) -> None:
        optimizer = inner_of(self.model.optimizer)
        owners = {}
        keys = {}
        for variable in self.model.trainable_variables:
            if self.ranks is not None:
                parts = self.parts[id(variable)] = self._divided(variable)
                parts.create(self.devices, variable, self.of(variable).gather())
            held = self.trained(variable).held
            keys[key_of(optimizer, variable)] = held
            owners |= {id(part): id(variable) for part in held}
        exclude_slices(optimizer, keys)
        parts = [part for held in keys.values() for part in held]
        slots = build_on(optimizer, parts)
        build_around(self.model.optimizer, parts)
        #: (id of the weight, name of the slot) -> slices.
        self.slots: dict[tuple[int, str], SlicedVariable] = {}
        for part, name, slot in slots:
            key = (owners[id(part)], name)
            if key not in self.slots:
                variable = next(v for v in self.model.weights if id(v) == key[0])
                self.slots[key] = self._divided(variable)
            self.slots[key].held.append(slot)
        self._host_optimizer: Any = None

    def host_optimizer(self) -> Any:
        """Returns an optimizer of the same kind, built on the whole weights of the host."""
        if self._host_optimizer is None:
            optimizer = self.model.optimizer
            host = type(optimizer).from_config(optimizer.get_config())
            slots = build_on(inner_of(host), self.model.trainable_variables)
            build_around(host, self.model.trainable_variables)
            self._host_slots = {(id(v), name): slot for v, name, slot in slots}
            self._host_optimizer = host
        return self._host_optimizer

    def _scalars(self) -> list[tuple[Any, Any]]:
        """Returns the pairs (sliced optimizer's, host optimizer's) of variables without slices."""
        own_slots = {id(part) for sliced in self.slots.values() for part in sliced.held}
        host_slots = {id(slot) for slot in self._host_slots.values()}
        optimizers = (self.model.optimizer, self._host_optimizer)
        own, host = map(_state_of, optimizers)
        own = [v for v in own if id(v) not in own_slots]
        host = [v for v in host if id(v) not in host_slots]
        return list(zip(own, host, strict=True))

    def slots_of(self, variable: Any) -> list[SlicedVariable]:
        return [sliced for (key, _), sliced in self.slots.items() if key == id(variable)]

    # Between host and devices -------------------------------------------------------------------

    def gather_weights(self) -> None:
        for variable in self.model.weights:
            self.gather_weight(variable)

    def gather_weight(self, variable: tf.Variable) -> None:
        """Brings a weight of the host up to date."""
        if id(variable) in self.behind:
            self.behind.discard(id(variable))
            set_value(variable, self.of(variable).gather())

    def scatter_weights(self) -> None:
        for variable in self.model.weights:
            self.scatter_weight(variable)
        self.behind.clear()

    def scatter_weight(self, variable: tf.Variable) -> None:
        self.of(variable).scatter(variable.numpy())

    def gather_optimizer(self, keep: bool = True) -> None:
        """Brings the optimizer together on the host; where ranks divide it, on all of them.

        Args:
            keep: whether this rank needs it, else it only gives its parts.
        """
        self.host_optimizer()
        for key, slot in self._host_slots.items():
            value = self.slots[key].gather()
            if keep:
                set_value(slot, value)
        for own, host in self._scalars():
            host.assign(own)

    def scatter_slots(self) -> None:
        for key, slot in self._host_slots.items():
            self.slots[key].scatter(slot.numpy())
        self._holds_loaded = False

    def scatter_optimizer(self) -> None:
        self.scatter_slots()
        for own, host in self._scalars():
            own.assign(host)

    # Memory -------------------------------------------------------------------------------------

    def bytes_per_device(self) -> dict[str, int]:
        """Returns what the variables that each device works with hold: device -> bytes.

        Read from the variables themselves, not computed from the layout. One that logical CPUs
        share counts for each of them, as on devices with a memory of their own.
        """
        held: dict[str, int] = dict.fromkeys(self.devices.devices, 0)
        for sliced in [*self.weights.values(), *self.parts.values(), *self.slots.values()]:
            for device, part in zip(held, sliced.slices, strict=True):
                held[device] += part.numpy().nbytes
        return held

    def release_host(self) -> None:
        """Frees the memory of the host's weights; the next ``gather_weights`` makes it anew."""
        for variable in self.model.weights:
            set_value(variable, tf.zeros([0], variable.dtype))
            self.behind.add(id(variable))
        self.release_host_optimizer()

    def release_host_optimizer(self) -> None:
        """Frees the memory of the host's slots; the next ``gather_optimizer`` makes it anew."""
        if self._holds_loaded:
            return
        for slot in self._host_slots.values() if self._host_optimizer is not None else ():
            set_value(slot, tf.zeros([0], slot.dtype))

    def made_host_slots(self) -> list[tf.Variable]:
        """Returns those of the host's optimizer, which is made if there is none."""
        self.host_optimizer()
        return list(self._host_slots.values())

    def own_parts(self) -> list[tf.Variable]:
        """Returns the slots that this rank alone has."""
        return [part for sliced in self.slots.values() for part in sliced.held]


def _state_of(optimizer: Any) -> list[Any]:
    own = variables_of(optimizer)
    return [*own, *loss_scale_state(optimizer), *rate_variables_of(optimizer)]
