"""Which number of a training is watched, as ``early_stopping`` and ``save_best`` name it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import OptionError, unknown_choice

_LOWER = (
    *("loss", "error", "mse", "rmse", "mae", "mape", "msle", "logcosh", "hinge", "poisson"),
    *("crossentropy", "divergence", "perplexity"),
)
_HIGHER = (
    *("acc", "accuracy", "auc", "precision", "recall", "specificity", "sensitivity"),
    *("f1", "f1_score", "fbeta_score", "r2_score", "dice_score", "iou", "io_u", "similarity"),
)


def _whole(value: Any) -> int:
    number = int(str(value))
    if number < 0:
        raise ValueError(value)
    return number


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _flag(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def _mode(value: Any) -> str:
    return {"min": "min", "max": "max"}[str(value)]


_Kinds = Mapping[str, tuple[Callable[[Any], Any], str]]
_OF_BEST: _Kinds = {"mode": (_mode, "min or max")}
_OF_STOPPING: _Kinds = {
    "patience": (_whole, "a whole number of epochs"),
    "min_delta": (_number, "a number"),
    "baseline": (_number, "a number"),
    "start_from_epoch": (_whole, "a whole number of epochs"),
    "restore_best_weights": (_flag, "true or false"),
    **_OF_BEST,
}


def watched(option: str, given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"monitor": name, "mode": "min" or "max"} of "val_accuracy" or "val_cost,mode=min".

    Args:
        option: which names a number, and which of two is better; early_stopping has the arguments
            of Keras' ``EarlyStopping``, as "val_loss,patience=3".
        given: to it; or the arguments themselves.

    Raises:
        OptionError: an argument that there is not, or that cannot hold.
    """
    kinds = _OF_STOPPING if option == "early_stopping" else _OF_BEST
    if isinstance(given, Mapping):
        pairs = dict(given)
    elif isinstance(given, str):
        monitor, *rest = given.split(",")
        pairs = {"monitor": monitor.strip()}
        for text in rest:
            key, _, value = (part.strip() for part in text.partition("="))
            if key in pairs and key in ("monitor", *kinds):
                raise OptionError(
                    f"{key} of {option} must be given once",
                    received=repr(given),
                    mend="Leave one of them out",
                )
            pairs[key] = value
    else:
        pairs = {}
    monitor = pairs.pop("monitor", None)
    if not isinstance(monitor, str) or not re.fullmatch(r"[^\s=]+", monitor):
        raise OptionError(
            f"{option} must begin with the name of a number of the training",
            received=repr(given),
            mend=f"Write {option} val_loss, or val_loss,{next(iter(kinds))}=..., of "
            f"{', '.join(kinds)}",
        )
    parsed: dict[str, Any] = {"monitor": monitor}
    for key, value in pairs.items():
        if key not in kinds:
            raise unknown_choice(f"part of {option}", key, list(kinds))
        read, kind = kinds[key]
        try:
            parsed[key] = read(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise OptionError(
                f"{key} of {option} must be {kind}",
                received=repr(value),
                mend=f"Write such a value, or leave {key} out",
            ) from None
    return parsed if "mode" in parsed else {**parsed, "mode": _better(option, monitor)}


def _better(option: str, monitor: str) -> str:
    """Returns "min" or "max": Keras would take the least of all that it does not know."""
    name = re.sub(r"_\d+$", "", monitor).lower()
    plain = name.removeprefix("val_")
    for mode, endings in (("min", _LOWER), ("max", _HIGHER)):
        if name.endswith(endings) and not plain.startswith("neg_"):
            return mode
    near = difflib.get_close_matches(plain, (*_LOWER, *_HIGHER), n=1)
    prefix = "val_" if name.startswith("val_") else ""
    hint = f"Did you mean '{prefix}{near[0]}'? If not, write" if near else "Write"
    raise OptionError(
        f"{option} must say whether less or more of a number is better",
        received=f"{monitor!r}, which can be either",
        mend=f"{hint} {monitor},mode=max, or mode=min",
    )
