"""The server between rounds: the learning process, and its state beside the model's weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import import_tensorflow_federated
from tfdist.errors import ModelError, OptionError
from tfdist.keras.optimizers import inner_of, squares_look_ups
from tfdist.strategies.federated.aggregation import (
    TrimmedMeanFactory,
    make_aggregator,
    update_bytes,
)
from tfdist.strategies.federated.client_work import build_client_work, zero_weights
from tfdist.strategies.federated.engine import Engine
from tfdist.strategies.federated.feed import ClientFeed
from tfdist.strategies.federated.model import TracedStep
from tfdist.strategies.federated.optimizers import (
    Proximal,
    client_optimizer,
    learning_rate_of,
    server_optimizer,
)
from tfdist.strategies.federated.options import Options
from tfdist.strategies.federated.packing import RoundFile
from tfdist.training.engine.binding import Binding, Saving
from tfdist.training.layers import loss_masks
from tfdist.training.layers.clipping import clips_by_norm, limit_of_values

tff = import_tensorflow_federated()

_DEFAULT_PROXIMAL_STRENGTH = 0.01
# More than a client draws of a seed in a round; each of Keras 3's counts what it has given.
_DRAWS_OF_A_ROUND = 1 << 32


class Server:
    """Runs rounds on TFF. The truth about the weights is the Keras model, before and after each.

    Args:
        model: the user's compiled model.
        statistics: the moving statistics of ``model`` to average.

    Attributes:
        bytes_of_client: what a client sends in a round, known once ``prepare`` was called.
    """

    def __init__(
        self,
        engine: Engine,
        options: Options,
        model: tf.keras.Model,
        statistics: tuple[tf.Variable, ...],
    ):
        self._engine = engine
        self._options = options
        self._model = model
        self._statistics = statistics
        self._process: Any = None
        self._aggregator: Any = None
        self._num_groups = 0
        self._key: Any = None
        self._private_terms: tuple[float, ...] = ()
        self._state: Any = None
        self._slots: list[tf.Variable] = []
        self._trained: list[Any] = []
        self._has_gradients: list[bool] = []
        self.bytes_of_client = 0
        #: The number of the round after the last one that was run, or 0 after a checkpoint is read.
        self.next_round = 0
        #: Rounds that have updated the weights, in all fits.
        self.num_rounds = tf.Variable(0, dtype=tf.int64, trainable=False)
        # Of a private training: checkpoints hold it, as epsilon depends on it.
        self._num_clients = tf.Variable(0, dtype=tf.int64, trainable=False)

    def prepare(self, binding: Binding, feed: ClientFeed) -> None:
        """Builds the process of the compiled model for these clients, unless it is built."""
        # A cohort that is drawn client by client may be all of them.
        num_slots = len(feed.clients.ids) if self._options.is_private else feed.num_replicas
        key = (binding.times_compiled, repr(feed.batch_spec), num_slots, feed.num_replicas)
        if key == self._key:
            return
        cause = self._options.sees_each_client
        if cause is not None and self._key is None:
            print(
                f"tfdist: {cause} must see the update of each client, so each is one of TFF's: "
                "several times as slow as groups of clients",
                flush=True,
            )
        step = TracedStep(binding, feed.batch_spec)
        self._refuse_look_ups(step)
        lost = sorted(step.changed_beside([*self._statistics, *step.seeds]))
        if lost and self._key is None:
            print(
                f"tfdist: warning: what clients make of {', '.join(lost)} is not averaged: "
                "each round begins with the value of the server",
                flush=True,
            )
        if self._options.algorithm == "fedsgd" and loss_masks.can_be(self._model):
            print(
                "tfdist: warning: the loss leaves out positions, by a mask or ignore_class: each "
                "client takes the mean of its own, so the gradients are not those of one device",
                flush=True,
            )
        aggregator = make_aggregator(self._options, feed.num_replicas)
        with self._engine.active():
            process = build_process(
                step,
                self._options,
                aggregator,
                optimizer=self._model.optimizer,
                client_rate=self._client_rate(),
                num_slots=num_slots,
                statistics=self._places(step),
            )
            state = process.initialize()
        if self._options.is_private:
            self._refuse_other_terms((*_terms(state), num_slots))
            self._num_clients.assign(num_slots)
        self._key, self._process, self._aggregator = key, process, aggregator
        self._non_trainable, self._seeds = step.non_trainable, step.seeds
        self._has_gradients = step.has_gradients
        # Always as many: TFF keeps something for good of each number of clients that it meets.
        self._num_groups = min(len(os.sched_getaffinity(0)), feed.num_replicas)
        trained = [variable.ref() for variable in step.trainable]
        self._state = self._gone_on(state, trained == self._trained)
        self._slots = [tf.Variable(leaf, trainable=False) for leaf in _numbers(self._state)]
        self._trained = trained
        self.bytes_of_client = update_bytes(step.trainable, self._options) + sum(
            variable.numpy().nbytes for variable in self._statistics
        )

    def _refuse_look_ups(self, step: TracedStep) -> None:
        optimizer = inner_of(self._model.optimizer)
        old = tf.keras.optimizers.legacy.SGD
        is_of_clients = self._options.algorithm != "fedsgd" and isinstance(optimizer, old)
        if is_of_clients and step.looked_up and optimizer.get_config()["momentum"]:
            raise ModelError(
                "the old SGD with momentum must train no table on clients, since it moves no row "
                "but those that were looked up, and TFF's moves all",
                received=f"legacy.SGD and '{step.looked_up[0]}'",
                mend="Compile with tf.keras.optimizers.SGD, or leave momentum out",
            )
        if step.looked_up and squares_look_ups(optimizer):
            raise ModelError(
                "a table that clients train must have an optimizer that adds up the gradients of "
                "equal look-ups, as with Keras 3 SGD alone does",
                received=f"'{step.looked_up[0]}' and {type(optimizer).__name__}",
                mend="Use SGD, or import tf_keras in place of keras",
            )
        clips = clips_by_norm(optimizer) or limit_of_values(optimizer) is not None
        # Other algorithms have refused what clips at all.
        if clips and step.looked_up:
            raise ModelError(
                "a table that clients train with algorithm='fedsgd' must have gradients that are "
                "not clipped, since Keras clips each row that was looked up, and clients send "
                "their sums",
                received=f"{type(optimizer).__name__} that clips and '{step.looked_up[0]}'",
                mend="Leave out clipnorm, global_clipnorm and clipvalue",
            )

    def _gone_on(self, begun: Any, trains_the_same: bool) -> Any:
        """Returns the state of a new process that goes on from the last one: the norms that updates
        are clipped at, and the moments of the server where it trains the same weights."""
        last = self._state
        if last is None or not self.num_rounds.numpy():
            return begun
        if trains_the_same:
            begun = begun._replace(finalizer=last.finalizer)
        if _shapes(begun.aggregator) == _shapes(last.aggregator):
            begun = begun._replace(aggregator=last.aggregator)
        return begun

    def _places(self, step: TracedStep) -> tuple[int, ...]:
        places = {variable.ref(): place for place, variable in enumerate(step.non_trainable)}
        return tuple(places[variable.ref()] for variable in self._statistics)

    def round_file(self, num_clients: int) -> RoundFile:
        """Returns an empty file for a round of at most so many clients."""
        if self._options.sees_each_client is not None:
            return RoundFile(num_clients, with_empty=False)
        return RoundFile(self._num_groups, with_empty=True)

    def run(self, packed: RoundFile) -> Any:
        """Trains on these clients; returns TFF's output, for ``accept``."""
        state = self._state._replace(global_model_weights=self._weights())
        clipping = self._aggregator.clipping(state.aggregator) if self._options.is_private else ()
        if state.client_work:
            rate = np.float32(self._client_rate())
            state = state._replace(client_work={**state.client_work, "learning_rate": rate})
        with self._engine.active():
            return self._process.next(state, packed.datasets(clipping))

    def accept(self, output: Any) -> None:
        """Updates the model by the output of a round."""
        self._state = output.state
        self._apply(output.state.global_model_weights.trainable)
        sums = output.metrics["client_work"]["train"]
        for variable, total in zip(self._statistics, sums["statistics"], strict=True):
            variable.assign(total / sums["rows"])
        for seed in self._seeds:
            seed.assign_add([0, _DRAWS_OF_A_ROUND])
        self.num_rounds.assign_add(1)

    def _apply(self, trainable: Any) -> None:
        variables = self._model.trainable_variables
        if self._options.algorithm == "fedsgd":
            # As in Keras, where no loss is: with zeros an optimizer would decay weights.
            pairs = [
                (tf.convert_to_tensor(gradient), variable)
                for gradient, variable, has in zip(
                    trainable, variables, self._has_gradients, strict=True
                )
                if has or self._options.is_private
            ]
            self._model.optimizer.apply_gradients(pairs)
            return
        for variable, value in zip(variables, trainable, strict=True):
            variable.assign(value)

    def _weights(self) -> Any:
        return tff.learning.models.ModelWeights(
            [variable.numpy() for variable in self._model.trainable_variables],
            [variable.numpy() for variable in self._non_trainable],
        )

    def _client_rate(self) -> float:
        """Returns the clients' learning rate, which a callback may set between rounds."""
        if self._options.algorithm == "fedsgd":
            return 0.0  # The clients take no step.
        return self._options.client_learning_rate or learning_rate_of(self._model.optimizer)

    # Checkpoints --------------------------------------------------------------------------------

    def saving(self) -> Saving:
        """Returns how checkpoints hold the state of the server beside the model."""
        private = {"clients": self._num_clients} if self._options.is_private else {}

        def beside(model: tf.keras.Model) -> dict[str, Any]:
            slots = {f"slot_{index}": slot for index, slot in enumerate(self._slots)}
            return {
                "optimizer": model.optimizer,
                "rounds": self.num_rounds,
                "server": tf.train.Checkpoint(**slots),
                **private,
            }

        return Saving(
            beside=beside,
            written=self.written,
            restored=self.restored,
            unwritten=tuple(private),
        )

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        for slot, value in zip(self._slots, _numbers(self._state), strict=True):
            slot.assign(value)
        yield

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with self.written():
            yield
        self.next_round = 0
        own = self._state
        values = iter([slot.numpy() for slot in self._slots])
        rest = own._replace(global_model_weights=())
        rest = tf.nest.map_structure(lambda leaf: next(values) if _is_number(leaf) else leaf, rest)
        # What was learned is the checkpoint's; rates, momentum and decay are this fit's.
        finalizer = rest.finalizer
        if finalizer:
            rule = server_optimizer(self._options.algorithm, self._options.server_rate)
            finalizer = rule.set_hparams(finalizer, rule.get_hparams(own.finalizer))
        self._state = rest._replace(
            global_model_weights=own.global_model_weights,
            client_work=own.client_work,
            finalizer=finalizer,
        )
        if self._options.is_private:
            self._refuse_other_terms((*_terms(self._state), int(self._num_clients.numpy())))

    def _refuse_other_terms(self, terms: tuple[float, ...]) -> None:
        """Raises OptionError where rounds were run on other terms of privacy: epsilon is of all."""
        if self.num_rounds.numpy() and terms != self._private_terms:
            names = ("noise", "clipping norm", "clients a round", "clients")
            told = [
                ", ".join(f"{value:.4g} {name}" for value, name in zip(of, names, strict=True))
                for of in (self._private_terms, terms)
            ]
            raise OptionError(
                "a private training must go on with the noise, the clipping norm and the clients "
                "that it began with, as its epsilon is of all rounds together",
                received=" and ".join(told),
                mend="Give the same ones, or begin another training",
            )
        self._private_terms = terms


def _terms(state: Any) -> tuple[float, float, float]:
    """Returns the noise of a private server's state over its clipping norm, that norm (0 where it
    adapts), and the clients of a round."""
    query = state.aggregator.query_state
    norm, noise = 0.0, getattr(query.numerator_state, "noise_multiplier", None)
    if noise is None:  # It does not adapt; their product alone could be that of others, too.
        norm = float(query.numerator_state.l2_norm_clip)
        noise = float(query.numerator_state.stddev) / norm
    return round(float(noise), 6), norm, float(query.denominator)


def _numbers(state: Any) -> list[Any]:
    """Returns the numbers in a server's state, the weights left out."""
    rest = state._replace(global_model_weights=())
    return [leaf for leaf in tf.nest.flatten(rest) if _is_number(leaf)]


def _shapes(state: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in tf.nest.flatten(state)]


def _is_number(leaf: Any) -> bool:
    return not isinstance(leaf, (str, bytes)) and np.asarray(leaf).dtype.kind in "biuf"


def build_process(
    step: TracedStep,
    options: Options,
    aggregator: Any,
    *,
    optimizer: Any,
    client_rate: float,
    num_slots: int,
    statistics: tuple[int, ...],
) -> Any:
    """Returns the ``tff.learning.templates.LearningProcess`` of the options.

    Args:
        step: of the clients' model.
        options: of the strategy.
        aggregator: the ``tff.aggregators`` factory of the options.
        optimizer: the compiled Keras optimizer.
        client_rate: the clients' learning rate.
        num_slots: the most clients in a round.
        statistics: indices in ``step.non_trainable`` of moving statistics to average.
    """
    client = None
    if options.algorithm != "fedsgd":
        client = client_optimizer(optimizer, client_rate)
    if options.algorithm == "fedprox":
        client = Proximal(client, options.proximal_strength or _DEFAULT_PROXIMAL_STRENGTH)
    is_unweighted = isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory)
    templates = tff.learning.templates
    begin = zero_weights(step)
    weights_type = begin.type_signature.result
    work = build_client_work(
        step,
        weights_type=weights_type,
        optimizer=client,
        num_slots=num_slots,
        statistics=statistics,
        # Where all count alike, a weight says no more than who is there.
        by_rows=not (is_unweighted or isinstance(aggregator, TrimmedMeanFactory)),
        private=aggregator if options.is_private else None,
    )
    if is_unweighted:
        aggregator = tff.aggregators.as_weighted_aggregator(aggregator)
    sent = work.next.type_signature.result.result.member
    return templates.compose_learning_process(
        begin,
        templates.build_broadcast_process(weights_type),
        work,
        aggregator.create(sent.update, sent.update_weight),
        templates.build_apply_optimizer_finalizer(
            server_optimizer(options.algorithm, options.server_rate), weights_type
        ),
    )
