"""The slots of an optimizer in parts, one for each replica: ``shard="optimizer"``.

Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stages 1 and 2). The optimizer that the user has
compiled the model with stays on the model, with its learning rate, its iterations and its
configuration. Between steps its slots hold nothing; an optimizer of the same kind, which nobody
else sees, has them for the parts of the weights that this process's replicas update.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.training.engine.binding import Binding, Enclosure
from tfdist.training.engine.collective import Collective
from tfdist.training.layers import eager_variables
from tfdist.training.memory.flat_parts import Division, in_groups
from tfdist.training.memory.part_files import Divided
from tfdist.training.memory.slots import build_empty, build_on, set_value

# Where an optimizer keeps its parts: they hold each other alone, and go together.
_PLACE = "_tfdist_parts"
#: How files are called of which Keras' ``load_weights`` takes slots, too.
_WITH_SLOTS = (".weights.h5", ".weights.json", ".keras")


class Parts:
    """The weights and slots that the replicas of this process update for one optimizer.

    Attributes:
        given: the optimizer that the user has given, without its loss scale.
        twin: the one that has the slots.
        weights: of the model, trainable, in its order.
        divisions: of the same.
        variables: of the same: the part of each local replica, a variable [part_size].
        slots: (index of the weight, name of the slot) -> the part of each local replica, in the
            order in which the optimizer makes whole slots.
    """

    def __init__(self, model: tf.keras.Model, collective: Collective, *, on_host: bool = False):
        self._on_host = on_host
        self._collective = collective
        self._strategy = model.distribute_strategy
        self.given = keras.optimizers.inner_of(model.optimizer)
        self.weights = list(model.trainable_variables)
        self.divisions = [
            Division(tuple(own.shape), collective.num_replicas, own.dtype, own.device)
            for own, *_ in map(self.components, self.weights)
        ]
        elements = sum(division.size for division in self.divisions)
        if elements < collective.num_replicas:
            raise ModelError(
                "a model whose optimizer's slots are divided must have an element of a weight for "
                "each replica",
                received=f"{elements} trainable elements and {collective.num_replicas} replicas",
                mend="Leave out shard, or take fewer replicas",
            )
        self.variables = [self._parts_of(index) for index in range(len(self.weights))]
        self.twin = _twin_of(self.given)
        self.slots: dict[tuple[int, str], list[tf.Variable]] = {}
        owners = {id(part): i for i, parts in enumerate(self.variables) for part in parts}
        flat = [part for parts in self.variables for part in parts]
        for part, name, slot in build_on(self.twin, flat):
            self.slots.setdefault((owners[id(part)], name), []).append(slot)

    def _parts_of(self, index: int) -> list[tf.Variable]:
        weight, division = self.weights[index], self.divisions[index]
        parts = []
        for local, own in enumerate(self.components(weight)):
            with tf.device(host_of(own.device) if self._on_host else own.device):
                value = division.part(own, self.number_of(local))
                parts.append(tf.Variable(value, trainable=False))
        return parts

    def is_divided(self, index: int) -> bool:
        """Whether the part of a weight is all that a replica has of it."""
        return False

    def number_of(self, local: int) -> int:
        """Returns the number, among all, of a replica of this process."""
        collective = self._collective
        return collective.process * (collective.num_replicas // collective.num_processes) + local

    def components(self, variable: Any) -> tuple[Any, ...]:
        """Returns the variable of each of this process's replicas."""
        return self._strategy.experimental_local_results(keras.tensors.uncast(variable))

    # Whole slots --------------------------------------------------------------------------------

    def whole_slots(self) -> list[tf.Variable]:
        """Returns the slots of the given optimizer, in the order of ``slots``."""
        every = keras.optimizers.variables_of(self.given)
        found = every[-len(self.slots) :] if self.slots else []
        shapes = [self.divisions[index].shape for index, _ in self.slots]
        assert [tuple(slot.shape) for slot in found] == shapes, "slots in another order"
        return found

    def gather(self, keep: bool = True) -> None:
        """Brings the parts of all replicas together in the given optimizer; on all processes.

        Args:
            keep: whether this process needs them; else it only gives its own.
        """
        pairs = list(zip(self.slots.items(), self.whole_slots(), strict=True))
        for group in in_groups(pairs, lambda pair: num_bytes(pair[1])):
            own = [[part.numpy() for part in parts] for (_, parts), _ in group]
            of_all = self._collective.gather(own)
            for number, (((index, _), _), whole) in enumerate(group if keep else ()):
                parts = [part for of_process in of_all for part in of_process[number]]
                self._set(whole, self.divisions[index].whole_array(parts))

    def scatter(self) -> None:
        """Takes the parts of this process's replicas from the given optimizer."""
        for ((index, _), parts), whole in zip(self.slots.items(), self.whole_slots(), strict=True):
            value = self.components(whole)[0].read_value()
            for local, part in enumerate(parts):
                part.assign(self.divisions[index].part(value, self.number_of(local)))

    def free_whole(self) -> None:
        """Gives back the memory of the given optimizer's slots."""
        for slot in self.whole_slots():
            self._set(slot, tf.zeros([0], slot.dtype))

    def _set(self, variable: Any, value: Any) -> None:
        for own in self.components(variable):
            set_value(own, value)


def host_of(device: str) -> str:
    """Returns the CPU of the process that ``device`` belongs to."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()


def num_bytes(variable: Any) -> int:
    """Returns what a whole variable takes, though it may be emptied."""
    return variable.shape.num_elements() * variable.dtype.size


def _twin_of(optimizer: Any) -> Any:
    """Returns an optimizer of the same kind, without slots, that counts the same iterations."""
    try:
        return keras.optimizers.twin_of(optimizer, optimizer.get_config())
    except NotImplementedError as error:
        raise ModelError(
            "an optimizer whose slots are divided must tell its configuration",
            received=f"{type(optimizer).__name__} with a schedule that has no get_config",
            mend="Write its get_config, or leave shard out",
        ) from error


class ShardedSlots:
    """The parts of the slots of a model's optimizer.

    Those of others that it had before stay with them: whoever has one may compile with it again.
    """

    def __init__(self, binding: Binding):
        self._binding = binding
        self._model = binding.model
        self._collective = binding.collective
        self._depth = 0
        self._empty: list[tf.Variable] = []

    @property
    def parts(self) -> Parts | None:
        """Those of the present optimizer; None before its first fit."""
        of_bindings = vars(keras.optimizers.inner_of(self._model.optimizer)).get(_PLACE)
        return None if of_bindings is None else of_bindings.get(self._binding)

    @contextlib.contextmanager
    def whole(self, everywhere: bool = False) -> Iterator[None]:
        """Encloses what reads the optimizer's slots: they are whole meanwhile.

        All processes must enter it together.

        Args:
            everywhere: whether all read them, else those that write files.
        """
        if self.parts is None or self._depth:
            yield
            return
        try:
            with self._aware():
                writes = self._collective.is_chief or self._collective.reads_together
                self.parts.gather(keep=writes or everywhere)
                yield
        finally:
            self.parts.free_whole()

    @contextlib.contextmanager
    def _aware(self) -> Iterator[None]:
        """Encloses what brings the slots together, or knows that they are in parts."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def enclosures(self) -> list[Enclosure]:
        """Returns what is put around methods of the model that give its slots values."""

        def loaded_whole(load: Callable[..., Any]) -> Callable[..., Any]:
            def run(filepath: Any, *args: Any, **options: Any) -> Any:
                if self.parts is None or not str(filepath).endswith(_WITH_SLOTS):
                    return load(filepath, *args, **options)
                with self.whole(everywhere=True):
                    result = load(filepath, *args, **options)
                    self.parts.scatter()
                return result

            return run

        return [(("load_weights",), loaded_whole)]

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[list[Divided]]:
        """Encloses what writes or reads files of parts; gives what is divided, here empty.

        All processes must enter it together.
        """
        with self._aware():
            yield self._divided()

    def _divided(self) -> list[Divided]:
        parts = self.parts
        assert parts is not None, "slots are divided before the first step"
        return [
            Divided(
                whole,
                parts.divisions[index],
                {parts.number_of(local): slot for local, slot in enumerate(slots)},
            )
            for ((index, _), slots), whole in zip(
                parts.slots.items(), parts.whole_slots(), strict=True
            )
        ]

    @contextlib.contextmanager
    def begun(self, *, restores: bool, in_parts: bool) -> Iterator[None]:
        """Encloses what is done before the first step; all processes enter it together.

        Args:
            restores: whether that may give the optimizer's slots values.
            in_parts: whether it then gives them to the parts. Else slots are whole meanwhile, on
                all processes, which otherwise no process ever holds.
        """
        self._check_weights()
        is_new = self.parts is None
        given = keras.optimizers.inner_of(self._model.optimizer)
        # One process may have loaded slots that the others have not.
        has_values = is_new and any(self._collective.gather(keras.optimizers.has_values(given)))
        if has_values or (restores and not in_parts):
            with self._made_on_host():
                eager_variables.make_slots(self._model)
            with self.whole(everywhere=True):
                if in_parts:
                    self._collective.broadcast(keras.optimizers.variables_of(given))
                else:
                    yield
                if is_new:
                    self._divide()
                self.parts.scatter()
            if is_new:
                self.parts.free_whole()
            if not in_parts:
                return
        elif is_new:
            with self._model.distribute_strategy.scope(), self._made_on_host():
                self._empty = build_empty(given, self._model.trainable_variables)
            eager_variables.make_slots(self._model)  # Those of a loss scale around it.
            if in_parts:  # What they begin with may be the weights'.
                self._collective.broadcast(self._model.trainable_variables)
                self._divide()
        if self.parts is not None:
            self._empty = self.parts.whole_slots()
            keras.optimizers.take_settings(self.parts.twin, given)  # Before a step is traced anew.
        try:
            yield
        finally:  # After an error, too: slots are there, and hold nothing.
            self._empty = []
            if self.parts is None:
                self._divide()

    @contextlib.contextmanager
    def _made_on_host(self) -> Iterator[None]:
        """Encloses the making of whole slots, which a device may have no room for."""
        if not self._binding.options.offloads_slots:
            yield
            return

        def on_host(make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
            with tf.device("CPU:0"):
                return make(**options)

        with tf.variable_creator_scope(on_host):
            yield

    def trained(self, weights: Sequence[Any]) -> list[Any]:
        """Returns what the step takes gradients of, for each of the trainable ``weights``."""
        return list(weights)

    def held(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Returns those ``variables`` of the model or its optimizer that have a value now."""
        empty = {id(slot) for slot in self._empty}
        return [variable for variable in variables if id(variable) not in empty]

    def _divide(self) -> None:
        # A strategy's scope belongs to a thread, and would mirror each part on all devices.
        with ThreadPoolExecutor(1) as apart:
            parts = apart.submit(self._made).result()
        # Keras would look for variables in it.
        vars(parts.given).setdefault(_PLACE, weakref.WeakKeyDictionary())[self._binding] = parts
        self._binding.around(parts.given, "finalize_variable_values", self._finalize)
        keras.trackables.before_checkpoints(parts.given, self._refuse_empty)

    def _made(self) -> Parts:
        on_host = self._binding.options.offloads_slots
        return Parts(self._model, self._collective, on_host=on_host)

    def _refuse_empty(self) -> None:
        """Raises:
        ModelError: what is about to write or read the slots does not bring them together.
        """
        if not self._depth:
            raise ModelError(
                f"slots that replicas divide ({self._binding.options.dividing_option}) must be "
                "kept by tfdist.Checkpoints, which brings them together",
                received="a tf.train.Checkpoint of the model or its optimizer",
                mend="Give model.fit the callback tfdist.Checkpoints(folder); weights alone are "
                "kept by model.save_weights in a file .h5",
            )

    def _check_weights(self) -> None:
        parts, trained = self.parts, self._model.trainable_variables
        if parts is not None and list(map(id, parts.weights)) != list(map(id, trained)):
            raise ModelError(
                "a model that trains other weights than before must be compiled with an optimizer "
                "of its own",
                received=f"the {type(parts.given).__name__} that it was compiled with before",
                mend="Give compile a new one",
            )

    def _finalize(self, optimizer: Any, finalize: Callable[..., None], weights: Any) -> None:
        """Has the end of Keras' fit, which gives weights their averages, read whole slots."""
        with self.whole(everywhere=True) if optimizer.use_ema else contextlib.nullcontext():
            finalize(weights)

    def bytes_of_each(self) -> list[int]:
        """Returns the bytes of the slots that each replica of this process holds."""
        slots = self.parts.slots.values() if self.parts is not None else ()
        per_part = [[slot.numpy().nbytes for slot in parts] for parts in slots]
        return [sum(sizes) for sizes in zip(*per_part, strict=True)]
