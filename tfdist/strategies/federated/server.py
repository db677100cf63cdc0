"""The server between rounds: the learning process, and its state beside the model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import import_tensorflow_federated
from tfdist.strategies.federated.aggregation import make_aggregator
from tfdist.strategies.federated.engine import Engine
from tfdist.strategies.federated.feed import ClientFeed
from tfdist.strategies.federated.model import ClientModel, TracedStep
from tfdist.strategies.federated.optimizers import (
    Proximal,
    client_optimizer,
    learning_rate_of,
    server_optimizer,
)
from tfdist.strategies.federated.options import Options
from tfdist.training.engine.binding import Binding, Saving

tff = import_tensorflow_federated()

# 2.6 times as fast as TFF's default: only one thread of a client's work would wait for the other.
_LOOP = tff.learning.LoopImplementation.DATASET_ITERATOR
_DEFAULT_PROXIMAL_STRENGTH = 0.01


class Server:
    """Runs rounds on TFF. The truth about the weights is the Keras model, before and after each.

    Args:
        model: the user's compiled model.
        statistics: indices in ``model.non_trainable_variables`` of moving statistics to average.
    """

    def __init__(
        self,
        engine: Engine,
        options: Options,
        model: tf.keras.Model,
        statistics: tuple[int, ...],
    ):
        self._engine = engine
        self._options = options
        self._model = model
        self._statistics = statistics
        self._process: Any = None
        self._key: Any = None
        self._state: Any = None
        self._slots: list[tf.Variable] = []
        #: Rounds that have updated the weights, in all fits.
        self.num_rounds = tf.Variable(0, dtype=tf.int64, trainable=False)

    def prepare(self, binding: Binding, feed: ClientFeed) -> None:
        """Builds the process of the model for these clients, unless it is built."""
        # A cohort that is drawn client by client may be all of them.
        num_slots = len(feed.clients.ids) if self._options.is_private else feed.num_replicas
        key = (repr(feed.batch_spec), num_slots, feed.num_replicas)
        if key == self._key:
            return
        step = TracedStep(binding, feed.batch_spec)

        def model_fn() -> ClientModel:
            return ClientModel(step, num_slots, self._statistics)

        with self._engine.active():
            process = build_process(
                model_fn,
                self._options,
                optimizer=self._model.optimizer,
                client_rate=self._client_rate(),
                expected_clients=feed.num_replicas,
            )
            state = process.initialize()
        self._key, self._process = key, process
        if self._state is None:
            self._state = state
            self._slots = [tf.Variable(leaf, trainable=False) for leaf in _numbers(state)]

    @property
    def statistics_bytes(self) -> int:
        """Returns what a client sends of moving statistics, in bytes."""
        variables = self._model.non_trainable_variables
        return sum(variables[index].numpy().nbytes for index in self._statistics)

    def run(self, datasets: list[tf.data.Dataset]) -> Any:
        """Trains on these clients; returns TFF's output, for ``accept``."""
        assert datasets, "TFF averages nothing to nothing without complaint"
        state = self._state._replace(global_model_weights=self._weights())
        with self._engine.active():
            return self._process.next(self._with_client_rate(state), datasets)

    def accept(self, output: Any) -> None:
        """Updates the model by the output of a round."""
        self._state = output.state
        self._apply(output.state.global_model_weights.trainable)
        self._average_statistics(output.metrics["client_work"]["train"])
        self.num_rounds.assign_add(1)

    def _apply(self, trainable: Any) -> None:
        variables = self._model.trainable_variables
        if self._options.algorithm == "fedsgd":
            gradients = [tf.convert_to_tensor(gradient) for gradient in trainable]
            self._model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return
        for variable, value in zip(variables, trainable, strict=True):
            variable.assign(value)

    def _average_statistics(self, sums: Any) -> None:
        rows = sums["rows"][0]
        for index, total in zip(self._statistics, sums["statistics"], strict=True):
            self._model.non_trainable_variables[index].assign(total / rows)

    def _weights(self) -> Any:
        return tff.learning.models.ModelWeights(
            [variable.numpy() for variable in self._model.trainable_variables],
            [variable.numpy() for variable in self._model.non_trainable_variables],
        )

    # The clients' learning rate, which a callback may set between rounds --------------------------

    def _client_rate(self) -> float:
        if self._options.algorithm == "fedsgd":
            return 0.0  # The clients take no step.
        return self._options.client_learning_rate or learning_rate_of(self._model.optimizer)

    def _with_client_rate(self, state: Any) -> Any:
        if not state.client_work:
            return state
        rate = np.float32(self._client_rate())
        return state._replace(client_work={**state.client_work, "learning_rate": rate})

    # Checkpoints --------------------------------------------------------------------------------

    def saving(self) -> Saving:
        """Returns how checkpoints hold the state of the server beside the model."""

        def beside(model: tf.keras.Model) -> dict[str, Any]:
            slots = {f"slot_{index}": slot for index, slot in enumerate(self._slots)}
            return {
                "optimizer": model.optimizer,
                "rounds": self.num_rounds,
                "server": tf.train.Checkpoint(**slots),
            }

        return Saving(beside=beside, written=self.written, restored=self.restored)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        for slot, value in zip(self._slots, _numbers(self._state), strict=True):
            slot.assign(value)
        yield

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with self.written():
            yield
        values = iter([slot.numpy() for slot in self._slots])
        rest = self._state._replace(global_model_weights=())
        rest = tf.nest.map_structure(lambda leaf: next(values) if _is_number(leaf) else leaf, rest)
        self._state = rest._replace(global_model_weights=self._state.global_model_weights)


def _numbers(state: Any) -> list[Any]:
    """Returns the numbers in a server's state, the weights left out."""
    rest = state._replace(global_model_weights=())
    return [leaf for leaf in tf.nest.flatten(rest) if _is_number(leaf)]


def _is_number(leaf: Any) -> bool:
    return not isinstance(leaf, (str, bytes)) and np.asarray(leaf).dtype.kind in "biuf"


def build_process(
    model_fn: Callable[[], Any],
    options: Options,
    *,
    optimizer: Any,
    client_rate: float,
    expected_clients: int,
) -> Any:
    """Returns the ``tff.learning.templates.LearningProcess`` of the options.

    Args:
        model_fn: makes the clients' model.
        options: of the strategy.
        optimizer: the compiled Keras optimizer.
        client_rate: the clients' learning rate.
        expected_clients: in a round; privacy divides by it.
    """
    algorithms = tff.learning.algorithms
    aggregator = make_aggregator(options, expected_clients)
    server = server_optimizer(options.algorithm, options.server_rate)
    if options.algorithm == "fedsgd":
        return algorithms.build_fed_sgd(
            model_fn,
            server_optimizer_fn=server,
            model_aggregator=tff.aggregators.as_weighted_aggregator(aggregator)
            if isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory)
            else aggregator,
            loop_implementation=_LOOP,
        )
    client = client_optimizer(optimizer, client_rate)
    if options.algorithm == "fedprox":
        client = Proximal(client, options.proximal_strength or _DEFAULT_PROXIMAL_STRENGTH)
    is_weighted = isinstance(aggregator, tff.aggregators.WeightedAggregationFactory)
    build = (
        algorithms.build_weighted_fed_avg if is_weighted else algorithms.build_unweighted_fed_avg
    )
    return build(
        model_fn,
        client_optimizer_fn=client,
        server_optimizer_fn=server,
        model_aggregator=aggregator,
        loop_implementation=_LOOP,
    )
