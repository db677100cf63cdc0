"""Runs scenarios in processes of their own: a strategy takes the devices of a process once.

A file of scenarios defines functions ``name(strategy, folder)`` that assert, decorated with
``scenario``. ``python tests/scenarios.py FILE STRATEGY OPTIONS OUT [NAME ...]`` runs them, on
every rank under a launcher, and each rank writes OUT.<rank>.json. ``Job`` is the pytest side.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCENARIOS: dict[str, Callable[[Any, Path], None]] = {}


def scenario(function: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
    SCENARIOS[function.__name__] = function
    return function


def load(file: Path) -> dict[str, Callable[[Any, Path], None]]:
    """Imports a file of scenarios and returns them by name."""
    sys.modules["scenarios"] = sys.modules[__name__]
    SCENARIOS.clear()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(SCENARIOS)


@dataclass
class Job:
    """The scenarios of one file on one strategy; run when the first result is asked for.

    ``only`` names some of them; all without.
    """

    file: Path
    folder: Path
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    #: Arguments of tfdist launch, where they do not follow from the ranks that report.
    launch: str | None = None
    timeout_s: float = 560
    only: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    _results: list[dict[str, str]] | None = None
    _output: str = ""

    def check(self, name: str) -> None:
        """Fails with the traceback of the first rank on which the scenario failed."""
        if self._results is None:
            self._run()
        assert len(self._results) == self.ranks, self._output[-4000:]
        for rank, results in enumerate(self._results):
            assert results[name] == "", f"rank {rank}: {results[name]}"

    def _run(self) -> None:
        self._results = []
        out = self.folder / "results"
        arguments = self.launch or (f"--workers {self.ranks}" if self.ranks > 1 else None)
        strategy = self.options.get("replicas", self.strategy)
        launch = f"-m tfdist launch --strategy {strategy} {arguments} --"
        launcher = (sys.executable, *launch.split()) if arguments else ()
        script = [__file__, str(self.file), self.strategy, json.dumps(self.options), str(out)]
        script += self.only
        done = subprocess.run(
            [*launcher, sys.executable, *script],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"} | self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.timeout_s,
            check=False,
        )
        self._output = done.stdout + done.stderr
        files = [out.with_suffix(f".{rank}.json") for rank in range(self.ranks)]
        self._results = [json.loads(file.read_text()) for file in files if file.exists()]


def _attempt(function: Callable[[Any, Path], None], strategy: Any, folder: Path) -> str:
    try:
        function(strategy, folder)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


def main(file: str, name: str, options: str, out: str, *wanted: str) -> None:
    import tfdist
    from tfdist.compat import import_tensorflow

    import_tensorflow()
    scenarios = load(Path(file).resolve())
    results = {}
    with tfdist.strategy(name, **json.loads(options)) as strategy:
        for number, scenario_name in enumerate(wanted or scenarios):
            begun = time.perf_counter()
            folder = Path(out).with_name(f"scenario-{number}")
            folder.mkdir(exist_ok=True)
            results[scenario_name] = _attempt(scenarios[scenario_name], strategy, folder)
            print(f"{scenario_name}: {time.perf_counter() - begun:.1f} s", flush=True)
        rank = strategy.topology.rank
        Path(out).with_suffix(f".{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
