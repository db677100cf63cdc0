"""What comes before the first step of a fit: what is tried, made, restored and sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.keras.trackables import optimizers_of
from tfdist.records.reading.source import fingerprint, spec_of_rows
from tfdist.records.sources.recognise import recognise
from tfdist.training.checkpoints.checkpoint import keepers_among
from tfdist.training.checkpoints.checkpoint_state import ORDER, DataState, Start
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.collective import Collective
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_data import batch_of, peeked
from tfdist.training.feed.keras_feed import GivenFeed
from tfdist.training.layers import batch_norm, eager_variables
from tfdist.training.loops.batch_reader import BatchReader
from tfdist.training.loops.membership import ElasticMembership, FixedMembership
from tfdist.training.loops.opening import Opening
from tfdist.training.model.lookup_vocabularies import check_vocabularies, follow_variables
from tfdist.training.model.scaling import ScaleLearningRate, Scaling
from tfdist.training.steps import layer_state, row_probe
from tfdist.training.steps.row_probe_rows import ROWS, filled_up, with_sizes_of


class Preparation:
    """Makes a model ready to be trained; all processes do so together.

    Args:
        check: refuses a model that has been compiled anew as it cannot be trained.
        divides: whether losses see parts of a batch.

    Attributes:
        checks_rows: whether rows are tried before the first step of a compilation.
    """

    def __init__(
        self,
        binding: Binding,
        membership: FixedMembership | ElasticMembership,
        opening: Opening,
        reader: BatchReader,
        scaling: Scaling,
        check: Callable[[tf.keras.Model], None] | None,
        *,
        divides: bool,
    ):
        self._binding = binding
        self._model = binding.model
        self._collective = binding.collective
        self._membership = membership
        self._opening = opening
        self._reader = reader
        self._check = check
        self._divides = divides
        self.checks_rows = True
        self._tried: int | None = None  # Compilation whose losses divide, or are warned of.
        self._has_told_of_pass = False
        self._scaling = scaling
        self.scale = None if scaling.is_off else ScaleLearningRate(scaling, binding.model.optimizer)

    def meet_rate(self) -> None:
        """Takes the rate to scale, before others or a checkpoint tell the one that they have."""
        if self.scale is not None:
            self.scale.meet(self._model.optimizer)

    def prepare(self, feed: Feed, callbacks: Any, begun_at: Start | None = None) -> Start:
        """Returns the first step; ``begun_at``: that of a fit which others are in the middle of."""
        model = self._model
        if self._check is not None:
            self._check(model)
        if self._is_untried():
            self._try_rows(feed.records.element_spec, feed.first_rows, tells=begun_at is None)
        keepers = keepers_among(callbacks)
        restores = any(keeper.resume for keeper in keepers)
        in_parts = bool(keepers) and keepers[0].meet(self._binding)
        with (
            keras.steps.training_as_compiled(model),
            self._binding.begun_slots(restores=restores, in_parts=in_parts),
        ):
            start = self._begin_alike(feed, callbacks, begun_at)
        if self._check is not None and keras.optimizers.has_parts(model.optimizer):
            self._check(model)  # Of several optimizers the parts may be known by now alone.
        if self.scale is not None:
            tells = self._collective.is_chief and begun_at is None
            joins = begun_at is not None
            steps = feed.steps_per_epoch
            if self.scale.prepare(model.optimizer, steps, tells=tells, joins=joins):
                self._scaling.check_executions(model)
            if tells:
                print(f"tfdist: {self._scaling.describe()}", flush=True)
        return start

    def try_given(self, x: Any, options: dict) -> None:
        """Does as ``_try_rows`` with what Keras takes itself, of which no iterator is read."""
        if self._is_untried():
            spec, arrays = self._given(x, options)
            if spec is not None:
                self._try_rows(
                    spec,
                    lambda count: arrays and tf.nest.map_structure(lambda a: a[:count], arrays),
                )

    def try_given_pass(self, x: Any, options: dict, *, predicts: bool = False) -> None:
        """Does as ``try_pass`` with what Keras takes itself."""
        if self._has_told_of_pass or self._has_whole_batches() or not self._is_untried():
            return
        spec, _ = self._given(x, options)
        if spec is not None:
            self.try_pass(spec[:1] if predicts else spec)

    def _given(self, x: Any, options: dict) -> tuple[Any, Any]:
        """Returns the specs of a batch of what Keras takes itself, and its arrays, where known."""
        if isinstance(x, tf.data.Dataset):
            return peeked(x)[1], None
        with contextlib.suppress(Exception):  # Keras takes more kinds than these.
            if recognise(x).kind == "sequence":
                arrays = batch_of(x[0])
            else:
                arrays = tf.nest.map_structure(np.asarray, self._opening.arrays(x, dict(options)))
            return spec_of_rows(arrays), arrays
        return None, None

    def try_pass(self, element_spec: tuple[Any, ...]) -> None:
        """Warns once of what couples rows where nothing has been trained; a fit tries more.

        Args:
            element_spec: of ``row_probe.explained_of_pass``.
        """
        has_told, self._has_told_of_pass = self._has_told_of_pass, True
        if has_told or self._has_whole_batches() or not self._is_untried():
            return
        _warn(row_probe.explained_of_pass(self._model, element_spec), self._collective)

    def _has_whole_batches(self) -> bool:
        """Whether a pass divides none, as microbatches are of a train step alone."""
        return self._collective.num_replicas == 1 and self._binding.options.accumulate_steps > 1

    def _is_untried(self) -> bool:
        return self._divides and self._tried != self._binding.times_compiled

    def _try_rows(
        self, element_spec: Any, first_rows: Callable[[int], Any], *, tells: bool = True
    ) -> None:
        """Tries what couples the rows of a batch, of which a line warns; see ``row_probe``.

        Args:
            element_spec: of a batch.
            first_rows: returns that many rows of the data, or fewer, or None.
            tells: whether this process has not been told in the same fit.
        """
        model, rows = self._model, None
        is_alone = self._collective.num_processes == 1
        tries = tells and self.checks_rows
        looks = self.checks_rows or is_alone
        if tries or (looks and not _have_sizes(element_spec[0])):
            with contextlib.suppress(Exception):  # Reading tells what is wrong with data.
                rows = filled_up(first_rows(ROWS))
        if tries:
            # With other rows, a rank could do without what others need it for.
            sums = self._reader.gather(None if rows is None else fingerprint(rows))
            rows = rows if sums == [sums[0]] * len(sums) else None
        if rows is not None:
            with contextlib.suppress(Exception):  # Rows may have other parts than their specs.
                element_spec = (with_sizes_of(rows[0], element_spec[0]), *element_spec[1:])
        moved = self._binding.moved = row_probe.moved_by(model, element_spec)
        layer_state.refuse_without_way(moved)
        self._binding.alike_look_ups = row_probe.looked_up_alike(model, element_spec)
        if tries:
            # On all processes: what a user's layer or loss does may need them all.
            options = self._binding.options
            in_microbatches = self._binding.engine.in_microbatches
            by_microbatch = in_microbatches or options.accumulate_steps > 1
            saves_memory = options.recomputes or options.offloads
            of_step = row_probe.step_explained(model, element_spec, rows)
            self._binding.has_told_of_step = bool(of_step)
            found = [
                *row_probe.explained(model, element_spec, rows, gradients=not saves_memory),
                *of_step,
                *layer_state.explained(moved, by_microbatch=model if by_microbatch else None),
                *batch_norm.explained(model, options.accumulate_steps),
            ]
            _warn(found, self._collective)
        self._tried = self._binding.times_compiled

    def begin_slots(self) -> None:
        """Makes ready for steps that Keras' own loops take: slots may lie on the host."""
        with keras.steps.training_as_compiled(self._model), self._binding.begun_slots():
            pass

    def _begin_alike(self, feed: Feed, callbacks: Any, begun_at: Start | None) -> Start:
        """Gives all processes the chief's variables, those of a checkpoint if it resumes."""
        model = self._model
        if self._binding.sharded is None:
            eager_variables.make_slots(model)  # They must exist to be restored or sent.
        knows_late = self._collective.num_processes > 1 or keras.trackables.SLOTS_COME_FIRST
        is_keras_step = "make_train_function" not in self._binding.engine.programs
        if knows_late and is_keras_step and optimizers_of(model) != [model.optimizer]:
            # What a step gives to other optimizers is known when it is traced.
            specimen = feed.specimen() if isinstance(feed, GivenFeed) else feed
            keras.steps.trace_step(model, iter(self._reader.batches(specimen, 0, 1)))
        start = Start()
        keepers = keepers_among(callbacks)
        if keepers:
            data = DataState(
                seed=feed.seed,
                num_records=feed.num_records,
                global_batch_size=feed.global_batch_size,
                steps_per_epoch=feed.steps_per_epoch,
                parts=self._membership.parts(feed),
                padding=feed.records.padding_code,
                order=ORDER,
            )
            confirm = getattr(feed.records, "confirm", None)
            start = keepers[0].bind(self._binding, data, begun_at=begun_at, confirm=confirm)
        if begun_at is None:
            optimizers = optimizers_of(model)
            optimizer_state = [v for one in optimizers for v in keras.optimizers.variables_of(one)]
            # A callback may have changed them before the checkpoint, which the chief alone reads.
            rates = [v for one in optimizers for v in keras.rates.rate_variables_of(one)]
            scale = keras.loss_scale.loss_scale_state(model.optimizer)
            seeds = keras.seeds.seeds_in(model)
            held = self._binding.engine.weights
            weights = keras.layers.variables_in(model) if held is None else held()
            variables = self._binding.held([*weights, *optimizer_state])
            moved = [each.variable for each in self._binding.moved]
            all_of_them = [*variables, *rates, *seeds, *scale, *moved]
            self._collective.broadcast(list({id(v): v for v in all_of_them}.values()))
            follow_variables(model)
            check_vocabularies(model, self._collective)
        return start


def _warn(found: list[str], collective: Collective) -> None:
    if found and collective.is_chief:
        print(f"tfdist: warning: {'; '.join(found)}", flush=True)


def _have_sizes(specs: Any) -> bool:
    """Whether the specs of inputs tell the size of each row."""
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(specs)]
    return all(s is None or (s.rank is not None and s[1:].is_fully_defined()) for s in shapes)
