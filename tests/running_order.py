"""Which worker runs a test, and in which order.

A test goes with those that share its expensive set-up: of its job, where a file has jobs or rows,
else of its file. What fails in seconds is first, then what was never timed, then the files that
take longest, so that workers end together: ``durations.json`` has the seconds of each group,
written by a run with ``--write-durations``. A run that is stopped says what had not run.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent
_DURATIONS = _TESTS / "durations.json"
#: Its groups wait for what the first of them makes: other workers begin with another file.
_WAITS = "conformance/test_conformance.py"
#: They read the code, and start nothing.
FIRST = ("test_layers.py", "test_errors.py", "faults/test_trust.py", "tools/test_house.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="writes the seconds of each group that has run to tests/durations.json",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}
    of_files: Counter[str] = Counter()
    for group, of_group in seconds.items():
        of_files[group.split("::")[0]] += of_group
    makes = max((g for g in seconds if g.startswith(_WAITS)), key=seconds.get, default="")
    after = sorted([0, 0, *of_files.values()])[-2] - 1

    def place(item: pytest.Item) -> tuple[Any, ...]:
        group = group_of(item)
        if group in FIRST:
            return (0, FIRST.index(group))
        # A file's groups follow each other: its fixtures end when a worker leaves the file.
        file = group.split("::")[0]
        of_file = of_files.get(file, math.inf)
        if file == _WAITS and group != makes:
            of_file = after
        return (1, -of_file, file, -seconds.get(group, math.inf))

    items.sort(key=place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def group_of(item: pytest.Item) -> str:
    name = item.path.relative_to(_TESTS).as_posix()
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "scenario" in params:
        return f"{name}::{params['scenario'][0]}"
    return f"{name}::{params['row']}" if "row" in params else name


class _Told:
    """What has run, as the process that prints the summary hears it."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._seconds: Counter[str] = Counter()
        self._ran: set[str] = set()
        self._asked: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._asked = ids

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._asked = self._asked or [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.rpartition("@")[2]] += report.duration
        self._ran.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        waiting = Counter(i.split("::")[0] for i in self._asked if i not in self._ran)
        if waiting:
            terminalreporter.section("had not run")
            for name, count in waiting.most_common():
                terminalreporter.write_line(f"{count:5} of {name}")
        if self._config.option.write_durations:
            known = json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}
            known |= {name: round(of) for name, of in self._seconds.items()}
            there = {
                n: of for n, of in known.items() if of and (_TESTS / n.split("::")[0]).exists()
            }
            _DURATIONS.write_text(json.dumps(there, indent=1, sort_keys=True) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(_Told(config))
