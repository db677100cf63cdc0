"""Scenarios: functions that run in processes of their own, as a strategy takes all devices of one.

A file of scenarios defines functions ``name(strategy, folder)`` that assert, decorated with
``scenario``. ``python tests/scenarios.py FILE STRATEGY OPTIONS OUT [NAME ...]`` runs them, on
every rank under a launcher. Each rank appends a line of JSON to OUT.<rank>.jsonl as a scenario
begins and as it ends. The pytest side is ``scenario_plugin.py``.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Scenario = Callable[[Any, Path], None]
#: What takes so long hangs: where is told, before ``scenario_plugin`` ends it.
_HANGS_S = 250
#: File -> name -> scenario: a file may import another one for what stands in it.
_KNOWN: dict[str, dict[str, Scenario]] = {}


def scenario(*jobs: Any, long: bool = False, ranks: bool = False) -> Any:
    """Makes a scenario of a function.

    Args:
        jobs: where it runs: names of the test module's ``JOBS``. Without any, and without
            parentheses, it runs on all that are not ``only_named``.
        long: whether `make test` leaves it to `make test-all`. ``scenario_plugin`` reads it.
        ranks: whether it says something of several processes alone, so that `make test` has it
            there.
    """

    def noted(function: Scenario) -> Scenario:
        of_file = _KNOWN.setdefault(function.__code__.co_filename, {})
        if function.__name__ in of_file:
            raise ValueError(f"two scenarios are named {function.__name__}: one would never run")
        of_file[function.__name__] = function
        return function

    return noted(*jobs) if jobs and callable(jobs[0]) else noted


def load(file: Path) -> dict[str, Scenario]:
    """Imports a file of scenarios and returns them by name."""
    sys.modules["scenarios"] = sys.modules[__name__]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _KNOWN[str(file)]


def choose(scenarios: dict[str, Scenario], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that are wanted: all where none is."""
    if unknown := [name for name in wanted if name not in scenarios]:
        sys.exit(f"no scenario is named {', '.join(unknown)}; there are: {', '.join(scenarios)}")
    return wanted or tuple(scenarios)


def _attempt(function: Scenario, strategy: Any, folder: Path) -> str:
    import pytest

    try:
        function(strategy, folder)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


def main(file: str, name: str, options: str, out: str, *wanted: str) -> None:
    import tfdist
    from tfdist.compat import import_tensorflow

    faulthandler.enable()  # An abort shows where it was.
    import_tensorflow()
    scenarios = load(Path(file).resolve())
    names = choose(scenarios, wanted)
    with tfdist.strategy(name, **json.loads(options)) as strategy:
        rank = strategy.topology.rank
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        with Path(out).with_suffix(f".{rank}.jsonl").open("w", buffering=1) as lines:
            for number, scenario_name in enumerate(names):
                folder = Path(out).with_name(f"scenario-{number}")
                folder.mkdir(exist_ok=True)
                print(json.dumps({"begun": scenario_name}), file=lines)
                begun = time.perf_counter()
                faulthandler.dump_traceback_later(_HANGS_S)
                error = _attempt(scenarios[scenario_name], strategy, folder)
                faulthandler.cancel_dump_traceback_later()
                print(f"{scenario_name}: {time.perf_counter() - begun:.1f} s", flush=True)
                if error:
                    print(error, file=sys.stderr, flush=True)
                print(json.dumps({"ended": scenario_name, "error": error}), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
