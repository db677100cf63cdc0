"""The compiled Keras optimizer as one of ``tff.learning.optimizers``, and the servers' optimizers.

TFF takes none of Keras' own. What has the same update is mapped; anything else is refused, such as
RMSprop, which adds epsilon within the root in Keras and outside of it in TFF.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compat import import_tensorflow_federated
from tfdist.errors import ModelError
from tfdist.keras.optimizer_copies import leaves_out_of_decay
from tfdist.keras.optimizers import WAITS
from tfdist.keras.rates import given_learning_rate, is_fixed

tff = import_tensorflow_federated()

_SUPPORTED = "SGD, Adam, AdamW or Adagrad"
# Attribute of a Keras optimizer -> the value that TFF's optimizers have without saying so.
_PLAIN = {
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "amsgrad": False,
    "nesterov": False,
    "decay": 0.0,
    WAITS: None,
}


def learning_rate_of(optimizer: Any) -> float:
    """Returns the learning rate of a compiled Keras optimizer.

    Raises:
        ModelError: it is a schedule.
    """
    rate = given_learning_rate(optimizer)
    if not is_fixed(optimizer):
        raise ModelError(
            "a client's learning rate must be a number, since its optimizer starts anew in each "
            "round and no schedule can go on",
            received=f"the schedule {type(rate).__name__}"
            if callable(rate)
            else type(optimizer).__name__,
            mend="Give a number, and the callback keras.callbacks.LearningRateScheduler, which "
            "sets the clients' learning rate for each round",
        )
    return float(tf.convert_to_tensor(rate))


def client_optimizer(optimizer: Any, learning_rate: float) -> Any:
    """Returns the ``tff.learning.optimizers`` optimizer that updates as the Keras one does.

    Raises:
        ModelError: TFF has none that does.
    """
    config = optimizer.get_config()
    kind = type(optimizer).__name__
    for option, plain in _PLAIN.items():
        if config.get(option, plain) not in (plain, None):
            raise ModelError(
                f"an optimizer of the clients must do without {option}, which none of TFF has",
                received=f"{kind}({option}={config[option]})",
                mend="Leave it out, or use algorithm='fedsgd', which takes any optimizer",
            )
    decay = config.get("weight_decay")
    if decay and kind != "AdamW":
        raise ModelError(
            "an optimizer of the clients must be AdamW to have weight_decay",
            received=f"{kind}(weight_decay={decay})",
            mend="Use AdamW, or a kernel_regularizer",
        )
    build = tff.learning.optimizers
    rate = learning_rate
    old = tf.keras.optimizers.legacy
    if type(optimizer) not in (getattr(tf.keras.optimizers, kind, None), getattr(old, kind, None)):
        kind = f"{type(optimizer).__module__}.{kind}"  # Which has the name of one alone.
    elif type(optimizer) is old.Adagrad:
        kind = "legacy.Adagrad"  # It adds epsilon outside of the root.
    if kind == "SGD":
        return build.build_sgdm(rate, momentum=config["momentum"] or None)
    if kind in ("Adam", "AdamW"):
        betas = (config["beta_1"], config["beta_2"], config["epsilon"])
        if kind == "Adam":
            return build.build_adam(rate, *betas)
        if leaves_out_of_decay(optimizer):
            raise ModelError(
                "AdamW of the clients must decay all weights, as TFF's does",
                received="AdamW.exclude_from_weight_decay",
                mend="Leave the exclusion out",
            )
        return build.build_adamw(rate, *betas, decay)
    if kind == "Adagrad":
        return build.build_adagrad(rate, config["initial_accumulator_value"], config["epsilon"])
    raise ModelError(
        f"the clients of strategy 'federated' must train with one of TFF's optimizers "
        f"({_SUPPORTED})",
        received=kind,
        mend=f"Compile the model with {_SUPPORTED}, or use algorithm='fedsgd', which takes any "
        "optimizer",
    )


class Proximal(tff.learning.optimizers.Optimizer):
    """A client's optimizer that also pulls towards the weights it began the round with.

    FedProx, Li et al. 2020, arXiv:1812.06127. ``build_weighted_fed_prox`` of TFF 0.87 adds
    ``strength * (initial - current)`` to the gradient, which pushes away from them: its sign is
    wrong (``proximal_client_work.py``).

    Args:
        optimizer: of ``tff.learning.optimizers``.
        strength: of the pull, the paper's mu.
    """

    def __init__(self, optimizer: Any, strength: float):
        self._optimizer = optimizer
        self._strength = strength

    def initialize(self, specs: Any) -> Any:
        zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)
        return True, zeros, self._optimizer.initialize(specs)

    def next(self, state: Any, weights: Any, gradients: Any) -> Any:
        is_first, initial, inner = state
        initial = tf.nest.map_structure(
            lambda kept, now: tf.where(is_first, now, kept), initial, weights
        )
        gradients = tff.learning.optimizers.handle_indexed_slices_gradients(gradients)
        pulled = tf.nest.map_structure(
            lambda gradient, now, begun: (
                None if gradient is None else gradient + self._strength * (now - begun)
            ),
            gradients,
            weights,
            initial,
        )
        inner, updated = self._optimizer.next(inner, weights, pulled)
        return (False, initial, inner), updated

    def get_hparams(self, state: Any) -> Any:
        return self._optimizer.get_hparams(state[2])

    def set_hparams(self, state: Any, hparams: Any) -> Any:
        is_first, initial, inner = state
        return is_first, initial, self._optimizer.set_hparams(inner, hparams)


class Unchanged(tff.learning.optimizers.Optimizer):
    """Gives the aggregated update itself as the new weights: the host applies it with Keras."""

    def initialize(self, specs: Any) -> Any:
        return ()

    def next(self, state: Any, weights: Any, gradients: Any) -> Any:
        return state, tf.nest.map_structure(tf.identity, gradients)


def server_optimizer(algorithm: str, learning_rate: float) -> Any:
    """Returns the optimizer that applies the average of the clients' updates.

    Reddi et al. 2021, arXiv:2003.00295, Algorithm 2, for fedadagrad, fedadam and fedyogi; Hsu et
    al. 2019, arXiv:1909.06335, for fedavgm.
    """
    build = tff.learning.optimizers
    # The adaptivity (tau) of 1e-3 is that paper's advice.
    return {
        "fedavg": lambda: build.build_sgdm(learning_rate),
        "fedprox": lambda: build.build_sgdm(learning_rate),
        "fedavgm": lambda: build.build_sgdm(learning_rate, momentum=0.9),
        "fedadagrad": lambda: build.build_adagrad(learning_rate, 0.0, 1e-6),
        "fedadam": lambda: build.build_adam(learning_rate, 0.9, 0.99, 1e-3),
        "fedyogi": lambda: build.build_yogi(learning_rate, 0.9, 0.99, 1e-3),
        "fedsgd": Unchanged,
    }[algorithm]()
