"""Runs a function of a benchmark in a process of its own: devices and memory are a process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

_TIMEOUT_S = 600


def call(module: str, function: str, **arguments: Any) -> Any:
    """Returns what ``function`` of ``module``, which ends with ``answer``, gives for ``arguments``.

    Args:
        arguments: JSON-able, as the result must be.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, function, json.dumps(arguments)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def answer(functions: Iterable[Callable[..., Any]]) -> None:
    """Prints what was asked for by ``call``, in the process that it has started."""
    name, arguments = sys.argv[1:]
    wanted = {function.__name__: function for function in functions}[name]
    print(json.dumps(wanted(**json.loads(arguments))))
