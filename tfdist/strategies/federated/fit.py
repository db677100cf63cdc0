"""What Keras' ``fit`` of a federated model trains on, and what its steps do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, ModelError, OptionError
from tfdist.keras.steps import trained_by, training_as_compiled
from tfdist.records.clients.collection import Clients
from tfdist.strategies.federated.feed import ClientFeed
from tfdist.strategies.federated.model import check_model
from tfdist.strategies.federated.options import Options
from tfdist.strategies.federated.rounds import Round, RoundRunner
from tfdist.strategies.federated.server import Server
from tfdist.strategies.single import Alone
from tfdist.training.engine.binding import Binding, Engine
from tfdist.training.engine.metrics import state_of
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_feed import GivenRecords
from tfdist.training.layers.data_errors import check_inputs, check_labels
from tfdist.training.loops.opening import refuse_settled

_SETTLED = (
    "validation_split",
    "sample_weight",
    "steps_per_epoch",
    "validation_steps",
    "validation_batch_size",
)
_EVALUATION_BATCH_SIZE = 128


class Rounds(Alone):
    """One replica, whose steps are rounds: each reads its clients before it trains on them."""

    steps_await_batches = False

    def __init__(self) -> None:
        self.note_wait: Callable[[float], None] = lambda _: None

    def tell_waits(self, note: Callable[[float], None]) -> None:
        self.note_wait = note


class FederatedFit:
    """The data and the steps of Keras' ``fit``: an epoch is a round, and a round is one step.

    ``evaluate`` and ``predict`` stay those of one device.

    Args:
        binding: of a model whose collective is a ``Rounds``.
        dataset: the strategy's own.
    """

    def __init__(
        self,
        binding: Binding,
        server: Server,
        options: Options,
        dataset: Callable[..., Any],
    ):
        self._binding = binding
        self._model = binding.model
        self._server = server
        self._options = options
        self._dataset = dataset
        self._rounds = RoundRunner(binding.model, server, options)
        self._collective = binding.collective
        self._feed: ClientFeed | None = None
        self._records: list[Round] = []

    def engine(self) -> Engine:
        """Returns what is put on the Keras model."""
        round_ = self._run_round  # One object: it is remembered which steps have been traced.
        return Engine(
            programs=trained_by(self._model, round_),
            loops={"train_on_batch": refuse_one_batch},
            around=((("fit",), self._over_clients),),
            saving=self._server.saving(),
        )

    def _over_clients(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        def fit_clients(
            x: Any = None,
            y: Any = None,
            batch_size: int | None = None,
            epochs: int = 1,
            verbose: Any = "auto",
            callbacks: Any = None,
            *,
            validation_data: Any = None,
            class_weight: dict[int, float] | None = None,
            **options: Any,
        ) -> tf.keras.callbacks.History:
            """Trains ``epochs`` rounds.

            Args:
                x: what ``strategy.dataset`` or ``open_clients`` returned, or what they take.
                y: labels, where x is an array.
                batch_size: records of one step of all clients of a round, where x is an array.
                validation_data: what ``strategy.dataset(training=False)`` returned, or what it
                    takes.

            Returns:
                The history: metrics of the clients' training, ``val_`` metrics, and for each round
                clients, clients_dropped, clients_failed, bytes_down, bytes_up, round_seconds and
                epsilon. Its ``rounds`` is a list of ``Round``, which names the clients.
            """
            options.pop("check_rows", None)  # Clients take Keras' own steps: nothing is tried.
            _refuse_settled(options)
            feed = self._clients(x, y, batch_size).weighted_by_class(class_weight)
            check_model(self._model, self._options)  # It may have been compiled anew.
            rounds = RoundFeed.of(feed)
            check_inputs(self._model, rounds.records.element_spec)
            check_labels(self._model, rounds.records.element_spec)
            # Keras' fit trains what was trainable when the model was compiled.
            with training_as_compiled(self._model):
                self._server.prepare(self._binding, feed)
            if validation_data is not None:
                options["validation_data"] = self._validation(validation_data)
            self._feed, self._records = feed, []
            self._rounds.forget()
            history = fit(rounds, epochs=epochs, verbose=verbose, callbacks=callbacks, **options)
            history.rounds = self._records
            return history

        return fit_clients

    def _run_round(self, numbers: Iterator[tf.Tensor]) -> dict[str, Any]:
        """Takes the place of Keras' train function; ``numbers``: of rounds."""
        record, sums = self._rounds.run(self._feed, int(next(numbers)))
        self._records.append(record)
        self._collective.note_wait(record.reading_seconds)
        return self._results(sums["metrics"]) | record.numbers()

    def _results(self, sums: list[np.ndarray]) -> dict[str, Any]:
        """Returns the results of the model's metrics from the sums of their state over clients."""
        for variable, value in zip(state_of(self._model), sums, strict=True):
            variable.assign(value)
        results = self._binding.results()
        self._model.reset_metrics()
        # Some metrics have a result for each class.
        return {
            name: float(value) if np.ndim(value) == 0 else value for name, value in results.items()
        }

    # Data ---------------------------------------------------------------------------------------

    def _clients(self, x: Any, y: Any, batch_size: int | None) -> ClientFeed:
        if isinstance(x, ClientFeed):
            if y is not None or batch_size is not None:
                raise OptionError(
                    "y and batch_size must be left out beside clients, which have their own",
                    received="y" if y is not None else f"batch_size={batch_size}",
                    mend="Leave it out",
                )
            return x
        if isinstance(x, Feed):
            raise DataError(
                "strategy 'federated' must train on clients",
                received="a dataset to evaluate on",
                mend="Write strategy.dataset(data, clients=...) without training=False",
            )
        source = x if y is None else (x, y)
        return self._dataset(source, global_batch_size=batch_size)

    def _validation(self, data: Any) -> Feed:
        if isinstance(data, Feed):
            return data.in_record_order()
        if isinstance(data, (ClientFeed, Clients)):
            raise DataError(
                "validation_data must be one set of records for all clients",
                received="records divided among clients",
                mend="Write strategy.dataset(data, training=False)",
            )
        return self._dataset(data, global_batch_size=_EVALUATION_BATCH_SIZE, training=False)


def refuse_one_batch(*args: Any, **options: Any) -> None:
    """Takes the place of ``train_on_batch``.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        "a model of strategy 'federated' must be trained in rounds, by clients",
        received="train_on_batch",
        mend="Call model.fit",
    )


def _refuse_settled(options: dict) -> None:
    refuse_settled(options, _SETTLED, by="the clients have", given_to="fit")
    known = inspect.signature(tf.keras.Model.fit).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"fit() got an unexpected keyword argument '{unknown[0]}'")


@dataclass(frozen=True, kw_only=True)
class RoundFeed(Feed):
    """The numbers of rounds: each is an epoch of one step, which asks the clients itself.

    Attributes:
        clients: who is asked.
    """

    clients: ClientFeed

    @classmethod
    def of(cls, clients: ClientFeed) -> RoundFeed:
        """Returns the rounds of ``clients``."""
        spec = clients.batch_spec
        return cls(
            records=GivenRecords((spec["x"], spec["y"])),
            global_batch_size=clients.global_batch_size,
            seed=clients.seed,
            clients=clients,
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.clients.callback_steps

    @property
    def num_records(self) -> int:
        return self.clients.num_records

    def begun_by(self, parts: int) -> RoundFeed:
        return self  # Their order is that of each client.

    def epochs(self, first: int, last: int, *, skip_steps: int = 0) -> tf.data.Dataset:
        return tf.data.Dataset.range(first, last)
