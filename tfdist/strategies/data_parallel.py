"""What the data-parallel strategies share: each replica holds the whole model and sees a share of
every global batch."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.errors import LaunchError, OptionError, first_line
from tfdist.strategies import rank_speeds
from tfdist.strategies.base import (
    DataOptions,
    ModelOrFn,
    Strategy,
    called,
    check_folder,
    save_atomically,
)
from tfdist.training.engine.options import StepOptions, picked

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.training.engine.collective import Collective
    from tfdist.training.feed.feed import Feed
    from tfdist.training.model.scaling import Scaling


class DataParallel(Strategy):
    """Trains the same model on every replica; an engine gives the ``Collective`` between them.

    Args:
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) the replicas.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
        precision: "float32", "mixed_bfloat16" or "mixed_float16": what the layers that model_fn
            makes compute in. Weights stay float32; with mixed_float16 the loss is scaled, and a
            gradient that is not finite on one replica skips the update on all. None leaves Keras'
            own policy.
        accumulate_steps: microbatches that each replica divides its share of a global batch into,
            one after the other, for one update: less memory, the same result.
        recompute: "blocks" computes activations once more on the way back instead of keeping them,
            block by block; names of layers or nested models do so with these; "none".
        sync_batch_norm: False lets BatchNormalization take its statistics on each replica, which
            is not exact.
        shard: "optimizer" divides the optimizer's slots among the replicas: each keeps those of its
            part of the weights, and updates that part. "weights", on horovod and multi_worker: it
            keeps its part of the weights of blocks alone, too; a block gathers its own where it
            runs, and once more on the way back, where its activations are computed again.
            ``recompute`` may name blocks. "none": each keeps all.
        offload: "optimizer" keeps those slots, and makes the updates, on the host's CPU beside
            GPUs (single and horovod, without shard="weights"); "activations" moves what the way
            back needs of the way forward to the host's memory meanwhile; a list of both; "none".
        offload_dir: a folder where activations go instead of the host's memory.
        device_speeds: ranks of unlike speed, on horovod and multi_worker: a number for each rank,
            or "measure", has each take rows of a global batch by its speed when it trains. The
            result is the same. Each rank then reads whole global batches, and keeps its rows.
    """

    #: Whether ranks can divide a batch by their speeds.
    divides_by_speed: ClassVar[bool] = False
    #: Whether replicas can divide weights.
    divides_weights = False

    def __init__(
        self,
        lr_scaling: str | None = None,
        warmup_epochs: float = 0,
        *,
        precision: str | None = None,
        accumulate_steps: int = 1,
        recompute: str | Sequence[str] | None = "none",
        sync_batch_norm: bool = True,
        shard: str = "none",
        offload: str | Sequence[str] = "none",
        offload_dir: str | os.PathLike | None = None,
        device_speeds: str | Sequence[float] | None = None,
    ):
        self._take_scaling(lr_scaling, warmup_epochs)
        self._step = StepOptions(**picked(StepOptions, locals()))
        if self._step.offloads_slots and not self.slots_can_be_offloaded:
            raise OptionError(
                "offload='optimizer' must have one replica in a process, as single and horovod "
                "have, since TensorFlow makes slots on each of several devices",
                received=f"strategy '{self.name}'",
                mend="Choose strategy horovod, or leave offload='optimizer' out",
            )
        if self._step.shards_weights and not self.divides_weights:
            raise OptionError(
                "shard='weights' must be on strategy 'horovod' or 'multi_worker', where each "
                "replica has a process of its own",
                received=f"strategy '{self.name}'",
                mend="Use one of these, or shard='optimizer', which divides slots",
            )
        self.precision = precision
        rank_speeds.check(device_speeds)
        if device_speeds is not None and not self.divides_by_speed:
            raise OptionError(
                "device_speeds must be on strategy 'horovod' or 'multi_worker', whose ranks each "
                "have a device",
                received=f"strategy '{self.name}'",
                mend="Use one of these, or leave device_speeds out",
            )
        self._device_speeds = device_speeds
        self._speeds: tuple[float, ...] | None = None

    def _find_speeds(self) -> None:
        """Finds the speeds of ranks that have just been connected; all of them call it."""
        if self._device_speeds is not None:
            self._speeds = rank_speeds.found(self._device_speeds, self.connect())

    #: Whether ``offload="optimizer"`` is for it.
    slots_can_be_offloaded: ClassVar[bool] = False

    @abc.abstractmethod
    def connect(self) -> Collective:
        """Returns the replicas, for one model; can be called from ``start`` on."""

    def make_model(self, model_fn: ModelOrFn) -> tf.keras.Model:
        """Returns the user's own model, made where the engine needs it."""
        return called(model_fn, may_be_unbuilt=True)

    @property
    def approximations(self) -> tuple[str, ...]:
        return self._step.approximations

    @property
    def num_replicas(self) -> int:
        return self.connect().num_replicas

    @property
    def scaling(self) -> Scaling:
        return self._scaling(self.connect().planned_replicas)

    def build(self, model_fn: ModelOrFn) -> tf.keras.Model:
        from tfdist.keras.layers import is_built
        from tfdist.training.model.deferred_build import build_with_first_data
        from tfdist.training.model.made_in_scope import explained
        from tfdist.training.model.precision import policy

        with policy(self.precision), explained(self.name):
            model = self.make_model(model_fn)
        if is_built(model):
            return self._with_steps(model)

        def build(make_weights: Callable[[], None]) -> None:
            with policy(self.precision), explained(self.name), model.distribute_strategy.scope():
                make_weights()
            self._with_steps(model)

        return build_with_first_data(model, build)

    def _with_steps(self, model: tf.keras.Model) -> tf.keras.Model:
        from tfdist.training.engine.binding import Binding
        from tfdist.training.model.precision import check_follows

        check_follows(model, self.precision)
        return self._assembled(Binding(model, self.connect()), options=self._step)

    def _share(self) -> dict[str, Any]:
        replicas = self.connect()
        return {
            "parts": replicas.num_processes,
            "part": replicas.process,
            "splits": replicas.num_replicas // replicas.num_processes,
            "speeds": replicas.speeds,
            "gather": replicas.gather,
        }

    def _feed(self, source: Any, options: DataOptions) -> Feed:
        of_each = self._step.accumulate_steps
        microbatches = self.num_replicas * of_each
        size = options.global_batch_size
        is_size = isinstance(size, int) and size > 0
        if options.training and of_each > 1 and is_size and size < microbatches:
            raise OptionError(
                "a global batch must have a row for each microbatch of each replica",
                received=f"global_batch_size={size}, {self.num_replicas} "
                f"replicas with accumulate_steps={of_each}",
                mend=f"Choose a global batch size of {microbatches} or more, since it is what one "
                "update sees",
            )
        return super()._feed(source, options)

    def from_chief(self, value: Any) -> Any:
        # Gathered, not broadcast: a chief that broadcasts returns before the others have come.
        return self.connect().gather(value)[0]

    def save(self, model: tf.keras.Model, path: str | os.PathLike) -> None:
        from tfdist.training.engine.binding import whole_slots
        from tfdist.training.model.manual_updates import warn_of_other_weights

        self._on_chief(lambda: check_folder(path))  # Before any rank reads the model for it.
        warn_of_other_weights(model, self.connect())
        with whole_slots(model):
            self._save(model, path)

    def _save(self, model: tf.keras.Model, path: str | os.PathLike) -> None:
        if self.connect().reads_together and not self.connect().is_chief:
            model.save(path)  # Which keeps no file on this rank.
        self._on_chief(lambda: save_atomically(model, path))

    def _on_chief(self, write: Callable[[], None]) -> None:
        """Runs ``write`` on the chief; raises on every rank where it fails.

        No rank returns before the file is there, and none waits for a file that does not come.
        """
        problem = None
        if self.connect().is_chief:
            try:
                write()
            except Exception as error:
                problem = error
        reason = self.from_chief(None if problem is None else first_line(problem))
        if problem is not None:
            raise problem
        if reason is not None:
            raise LaunchError(
                "rank 0 must save the model", received=reason, mend="See the error of rank 0"
            )
