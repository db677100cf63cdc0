"""Strategy ``pipeline``: the layers of a model on several devices, microbatches through them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.errors import OptionError
from tfdist.strategies.base import DataOptions, ModelOrFn, made_here
from tfdist.strategies.mirrored import choose_devices, make_logical_cpus
from tfdist.strategies.model_parallel import ModelParallel
from tfdist.strategies.pipeline.options import Options
from tfdist.training.engine.options import OfBatchNorm, StepOptions, picked

if TYPE_CHECKING:
    from tfdist.strategies.pipeline.describe import Description
    from tfdist.training.feed.feed import Feed

# Keras' own.
_ASSUMED_GLOBAL_BATCH_SIZE = 32


class Pipeline(ModelParallel):
    """The model in stages, one on each device; a global batch goes through in microbatches.

    Args:
        stages: devices: GPUs where there are any, logical CPUs otherwise.
        microbatches: parts of a global batch, or of a rank's share of it; they divide it.
        schedule: "gpipe", "1f1b" (fewer activations at a time) or "interleaved" (a smaller bubble).
        chunks_per_stage: for "interleaved": parts of the model on each device; 2 when None.
        cut_after: names of the last layers of all parts but the last; None balances them.
        optimize: what the automatic cuts balance: "speed" (time) or "memory" (bytes).
        balance: "estimated" takes the time of a layer from its operations, and its memory from its
            outputs. "measured" runs each layer on a microbatch when the model is built, of the
            rows of the dataset that was made before, or of a batch of 32: a second or more.
        recompute: "blocks" computes the activations of each part of the model once more on the way
            back instead of keeping them, Dropout and noise drawing the same numbers again; "none"
            keeps them.
        batch_norm: "synchronized" takes the statistics of the whole batch, which is exact, but
            the layers between two BatchNormalizations of a stage then take batches whole;
            "per_microbatch" divides them there too, and differs from one device.
        freeze_until: a layer, or a nested model; it and all before it are not trained, and never
            go backward.
        frozen_cache: "memory" or "disk" keeps the outputs of frozen layers for each record, so
            that they run once and not in each epoch. Frozen layers that draw random numbers, and
            datasets with a map_fn or a record_fn, are refused.
        frozen_cache_dir: the folder for "disk". What another model or other data has left there
            is never used.
        replicas: "horovod" or "multi_worker": each rank of such a job holds a pipeline on devices
            of its own, and the ranks share global batches; None: one pipeline, in one process.
        shard: "optimizer": of the ranks of ``replicas``, each keeps the optimizer's slots of its
            part of a stage's weights alone, and updates that part; "none": each keeps all.
        precision: "float32", "mixed_bfloat16" or "mixed_float16": what the layers that model_fn
            makes compute in; None leaves Keras' own policy.
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) the ranks.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
    """

    name = "pipeline"
    takes_lengths = False

    def __init__(
        self,
        *,
        stages: int = 2,
        microbatches: int = 4,
        schedule: str = "gpipe",
        chunks_per_stage: int | None = None,
        cut_after: Sequence[str] | str | None = None,
        optimize: str = "speed",
        balance: str = "estimated",
        recompute: str | None = "none",
        batch_norm: str = "synchronized",
        freeze_until: str | None = None,
        frozen_cache: str | None = None,
        frozen_cache_dir: str | os.PathLike | None = None,
        replicas: str | None = None,
        shard: str = "none",
        precision: str | None = None,
        lr_scaling: str | None = None,
        warmup_epochs: float = 0,
    ):
        super().__init__(lr_scaling, warmup_epochs, replicas=replicas, precision=precision)
        self._options = Options(**picked(Options, locals()))
        self._devices: list[str] = []
        self._global_batch_size = _ASSUMED_GLOBAL_BATCH_SIZE

    def start(self) -> None:
        import tensorflow as tf

        stages = self._options.stages
        self._start_ranks(stages)
        gpus = [f"GPU:{i}" for i, _ in enumerate(tf.config.get_visible_devices("GPU"))]
        self._devices = choose_devices(gpus, stages, option="stages")
        if not gpus:
            _let_all_stages_run(stages)
            make_logical_cpus(stages)
        self._join_ranks(tuple(self._devices))

    def close(self) -> None:
        self._devices = []

    @property
    def approximations(self) -> tuple[str, ...]:
        causes = []
        if self._options.batch_norm == "per_microbatch":
            causes.append(
                OfBatchNorm(
                    "batch_norm='per_microbatch' takes the statistics of BatchNormalization from "
                    "each microbatch"
                )
            )
        if self._options.freeze_until is not None:
            causes.append(
                f"freeze_until='{self._options.freeze_until}' does not train the layers before it, "
                "unless the model has frozen them itself"
            )
        return tuple(causes)

    def build(self, model_fn: ModelOrFn) -> Any:
        import tensorflow as tf

        from tfdist.keras.seeds import draws_by_step
        from tfdist.strategies.pipeline.chunks import place
        from tfdist.strategies.pipeline.frozen import Frozen
        from tfdist.strategies.pipeline.frozen_cache import FrozenCache
        from tfdist.strategies.pipeline.functions import put_on_norms
        from tfdist.strategies.pipeline.measure import measure
        from tfdist.strategies.pipeline.plan import find_named, freeze, make_plan
        from tfdist.strategies.pipeline.refusals import check_compiled
        from tfdist.strategies.pipeline.steps import PipelineSteps
        from tfdist.training.engine.binding import Binding, Engine
        from tfdist.training.layers import randomness
        from tfdist.training.model.layer_calls import graph_of
        from tfdist.training.model.padding_warning import warn_of_padding
        from tfdist.training.model.precision import check_follows, policy
        from tfdist.training.model.refusals import refuse_own_metrics

        self._entered(self._devices or None)

        graph = named = measured = None

        def make_model() -> tf.keras.Model:
            nonlocal graph, named
            with policy(self.precision):
                model = made_here(model_fn)
            check_follows(model, self.precision)
            graph = graph_of(model, needed_by="a pipeline", otherwise="use strategy 'mirrored'")
            named = named or find_named(graph, self._options)
            graph = freeze(model, graph, named)
            return model

        def devices_of(model: tf.keras.Model) -> dict:
            nonlocal measured
            if self._options.balance == "measured":
                rows = max(1, self._global_batch_size // self._microbatches_of_all)
                measured = self.from_chief(measure(graph, rows))  # One plan for all ranks.
            plan = make_plan(model, graph, self._options, named, measured)
            stages = plan.stage_of_variables()
            return {ref: self._devices[stage] for ref, stage in stages.items()}

        model = place(make_model, devices_of)
        plan = make_plan(model, graph, self._options, named, measured)
        if self._options.microbatches > 1:
            warn_of_padding(model, is_chief=self.topology.is_chief)
        ranks = self.connect()
        if ranks.shares_batches:
            refuse_own_metrics(model, self.name)
        binding = Binding(model, ranks)
        put_on_norms(binding)
        randomness.put_on(binding)
        for owner, values in draws_by_step(model):
            binding.put(owner, values)

        def compiled() -> None:
            check_compiled(model)
            model.optimizer.jit_compile = False  # XLA takes variables of one device only.

        compiled()
        cache = None
        if self._options.frozen_cache is not None:
            cache = FrozenCache(Frozen(model, plan, self._devices), self._options.frozen_folder)
        steps = PipelineSteps(binding, plan, self._devices, cache and cache.frozen)
        return self._assembled(
            binding,
            engine=Engine(
                steps=steps,
                around=((("fit",), functools.partial(_prepared, steps=steps, cache=cache)),),
                compiled=compiled,
                takes_shares=True,
                in_microbatches=self._options.microbatches > 1 or steps.recompute,
                knows=plan,
            ),
            options=StepOptions(shard=self._options.shard),
            divides=True,
            # Of ranks it is told that each would train a model of its own.
            by_hand=None if ranks.shares_batches else "the stages took turns, without microbatches",
        )

    def _feed(self, source: Any, options: DataOptions) -> Feed:
        microbatches, ranks = self._microbatches_of_all, self.num_replicas
        size = options.global_batch_size
        if options.training and isinstance(size, int) and size % microbatches:
            below = size // microbatches * microbatches
            of_all = "" if ranks == 1 else f" on each of {ranks} ranks"
            raise OptionError(
                "microbatches must divide global_batch_size",
                received=f"microbatches={self._options.microbatches}{of_all}, "
                f"global_batch_size={size}",
                mend=f"Choose a global batch size of {below or microbatches} or "
                f"{below + microbatches}, or other microbatches",
            )
        feed = super()._feed(source, options)
        if options.training:
            self._global_batch_size = size
        return feed

    def describe(self, model: Any) -> Description:
        """Returns the stages of a built model and its schedule; print it, or ``draw`` it.

        Raises:
            ModelError: this strategy did not build the model.
        """
        from tfdist.strategies.pipeline.describe import Description, optimizer_bytes
        from tfdist.strategies.pipeline.plan import Plan
        from tfdist.training.engine.binding import binding_of, known_of

        plan = known_of(model, Plan, "describe")
        kept = optimizer_bytes(binding_of(model, "describe"))
        # Not ``_devices``, which are given back at the end of the with block.
        rank = self.topology.rank
        devices = next((place.devices for place in self._places if place.rank == rank), ())
        return Description(plan, devices, self._places, kept)

    @property
    def _microbatches_of_all(self) -> int:
        """Microbatches of a global batch, over all ranks."""
        return self._options.microbatches * self.num_replicas


def _prepared(fit: Callable, steps: Any, cache: Any) -> Callable:
    from tfdist.training.feed.feed import Feed

    @functools.wraps(fit)
    def prepared(x: Any = None, *args: Any, **options: Any) -> Any:
        steps.gradient_loss()
        if cache is None:
            return fit(x, *args, **options)
        if not isinstance(x, Feed) or args:
            raise OptionError(
                "a fit with frozen_cache must be given what strategy.dataset returns, and all "
                "other arguments by name",
                received=f"fit({type(x).__name__}{', ...' if args else ''})",
                mend="Write model.fit(strategy.dataset(data, global_batch_size=...), epochs=...)",
            )
        return _fit_on_kept(fit, cache, x, options)

    return prepared


def _fit_on_kept(fit: Callable, cache: Any, feed: Any, options: dict) -> Any:
    from tfdist.training.feed.feed import Feed
    from tfdist.training.loops.fit import listed

    callbacks = listed(options.pop("callbacks", None))
    validation = options.get("validation_data")
    if isinstance(validation, Feed):
        kept = cache.feed(validation, training=False)
        options = options | {"validation_data": kept}
    kept = cache.feed(feed, training=True)
    return fit(kept, callbacks=[*callbacks, cache.guard()], **options)


def _let_all_stages_run(stages: int) -> None:
    """A stage occupies a thread while it computes: fewer threads than stages would take turns."""
    import tensorflow as tf

    threads = tf.config.threading
    if threads.get_inter_op_parallelism_threads() == 0:
        with contextlib.suppress(RuntimeError):  # TensorFlow runs already, with as many as it has.
            threads.set_inter_op_parallelism_threads(max(os.cpu_count() or 1, stages + 1))
