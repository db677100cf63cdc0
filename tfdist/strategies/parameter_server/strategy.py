"""Parameter servers: ``tf.distribute.ParameterServerStrategy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tfdist import topology
from tfdist.compat import uses_keras_3
from tfdist.errors import DataError, OptionError
from tfdist.strategies.base import DataOptions, ModelOrFn, Strategy, called, made_here
from tfdist.topology import Topology
from tfdist.training.engine.options import check_count, check_precision, deadline

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.strategies.parameter_server.cluster import Cluster
    from tfdist.strategies.parameter_server.steps import AsynchronousSteps
    from tfdist.training.feed.feed import Feed


class ParameterServer(Strategy):
    """Weights lie on parameter servers; each worker takes steps of its own and waits for nobody.

    All processes run the same program. It goes on in the chief alone: a worker or parameter server
    stays in ``start`` until the chief's program ends, and then ends with ``SystemExit(0)``.

    A step is one global batch, computed by one worker. The chief reads the records and sends each
    batch to the worker that takes it. ``evaluate`` and ``predict`` run on the chief.

    Args:
        min_shard_bytes: a variable is divided among the parameter servers in shards of at least so
            many bytes; None leaves every variable whole.
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) the workers.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
        precision: "float32" or "mixed_bfloat16": what the layers that model_fn makes compute in.
            Weights stay float32. None leaves Keras' own policy.
        start_timeout_s: seconds that a task waits for the others to come up; None takes those of
            the command that has started it, else 120.
        stall_timeout_s: seconds that a task may be silent, and a step may take, before the job ends
            in an error; None takes those of the command, and more, else 300.
        threads: threads that a task computes with; None divides the cores among a host's tasks.
    """

    name = "parameter_server"
    takes_lengths = False
    _was_entered: ClassVar[bool] = False

    def __init__(
        self,
        *,
        min_shard_bytes: int | None = 256 << 10,
        lr_scaling: str | None = None,
        warmup_epochs: float = 0,
        precision: str | None = None,
        start_timeout_s: float | None = None,
        stall_timeout_s: float | None = None,
        threads: int | None = None,
    ):
        self._take_scaling(lr_scaling, warmup_epochs)
        check_precision(precision)
        if precision == "mixed_float16":
            raise OptionError(
                "a loss on parameter servers must not be scaled, as mixed_float16 needs",
                received="precision='mixed_float16'",
                mend="Choose precision='mixed_bfloat16'",
            )
        self.precision = precision
        for option, value in (("min_shard_bytes", min_shard_bytes), ("threads", threads)):
            if value is not None:
                check_count(option, value)
        self._min_shard_bytes = min_shard_bytes
        self._start_timeout_s = deadline("start_timeout_s", start_timeout_s)
        self._stall_timeout_s = deadline("stall_timeout_s", stall_timeout_s)
        self._threads = threads
        self._cluster: Cluster | None = None
        self._steps: list[AsynchronousSteps] = []

    def start(self) -> None:
        """Connects the tasks. Returns on the chief only.

        Raises:
            SystemExit: on workers and parameter servers, with code 0, when the chief has ended.
            OptionError: TF_CONFIG describes no chief, workers and parameter servers; or this
                process has entered the strategy before.
            LaunchError: a task did not come up, or the chief has died.
        """
        place = topology.current()
        missing = [role for role in topology.ROLES if role not in place.roles]
        if missing:
            raise OptionError(
                "strategy 'parameter_server' must run on a chief, workers and parameter servers",
                received=f"a process without {' and '.join(missing)} in its TF_CONFIG",
                mend="Start it with tfdist launch --strategy parameter_server --workers 2 --ps 1",
            )
        if ParameterServer._was_entered:
            raise OptionError(
                "a program must enter strategy 'parameter_server' once, for its workers and "
                "servers end when the chief leaves it",
                received="another time",
                mend="Do all that needs them within one 'with tfdist.strategy(...)'",
            )
        ParameterServer._was_entered = True
        from tfdist.strategies.parameter_server.cluster import Cluster, serve, take_devices

        config = take_devices(place, self._threads)
        if place.role != "chief":
            serve(place, config, start_timeout_s=self._start_timeout_s)
            raise SystemExit(0)
        self._cluster = Cluster(
            place,
            min_shard_bytes=self._min_shard_bytes,
            start_timeout_s=self._start_timeout_s,
            stall_timeout_s=self._stall_timeout_s,
        )

    def close(self) -> None:
        """Ends the other tasks. What was built stays usable on the chief, but for training."""
        if self._cluster is None:
            return
        try:
            for steps in self._steps:
                steps.finish()
        finally:
            self._cluster.say_goodbye()
            self._cluster, self._steps = None, []

    @property
    def topology(self) -> Topology:
        return topology.current()

    @property
    def num_replicas(self) -> int:
        """Workers. They share the epoch, not a batch."""
        return self._entered(self._cluster).num_workers

    @property
    def approximations(self) -> tuple[str, ...]:
        if self.num_replicas == 1:
            return ()  # Steps follow one another.
        return (
            "workers do not wait for each other: a gradient is applied to weights that others have "
            "changed since they were read",
            "the moving statistics of BatchNormalization are moved by whichever worker comes first",
            "the step of a worker that is lost is taken again, and may count twice",
        )

    def build(self, model_fn: ModelOrFn) -> tf.keras.Model:
        import tensorflow as tf

        from tfdist.strategies.parameter_server.refusals import (
            made_on_servers,
            refuse_model,
            whole_in_mixed_precision,
        )
        from tfdist.strategies.parameter_server.steps import AsynchronousSteps, Servers
        from tfdist.strategies.parameter_server.twin import Twin
        from tfdist.training.engine.binding import Binding
        from tfdist.training.model.lookup_vocabularies import take_adapted
        from tfdist.training.model.precision import check_follows, policy
        from tfdist.training.model.stateful_rnn import refuse_stateful

        cluster = self._entered(self._cluster)
        is_made = isinstance(model_fn, tf.keras.Model)
        with policy(self.precision):
            model = made_here(model_fn)
        check_follows(model, self.precision)
        refuse_model(model)
        refuse_stateful(model, "workers that take steps of their own")
        with (
            cluster.engine.scope(),
            policy(self.precision),
            made_on_servers(model.name),
            whole_in_mixed_precision(),
        ):
            twin = tf.keras.models.clone_model(model) if is_made else called(model_fn)
            if is_made and uses_keras_3():
                take_adapted(twin, model)  # It makes variables for them.
        steps = AsynchronousSteps(
            model,
            Twin(model, twin, cluster.engine, is_compiled=not is_made),
            cluster.coordinator,
            cluster.watch,
            cluster.num_workers,
        )
        self._steps.append(steps)
        binding = Binding(model, Servers(steps))
        steps.heard_by(binding)
        by_hand = "the chief did all the work"
        return self._assembled(binding, engine=steps.engine(), by_hand=by_hand)

    def _feed(self, source: Any, options: DataOptions) -> Feed:
        feed = super()._feed(source, options)
        if feed.held is not None:
            raise DataError(
                "the chief of strategy 'parameter_server' must read all records",
                received="records divided among hosts",
                mend="Give the chief's host the whole data",
            )
        return feed
