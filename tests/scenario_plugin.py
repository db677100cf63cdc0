"""Scenarios as tests: collected one by one, run together in as few processes as can be.

A test module names its file of scenarios and its jobs, and says what is to be tested of each:

    SCENARIOS = "fit_scenarios.py"
    JOBS = {"mirrored": Job("mirrored", {"devices": 2}), "horovod": Job("horovod", ranks=2)}

    def test_fit(scenario):
        scenario.check()

A job is started when its first result is asked for, with those scenarios alone that this run of
pytest has selected, and a test ends as soon as its own scenario has. What several jobs run is in
the short tier on one of them, where it costs least; on the others it is ``long``, as a scenario is
everywhere that says ``long=True``. A process that is lost fails the scenario that it ran; the
others go on in a new one. See ``scenarios.py`` for that side.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = Path(__file__).with_name("scenarios.py")
#: A process that begins and ends nothing for so long hangs, even on a machine that is busy.
_SILENT_S = 280
#: Of a job: its first one, and those after a scenario that took it down.
_MOST_PROCESSES = 3
#: The start of a job, in scenarios.
_START = 3
#: Two silences: of the start, and of the first scenario.
_TIMEOUT_S = 2 * _SILENT_S + 20


@dataclass(frozen=True)
class Job:
    """How scenarios are run.

    Attributes:
        strategy: its registered name.
        options: of the strategy.
        ranks: processes that run the scenarios.
        launch: arguments of tfdist launch, where they do not follow from the ranks.
        only_named: whether it has those scenarios only that name it.
        env: environment variables.
        skip: why it cannot run here.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    launch: str | None = None
    only_named: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    skip: str = ""

    def launcher(self) -> list[str]:
        """Returns the words before ``python``; none where one process is all."""
        arguments = self.launch or (f"--workers {self.ranks}" if self.ranks > 1 else None)
        if arguments is None:
            return []
        ranks = f"-o replicas={self.options['replicas']}" if "replicas" in self.options else ""
        words = f"-m tfdist launch --strategy {self.strategy} {ranks} {arguments} --"
        return [sys.executable, *words.split()]


class _Process:
    """A process (or the ranks under a launcher) that runs scenarios, and what it has told."""

    def __init__(self, job: Job, file: Path, folder: Path, names: list[str]):
        folder.mkdir()
        self._output = folder / "output"
        self._told = [folder / f"results.{rank}.jsonl" for rank in range(job.ranks)]
        script = [_SCRIPT, file, job.strategy, json.dumps(job.options), folder / "results", *names]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*job.launcher(), sys.executable, *map(str, script)],
                env=os.environ
                | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
                | job.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._size = 0
        self._heard = time.monotonic()

    def end_of(self, seconds: float) -> str:
        """Waits that long at most; returns how it ended, or nothing while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        code = self._process.returncode
        if code is not None:
            return f"ended with exit code {code}"
        size = sum(file.stat().st_size for file in self._told if file.exists())
        if size != self._size:
            self._size, self._heard = size, time.monotonic()
        if time.monotonic() - self._heard < _SILENT_S:
            return ""
        self.stop()
        return f"was ended, silent for {_SILENT_S} s"

    @property
    def succeeded(self) -> bool:
        return self._process.returncode == 0

    def events(self) -> list[list[dict[str, str]]]:
        """Returns for each rank what has begun and ended; a line that is being written waits."""
        texts = [file.read_text() if file.exists() else "" for file in self._told]
        return [[json.loads(line) for line in text.split("\n")[:-1]] for text in texts]

    def tail(self) -> str:
        return self._output.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """A launcher is asked first, as it ends what it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Run:
    """Scenarios of a file on a job, in this order."""

    def __init__(self, job: Job, file: Path, folder: Path, names: tuple[str, ...]):
        self._job, self._file, self._folder, self._names = job, file, folder, names
        #: Scenario -> what went wrong, "" where nothing did.
        self._results: dict[str, str] = {}
        self._process: _Process | None = None
        self._processes = 0

    def check(self, name: str) -> None:
        """Waits for a scenario, and fails with its traceback on each rank on which it failed."""
        while name not in self._results:
            self._go_on()
        if self._results[name]:
            pytest.fail(self._results[name], pytrace=False)
        while self._process and not self._pending():
            self._go_on()

    def close(self) -> None:
        if self._process:
            self._process.stop()

    def _pending(self) -> list[str]:
        return [name for name in self._names if name not in self._results]

    def _go_on(self) -> None:
        """Takes what there is to know within a moment."""
        if self._process is None:
            folder = self._folder / f"process-{self._processes}"
            self._process = _Process(self._job, self._file, folder, self._pending())
            self._processes += 1
        how = self._process.end_of(0.05)
        events = self._process.events()
        self._results |= _ended(events)
        if not how:
            return
        ended, self._process = self._process, None
        if self._pending():
            self._blame(events, f"the process {how}:\n{ended.tail()}")
        elif not ended.succeeded:
            pytest.fail(f"after all scenarios the process {how}:\n{ended.tail()}", pytrace=False)

    def _blame(self, events: list[list[dict[str, str]]], loss: str) -> None:
        """Says why scenarios have no result, of which those that did not begin may run again."""
        pending = self._pending()
        told = [event for of_rank in events for event in of_rank]
        if not told:
            self._results |= dict.fromkeys(pending, f"no scenario began: {loss}")
            return
        errors = [
            f"rank {rank}: {event['error']}"
            for rank, of_rank in enumerate(events)
            for event in of_rank
            if event.get("ended") == pending[0] and event["error"]
        ]
        self._results[pending[0]] = "\n".join([*errors, f"in {pending[0]} {loss}"])
        if self._processes == _MOST_PROCESSES:
            why = f"did not run: {_MOST_PROCESSES} processes were lost, in the last {loss}"
            self._results |= dict.fromkeys(pending[1:], why)


def _ended(events: list[list[dict[str, str]]]) -> dict[str, str]:
    """Returns what all ranks have ended: scenario -> its errors."""
    ended = [{e["ended"]: e["error"] for e in of_rank if "ended" in e} for of_rank in events]
    return {
        name: "\n".join(f"rank {r}: {of[name]}" for r, of in enumerate(ended) if of[name])
        for name in ended[0]
        if all(name in of_rank for of_rank in ended)
    }


def plan(file: Path, jobs: Mapping[str, Job]) -> list[tuple[str, str]]:
    """Returns (job, scenario) of all that a file declares, which is read and not imported."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(file.read_text(), str(file)).body:
        if isinstance(node, ast.FunctionDef) and (named := _declared(node)) is not None:
            _require(node.name not in found, f"two scenarios of {file} are named {node.name}")
            unknown = ", ".join(name for name in named if name not in jobs)
            known = ", ".join(jobs)
            _require(not unknown, f"{node.name} in {file} names {unknown}; JOBS are {known}")
            found[node.name] = named or tuple(j for j in jobs if not jobs[j].only_named)
            _require(found[node.name], f"{node.name} in {file} runs nowhere: it must name a job")
    planned = [(job, name) for job in jobs for name, on in found.items() if job in on]
    idle = ", ".join(set(jobs) - {job for job, _ in planned})
    _require(not idle, f"no scenario of {file} runs on {idle}")
    return planned


def scenarios_with(word: str, file: Path) -> set[str]:
    """Returns those of a file that say ``long=True`` or ``ranks=True``, whichever is asked for."""
    return {
        node.name
        for node in ast.parse(file.read_text(), str(file)).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if keyword.arg == word and ast.literal_eval(keyword.value)
    }


def short_tier(
    planned: list[tuple[str, str]],
    jobs: Mapping[str, Job],
    long: Set[str] = frozenset(),
    of_ranks: Set[str] = frozenset(),
) -> set[tuple[str, str]]:
    """Returns of each scenario that is not ``long`` the (job, scenario) that `make test` runs.

    It is the one of its jobs on which it costs least: each process of a job traces for itself,
    and a job that is not started yet has to be. What is ``of_ranks`` is tried on a job of several.
    """
    able: dict[str, list[str]] = {}
    for job, name in planned:
        has_them = jobs[job].ranks > 1 or name not in of_ranks
        if name not in long and not jobs[job].skip and has_them:
            able.setdefault(name, []).append(job)
    taken: Counter[str] = Counter()
    chosen = set()

    def cost(job: str) -> int:
        return jobs[job].ranks * ((taken[job] or _START) + 1)

    for name, on in sorted(able.items(), key=lambda scenario: len(scenario[1])):
        job = min(on, key=cost)
        taken[job] += 1
        chosen.add((job, name))
    return chosen


def _declared(function: ast.FunctionDef) -> tuple[str, ...] | None:
    """Returns the jobs that ``@scenario`` names; None where a function is no scenario."""
    for decorator in function.decorator_list:
        match decorator:
            case ast.Name("scenario"):
                return ()
            case ast.Call(ast.Name("scenario"), arguments):
                return tuple(ast.literal_eval(argument) for argument in arguments)
    return None


def _require(holds: object, message: str) -> None:
    if not holds:
        raise pytest.Collector.CollectError(message)


@dataclass(frozen=True)
class Scenario:
    """What a test is given."""

    run: Run
    name: str

    def check(self) -> None:
        self.run.check(self.name)


def _file(module: Any) -> Path:
    return Path(module.__file__).with_name(module.SCENARIOS)


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Returns each value that a parameter has in the tests of a file that this run has selected."""
    here = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    return list(dict.fromkeys(of[parameter] for of in params if parameter in of))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        jobs = metafunc.module.JOBS
        params = []
        file = _file(metafunc.module)
        planned = plan(file, jobs)
        words = (scenarios_with("long", file), scenarios_with("ranks", file))
        short = short_tier(planned, jobs, *words)
        for pair in planned:
            skip = jobs[pair[0]].skip
            marks = [pytest.mark.timeout(_TIMEOUT_S), pytest.mark.skipif(bool(skip), reason=skip)]
            marks += [] if pair in short else [pytest.mark.long]
            params.append(pytest.param(pair, id="-".join(pair), marks=marks))
        metafunc.parametrize("scenario", params, indirect=True)


@pytest.fixture
def scenario(request: pytest.FixtureRequest, scenario_runs: dict[str, Run]) -> Scenario:
    """A scenario of the module's file on one of its jobs; each is a test."""
    job, name = request.param
    return Scenario(scenario_runs[job], name)


@pytest.fixture(scope="module")
def scenario_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Run]]:
    """The jobs of a module, each with what this run of pytest has selected of it."""
    module = request.module
    asked: dict[str, list[str]] = {}
    for job, name in selected(request, "scenario"):
        asked.setdefault(job, []).append(name)
    runs = {
        job: Run(module.JOBS[job], _file(module), tmp_path_factory.mktemp(job), tuple(names))
        for job, names in asked.items()
    }
    yield runs
    for run in runs.values():
        run.close()
