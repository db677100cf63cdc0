"""What a search chooses from: ranges and choices, by name, as space.yaml has them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tfdist.errors import OptionError, unknown_choice
from tfdist.runs.settings import SEARCHED, Settings

#: The section of options of the training; all other names are arguments of the model's function.
TRAIN = "train"
# What YAML takes for a text, and people write as a number: 1e-4 without a point.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_KEYS = ("low", "high", "log", "int")
_EXAMPLE = "{low: 0.0001, high: 0.1, log: true}, or [8, 16, 32]"


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both among them."""

    low: int | float
    high: int | float
    log: bool = False
    int: bool = False

    @property
    def ends(self) -> tuple[Any, ...]:
        return (self.low, self.high)

    def suggested(self, trial: Any, name: str) -> Any:
        suggest = trial.suggest_int if self.int else trial.suggest_float
        return suggest(name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Choice:
    """One of ``values``."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.values

    def suggested(self, trial: Any, name: str) -> Any:
        return trial.suggest_categorical(name, self.values)


@dataclass(frozen=True)
class Space:
    """What is chosen for each trial.

    Attributes:
        model: argument of the model's function -> its values.
        train: option of the training -> its values.
    """

    model: Mapping[str, Range | Choice]
    train: Mapping[str, Range | Choice]

    def suggested(self, trial: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what a trial of Optuna's is given: for the model, and for the training.

        What the trial has been given before it is given again.
        """
        of_model = {name: each.suggested(trial, name) for name, each in self.model.items()}
        of_training = {
            name: each.suggested(trial, f"{TRAIN}.{name}") for name, each in self.train.items()
        }
        return of_model, of_training


def parsed(given: Any) -> Space:
    """Returns the space that a mapping describes: see docs/tuning.md.

    Raises:
        OptionError: it is none.
    """
    if not isinstance(given, Mapping) or not given:
        raise OptionError(
            "a space must name what is chosen, and from what",
            received=repr(given),
            mend=f"Write lines such as width: {_EXAMPLE}",
        )
    of_training = given.get(TRAIN, {})
    if not isinstance(of_training, Mapping):
        raise OptionError(
            f"{TRAIN} in a space must be a section of options of the training",
            received=repr(of_training),
            mend=f"Write {TRAIN}: {{lr: {{low: 0.0001, high: 0.1, log: true}}}}",
        )
    for name in of_training:
        if name not in SEARCHED:
            raise unknown_choice(f"option in {TRAIN} of a space", name, SEARCHED)
    of_model = {name: value for name, value in given.items() if name != TRAIN}
    for name in of_model:
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(
                "a space must name arguments of the model's function",
                received=repr(name),
                mend="Write a name as Python has it, such as width",
            )
    kinds = {each.name: each.type for each in fields(Settings)}
    return Space(
        {name: _values(name, value) for name, value in of_model.items()},
        {
            name: _values(f"{TRAIN}.{name}", value, are_whole=kinds[name].startswith("int"))
            for name, value in of_training.items()
        },
    )


def _values(name: str, given: Any, *, are_whole: bool = False) -> Range | Choice:
    if isinstance(given, (list, tuple)) and given:
        values = tuple(map(_number, given))
        if all(value is None or isinstance(value, (bool, int, float, str)) for value in values):
            if len(set(values)) < len(values):  # Optuna would keep the first of them for each.
                raise OptionError(
                    f"{name} in a space must have each value once, where true is 1 and false is 0",
                    received=repr(given),
                    mend="Leave one of them out, or write names, as ['one', 'yes']",
                )
            return Choice(values)
    if not isinstance(given, Mapping) or not {"low", "high"} <= set(given):
        raise OptionError(
            f"{name} in a space must be a range with low and high, or a list of plain values",
            received=repr(given),
            mend=f"Write {name}: {_EXAMPLE}",
        )
    for key in given:
        if key not in _KEYS:
            raise unknown_choice(f"part of {name} in a space", key, _KEYS)
    low, high = _number(given["low"]), _number(given["high"])
    flags = {"log": given.get("log", False), "int": are_whole or given.get("int", False)}
    kinds = (int,) if flags["int"] is True else (int, float)
    are_numbers = all(type(end) in kinds and abs(end) <= sys.float_info.max for end in (low, high))
    if not are_numbers or not all(isinstance(flag, bool) for flag in flags.values()):
        raise OptionError(
            f"{name} in a space must have numbers for low and high, whole ones where it counts",
            received=repr(dict(given)),
            mend=f"Write {name}: {_EXAMPLE}",
        )
    if not low < high or (flags["log"] and low <= 0):
        raise OptionError(
            f"low of {name} in a space must be less than high, and above 0 where log is true",
            received=f"{low} to {high}",
            mend="Give other ends",
        )
    return Range(low, high, **flags)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
