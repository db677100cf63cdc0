"""The learning rate of a larger global batch: scaled by the world size, with a warm-up.

Off unless asked. Goyal et al. 2017, arXiv:1706.02677, section 2.2 (linear rule, gradual warm-up);
Krizhevsky 2014, arXiv:1404.5997, section 5 (square root).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
import wrapt

from tfdist.errors import OptionError, unknown_choice
from tfdist.keras.optimizers import steps_of
from tfdist.keras.rates import given_learning_rate, is_fixed, rate_of_last_step
from tfdist.keras.steps import steps_per_execution
from tfdist.keras.tensors import as_numpy

RULES = ("linear", "sqrt")


@dataclass(frozen=True)
class Scaling:
    """A rule, made ready for one job.

    Attributes:
        rule: "linear", "sqrt" or None.
        warmup_epochs: epochs in which the rate climbs from the unscaled to the scaled one.
        num_replicas: what the rate is scaled by.
    """

    rule: str | None
    warmup_epochs: float
    num_replicas: int

    def __post_init__(self) -> None:
        if self.rule is not None and self.rule not in RULES:
            raise unknown_choice("lr_scaling", self.rule, RULES)
        if (
            not isinstance(self.warmup_epochs, (int, float))
            or not 0 <= self.warmup_epochs < math.inf
        ):
            raise OptionError(
                "warmup_epochs must be 0 or more, and finite",
                received=repr(self.warmup_epochs),
                mend="Leave it out, for no warmup",
            )

    @property
    def factor(self) -> float:
        if self.rule is None:
            return 1.0
        return float(self.num_replicas if self.rule == "linear" else math.sqrt(self.num_replicas))

    @property
    def is_off(self) -> bool:
        return self.rule is None and not self.warmup_epochs

    def check_executions(self, model: tf.keras.Model) -> None:
        """Raises:
        OptionError: a fixed rate is to climb, which can be set between executions alone.
        """
        several = steps_per_execution(model)
        if several > 1 and self.num_replicas > 1:  # Of one replica it does not climb.
            raise OptionError(
                "warmup_epochs must have one step an execution where the learning rate is one "
                "fixed number, which is set before each",
                received=f"warmup_epochs={self.warmup_epochs:g} and steps_per_execution={several}",
                mend="Give the optimizer a schedule, or leave one of both out",
            )

    def multiplier(self, step: Any, steps_per_epoch: int) -> Any:
        """Returns what the user's rate is multiplied by at ``step`` (optimizer iterations).

        Without a rule the warm-up climbs from ``1 / num_replicas`` of the rate to the whole of it.
        """
        start = 1.0 if self.rule else 1.0 / self.num_replicas
        warmup_steps = self.warmup_epochs * steps_per_epoch
        if not warmup_steps:
            return self.factor
        progress = tf.minimum(tf.cast(step, tf.float32) / warmup_steps, 1.0)
        return start + (self.factor - start) * progress

    def describe(self) -> str:
        if self.rule is None and self.num_replicas == 1:
            return (
                "learning rate: warmup_epochs has no effect on one replica without lr_scaling, "
                "since it climbs from the rate divided by the replicas"
            )
        how = f"{self.rule} scaling x{self.factor:g}" if self.rule else "no scaling"
        return f"learning rate: {how}, warm-up over {self.warmup_epochs:g} epochs"


class _ScaledSchedule(wrapt.ObjectProxy):
    """A user's schedule, multiplied. A proxy: it saves as the schedule it wraps."""

    def __init__(self, schedule: Any, scaling: Scaling, steps_per_epoch: int):
        super().__init__(schedule)
        self._self_scaling = scaling
        self._self_steps_per_epoch = steps_per_epoch

    def __call__(self, step: Any) -> Any:
        rate = self.__wrapped__(step)
        return rate * self._self_scaling.multiplier(step, self._self_steps_per_epoch)


class ScaleLearningRate(tf.keras.callbacks.Callback):
    """Applies a ``Scaling`` to an optimizer. One object serves all fits of a model.

    A schedule is wrapped. A fixed rate is set in each step of the warm-up, or once before the first
    step, and left alone after it, so callbacks that set the rate still work, and so does a rate
    restored by a checkpoint. A line tells whoever sets it within the warm-up.
    """

    def __init__(self, scaling: Scaling, optimizer: tf.keras.optimizers.Optimizer):
        super().__init__()
        self._scaling = scaling
        self._steps_per_epoch = 0
        self._is_climbing = False
        self._tells = False
        self._read(optimizer)
        self._has_set = False

    def _read(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        if rate_of_last_step(optimizer) is None:
            raise OptionError(
                "lr_scaling and warmup_epochs must go with an optimizer of one learning rate",
                received=type(optimizer).__name__,
                mend="Leave them out, and give each of its optimizers the rate that it is to have",
            )
        if not is_fixed(optimizer) and _schedule_of(optimizer) is None:
            raise OptionError(
                "lr_scaling and warmup_epochs must go with a number or a schedule",
                received="a function for the learning rate",
                mend="Give keras.optimizers.schedules, or leave them out",
            )
        self._optimizer = optimizer
        self._schedule = _schedule_of(optimizer)
        self._base_rate = None if self._schedule else float(as_numpy(optimizer.learning_rate))
        self._last_rate = self._base_rate  # That the last step of the warm-up was given.
        self._last_step = -1

    def prepare(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        steps_per_epoch: int,
        *,
        tells: bool = False,
        joins: bool = False,
    ) -> bool:
        """Must be called before the train step is traced.

        Args:
            tells: whether this process is the one that warns.
            joins: whether others are in the middle of this fit, whose rate the optimizer is given.

        Returns:
            See ``go_on``.
        """
        self._tells = tells
        if not joins:
            self.meet(optimizer)
        step, warms_up = int(as_numpy(steps_of(optimizer))), bool(self._scaling.warmup_epochs)
        if step != self._last_step + 1:
            self._last_rate = None  # A checkpoint may have restored another one.
        self._steps_per_epoch = steps_per_epoch
        changes_by_step = self.go_on(optimizer)
        if self._base_rate is not None and not (warms_up or step or joins):
            self._has_set = True
            optimizer.learning_rate = self._base_rate * self._scaling.factor
            self._last_rate = float(as_numpy(optimizer.learning_rate))
        elif self._base_rate is not None and tells and not (self._has_set or joins):
            self._tell_of_steps(optimizer, step)
        if self._schedule is not None:
            optimizer.learning_rate = _ScaledSchedule(
                self._schedule, self._scaling, steps_per_epoch
            )
        return changes_by_step

    def go_on(self, optimizer: tf.keras.optimizers.Optimizer) -> bool:
        """Looks whether steps of the warm-up are to come: a loss may have led back into it.

        Returns:
            Whether a fixed rate changes from step to step, and not at the next one alone.
        """
        step = int(as_numpy(steps_of(optimizer)))
        if step <= self._last_step:
            self._last_rate = None  # The rate is that of a later step, perhaps of a callback.
        left = self._last_of_warmup - step
        climbs = self._base_rate is not None and bool(self._scaling.warmup_epochs)
        self._is_climbing = climbs and left >= 0
        return climbs and left > 0

    @property
    def _last_of_warmup(self) -> int:
        """The first step that has the whole rate: a part of an epoch need not be whole steps."""
        return math.ceil(self._scaling.warmup_epochs * self._steps_per_epoch)

    def _tell_of_steps(self, optimizer: tf.keras.optimizers.Optimizer, step: int) -> None:
        if step > self._last_of_warmup:
            self._has_set = True
            print(
                f"tfdist: the learning rate stays {float(as_numpy(optimizer.learning_rate)):g}: it "
                f"is scaled at the first steps alone, and this optimizer has taken {step:,}",
                flush=True,
            )

    def meet(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        """Takes the rate that is to be scaled; before a checkpoint restores one that is."""
        is_other_schedule = _schedule_of(optimizer) not in (None, self._schedule)
        if optimizer is not self._optimizer or is_other_schedule or self._was_set(optimizer):
            self._read(optimizer)

    def _was_set(self, optimizer: tf.keras.optimizers.Optimizer) -> bool:
        """Whether a user has set the rate since, before the first step."""
        if self._base_rate is None or int(as_numpy(steps_of(optimizer))):
            return False
        return float(as_numpy(optimizer.learning_rate)) not in (self._base_rate, self._last_rate)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if not self._is_climbing:  # Reading the step would hold up the device in each one.
            return
        optimizer = self.model.optimizer
        step = int(as_numpy(steps_of(optimizer)))
        self._is_climbing = step <= self._last_of_warmup
        if self._is_climbing:
            self._has_set = True
            self._tell_of_others(optimizer)
            multiplier = float(self._scaling.multiplier(step, self._steps_per_epoch))
            optimizer.learning_rate = self._base_rate * multiplier
            self._last_rate, self._last_step = float(as_numpy(optimizer.learning_rate)), step

    def _tell_of_others(self, optimizer: tf.keras.optimizers.Optimizer) -> None:
        found = float(as_numpy(optimizer.learning_rate))
        if self._tells and self._last_rate not in (None, found):
            self._tells = False
            print(
                f"tfdist: warning: the learning rate was set to {found:g} within the warm-up of "
                f"{self._scaling.warmup_epochs:g} epochs, which sets it anew in each step, so that "
                "this one has no effect. Leave warmup_epochs out, or give the optimizer a schedule",
                flush=True,
            )


class EffectiveLearningRate(tf.keras.callbacks.Callback):
    """Puts the rate of an epoch's last step into the history, as ``learning_rate``."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        rate = rate_of_last_step(self.model.optimizer)
        if logs is not None and rate is not None:
            logs["learning_rate"] = float(as_numpy(rate))


def _schedule_of(optimizer: tf.keras.optimizers.Optimizer) -> Any | None:
    rate = given_learning_rate(optimizer)
    if isinstance(rate, _ScaledSchedule):  # As when an optimizer is compiled with once more.
        rate = rate.__wrapped__
    is_schedule = isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None
