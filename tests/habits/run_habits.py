"""Runs all habits in this process, on a strategy or in plain Keras; see ``test_habits.py``.

``python run_habits.py STRATEGY OPTIONS OUT [NAME ...]`` appends a line of JSON for each program to
OUT.<rank>.jsonl as it ends, so that a process that dies shows how far it has come.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import tfdist
from tfdist.compat import import_tensorflow

tf = import_tensorflow()

from habit import HABITS, OWN_BATCHES, Here  # noqa: E402

from tfdist.errors import TfdistError  # noqa: E402

RATES = ("lr", "learning_rate")
FILES = ("models", "preparing", "compiling", "data", "loops", "recipes", "given")


def numbers(result: Any) -> Any:
    """Returns what a program returned as JSON: of a model, the weights of its layers."""
    if isinstance(result, tf.keras.Model):
        of_metrics = {id(variable) for metric in result.metrics for variable in metric.variables}
        kept = [weight for weight in result.weights if id(weight) not in of_metrics]
        kept = [weight for weight in kept if hasattr(weight, "numpy")]  # A vocabulary is none.
        return [numbers(weight.numpy()) for weight in kept]
    if isinstance(result, tf.keras.callbacks.History):
        # tfdist shows the learning rate, too, and Keras' callbacks show it under two names.
        shown = {name: result.history[name] for name in result.history if name not in RATES}
        return numbers(shown)
    if isinstance(result, dict):
        return {name: numbers(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [numbers(each) for each in result]
    return np.asarray(result).tolist()


def run(program: Any, here: Here) -> dict[str, Any]:
    try:
        return {"numbers": numbers(program(here))}
    except TfdistError as error:
        return {"refused": str(error)}
    except Exception:
        return {"failed": traceback.format_exc()}


def main(name: str, options: str, out: str, *wanted: str) -> None:
    for file in FILES:
        importlib.import_module(f"{file}_habits")
    if name in ("plain", "single"):
        tf.config.run_functions_eagerly(True)  # Nothing is traced: half the time, the same numbers.
    if name == "plain":
        run_all(None, Path(out).with_suffix(".0.jsonl"), wanted)
        return
    with tfdist.strategy(name, **json.loads(options)) as strategy:
        rank = strategy.topology.rank
        run_all(strategy, Path(out).with_suffix(f".{rank}.jsonl"), wanted)


def run_all(strategy: Any, out: Path, wanted: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder, out.open("w") as lines:
        for name in wanted or HABITS:
            habit = HABITS[name]
            own = OWN_BATCHES in habit.verdicts.values()
            for parts in (0, 1, 2) if own and strategy is None else (0,):
                place = Path(folder) / f"{name}-{parts}"
                place.mkdir()
                begun = time.perf_counter()
                found = run(habit.program, Here(strategy, place, parts))
                found |= {"habit": name, "parts": parts, "verdicts": habit.verdicts}
                # Ends the iterators of its loops. To end many at a time takes TensorFlow up to a
                # minute, in which another rank would wait.
                gc.collect()
                found["seconds"] = round(time.perf_counter() - begun, 2)
                lines.write(json.dumps(found) + "\n")
                lines.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
