"""What a client gains when it fine-tunes the global model on its own records.

Personalization as it is evaluated by Wang et al. 2019, arXiv:1910.10252: a client's records are
divided; the global model is judged on the held-out part before and after local training on the
other one. Nothing is averaged, so this is plain Keras.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.errors import DataError, ModelError, OptionError
from tfdist.keras.optimizer_copies import decay_alike, make_old_slots
from tfdist.records.clients.collection import Clients
from tfdist.records.reading.map_fn import spec_of_batch
from tfdist.records.report_text import as_text, table_of
from tfdist.training.engine.options import check_count, check_seed
from tfdist.training.layers.data_errors import explain_value_error

_EVALUATION_BATCH_SIZE = 128
_CLIENTS_SHOWN = 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Personalization:
    """The global model on each client's held-out records, before and after. Prints as two tables.

    Attributes:
        ids: the clients.
        num_tuned: int64 [clients], records that each client fine-tuned on.
        num_held_out: int64 [clients], records that it was judged on.
        before: by name of the loss and each metric, float64 [clients].
        after: likewise.
        failed: clients that were left out -> why.
    """

    ids: tuple[str, ...]
    num_tuned: np.ndarray
    num_held_out: np.ndarray
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    failed: dict[str, str] = field(default_factory=dict)

    def means(self, name: str) -> tuple[float, float]:
        """Returns a metric before and after, averaged over the clients by held-out records."""
        weights = self.num_held_out
        return tuple(
            float(np.average(values[name], weights=weights)) for values in (self.before, self.after)
        )

    def __str__(self) -> str:
        shown = itertools.islice(self.failed.values(), _CLIENTS_SHOWN)
        lines = [f"left out: {reason}" for reason in shown]
        return as_text(self._summary(), self._first_clients(), *lines)

    __repr__ = __str__

    def _summary(self) -> Any:
        left_out = f", {len(self.failed)} left out" if self.failed else ""
        title = (
            f"{len(self.ids):,} clients, {self.num_tuned.sum():,} records to fine-tune on, "
            f"{self.num_held_out.sum():,} held out{left_out}"
        )
        numbers = ("global model", "fine-tuned", "clients up", "clients down")
        table = table_of(title, ["mean over held-out records"], numbers)
        for name in self.before:
            change = self.after[name] - self.before[name]
            up, down = (change > 0).sum(), (change < 0).sum()
            table.add_row(name, *(f"{mean:.4f}" for mean in self.means(name)), str(up), str(down))
        return table

    def _first_clients(self) -> Any:
        numbers = ("fine-tuned on", "held out", *self.before)
        table = table_of("clients: global model, fine-tuned", ["client"], numbers)
        for row, client in enumerate(self.ids[:_CLIENTS_SHOWN]):
            values = [
                f"{self.before[name][row]:.3f}  {self.after[name][row]:.3f}" for name in self.before
            ]
            counts = (f"{self.num_tuned[row]:,}", f"{self.num_held_out[row]:,}")
            table.add_row(client, *counts, *values)
        if len(self.ids) > _CLIENTS_SHOWN:
            table.add_row(f"and {len(self.ids) - _CLIENTS_SHOWN:,} more")
        return table


def personalize(
    model: tf.keras.Model,
    clients: Clients,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float | None,
    held_out_share: float,
    num_clients: int | None,
    seed: int,
    progress: Progress | None = None,
) -> Personalization:
    """Fine-tunes the model on each client in turn; its weights are afterwards what they were.

    Args: see ``Federated.personalize``.

    Raises:
        OptionError: an option out of range.
        ModelError: a metric has several results, as one for each class.
        DataError: no client at all could be fine-tuned.
    """
    _check_options(epochs, batch_size, learning_rate, held_out_share, num_clients, seed)
    chosen = _choose(clients, num_clients, seed)
    trial = _Trial(model, clients.element_spec, learning_rate)
    rows: dict[str, tuple[int, int, dict[str, float], dict[str, float]]] = {}
    failed: dict[str, str] = {}
    with trial.weights_kept():
        for number, client in enumerate(chosen):
            try:
                parts = _divide(clients.load(client), held_out_share, [seed, number])
                rows[client] = trial.run(*parts, epochs, batch_size, [seed, number])
            except (DataError, tf.errors.InvalidArgumentError) as error:
                name = f"client '{client}': "
                failed[client] = name + str(_explained(error, model)).removeprefix(name)
            if progress is not None:
                progress(number + 1, len(chosen))
    if not rows:
        raise DataError(
            "at least one client must be able to fine-tune the model",
            received=next(iter(failed.values())),
            mend=f"Look at the clients: all {len(failed)} were left out",
        )
    tuned, held_out, before, after = zip(*rows.values(), strict=True)
    return Personalization(
        ids=tuple(rows),
        num_tuned=np.array(tuned),
        num_held_out=np.array(held_out),
        before=_columns(before),
        after=_columns(after),
        failed=failed,
    )


def _explained(error: Exception, model: tf.keras.Model) -> DataError:
    """Returns what is wrong with a client's data; raises an error that nothing explains."""
    if isinstance(error, DataError):
        return error
    explained = explain_value_error(error, model)
    if explained is None:
        raise error
    return explained


class _Trial:
    """Judges and trains a compiled model on the records of one client after the other."""

    def __init__(self, model: tf.keras.Model, element_spec: Any, learning_rate: float | None):
        self._model = model
        config = model.optimizer.get_config()
        if learning_rate is not None:
            config["learning_rate"] = learning_rate
        self._optimizer = type(model.optimizer).from_config(config)  # It has not taken a step.
        itself = [(variable, variable) for variable in model.trainable_variables]
        decay_alike(model.optimizer, self._optimizer, itself)
        spec = spec_of_batch(element_spec)

        def loss_of(x: Any, y: Any, y_pred: Any, weight: Any, training: bool) -> Any:
            return keras.losses.compute_loss(model, x, y, y_pred, weight, training=training)

        @tf.function(input_signature=spec, autograph=False)
        def train(x: Any, y: Any, weight: Any = None) -> None:
            weights = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = loss_of(x, y, keras.steps.called(model, x, training=True), weight, True)
            gradients = keras.optimizers.gradients_of(self._optimizer, loss, weights, tape)
            self._optimizer.apply_gradients(zip(gradients, weights, strict=True))

        @tf.function(input_signature=spec, autograph=False)
        def judge(x: Any, y: Any, weight: Any = None) -> None:
            y_pred = keras.steps.called(model, x, training=False)
            loss = loss_of(x, y, y_pred, weight, False)
            keras.losses.show_loss(model, loss, tf.shape(tf.nest.flatten(x)[0])[0])
            model.compute_metrics(x, y, y_pred, weight)

        self._train, self._judge = train, judge

    @contextlib.contextmanager
    def weights_kept(self) -> Iterator[None]:
        """Remembers the weights, which every client starts from, and restores them at the end."""
        self._weights = self._model.get_weights()
        self._slots: list[np.ndarray] | None = None
        try:
            yield
        finally:
            self._model.set_weights(self._weights)
            self._model.reset_metrics()

    def run(
        self, tuned: Any, held_out: Any, epochs: int, batch_size: int, seed: list[int]
    ) -> tuple[int, int, dict[str, float], dict[str, float]]:
        """Returns the numbers of records, and the results before and after."""
        self._start()
        before = self._results(held_out)
        rng = np.random.default_rng([*seed, 1])
        rows = _num_rows(tuned)
        for _ in range(epochs):
            order = rng.permutation(rows)
            for start in range(0, rows, batch_size):
                self._train(*_take(tuned, order[start : start + batch_size]))
        return rows, _num_rows(held_out), before, self._results(held_out)

    def _start(self) -> None:
        self._model.set_weights(self._weights)
        if hasattr(self._optimizer, "build"):
            keras.optimizers.build(self._optimizer, self._model.trainable_variables)
        else:  # Of Keras' old kind.
            make_old_slots(self._optimizer, self._model.trainable_variables)
        variables = keras.optimizers.variables_of(self._optimizer)
        if self._slots is None:
            self._slots = [variable.numpy() for variable in variables]
        for variable, value in zip(variables, self._slots, strict=True):
            variable.assign(value)

    def _results(self, records: Any) -> dict[str, float]:
        self._model.reset_metrics()
        rows = _num_rows(records)
        for start in range(0, rows, _EVALUATION_BATCH_SIZE):
            self._judge(*_take(records, slice(start, start + _EVALUATION_BATCH_SIZE)))
        results = self._model.get_metrics_result()
        return {name: _number(name, value) for name, value in results.items()}


def _number(name: str, result: Any) -> float:
    if np.ndim(result) > 0:
        raise ModelError(
            "a metric must be one number to say what a client gains",
            received=f"'{name}' with {np.size(result)} numbers",
            mend="Give one that averages, such as F1Score(average='macro')",
        )
    return float(result)


def _check_options(
    epochs: int,
    batch_size: int,
    learning_rate: float | None,
    held_out_share: float,
    num_clients: int | None,
    seed: int,
) -> None:
    check_seed(seed)
    counts = {"epochs": epochs, "batch_size": batch_size}
    if num_clients is not None:
        counts["num_clients"] = num_clients
    for name, value in counts.items():
        check_count(name, value)
    if not isinstance(held_out_share, Real) or not 0 < held_out_share < 1:
        raise OptionError(
            "held_out_share must be between 0 and 1",
            received=repr(held_out_share),
            mend="Choose for example 0.5",
        )
    is_number = isinstance(learning_rate, Real)
    if learning_rate is not None and not (is_number and 0 < learning_rate < math.inf):
        raise OptionError(
            "learning_rate must be a positive number",
            received=repr(learning_rate),
            mend="Leave it out, for the rate of the training",
        )


def _choose(clients: Clients, num_clients: int | None, seed: int) -> list[str]:
    if num_clients is None or num_clients >= len(clients):
        return list(clients.ids)
    chosen = np.random.default_rng(seed).choice(len(clients), num_clients, replace=False)
    return [clients.ids[number] for number in sorted(chosen)]


def _divide(records: Any, held_out_share: float, seed: list[int]) -> tuple[Any, Any]:
    """Returns the records to fine-tune on and those that are held out, at least one each."""
    if len(records) < 2:
        raise DataError(
            "data for fine-tuning must have labels",
            received="records of inputs alone",
            mend="Give the labels beside the inputs: (x, y)",
        )
    rows = _num_rows(records)
    if rows < 2:
        raise DataError(
            "a client must have a record to fine-tune on and one to hold out",
            received=f"{rows} in all",
            mend="Give it 2 records or more",
        )
    order = np.random.default_rng(seed).permutation(rows)
    held_out = min(max(1, round(held_out_share * rows)), rows - 1)
    return _take(records, order[held_out:]), _take(records, order[:held_out])


def _num_rows(records: Any) -> int:
    return len(tf.nest.flatten(records)[0])


def _take(records: Any, rows: np.ndarray | slice) -> Any:
    return tf.nest.map_structure(lambda array: array[rows], records)


def _columns(results: tuple[dict[str, float], ...]) -> dict[str, np.ndarray]:
    return {name: np.array([result[name] for result in results]) for name in results[0]}
