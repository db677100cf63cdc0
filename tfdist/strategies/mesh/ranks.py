"""What meshes on several ranks share, where each rank holds one: sums, and parts of slots.

Loss and metrics are those of the rank's own rows. A loss counts by the rank's part of the global
batch, so gradients of the ranks add up to those of one device. With ``shard="optimizer"`` a rank
has of each slice of a weight one part more, which the optimizer updates, and the slots of that
part. Gradients are then added up so that each rank gets its part; all gather the parts of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras.optimizers import steps_of
from tfdist.training.engine.collective import Collective
from tfdist.training.layers import losses
from tfdist.training.memory.flat_parts import Division


class Ranks:
    """The ranks as one step sees them.

    Args:
        told: int64 [2], the true rows of this rank, and those of the global batch.
    """

    def __init__(self, collective: Collective, told: tf.Tensor):
        self._collective = collective
        self.told = told
        self._num_sums = 0

    @property
    def part(self) -> tf.Tensor:
        """The rows of this rank over those of all, float []."""
        return losses.part_of(self.told)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum over ranks, which all come to their sums in the same order."""
        self._num_sums += 1
        return self._collective.sum(tensor, f"mesh.{self._num_sums}")

    def sum_slices(self, slices: Sequence[tf.Tensor], first_places: Sequence[int]) -> list[Any]:
        """Returns the sums of what the devices hold; those of equal slices are made once.

        Args:
            first_places: for each device the first one that holds the same.
        """
        return _by_firsts(first_places, lambda place: self.sum(slices[place]))


def _by_firsts(first_places: Sequence[int], make: Callable[[int], Any]) -> list[Any]:
    """Returns what ``make`` gives for each device; of those that hold the same for the first."""
    made: list[Any] = []
    for place, first in enumerate(first_places):
        made.append(make(place) if place == first else made[first])
    return made


def true_labels(data: Any, ranks: Collective) -> tuple[Any, Any, Any, Any]:
    """Returns x, y and sample weights of a batch, and the share that they are of a global one.

    A rank that the uneven tail leaves without a row has a row of padding as x, and no labels.
    """
    if not ranks.shares_batches:
        return *tf.keras.utils.unpack_x_y_sample_weight(data), None
    batch, told = data
    x, y, weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    rows = int(told[0])
    y, weight = tf.nest.map_structure(
        lambda tensor: None if tensor is None else tensor[:rows], (y, weight)
    )
    return x, y, weight, told


class RankParts:
    """How slices are divided among the ranks."""

    def __init__(self, collective: Collective):
        self._collective = collective

    def division(self, slice_: Any) -> Division:
        """Returns how a slice, or what has its shape and type, is divided."""
        shape = tuple(slice_.shape)
        return Division(shape, self._collective.num_replicas, tf.as_dtype(slice_.dtype))

    def cut(self, slice_: Any) -> Any:
        """Returns this rank's part of a slice, [part_size]."""
        return self.division(slice_).part(slice_, self._collective.process)

    def joined(self, parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
        """Returns the slices that ``parts`` are this rank's parts of; all ranks call it together.

        Args:
            shape: of each slice.
        """
        divisions = [Division(shape, self._collective.num_replicas, part.dtype) for part in parts]
        of_all = self._collective.gather(list(parts))
        return [
            division.whole_array([of_rank[number] for of_rank in of_all])
            for number, division in enumerate(divisions)
        ]

    def sums(self, slices: Sequence[Any], first_places: Sequence[int], name: str) -> list[Any]:
        """Returns this rank's parts of the sums over ranks of what the devices hold.

        Args:
            first_places: for each device the first one that holds the same: it is summed once.
            name: of the weight.
        """

        def part_of_sum(place: int) -> Any:
            slice_ = tf.convert_to_tensor(slices[place])
            with tf.device(slice_.device):
                rows = self.division(slice_).rows(slice_) * losses.uncounted(self._collective)
            return self._collective.reduce_scatter(rows, f"mesh.{name}.{place}")

        return _by_firsts(first_places, part_of_sum)

    def gathered(self, part: Any, slice_: Any, name: str) -> Any:
        """Returns the slice whose parts the ranks have updated."""
        rows = self._collective.all_gather(part, f"mesh.weights.{name}")
        return self.division(slice_).whole(rows)


class DividedSlots:
    """What fits and checkpoints ask of slots in parts; see ``training.memory.sharded_slots``.

    Args:
        state: the ``SlicedState``, of which this rank has parts.
    """

    def __init__(self, model: tf.keras.Model, collective: Collective, state: Any):
        self._model = model
        self._collective = collective
        self._state = state
        self._depth = 0
        self._begun: Any = None

    @contextlib.contextmanager
    def whole(self, everywhere: bool = False) -> Iterator[None]:
        """Encloses what reads whole slots; all ranks enter it together.

        Args:
            everywhere: whether all read them, else the chief.
        """
        if not self._depth:
            self._take_loaded()
        self._depth += 1
        try:
            if self._depth == 1:
                self._state.gather_optimizer(everywhere or self._collective.is_chief)
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._state.release_host_optimizer()

    def _take_loaded(self) -> None:
        """Gives all ranks the slots that the chief's optimizer was loaded with, once."""
        optimizer = self._model.optimizer
        if self._begun is optimizer:
            return
        self._begun = optimizer
        if any(self._collective.gather(int(steps_of(optimizer)) > 0)):
            # Not gathered: of those that the chief alone has loaded the others have no parts.
            self._take_chiefs()
            self._state.release_host_optimizer()

    def _take_chiefs(self) -> None:
        self._collective.broadcast(self._state.made_host_slots())
        self._state.scatter_slots()

    @contextlib.contextmanager
    def begun(self, restores: bool, in_parts: bool = False) -> Iterator[None]:
        """Encloses what is done before the first step: the chief's slots are what all begin with.

        Args:
            restores: whether that may give the optimizer's slots values.
            in_parts: never: the chief reads and writes checkpoints.
        """
        assert not in_parts, "a checkpoint of which each rank reads its parts"
        self._take_loaded()
        if not restores:
            yield
            # Which a checkpoint may have made, to be written later.
            self._state.release_host_optimizer()
            return
        with self.whole(everywhere=True):
            yield
            self._take_chiefs()

    def held(self, variables: Sequence[Any]) -> list[Any]:
        """Returns those ``variables`` that all ranks have alike."""
        own = {id(part) for part in self._state.own_parts()}
        return [variable for variable in variables if id(variable) not in own]
