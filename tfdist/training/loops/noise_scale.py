"""``tfdist.NoiseScale``: which global batch still pays, measured beside a training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError, ModelError, OptionError
from tfdist.keras.optimizers import inner_of
from tfdist.keras.rates import more_than_one_rate
from tfdist.keras.steps import steps_per_execution
from tfdist.training.checkpoints.callback_state import GrowingBatch
from tfdist.training.engine.binding import Binding, binding_of
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.engine.options import check_count
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_feed import GivenFeed
from tfdist.training.steps.custom_steps import own_steps
from tfdist.training.steps.gradient_noise import GradientNoise

_SGD = (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD)


class NoiseScale(GrowingBatch):
    """Measures the gradient noise scale: the global batch above which more rows gain little.

    Each epoch's logs get ``noise_scale``, in rows: the variance of the gradient of one row over the
    square of the true gradient (McCandlish et al. 2018, arXiv:1812.06162). A step on so many rows
    gains half of what the best possible step would; on a tenth of them, a tenth: so a batch well
    below it can be made larger, with a larger learning rate, and one well above it wastes rows. It
    is told by the gradients of the parts that a batch is divided into anyway: replicas, and
    microbatches of ``accumulate_steps``. What the training computes does not change. Where the
    gradients of an epoch are noise alone it is infinite.

    .. code-block:: python

        with tfdist.strategy("horovod") as strategy:
            model = strategy.build(model_fn)
            model.fit(data, callbacks=[tfdist.NoiseScale()])  # history: noise_scale

    With ``apply=True`` it also chooses the global batch of each epoch, at the end of the one
    before: the noise scale that was measured, but no more than twice the batch before, no less than
    half of it or than that of the data, at most ``max_batch``, and a multiple of the replicas. Each
    epoch is then one device's at that batch, and checkpoints remember it. The rate that the model
    has for the first batch B0 is multiplied for a batch B by

    - SGD, with momentum or without: AdaScale's gain (Johnson et al. 2020, arXiv:2007.05105), once
      for an epoch: ``(S / B0 + g) / (S / B + g)``, where S is the variance of the gradient of one
      row and g the square of the true gradient: from 1, without noise, to B / B0, of noise alone;
    - all others: ``sqrt(B / B0)`` (Malladi et al. 2022, arXiv:2205.10287, for Adam and RMSProp).

    The logs get ``global_batch_size``, that of the epoch which has ended. A fit that is resumed
    within an epoch measures the rest of it. One that is resumed at an epoch's end may have a lower
    ``max_batch``, or other replicas: batch and rate are lowered to what they allow. A batch that
    has grown is not gone on with without ``apply=True``. A newly built or compiled model begins
    with the first batch. So does a later fit without this callback, or with another one, and at the
    rate of that batch, unless the rate was set after the fit before. An epoch in which no step
    could measure leaves batch and rate.

    Args:
        apply: whether to change the global batch and the learning rate.
        max_batch: with ``apply``: rows of the largest global batch.

    Raises:
        OptionError: one of ``apply`` and ``max_batch`` without the other; in the fit, when
            something else sets the rate, or the epoch that is gone on with has a batch above
            ``max_batch``.
        ModelError: when the fit begins, of a batch that is not divided, on a strategy that does not
            take data-parallel steps, of a train_step of one's own, in ``strategy.run``, or with
            ``shard``; with ``apply`` of a learning rate that is not one fixed number.
        DataError: with ``apply``, of batches that were given as they are.
    """

    def __init__(self, *, apply: bool = False, max_batch: int | None = None) -> None:
        super().__init__()
        if apply != (max_batch is not None):
            raise OptionError(
                "apply=True of tfdist.NoiseScale must have a max_batch, which nothing else has",
                received=f"apply={apply}, max_batch={max_batch}",
                mend="Write NoiseScale(apply=True, max_batch=1024), or leave both out",
            )
        if max_batch is not None:
            check_count("max_batch", max_batch)
        self.grows = apply
        self._most = max_batch
        self._noise: GradientNoise | None = None
        self._optimizer: Any = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        binding = binding_of(model, "tfdist.NoiseScale")
        _check(binding)
        if self.grows:
            _check_rate(binding)
        if self._optimizer is not model.optimizer:  # Its rate is of no batch of an earlier fit.
            self._optimizer = model.optimizer
            self.forget()
            with model.distribute_strategy.scope():
                self._noise = GradientNoise(binding.collective)
        self._collective = binding.collective
        binding.noise = self._noise  # Until the fit has ended, see ``Runs.fit``.
        model.train_function = None  # One that was traced before does not measure.

    def gain_with(self, optimizer: Any) -> float:
        """Returns what the rate of ``optimizer`` is multiplied by in a fit that goes on now."""
        return self.gain if optimizer is self._optimizer and self.gain is not None else 1.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        assert self._noise is not None
        self._noise.sums.assign(tf.zeros_like(self._noise.sums))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        assert self._noise is not None
        variance, signal, steps = (float(each) for each in self._noise.sums.read_value())
        if logs is not None:
            is_signal = steps > 0 and signal > 0
            logs["noise_scale"] = max(0.0, variance) / signal if is_signal else float("inf")
        if self.grows:
            if logs is not None:
                logs["global_batch_size"] = self.batch
            self._choose(max(0.0, variance), max(0.0, signal), is_measured=steps > 0)

    def begin(self, batch: int, num_records: int, *, within_epoch: bool) -> None:
        """Makes ready for a fit on data of so many records, given with a global batch.

        Args:
            within_epoch: whether the fit goes on with an epoch that has begun.

        Raises:
            OptionError: a fit with another one is gone on with, or an epoch of a batch above
                ``max_batch``.
        """
        if self.first_batch not in (None, batch):
            raise OptionError(
                "a fit of NoiseScale(apply=True) must go on with its first global_batch_size",
                received=f"{batch}, where it was {self.first_batch}",
                mend=f"Give global_batch_size={self.first_batch}: the batch that it had come to is "
                "remembered",
            )
        if batch > self._most:
            raise OptionError(
                "max_batch of NoiseScale must be at least global_batch_size",
                received=f"max_batch={self._most} and global_batch_size={batch}",
                mend=f"Give max_batch={batch} or more",
            )
        self._num_records = num_records
        if self.first_batch is None:
            self.first_batch, self.batch, self.gain = batch, batch, 1.0
        elif not within_epoch:  # An earlier fit may have had more memory, or other replicas.
            batch = within(self.batch, self.first_batch, *self._limits())
            if batch != self.batch:
                # AdaScale's gain tells S and g, but for a factor of both.
                signal = max(0.0, 1 / self.first_batch - self.gain / self.batch)
                self._take(batch, self._gain(self.gain - 1, signal, batch))
        elif self.batch > self._most:
            raise OptionError(
                "max_batch of NoiseScale must be at least the batch of the epoch that is gone on "
                "with",
                received=f"max_batch={self._most}, where the epoch has {self.batch}",
                mend=f"Give max_batch={self.batch}, or resume from a checkpoint at an epoch's end",
            )

    def _choose(self, variance: float, signal: float, *, is_measured: bool) -> None:
        """Sets batch and learning rate of the coming epoch, alike on all processes."""
        batch, gain = self.batch, self.gain
        if is_measured:
            batch = next_batch(variance, signal, batch, self.first_batch, *self._limits())
            gain = self._gain(variance, signal, batch)
        self._take(*self._collective.gather((batch, gain))[0])

    def _limits(self) -> tuple[int, int]:
        """Returns the largest batch, and what each is a multiple of."""
        return min(self._most, self._num_records), self._collective.num_replicas

    def _gain(self, variance: float, signal: float, batch: int) -> float:
        """Returns what the learning rate of the first batch is multiplied by for ``batch``."""
        if isinstance(inner_of(self.model.optimizer), _SGD):
            return adascale_gain(variance, signal, self.first_batch, batch)
        return math.sqrt(batch / self.first_batch)

    def _take(self, batch: int, gain: float) -> None:
        # What other callbacks have made of the rate stays in it.
        _multiply_rate(self.model.optimizer, gain / self.gain)
        self.batch, self.gain = batch, gain


@contextlib.contextmanager
def at_rate_of_its_batch(binding: Binding, callbacks: Sequence[Any]) -> Iterator[None]:
    """Encloses a fit: takes the gain of an earlier one's batch from the rate, and notes its own."""
    optimizer = getattr(binding.model, "optimizer", None)
    growing = next((c for c in callbacks if isinstance(c, NoiseScale) and c.grows), None)

    def gain_now() -> float:
        return 1.0 if growing is None else growing.gain_with(optimizer)

    grown, had, rate = binding.grown or (optimizer, 1.0, None)
    is_as_left = grown is optimizer and (rate is None or rate == _rate_of(optimizer))
    # A rate that was set since is what this fit is to have.
    if is_as_left and gain_now() != had:
        _multiply_rate(optimizer, gain_now() / had)
    binding.grown = None
    try:
        yield
    finally:
        if gain_now() != 1:
            binding.grown = (optimizer, gain_now(), _rate_of(optimizer))


def _rate_of(optimizer: Any) -> float:
    return float(tf.convert_to_tensor(inner_of(optimizer).learning_rate))


def _multiply_rate(optimizer: Any, factor: float) -> None:
    inner_of(optimizer).learning_rate = _rate_of(optimizer) * factor


def next_batch(
    variance: float, signal: float, batch: int, first: int, most: int, replicas: int
) -> int:
    """Returns the rows of the global batch after one of ``batch`` rows, see ``NoiseScale``."""
    scale = variance / signal if signal > 0 else math.inf
    return within(min(max(scale, batch / 2), 2 * batch), first, most, replicas)


def within(rows: float, first: int, most: int, replicas: int) -> int:
    """Returns the largest global batch of at most ``rows`` that may be, but ``first`` at least."""
    return max(first, int(min(rows, most)) // replicas * replicas)


def adascale_gain(variance: float, signal: float, first: int, batch: int) -> float:
    """Returns what a step on ``batch`` rows gains over one on ``first``, see ``NoiseScale``."""
    if variance == 0:
        return 1.0
    return (variance / first + signal) / (variance / batch + signal)


def check_growing(feed: Feed, callbacks: Sequence[Any], *, is_scaled: bool) -> None:
    """Checks that a global batch may change between epochs.

    Args:
        callbacks: of the fit.
        is_scaled: whether the strategy changes the learning rate.

    Raises:
        DataError: the batches of the data are given as they are.
        OptionError: two would change the learning rate.
    """
    if isinstance(feed, GivenFeed) or feed.records.is_sequential:
        raise DataError(
            "NoiseScale(apply=True) must have data that can be divided into other batches",
            received="batches that are given as they are, or a pipeline of tf.data",
            mend="Give arrays, or strategy.dataset of shards or arrays; or leave apply out",
        )
    schedulers = [c for c in callbacks if isinstance(c, tf.keras.callbacks.LearningRateScheduler)]
    if is_scaled or schedulers:
        raise OptionError(
            "one of lr_scaling, warmup_epochs, the callback LearningRateScheduler and "
            "NoiseScale(apply=True) must change the rate",
            received="more than one",
            mend="Leave the others out",
        )


def _check_rate(binding: Binding) -> None:
    """Raises ModelError where batch and learning rate cannot change between epochs."""
    model = binding.model
    received = more_than_one_rate(model)
    if received is None and steps_per_execution(model) > 1:
        received = f"steps_per_execution={steps_per_execution(model)}"
    elif received is None and isinstance(binding.collective, ElasticCollective):
        received = "an elastic job"
    if received is not None:
        raise ModelError(
            "NoiseScale(apply=True) must have one optimizer with a fixed learning rate, one step "
            "an execution and processes that stay",
            received=received,
            mend="Compile the model so, or leave apply out",
        )


def _check(binding: Binding) -> None:
    """Raises ModelError where the steps of a model tell no gradients of parts."""
    model, options = binding.model, binding.options
    shares = binding.collective.shares_batches and not binding.engine.takes_shares
    received = None
    if binding.sharded is not None:
        received = f"{options.dividing_option}, where no replica has the whole gradient"
    elif binding.takes_body:
        received = "the body of a loop of one's own, in strategy.run"
    elif "train_step" in own_steps(model):
        received = f"a train_step of its own, of model '{model.name}'"
    elif not shares and options.accumulate_steps == 1:
        received = "a batch that one replica takes whole"
    if received is not None:
        raise ModelError(
            "tfdist.NoiseScale must see the gradients of parts of a batch",
            received=received,
            mend="Train on several replicas of mirrored, horovod or multi_worker, or give "
            "accumulate_steps=2, with a model that Keras' own step trains",
        )
