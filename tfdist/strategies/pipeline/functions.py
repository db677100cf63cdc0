"""What runs for each microbatch, as functions that TensorFlow traces once.

Made anew for each microbatch, the operations of the layers are most of what a first step takes.

BatchNormalization takes statistics of the whole batch, or of each microbatch. With those of the
whole batch each such layer stands in a chunk that takes the batch whole, so it is called as on one
device; where ranks share a batch, the sums of all of them are added up. This is about both, about
layers of microbatches, and about forward passes that run once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from tfdist.keras import step_context
from tfdist.keras.tensors import mask_of, with_mask
from tfdist.strategies.pipeline.chunks import Chunk
from tfdist.strategies.pipeline.schedule import WHOLE
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import batch_norm, batch_statistics, randomness
from tfdist.training.layers.gradients import activity_losses
from tfdist.training.model.logits import Logits, logits_of


def pay(num_microbatches: int) -> bool:
    """Whether functions take less than they save. Two microbatches took the same either way."""
    return num_microbatches > 2 and not tf.executing_eagerly()


class OutputWithoutGradient(Exception):
    """Raised while a step is traced: it must be traced anew, without a function for ``chunk``.

    Where TensorFlow is given no gradient for an output of a function it takes one of zeros, of
    which an infinite slope, or a layer that divides a gradient by its norm, makes NaN.
    """

    def __init__(self, chunk: Chunk):
        super().__init__(chunk)
        self.chunk = chunk


class Functions:
    """The functions of one trace of a step. Each is traced once for each shape of a microbatch.

    The next trace makes its own: a model that was compiled anew may train other layers.

    Args:
        output_keys: of the model; the logits behind these outputs are kept.
        num_microbatches: see ``pay``.
        recompute: whether a chunk may run twice.
        shares_batches: whether the batch is shared with other ranks, so that a whole one is none.
        without: chunks that are to have none: those that take a batch whole, among others.
    """

    def __init__(
        self,
        output_keys: list[int],
        *,
        training: bool,
        num_microbatches: int,
        recompute: bool,
        shares_batches: bool,
        without: frozenset[Chunk],
    ):
        self._output_keys = frozenset(output_keys)
        self._training = training
        self._traces = pay(num_microbatches)
        self._recompute = recompute
        self._shares_batches = shares_batches
        #: Number of a chunk -> its BatchNormalizations of the first time that it runs.
        self._over_ranks: dict[int, OverRanks] = {}
        self._functions: dict[tuple[Chunk, bool], Callable] = {}
        #: Those, and chunks that draw numbers which ``seed`` does not settle.
        self._without = set(without)
        #: Key of an output -> what Keras finds behind it in the function.
        self._behind: dict[int, Logits] = {}

    def chunk(
        self,
        number: int,
        chunk: Chunk,
        inputs: list[tf.Tensor],
        microbatch: int,
        *,
        is_real: Any,
        seed: tf.Tensor | None,
        moves: bool,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the outputs of a chunk, masks and logits attached, and the losses it adds.

        Args:
            number: of the chunk.
            microbatch: its number, or WHOLE.
            is_real: bool, False when the microbatch is padding.
            seed: of the step; None where no layer draws numbers.
            moves: as for ``of_part``.
        """

        def run(inputs: list[Any], is_real: Any, seed: Any) -> tuple[list, list]:
            normed = self._norms(number, microbatch, is_real=is_real, moves=moves)
            seeded = randomness.repeatable(*seed, number) if seed else contextlib.nullcontext()
            with normed, seeded:
                made = tf.nest.flatten(chunk.model(inputs, training=self._training))
            return made, activity_losses(chunk.model)

        drawn = None if seed is None else (seed, max(microbatch, 0))
        if not self._traces or chunk in self._without:
            return run(inputs, is_real, drawn)

        def traced(inputs: list[Any], masks: list[Any], *more: Any) -> tuple[list, ...]:
            for tensor, mask in zip(inputs, masks, strict=True):
                with_mask(tensor, mask)
            made, activity = run(inputs, *more)
            return made, _masks(made), self._logits(chunk, made), activity

        # As a tensor, or each microbatch would have a function of its own.
        drawn_with = None if drawn is None else (seed, tf.constant(microbatch))
        arguments = inputs, _masks(inputs), is_real, drawn_with
        if (chunk, moves) not in self._functions:
            function = self._functions[chunk, moves] = function_of(traced)
            graph = function.get_concrete_function(*arguments).graph
            # By itself: each call of the function might draw the same ones.
            if randomness.unseeded(graph, graph.get_operations()):
                self._without.add(chunk)
                return run(inputs, is_real, drawn)
        made, masks, logits, activity = self._functions[chunk, moves](*arguments)
        for place, key in enumerate(chunk.outputs):
            if logits[place] is not None:
                made[place] = self._behind[key].behind(made[place], logits[place])
            with_mask(made[place], masks[place])
        return made, activity

    def _norms(
        self, number: int, microbatch: int, *, is_real: Any, moves: bool
    ) -> contextlib.AbstractContextManager:
        """Returns what encloses a forward pass for the BatchNormalizations in it."""
        is_whole = microbatch == WHOLE
        if is_whole and self._shares_batches:
            of_chunk = self._over_ranks.setdefault(number, OverRanks(number))
            return of_chunk.first(is_real) if moves else of_chunk.again()
        # One whole batch that runs once is what a BatchNormalization sees on one device.
        if is_whole and not self._recompute:
            return contextlib.nullcontext()
        return of_part(is_real=is_real, moves=moves)

    def outputs_to_reach(self, chunk: Chunk, made: list[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Returns outputs of a function that need a gradient, see ``OutputWithoutGradient``.

        Each with its logits: one of both is enough, since softmax and sigmoid have no such slope.
        """
        if not self._traces or chunk in self._without:
            return []
        pairs = [(tensor, logits_of(tensor)) for tensor in made if tensor.dtype.is_floating]
        return [[one] if logits is None else [one, logits.tensor] for one, logits in pairs]

    def _logits(self, chunk: Chunk, made: list[tf.Tensor]) -> list[tf.Tensor | None]:
        """Returns the logits behind outputs of the model: a function returns plain tensors."""
        found = {
            key: logits_of(tensor)
            for key, tensor in zip(chunk.outputs, made, strict=True)
            if key in self._output_keys
        }
        self._behind.update({key: logits for key, logits in found.items() if logits is not None})
        behind = [found.get(key) for key in chunk.outputs]
        return [None if logits is None else logits.tensor for logits in behind]


def function_of(body: Callable) -> Callable:
    """Returns ``body`` as a function in which AutoGraph does what it does outside.

    A layer or loss of the user's own may write ``if``.
    """
    outside = ag_ctx.control_status_ctx()

    def within(*arguments: Any) -> Any:
        with ag_ctx.ControlStatusCtx(outside.status, outside.options):
            return body(*arguments)

    return tf.function(within, autograph=False)


def _masks(tensors: list[tf.Tensor]) -> list[tf.Tensor | None]:
    return [mask_of(tensor) for tensor in tensors]


def of_part(*, is_real: Any, moves: bool) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass in training that is not the only one of its batch.

    Args:
        is_real: bool, False when the microbatch is padding.
        moves: whether layers move their moving statistics; a forward pass that is computed once
            more must not.
    """
    return step_context.within(norms=_Part(is_real, moves))


@dataclass(frozen=True)
class _Part:
    """See ``of_part``."""

    is_real: Any
    moves: bool

    def normalized(self, norm: batch_norm.Norm, inputs: tf.Tensor) -> tf.Tensor:
        own = batch_statistics.local_sums(norm.layer, inputs)
        output = batch_statistics.normalized(norm.layer, inputs, own)

        def move() -> bool:
            batch_statistics.move_statistics(norm.layer, own)
            return True

        if self.moves:  # Last: sums and output are around the moving mean.
            tf.cond(tf.convert_to_tensor(self.is_real), move, lambda: False)
        return output


class OverRanks:
    """The BatchNormalizations of a chunk that takes whole batches, which ranks share.

    Args:
        number: of the chunk, the same on all ranks.
    """

    def __init__(self, number: int):
        self._number = number
        self._statistics = batch_norm.Repeatable()

    @contextlib.contextmanager
    def first(self, is_real: Any) -> Iterator[None]:
        """Encloses the forward pass of a step; ``is_real``: as for ``of_part``."""
        step = batch_norm.shared_step(is_real=is_real, microbatch=self._number)
        with step, self._statistics.first():
            yield

    def again(self) -> contextlib.AbstractContextManager:
        """Returns what encloses the same pass, computed once more."""
        return self._statistics.again()


def put_on_norms(binding: Binding) -> None:
    """Lets every BatchNormalization of a model follow ``of_part``, or ``OverRanks``."""
    if binding.collective.shares_batches:
        batch_norm.put_on(binding, synchronized=True)
        return
    for layer in batch_norm.layers_of(binding.model):
        batch_norm.follow(binding, layer, synchronized=True)
