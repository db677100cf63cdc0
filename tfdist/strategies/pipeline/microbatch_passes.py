"""What a task of the schedule does: one microbatch through one chunk, forward or backward.

Chunks hand tensors to each other, and gradients back. One makes them of microbatches where the next
reads a whole batch, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.keras.optimizers import loss_factor
from tfdist.keras.tensors import mask_of, with_mask
from tfdist.strategies.pipeline.chunks import Chunk
from tfdist.strategies.pipeline.functions import Functions, OutputWithoutGradient
from tfdist.strategies.pipeline.microbatches import Microbatch, Share
from tfdist.strategies.pipeline.schedule import WHOLE
from tfdist.training.layers.gradients import Sums, added
from tfdist.training.model.logits import changed, logits_of
from tfdist.training.model.precision import full_type

Place = tuple[int, int]  # (chunk, or key of a tensor; microbatch or WHOLE)


class Turns:
    """Lets each device do one task at a time, in the order in which they are written."""

    def __init__(self) -> None:
        self._last: dict[str, list[Any]] = {}

    def after_last(self, device: str) -> Any:
        return tf.control_dependencies(self._last.get(device, []))

    def done(self, device: str, results: list[Any]) -> None:
        """``results`` must be all that the task has made, or the next one starts too early."""
        # Of a function that TensorFlow inlines only side effects are waited for, not what it makes:
        # so each result is read.
        if results:
            with tf.device(device):
                self._last[device] = [tf.group(*map(tf.identity, results))]


class Recorded(NamedTuple):
    """A forward pass with what its backward pass needs.

    ``logits``: of inputs that are outputs of the model, by key; the loss may go back to them.
    """

    tape: tf.GradientTape
    inputs: dict[int, Any]
    logits: dict[int, Any]
    targets: Targets


class Targets(NamedTuple):
    """What a chunk has made of a microbatch.

    Attributes:
        outputs: key -> tensor.
        loss: of the last chunk, weighted by the share of the microbatch; else None.
        activity: the losses that layers added, each with whether it is a number for each row; a
            mean is weighted likewise. Empty when there are none.
        to_reach: of each list of tensors one must have a gradient.
    """

    outputs: dict[int, Any]
    loss: Any | None
    activity: list[tuple[Any, bool]]
    to_reach: list[list[Any]]


class Forward:
    """The forward passes of one step.

    Args:
        steps: the ``PipelineSteps`` that these are of.
        chunks: as many as the schedule has.
        parts: the microbatches by number, and the WHOLE batch.
        given: key -> what the chunks are given, for the whole batch.
    """

    def __init__(
        self,
        steps: Any,
        chunks: tuple[Chunk, ...],
        parts: dict[int, Microbatch],
        given: dict[int, tf.Tensor],
        *,
        training: bool,
    ):
        self.steps = steps
        self.chunks = chunks
        self.parts = parts
        self.training = training
        self.turns = Turns()
        self.functions = Functions(
            steps.output_keys,
            training=training,
            num_microbatches=len(parts) - 1,
            recompute=steps.recompute,
            shares_batches=steps.ranks.shares_batches,
            without=frozenset(steps.without_function),
        )
        self.values = Values(parts, given)
        self.recorded: dict[Place, Recorded] = {}
        #: Chunk and number of a loss that a layer adds, whether by row -> those of microbatches.
        self._activity: dict[tuple[int, int, bool], list[tf.Tensor]] = {}
        self._loss = steps.gradient_loss() if training else None
        self._step_seed = steps.seeds.of_step() if training and steps.seeds else None

    def run(self, number: int, microbatch: int) -> None:
        chunk = self.chunks[number]
        with tf.device(chunk.device), self.turns.after_last(chunk.device):
            if self.training and chunk.learns and not self.steps.recompute:
                recorded = self.record(number, microbatch, moves=True)
                self.recorded[number, microbatch] = recorded
                targets = recorded.targets
            else:
                inputs = self._inputs(chunk, microbatch)
                targets = self._through(number, microbatch, inputs, moves=True)
        for key, tensor in targets.outputs.items():
            self.values.put(key, microbatch, tensor)
        for place, (loss, by_row) in enumerate(targets.activity):
            self._activity.setdefault((number, place, by_row), []).append(loss)
        losses = [] if targets.loss is None else [targets.loss]
        losses += [loss for loss, _ in targets.activity]
        self.turns.done(chunk.device, [*targets.outputs.values(), *losses])

    def record(self, number: int, microbatch: int, *, moves: bool) -> Recorded:
        """Runs a chunk such that a gradient can be taken."""
        chunk = self.chunks[number]
        inputs = self._inputs(chunk, microbatch)
        flowing = [key for key in inputs if key in chunk.differentiable]
        found = {key: logits_of(inputs[key]) for key in flowing}
        logits = {key: behind.tensor for key, behind in found.items() if behind is not None}
        with tf.GradientTape() as tape:
            tape.watch([*(inputs[key] for key in flowing), *logits.values()])
            targets = self._through(number, microbatch, inputs, moves=moves)
        return Recorded(tape, inputs, logits, targets)

    def outputs(self) -> list[tf.Tensor]:
        """Returns the outputs of the model for the whole batch."""
        return [self.values.outputs(key, WHOLE) for key in self.steps.output_keys]

    def activity_losses(self) -> list[tf.Tensor]:
        """Returns what layers added of the whole batch: a number, or one for each row."""
        return [
            tf.concat(parts, 0) if by_row else tf.add_n(parts)
            for (*_, by_row), parts in self._activity.items()
        ]

    def _inputs(self, chunk: Chunk, microbatch: int) -> dict[int, tf.Tensor]:
        """Brings the inputs of a chunk to its device."""
        carried = {key: self.values.inputs(key, microbatch) for key in chunk.inputs}
        if chunk is self.chunks[-1] and self.training:  # The loss reads all outputs.
            for key in self.steps.output_keys:
                if key not in chunk.outputs:
                    carried[key] = self.values.outputs(key, microbatch)
        return carried

    def _through(
        self, number: int, microbatch: int, inputs: dict[int, Any], *, moves: bool
    ) -> Targets:
        chunk, part = self.chunks[number], self.parts[microbatch]
        made, added_losses = self.functions.chunk(
            number,
            chunk,
            [inputs[key] for key in chunk.inputs],
            microbatch,
            is_real=part.is_real,
            seed=self._step_seed,
            moves=moves,
        )
        outputs = dict(zip(chunk.outputs, made, strict=True))
        rows = next(iter(inputs.values())).shape[0]
        activity = [
            # Keras trains on the sum of numbers of rows.
            (part.true_rows(loss), True)
            if _is_by_row(loss, rows)
            else (loss * part.share(loss.dtype), False)
            for loss in added_losses
        ]
        loss = None
        if self.training and chunk is self.chunks[-1]:
            loss = self._own_loss(part, {**inputs, **outputs})
        to_reach = self.functions.outputs_to_reach(chunk, made) if self.training else []
        return Targets(outputs, loss, activity, to_reach)

    def _own_loss(self, part: Microbatch, known: dict[int, Any]) -> tf.Tensor | None:
        y_pred = self.steps.packed(
            [changed(part.true_rows, known[key]) for key in self.steps.output_keys]
        )
        y, sample_weight = part.labels

        def own_loss() -> tf.Tensor:
            return self._loss(y, y_pred, sample_weight)

        if part.is_real is True or self.steps.loss_is_keras_own:
            loss = own_loss()
        else:  # Of no rows, a user's own mean would be NaN.
            dtype = full_type(tf.nest.flatten(y_pred)[0].dtype)
            loss = tf.cond(
                part.is_real, lambda: tf.cast(own_loss(), dtype), lambda: tf.zeros([], dtype)
            )
        if loss is None or self.steps.loss_is_sum:  # None: only layers add losses.
            return loss
        return loss * part.share(loss.dtype)


class Backward:
    """The backward passes of one step.

    Args:
        share: what the batch is of a global one.
        gradients: receives those of the variables.
    """

    def __init__(self, steps: Any, forward: Forward, share: Share, gradients: Sums):
        self._steps = steps
        self._forward = forward
        self._share = share
        self._gradients = gradients
        #: What the loss is multiplied by, so that float16 gradients do not vanish.
        self.scale = loss_factor(steps.model.optimizer)
        self._upstream = Upstream(forward.parts)
        self._upstream_of_logits = Upstream(forward.parts)

    def run(self, number: int, microbatch: int) -> None:
        chunk = self._forward.chunks[number]
        if not chunk.learns:
            return
        with tf.device(chunk.device), self._forward.turns.after_last(chunk.device):
            if self._steps.recompute:
                recorded = self._forward.record(number, microbatch, moves=False)
            else:
                recorded = self._forward.recorded.pop((number, microbatch))
            made = self._back(chunk, microbatch, recorded)
        self._forward.turns.done(chunk.device, [_dense(tensor) for tensor in made])

    def _back(self, chunk: Chunk, microbatch: int, recorded: Recorded) -> list[Any]:
        """Adds to the gradients of variables and inputs; returns the new sums."""
        targets, seeds = self._targets(recorded.targets, microbatch)
        if not targets:
            return []
        flowing = [key for key in recorded.inputs if key in chunk.differentiable]
        sources = [recorded.inputs[key] for key in flowing]
        behind, logits = list(recorded.logits), list(recorded.logits.values())
        found, reached = recorded.tape.gradient(
            targets,
            [[*sources, *logits, *chunk.variables], recorded.targets.to_reach],
            output_gradients=seeds,
        )
        if any(all(gradient is None for gradient in each) for each in reached):
            raise OutputWithoutGradient(chunk)
        of_inputs, rest = found[: len(sources)], found[len(sources) :]
        of_logits, rest = rest[: len(logits)], rest[len(logits) :]
        made = [
            self._upstream.send(key, microbatch, gradient)
            for key, gradient in zip(flowing, of_inputs, strict=True)
            if gradient is not None
        ]
        made += [
            self._upstream_of_logits.send(key, microbatch, gradient)
            for key, gradient in zip(behind, of_logits, strict=True)
            if gradient is not None
        ]
        return made + self._gradients.add(chunk.variables, rest)

    def _targets(self, made: Targets, microbatch: int) -> tuple[list[Any], list[Any]]:
        """Returns what to differentiate, and the gradient that each begins with."""
        pairs = []
        for key, tensor in made.outputs.items():
            gradient = self._upstream.take(key, microbatch)
            if gradient is not None:
                pairs.append((tensor, gradient))
            gradient = self._upstream_of_logits.take(key, microbatch)
            if gradient is not None:
                pairs.append((logits_of(tensor).tensor, gradient))
        share = self._share
        losses = [
            (loss, share.of_sum if by_row else share.of_mean) for loss, by_row in made.activity
        ]
        if made.loss is not None:
            of_loss = share.of_sum if self._steps.loss_is_sum else share.of_mean
            losses.insert(0, (made.loss, of_loss))
        for loss, factor in losses:
            seed = tf.ones_like(loss) if self.scale is None else tf.cast(self.scale, loss.dtype)
            pairs.append((loss, seed * tf.cast(factor, loss.dtype)))
        return [target for target, _ in pairs], [seed for _, seed in pairs]


def _is_by_row(loss: tf.Tensor, rows: int | None) -> bool:
    return bool(loss.shape.rank) and loss.shape[0] == rows


def _dense(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


class Values:
    """The tensors of one step, by key.

    Args:
        parts: all microbatches, and the whole batch.
        given: key -> tensor of the whole batch.
    """

    def __init__(self, parts: Mapping[int, Microbatch], given: Mapping[int, tf.Tensor]):
        self._parts = parts
        #: As they were made, on the device that made them.
        self._made: dict[Place, tf.Tensor] = {(key, WHOLE): t for key, t in given.items()}

    def put(self, key: int, number: int, tensor: tf.Tensor) -> None:
        self._made[key, number] = tensor

    def inputs(self, key: int, number: int) -> tf.Tensor:
        """Returns a copy of the rows of one part on the present device, its mask attached."""
        return self._rows(_plainly, key, number)

    def outputs(self, key: int, number: int) -> tf.Tensor:
        """Returns the same with the logits that a loss looks for."""
        return self._rows(changed, key, number)

    def _rows(self, how: Callable, key: int, number: int) -> tf.Tensor:
        if (key, number) in self._made:
            return _carried(how, tf.identity, self._made[key, number])
        if number != WHOLE:
            return _carried(how, self._parts[number].cut, self._made[key, WHOLE])
        numbers = [each for each in self._parts if each != WHOLE]

        def joined(*tensors: tf.Tensor) -> tf.Tensor:
            pairs = zip(numbers, tensors, strict=True)
            return tf.concat([self._parts[each].held_rows(t) for each, t in pairs], axis=0)

        return _carried(how, joined, *(self._made[key, each] for each in numbers))


class Upstream:
    """The gradients of tensors, added up as those that read the tensors send them."""

    def __init__(self, parts: Mapping[int, Microbatch]):
        self._parts = parts
        self._sums: dict[Place, tf.Tensor] = {}

    def send(self, key: int, number: int, gradient: Any) -> tf.Tensor:
        """Adds the gradient of one part; returns the new sum."""
        dense = tf.convert_to_tensor(gradient)
        self._sums[key, number] = added(self._sums.get((key, number)), dense)
        return self._sums[key, number]

    def take(self, key: int, number: int) -> tf.Tensor | None:
        """Returns the gradient of what a chunk made of one part; None where there is none."""
        own = self._sums.pop((key, number), None)
        other = self._joined(key) if number == WHOLE else self._cut(key, number)
        total = added(own, other)
        return None if total is None else tf.identity(total)

    def _joined(self, key: int) -> tf.Tensor | None:
        found = [
            part.held_rows(self._sums.pop((key, number)))
            for number, part in self._parts.items()
            if (key, number) in self._sums
        ]
        return tf.concat(found, axis=0) if found else None

    def _cut(self, key: int, number: int) -> tf.Tensor | None:
        whole, part = self._sums.get((key, WHOLE)), self._parts[number]
        if whole is None or part.is_real is True:
            return None if whole is None else part.cut(whole)
        rows = part.cut(whole)
        return tf.where(part.is_real, rows, tf.zeros_like(rows))  # Of padding there is none.


def _plainly(change: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    return change(*tensors)


def _carried(how: Callable, change: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    """Returns the tensors changed; masks that Keras attached are changed likewise."""
    masks = [mask_of(tensor) for tensor in tensors]
    copy = how(change, *tensors)
    return copy if masks[0] is None else with_mask(copy, change(*masks))
