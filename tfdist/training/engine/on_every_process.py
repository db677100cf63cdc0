"""What all processes of a fit do between two steps, each in its own time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tensorflow as tf

from tfdist.errors import TfdistError, cannot_write
from tfdist.training.engine.collective import Collective

_Told = TypeVar("_Told")


def tried(
    collective: Collective, act: Callable[[], _Told], target: Path
) -> tuple[_Told | None, TfdistError | None]:
    """Calls ``act``, which writes ``target``; returns what it returned, or the error of writing."""
    try:
        return act(), None
    except TfdistError as error:
        return None, error
    except (OSError, tf.errors.OpError) as error:
        if collective.explain(error) is not None:
            raise  # A rank was lost while all were reading the weights.
        problem = cannot_write(target, error)
        problem.__cause__ = error
        return None, problem


def on_all(
    collective: Collective, act: Callable[[], _Told], target: Path, more_s: float = 0.0
) -> list[tuple[_Told | None, TfdistError | None]]:
    """Calls ``act``, which writes ``target`` or has a part in it, on each process.

    Args:
        more_s: seconds that it may take: see ``Collective.waiting``.

    Returns:
        What ``tried`` returned on each process, on all of them.

    Raises:
        TfdistError: on a process that could not write, its own.
    """
    place = f"the writing of {target.name}"
    with collective.apart(place, more_s):
        told, problem = tried(collective, act, target)
    with collective.waiting(place, more_s):
        of_all = collective.gather((told, problem))
    if problem is not None:
        raise problem  # Told to others, it has lost its cause.
    return of_all
