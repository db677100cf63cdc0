"""``tfdist.NoiseScale``: which global batch still pays, measured beside a training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training.engine.binding import Binding, binding_of
from tfdist.training.steps.custom_steps import own_steps
from tfdist.training.steps.gradient_noise import GradientNoise


class NoiseScale(tf.keras.callbacks.Callback):
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

    Raises:
        ModelError: when the fit begins, of a batch that is not divided, on a strategy that does not
            take data-parallel steps, of a train_step of one's own, or with ``shard``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noise: GradientNoise | None = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        binding = binding_of(model, "tfdist.NoiseScale")
        _check(binding)
        if self._noise is None:
            with model.distribute_strategy.scope():
                self._noise = GradientNoise(binding.collective)
        binding.noise = self._noise  # Until the fit has ended, see ``Runs.fit``.
        model.train_function = None  # One that was traced before does not measure.

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        assert self._noise is not None
        self._noise.sums.assign(tf.zeros_like(self._noise.sums))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        assert self._noise is not None
        variance, signal, steps = (float(each) for each in self._noise.sums.read_value())
        if logs is not None:
            is_signal = steps > 0 and signal > 0
            logs["noise_scale"] = max(0.0, variance) / signal if is_signal else float("inf")


def _check(binding: Binding) -> None:
    """Raises ModelError where the steps of a model tell no gradients of parts."""
    model, options = binding.model, binding.options
    shares = binding.collective.shares_batches and not binding.engine.takes_shares
    received = None
    if binding.sharded is not None:
        received = f"{options.dividing_option}, where no replica has the whole gradient"
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
