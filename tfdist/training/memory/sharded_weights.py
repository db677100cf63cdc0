"""Weights and slots in parts, one for each replica: ``shard="weights"``.

Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stage 3); Zhao et al. 2023, arXiv:2304.11277, FSDP.
From the first step on the weights of blocks hold nothing: a block gathers its own where it runs, on
the way back once more, and drops them. Weights outside of blocks stay whole. Each process has one
replica.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.training.engine.binding import Binding, Enclosure
from tfdist.training.layers import eager_variables
from tfdist.training.memory.emptied_variable import Elsewhere
from tfdist.training.memory.flat_parts import Division, in_groups
from tfdist.training.memory.part_files import Divided
from tfdist.training.memory.sharded_slots import Parts, ShardedSlots, num_bytes
from tfdist.training.memory.slots import build_empty
from tfdist.training.memory.weight_blocks import Block


class ShardedWeights(ShardedSlots):
    """The parts of a model's weights, and of the slots of its optimizer."""

    def __init__(self, binding: Binding):
        super().__init__(binding)
        self._blocks: list[Block] = []
        self._weights: dict[int, Elsewhere] = {}  # By the id of the whole variable.

    @property
    def are_divided(self) -> bool:
        """Whether the weights of blocks lie in parts; before the first step they do not."""
        return bool(self._weights)

    @property
    def are_apart(self) -> bool:
        """Whether the model must gather them to run; what writes files takes it as it is."""
        return any(each.host is None for each in self._weights.values())

    def take_blocks(self, segments: Sequence[Any]) -> dict[int, Block]:
        """Finds the weights that are divided, of which each is in one segment alone.

        Args:
            segments: of the model, see ``segments.Segment``.

        Returns:
            Number of a segment -> its block.

        Raises:
            ModelError: there are none, or one has a regularizer or a constraint.
        """
        found: dict[int, Block] = {}
        owned = [[keras.tensors.uncast(w) for w in s.model.trainable_weights] for s in segments]
        owners = Counter(id(weight) for weights in owned for weight in weights)
        for number, (segment, weights) in enumerate(zip(segments, owned, strict=True)):
            own = [weight for weight in weights if owners[id(weight)] == 1]
            if segment.repeats and own:
                _refuse_what_needs_whole_weights(segment)
                found[number] = Block(segment.name, number, own, self._collective)
        if not found:
            raise ModelError(
                "a model whose weights replicas divide (shard='weights') must have blocks with "
                "trainable weights that no other layer shares",
                received=f"none in model '{self._model.name}'",
                mend="Give recompute the names of other layers, or use shard='optimizer'",
            )
        self._blocks = list(found.values())
        return found

    def trained(self, weights: Sequence[Any]) -> list[Any]:
        own = [self._weights.get(id(keras.tensors.uncast(weight))) for weight in weights]
        return [w if o is None else o.part for w, o in zip(weights, own, strict=True)]

    def held(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        apart = {id(each.variable) for each in self._all()}
        return [v for v in variables if id(keras.tensors.uncast(v)) not in apart]

    def _all(self) -> list[Elsewhere]:
        return [*self._weights.values(), *(() if self.parts is None else self.parts.elsewhere)]

    # Before the first step ----------------------------------------------------------------------

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[list[Divided]]:
        self.settle()
        with super().in_parts() as slots:
            weights = [
                Divided(own.variable, own.division, {self._collective.process: own.part})
                for own in self._weights.values()
            ]
            yield [*weights, *slots]

    @contextlib.contextmanager
    def begun(self, *, restores: bool, in_parts: bool) -> Iterator[None]:
        self._check_weights()
        if not self.are_divided:
            self._divide_weights()
        if self.parts is None:
            self._divide_slots()
        with self._aware():  # What is restored goes to the parts.
            yield
        self.settle()

    def _divide_weights(self) -> None:
        """Keeps this process's part of the chief's weights, one weight after the other."""
        for block in self._blocks:
            for weight in block.variables:
                self._collective.broadcast([weight])
                division = Division(
                    tuple(weight.shape), self._collective.num_replicas, weight.dtype
                )
                part = tf.Variable(division.part(weight, self._collective.process))
                own = self._weights[id(weight)] = Elsewhere(self._binding, weight, part, division)
                block.held.append(own)
        keras.steps.forget_functions(self._model)  # They have read whole weights.

    def _divide_slots(self) -> None:
        given = keras.optimizers.inner_of(self._model.optimizer)
        if any(self._collective.gather(keras.optimizers.has_values(given))):
            eager_variables.make_slots(self._model)
            self._collective.broadcast(keras.optimizers.variables_of(given))
            self._divide()
            self.parts.scatter()
        else:
            build_empty(given, self._model.trainable_variables)
            eager_variables.make_slots(self._model)  # Those of a loss scale around it.
            self._divide()
        wholes = self.parts.whole_slots()
        for (index, _), whole in zip(self.parts.slots, wholes, strict=True):
            (part,) = self.parts.slots[index, _]
            own = Elsewhere(self._binding, whole, part, self.parts.divisions[index])
            self.parts.elsewhere.append(own)

    def _made(self) -> Parts:
        return _Parts(self._model, self._collective, self._weights)

    # Whole values -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Gives all processes what the chief was given: by set_weights, or from a file."""
        if not self.are_divided:
            return
        apart = self._all()
        known = [number for number, each in enumerate(apart) if each.given is not None]
        known_to = self._collective.gather(known)
        elsewhere = [rank for rank, own in enumerate(known_to) if set(own) - set(known_to[0])]
        if elsewhere:
            raise ModelError(
                "weights that replicas divide (shard='weights') must be set on all ranks, or on "
                "rank 0, whose values hold",
                received=f"set_weights or load_weights on rank {elsewhere[0]}, and not on rank 0",
                mend="Call it on all ranks",
            )
        for number in known_to[0]:
            value = apart[number].given if self._collective.is_chief else None
            apart[number].take(self._collective.gather(value)[0])
        for each in apart:
            each.given = None
        if any(known_to):  # Those that are whole were given values, too.
            self._collective.broadcast(self.held(keras.layers.variables_in(self._model)))

    @contextlib.contextmanager
    def whole(self, everywhere: bool = False) -> Iterator[None]:
        """Encloses what reads weights and slots: the host has them whole meanwhile."""
        if not self.are_divided or self._depth:
            yield
            return
        self.settle()
        try:
            with self._aware():
                self._gather(keep=self._collective.is_chief or everywhere)
                yield
        finally:
            for each in self._all():
                each.host = None

    def _gather(self, keep: bool) -> None:
        for group in in_groups(self._all(), lambda each: num_bytes(each.variable)):
            of_all = self._collective.gather([each.part.numpy() for each in group])
            for number, each in enumerate(group if keep else ()):
                each.host = each.division.whole_array([parts[number] for parts in of_all])

    def enclosures(self) -> list[Enclosure]:
        """Returns what is put around methods of the model that read its weights."""

        def settled(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                self.settle()
                return method(*args, **options)

            return run

        loops = ("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
        return [
            (loops, settled),
            (("get_weights",), self.whole(everywhere=True)),
            (("load_weights",), self._aware()),  # Of TensorFlow's format slots take their parts.
        ]


class _Parts(Parts):
    """Parts of slots, and of weights of which some are there as parts already.

    Attributes:
        elsewhere: the whole slots, in the order of ``slots``.
    """

    def __init__(self, model: tf.keras.Model, collective: Any, held: dict[int, Elsewhere]):
        self._held = held
        self.elsewhere: list[Elsewhere] = []
        super().__init__(model, collective)

    def is_divided(self, index: int) -> bool:
        return id(keras.tensors.uncast(self.weights[index])) in self._held

    def _parts_of(self, index: int) -> list[tf.Variable]:
        if self.is_divided(index):
            return [self._held[id(keras.tensors.uncast(self.weights[index]))].part]
        return super()._parts_of(index)


def _refuse_what_needs_whole_weights(segment: Any) -> None:
    """Raises:
    ModelError: something reads or changes whole weights outside of the calls of their layers.
    """
    layers, weights = keras.layers.layers_in(segment.model), segment.model.trainable_weights
    regularized = [layer.name for layer in layers if keras.layers.num_added_losses(layer)]
    bound = [weight.name for weight in weights if weight.constraint is not None]
    if regularized or bound:
        raise ModelError(
            "weights that replicas divide (shard='weights') must have neither regularizers nor "
            "constraints, which look at whole ones",
            received=f"a regularizer of layer '{regularized[0]}'"
            if regularized
            else f"a constraint of '{bound[0]}'",
            mend="Leave it out (AdamW has weight_decay), leave its layer out of the blocks "
            "(recompute=names of the others), or use shard='optimizer'",
        )
