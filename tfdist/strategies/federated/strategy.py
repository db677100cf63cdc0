"""Strategy "federated": clients train on their own records, a server averages, on TFF."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfdist.errors import ModelError, OptionError
from tfdist.strategies.base import DataOptions, ModelOrFn, Strategy, made_here, make_feed
from tfdist.strategies.federated.options import Options
from tfdist.training.engine.options import check_count, picked

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.training.feed.training_data import TrainingData


class Federated(Strategy):
    """Federated learning on TensorFlow Federated, simulated on this machine.

    An epoch of a fit is a round: some clients get the model, train on their own records, and the
    server averages what they send back. The compiled optimizer is the clients' one; it starts anew
    in each round. With "fedsgd" it is the server's.

    Args:
        algorithm: "fedavg" (McMahan et al. 2017, arXiv:1602.05629); "fedprox" (Li et al. 2020,
            arXiv:1812.06127); "fedavgm" (Hsu et al. 2019, arXiv:1909.06335); "fedadagrad",
            "fedadam", "fedyogi" (Reddi et al. 2021, arXiv:2003.00295); "fedsgd", one gradient of
            each client a round, applied by the compiled optimizer: exact, and any optimizer goes.
        clients_per_round: clients asked in a round; None asks all.
        local_epochs: times that a client goes over its records in a round.
        local_batch_size: records of a client's step; None divides ``global_batch_size`` among the
            clients of a round. FedSGD takes all of a client's records at once when None.
        client_learning_rate: of the clients; None takes the compiled optimizer's, which callbacks
            such as LearningRateScheduler may change between rounds.
        server_learning_rate: of the server; None is 1, or 0.03 for the adaptive algorithms.
        proximal_strength: the mu of FedProx; 0.01 when None.
        batch_norm: what becomes of BatchNormalization: "refuse"; "group_norm" replaces it, which
            is best where labels are skewed; "average" averages its moving statistics by records.
        dropout_rate: probability that a client never answers.
        straggler_rate: probability that a client does only a part of its local work.
        min_clients: fewer than this in a round, and it is repeated with other clients.
        max_attempts: cohorts that a round asks before it ends with an error.
        aggregation: "mean", by numbers of records; "clipped_mean", at an adaptive norm (Andrew et
            al. 2021, arXiv:1905.03871); "median" or "trimmed_mean" of each weight, all clients
            alike (Yin et al. 2018, arXiv:1803.01498).
        trim_fraction: of the clients, cut off on either side by "trimmed_mean".
        quantize_bits: 1 to 16; updates are sent in so many bits a weight.
        secure_aggregation: TFF's simulation of a secure sum: fixed-point numbers, computed in the
            open. It shows what secure aggregation does to accuracy; it hides nothing.
        dp_noise_multiplier: differential privacy of clients: standard deviation of the noise over
            the clipping norm. Clients are then averaged alike, and each joins a round by itself
            with probability clients_per_round / clients. Epsilon covers the model, not the
            training metrics in the history.
        dp_clip_norm: largest norm of an update; "adaptive" follows the median of the norms.
        dp_delta: probability that the promise fails; None is clients^-1.1.
        sampling_seed: of cohorts, drop-outs and stragglers.
        lr_scaling: None; there is nothing to scale by.
        warmup_epochs: 0; give the callback LearningRateScheduler instead.
    """

    name = "federated"
    takes_lengths = False

    def __init__(
        self,
        *,
        algorithm: str = "fedavg",
        clients_per_round: int | None = None,
        local_epochs: int = 1,
        local_batch_size: int | None = None,
        client_learning_rate: float | None = None,
        server_learning_rate: float | None = None,
        proximal_strength: float | None = None,
        batch_norm: str = "refuse",
        dropout_rate: float = 0.0,
        straggler_rate: float = 0.0,
        min_clients: int = 1,
        max_attempts: int = 3,
        aggregation: str = "mean",
        trim_fraction: float = 0.1,
        quantize_bits: int | None = None,
        secure_aggregation: bool = False,
        dp_noise_multiplier: float | None = None,
        dp_clip_norm: float | str = "adaptive",
        dp_delta: float | None = None,
        sampling_seed: int = 0,
        lr_scaling: str | None = None,
        warmup_epochs: float = 0,
    ):
        self._options = Options(**picked(Options, locals()))
        self._take_scaling(lr_scaling, warmup_epochs)
        if not self.scaling.is_off:
            raise OptionError(
                "the clients of strategy 'federated' must train with the learning rate as it is",
                received=f"lr_scaling={lr_scaling}, warmup_epochs={warmup_epochs}",
                mend="Give client_learning_rate, or the callback LearningRateScheduler",
            )
        self._engine: Any = None

    def start(self) -> None:
        from tfdist.strategies.federated.engine import Engine

        self._engine = Engine(secure=self._options.secure_aggregation)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def num_replicas(self) -> int:
        return self._options.clients_per_round or 1

    @property
    def approximations(self) -> tuple[str, ...]:
        options = self._options
        causes = []
        if options.algorithm != "fedsgd":
            if options.clients_per_round != 1:
                causes.append("clients take steps apart before they are averaged")
            causes.append(
                "a client's optimizer starts anew in each round (plain SGD has nothing to lose)"
            )
        if options.algorithm not in ("fedavg", "fedsgd"):
            causes.append(f"algorithm='{options.algorithm}' is another rule than one device's")
        if options.algorithm != "fedsgd" and options.server_rate != 1:
            causes.append(f"the server's learning rate is {options.server_rate:g}, not 1")
        for name, plain in (
            ("dropout_rate", 0),
            ("straggler_rate", 0),
            ("aggregation", "mean"),
            ("quantize_bits", None),
            ("secure_aggregation", False),
            ("dp_noise_multiplier", None),
        ):
            value = getattr(options, name)
            if value != plain:
                causes.append(f"{name}={value} changes the average")
        if options.batch_norm == "average":
            causes.append("BatchNormalization takes the statistics of each client's own batches")
        if options.batch_norm == "group_norm":
            causes.append("batch_norm='group_norm' has replaced BatchNormalization")
        return tuple(causes)

    def build(self, model_fn: ModelOrFn) -> Any:
        """See ``Strategy.build``.

        Raises:
            ModelError: BatchNormalization without ``batch_norm``, an optimizer that TFF does not
                have, a schedule of the learning rate, or steps of the model's own.
        """
        self._entered(self._engine)
        from tfdist.strategies.federated import batch_norm
        from tfdist.strategies.federated.fit import FederatedFit, Rounds
        from tfdist.strategies.federated.model import check_model
        from tfdist.strategies.federated.server import Server
        from tfdist.training.engine.binding import Binding

        model = made_here(model_fn)
        statistics: tuple[tf.Variable, ...] = ()
        if self._options.batch_norm == "refuse":
            batch_norm.check(model)
        elif self._options.batch_norm == "group_norm":
            model = batch_norm.with_group_norm(model)
        else:
            statistics = batch_norm.moving_statistics(model)
            if statistics and self._options.is_private:
                raise ModelError(
                    "moving statistics must not be averaged in a private fit, since no noise is "
                    "added to them",
                    received="batch_norm='average' with dp_noise_multiplier",
                    mend="Give batch_norm='group_norm'",
                )
        check_model(model, self._options)
        server = Server(self._engine, self._options, model, statistics)
        binding = Binding(model, Rounds())
        engine = FederatedFit(binding, server, self._options, self.dataset).engine()
        return self._assembled(binding, engine=engine, by_hand="no client took part")

    def dataset(
        self,
        source: Any,
        *,
        global_batch_size: int | None = None,
        clients: int | None = None,
        partition: str = "iid",
        **options: Any,
    ) -> TrainingData:
        """Returns clients to train on, or central records to evaluate on.

        Args:
            source: what ``open_clients`` takes or returned, to train on; see ``Strategy.dataset``
                for ``training=False``.
            global_batch_size: records of one step of all clients of a round together.
            clients: how many clients to deal records to that have none; ``clients_per_round`` when
                None.
            partition: how; see ``open_clients``.
            options: the others of ``Strategy.dataset``: ``training=False`` returns the records in
                order, for evaluate, predict and ``validation_data``; ``seed`` is of the partition,
                too; random numbers of ``record_fn`` are others in each round; ``pad_to`` and
                ``bucket_by_length`` are refused, for all records have one length.

        Raises:
            OptionError: an unknown partition, or no number of clients.
            DataError: the source cannot be read.
        """
        if global_batch_size is not None:
            check_count("global_batch_size", global_batch_size)
        asked = self._checked(DataOptions(global_batch_size=global_batch_size or 128, **options))
        from tfdist.records.clients.collection import Clients, open_clients
        from tfdist.strategies.federated.feed import ClientFeed, Sampler

        ours = self._options
        if not asked.training:
            return make_feed(source, asked)
        if asked.record_fn is not None and isinstance(source, Clients):
            raise OptionError(
                "record_fn must be given where clients are opened",
                received="record_fn beside clients that are open",
                mend="Give it to open_clients",
            )
        if not isinstance(source, Clients):
            opened = functools.partial(
                open_clients,
                source,
                partition=partition,
                seed=asked.seed,
                map_fn=asked.map_fn,
                record_fn=asked.record_fn,
                batched=asked.batched,
            )
            try:
                source = opened(clients=clients)
            except OptionError:
                is_named = str(partition).startswith("by:")  # Which takes no number.
                if clients is not None or ours.clients_per_round is None or is_named:
                    raise
                source = opened(clients=ours.clients_per_round)
        sampler = Sampler(
            clients_per_round=ours.clients_per_round,
            is_poisson=ours.is_private,
            dropout_rate=ours.dropout_rate,
            straggler_rate=ours.straggler_rate,
            seed=ours.sampling_seed,
        )
        expected = sampler.expected(len(source.ids))
        batch_size = ours.local_batch_size
        if batch_size is None and ours.algorithm != "fedsgd":
            batch_size = max(1, (global_batch_size or 16 * expected) // expected)
        return ClientFeed(
            clients=source,
            sampler=sampler,
            local_batch_size=batch_size,
            local_epochs=ours.local_epochs,
            num_replicas=expected,
            seed=asked.seed,
        )

    def personalize(
        self,
        model: Any,
        clients: Any,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        held_out_share: float = 0.5,
        num_clients: int | None = None,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Returns what each client gains when it fine-tunes the global model on its own records.

        A client's records are divided at random. The model is judged on the held-out part, before
        and after training on the other part with a fresh optimizer like the compiled one; then it
        gets its weights back. A client that took part in the fit has trained on its held-out
        records too: for figures on new data give clients that the fit has not seen.

        Args:
            model: what ``build`` returned.
            clients: what ``dataset`` or ``open_clients`` returned, or data that has clients.
            epochs: over the client's part to fine-tune on.
            batch_size: ``local_batch_size``, or 16, when None.
            learning_rate: ``client_learning_rate``, or the compiled one, when None.
            held_out_share: of a client's records, between 0 and 1.
            num_clients: judge so many clients, drawn by ``seed``; None for all.
            progress: called with (clients done, clients in all).

        Returns:
            ``Personalization``: loss and metrics of each client before and after. A client with bad
            data, or with a single record, is left out and named in ``failed``.

        Raises:
            OptionError: an option out of range.
            ModelError: a metric has several results, as one for each class.
            DataError: no client at all could fine-tune the model.
        """
        from tfdist.records.clients.collection import Clients, open_clients
        from tfdist.strategies.federated.feed import ClientFeed
        from tfdist.strategies.federated.personalize import personalize

        if isinstance(clients, ClientFeed):
            clients = clients.clients
        elif not isinstance(clients, Clients):
            clients = open_clients(clients)
        return personalize(
            model,
            clients,
            epochs=epochs,
            batch_size=self._options.local_batch_size or 16 if batch_size is None else batch_size,
            learning_rate=self._options.client_learning_rate
            if learning_rate is None
            else learning_rate,
            held_out_share=held_out_share,
            num_clients=num_clients,
            seed=seed,
            progress=progress,
        )
