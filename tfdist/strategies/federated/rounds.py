"""One round: a cohort is asked, bad clients are left out, the rest is averaged."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError, LaunchError, WriteError
from tfdist.keras.layers import variables_in
from tfdist.records.reading.shape_errors import explain_shape_error
from tfdist.strategies.federated.feed import ClientFeed, Cohort, num_rows
from tfdist.strategies.federated.options import Options
from tfdist.strategies.federated.packing import RoundFile, group_of_each
from tfdist.strategies.federated.server import Server
from tfdist.training.layers.data_errors import explain_value_error

_DIVERGED = "its update is not finite"


@dataclass
class Round:
    """What happened in a round.

    Attributes:
        number: counted from 1.
        clients: those whose updates were averaged.
        dropped: those that got the model and never answered.
        slow: those that did a part of their local work only.
        failed: those that were left out -> why.
        attempts: cohorts that were asked; more than 1 when too few clients were left of one.
        bytes_down: sent to clients.
        bytes_up: sent by clients.
        seconds: of the round, without validation.
        reading_seconds: of these, in which the clients' records were read: nobody trains then.
        epsilon: of all rounds so far; None without differential privacy.
    """

    number: int
    clients: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    attempts: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    reading_seconds: float = 0.0
    epsilon: float | None = None

    def numbers(self) -> dict[str, float]:
        """Returns what the history of a fit has of it."""
        logs = {
            "clients": len(self.clients),
            "clients_dropped": len(self.dropped),
            "clients_failed": len(self.failed),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "round_seconds": self.seconds,
        }
        return logs if self.epsilon is None else logs | {"epsilon": self.epsilon}


class RoundRunner:
    """Runs the rounds of a model, and remembers which clients of a fit it has named as bad."""

    def __init__(self, model: tf.keras.Model, server: Server, options: Options):
        self._model = model
        self._server = server
        self._options = options
        self._weights_bytes = sum(v.numpy().nbytes for v in variables_in(model))
        self.forget()

    def forget(self) -> None:
        """Begins another fit, of records that may have been mended."""
        self._named: set[str] = set()
        self._known_bad: dict[str, str] = {}

    def run(self, feed: ClientFeed, number: int) -> tuple[Round, Any]:
        """Runs round ``number``, counted from 0; returns it and the sums that clients reported.

        A fit that begins anew at 0 goes on from the rounds that there were before: with the same
        numbers it would ask the same clients again, which the accounting of privacy does not know.

        Raises:
            DataError: ``min_clients`` clients could not be found in ``max_attempts`` cohorts.
        """
        begun = time.perf_counter()
        number = max(number, int(self._server.num_rounds.numpy()), self._server.next_round)
        record = Round(number + 1)
        output = None
        while output is None:
            if record.attempts == self._options.max_attempts:
                raise self._too_few(record)
            cohort = feed.sampler.cohort(feed.clients.ids, number, record.attempts)
            record.attempts += 1
            output = self._attempt(feed, cohort, number, record)
        self._server.accept(output)
        self._server.next_round = number + 1
        if self._options.is_private:
            record.epsilon = self._epsilon(feed)
        record.seconds = time.perf_counter() - begun
        return record, output.metrics["client_work"]["train"]

    def _attempt(self, feed: ClientFeed, cohort: Cohort, number: int, record: Round) -> Any:
        record.dropped = tuple(client for client in cohort.asked if client in cohort.dropped)
        record.bytes_down += len(cohort.asked) * self._weights_bytes
        output = None
        while output is None:
            with self._server.round_file(len(cohort.answering)) as packed:
                begun = time.perf_counter()
                ready = self._load(feed, cohort, number, record, packed)
                record.reading_seconds += time.perf_counter() - begun
                if not self._are_enough(ready):
                    return None
                try:
                    output = self._server.run(packed)
                except WriteError:
                    raise
                except Exception:
                    bad = self._find_bad(feed, cohort, ready, number)
                    if not bad:
                        raise
                    self._known_bad |= bad
        present = output.metrics["client_work"]["train"]["present"]
        for slot, client in enumerate(ready):
            if not present[slot]:
                self._leave_out(record, client, _DIVERGED)
        record.clients = tuple(c for slot, c in enumerate(ready) if present[slot])
        record.slow = tuple(client for client in ready if client in cohort.shares)
        record.bytes_up += len(ready) * self._server.bytes_of_client
        return output if self._are_enough(record.clients) else None

    def _are_enough(self, clients: Any) -> bool:
        return len(clients) >= self._options.min_clients

    def _load(
        self, feed: ClientFeed, cohort: Cohort, number: int, record: Round, packed: RoundFile
    ) -> list[str]:
        """Packs the clients of a cohort whose records can be read; returns them by their slots."""
        ready: list[str] = []
        work = [feed.work_of(client) for client in cohort.answering]
        groups = group_of_each(work, packed.num_groups)
        for client, group in zip(cohort.answering, groups, strict=True):
            if client in self._known_bad:
                self._leave_out(record, client, self._known_bad[client])
                continue
            try:
                arrays = feed.load(client, number)
            except (DataError, tf.errors.InvalidArgumentError) as error:
                explained = explain_shape_error(error, list(feed.batch_spec.values()))
                if explained is None and not isinstance(error, DataError):
                    raise
                self._leave_out(record, client, str(explained or error))
                continue
            order = feed.order(num_rows(arrays), len(ready), number, cohort.shares.get(client))
            packed.add(group, arrays, order, len(ready))
            ready.append(client)
        return ready

    def _find_bad(
        self, feed: ClientFeed, cohort: Cohort, ready: list[str], number: int
    ) -> dict[str, str]:
        """Asks each client alone: TFF does not say whose records an error came from."""
        bad, unexplained = {}, 0
        for slot, client in enumerate(ready):
            arrays = feed.load(client, number)
            order = feed.order(num_rows(arrays), slot, number, cohort.shares.get(client))
            with self._server.round_file(1) as packed:
                packed.add(0, arrays, order, 0)
                try:
                    self._server.run(packed)
                except Exception as error:
                    if isinstance(error, LaunchError) and len(ready) == 1:
                        raise
                    explained = explain_value_error(error, self._model)
                    bad[client] = _said(error) if explained is None else str(explained)
                    unexplained += explained is None
        # What all of them meet is no fault of their records, unless these explain it.
        return {} if unexplained == len(ready) > 1 else bad

    def _leave_out(self, record: Round, client: str, reason: str) -> None:
        record.failed[client] = reason
        if client not in self._named:
            self._named.add(client)
            text = reason if f"'{client}'" in reason else f"client '{client}': {reason}"
            print(f"tfdist: left out {text}", flush=True)

    def _too_few(self, record: Round) -> DataError:
        found = [f"{len(record.dropped)} of the last cohort dropped out"] if record.dropped else []
        found += list(record.failed.values())[:1]
        if len(record.failed) > 1:
            found.append(f"{len(record.failed) - 1} more failed")
        return DataError(
            f"round {record.number} must have at least {self._options.min_clients} clients",
            received=f"too few in {record.attempts} cohorts" + "".join(f"; {t}" for t in found),
            mend="Mend their data, ask more clients (clients_per_round), or lower min_clients or "
            "dropout_rate",
        )

    def _epsilon(self, feed: ClientFeed) -> float:
        num_clients = len(feed.clients.ids)
        delta = self._options.dp_delta or default_delta(num_clients)
        rate = feed.num_replicas / num_clients
        ledger = Ledger(float(self._options.dp_noise_multiplier), rate, delta)
        epsilon = ledger.epsilon(int(self._server.num_rounds.numpy()))
        print(
            f"tfdist: after {int(self._server.num_rounds.numpy())} rounds epsilon is "
            f"{epsilon:.2f} for delta {delta:.2g} (a client's data as a whole)",
            flush=True,
        )
        return epsilon


def _said(error: Exception) -> str:
    """Returns what an error of TFF's worker says, without its envelope."""
    text = str(error)
    details = re.search(r'details = "(.*?)"\s*\n', text, re.DOTALL)
    return (details.group(1) if details else text).strip().splitlines()[0][:300]


@dataclass(frozen=True)
class Ledger:
    """Accounts for rounds of the Gaussian mechanism on clients drawn independently of each other.

    What a private training has given away so far is an epsilon for a delta. The unit of privacy
    is a client with all of its records. Rényi accounting of the Poisson subsampled Gaussian
    mechanism: Mironov et al. 2019, arXiv:1908.10530.

    Attributes:
        noise_multiplier: standard deviation of the noise over the clipping norm.
        sampling_rate: probability that a client is in a round.
        delta: probability that the promise fails; below 1 / clients.
    """

    noise_multiplier: float
    sampling_rate: float
    delta: float

    def epsilon(self, num_rounds: int) -> float:
        """Returns the epsilon of ``num_rounds`` rounds together; infinite without noise."""
        import dp_accounting

        if self.noise_multiplier == 0:
            return math.inf
        event: Any = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(self.sampling_rate, event)
        accountant = dp_accounting.rdp.RdpAccountant()
        accountant.compose(event, num_rounds)
        return float(accountant.get_epsilon(self.delta))


def default_delta(num_clients: int) -> float:
    """Returns n^-1.1, which is below 1 / n as it must be."""
    return num_clients**-1.1
