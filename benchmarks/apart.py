"""Runs a part of a benchmark in a process of its own: devices, memory, packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_TIMEOUT_S = 600
_ENVIRONMENTS = Path(__file__).parents[1] / ".cache"


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


def python_with(name: str, *packages: str) -> Path:
    """Returns the Python of an environment with ``packages``, which is made once."""
    home = _ENVIRONMENTS / name
    python = home / "bin" / "python"
    if not (home / "made").exists():
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        (home / "made").touch()
    return python
