"""Scenarios as tests: what is selected runs, what takes its process down fails alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import scenario_plugin
import scenarios
from scenario_plugin import Job, Run, plan, scenarios_with, short_tier

_SCENARIOS = """
import os
from pathlib import Path
from scenarios import scenario

RAN = Path(__file__).with_name("ran")

@scenario
def first(strategy, folder):
    RAN.write_text("first ")

@scenario
def aborts(strategy, folder):
    os.abort()

@scenario("one", "other")
def after_it(strategy, folder):
    RAN.write_text(RAN.read_text() + "after_it")

@scenario
def differs(strategy, folder):
    assert strategy.name == "mirrored"

@scenario("other")
def elsewhere(strategy, folder):
    RAN.write_text("elsewhere")
"""
_TEST = """
from scenario_plugin import Job

SCENARIOS = "scratch_scenarios.py"
JOBS = {"one": Job("single"), "other": Job("single", only_named=True)}

def test_on(scenario):
    scenario.check()
"""

_JOBS = {"one": Job("single"), "other": Job("single", only_named=True)}


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    file = tmp_path / "scratch_scenarios.py"
    file.write_text(_SCENARIOS)
    (tmp_path / "test_scratch.py").write_text(_TEST)
    return file


def test_one_scenario_aborts_and_the_selected_others_pass(scratch):
    selected = ["-k", "one and not elsewhere", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "scenario_plugin", *selected, str(scratch.parent)],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ['PYTHONPATH']}"},
        cwd=scratch.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "2 failed, 2 passed, 2 deselected" in done.stdout, done.stdout + done.stderr
    for name in ("first", "after_it"):
        assert f"PASSED test_scratch.py::test_on[one-{name}]" in done.stdout
    # Each failure has its own words: of the abort, where it was and how the process ended.
    aborted, differs = done.stdout.split("test_on[one-differs]")[:2]
    assert "in aborts the process ended with exit code -6" in aborted
    assert "scratch_scenarios.py" in aborted
    assert "rank 0: Traceback" in differs
    assert "assert strategy.name" in differs
    assert "exit code" not in differs.split("====")[0]
    assert scratch.with_name("ran").read_text() == "first after_it"


def test_one_that_hangs_is_ended(scratch, tmp_path, monkeypatch):
    hangs = "@scenario\ndef hangs(strategy, folder):\n    import time\n    time.sleep(600)\n"
    scratch.write_text(_SCENARIOS + hangs)
    run = Run(Job("single"), scratch, tmp_path, ("first", "hangs", "differs"))
    run.check("first")
    monkeypatch.setattr(scenario_plugin, "_SILENT_S", 1)
    monkeypatch.setattr(scenario_plugin, "_MOST_PROCESSES", 1)
    with pytest.raises(pytest.fail.Exception, match="in hangs the process was ended, silent for 1"):
        run.check("hangs")
    with pytest.raises(pytest.fail.Exception, match="did not run: 1 processes were lost"):
        run.check("differs")


def test_where_scenarios_run(scratch):
    assert plan(scratch, _JOBS) == [
        ("one", "first"),
        ("one", "aborts"),
        ("one", "after_it"),
        ("one", "differs"),
        ("other", "after_it"),
        ("other", "elsewhere"),
    ]


def test_the_short_tier_has_each_scenario_once():
    planned = [(job, name) for job in ("a", "b", "lost") for name in ("x", "y", "z")] + [("a", "w")]
    jobs = {"a": Job("single"), "b": Job("single"), "lost": Job("single", skip="no MPI here")}
    chosen = short_tier(planned, jobs)
    assert sorted(name for _, name in chosen) == ["w", "x", "y", "z"]
    assert ("a", "w") in chosen
    assert chosen <= set(planned)
    assert {name for _, name in short_tier(planned, jobs, {"x", "w"})} == {"y", "z"}


def test_the_short_tier_starts_jobs_that_have_enough_to_do():
    jobs = {"one": Job("single"), "too": Job("single"), "ranks": Job("horovod", ranks=2)}

    def shares(number: int, *, of_ranks: int = 0) -> Counter[str]:
        planned = [(job, f"s{n}") for job in jobs for n in range(number)]
        named = [("ranks", f"r{n}") for n in range(of_ranks)]
        return Counter(job for job, _ in short_tier(planned + named, jobs))

    assert shares(3) == {"one": 3}
    assert shares(8) == {"one": 4, "too": 4}
    # What a process of one device traces, each rank does.
    assert shares(22) == {"one": 9, "too": 9, "ranks": 4}
    assert shares(3, of_ranks=1) == {"one": 3, "ranks": 1}
    planned = [(job, "between them") for job in jobs]
    assert short_tier(planned, jobs, of_ranks={"between them"}) == {("ranks", "between them")}


def test_a_scenario_may_be_long(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "@scenario(ranks=True)\ndef one(strategy, folder): ...\n\n"
        "@scenario('here', long=True)\ndef other(strategy, folder): ...\n"
    )
    assert scenarios_with("long", file) == {"other"}
    assert scenarios_with("ranks", file) == {"one"}
    assert plan(file, {"here": Job("single")}) == [("here", "one"), ("here", "other")]


@pytest.mark.parametrize(
    ("added", "jobs", "message"),
    [
        ("@scenario\ndef first(strategy, folder): ...", _JOBS, "two scenarios .* named first"),
        (
            "@scenario('ohter')\ndef last(strategy, folder): ...",
            _JOBS,
            "ohter; JOBS are one, other",
        ),
        ("", {"other": _JOBS["other"]}, "first .* runs nowhere"),
        ("", _JOBS | {"third": _JOBS["other"]}, "no scenario of .* runs on third"),
    ],
    ids=["twice", "unknown job", "nowhere", "nothing to do"],
)
def test_a_declaration_that_cannot_be(added, jobs, message, scratch):
    scratch.write_text(_SCENARIOS + added)
    with pytest.raises(pytest.Collector.CollectError, match=message):
        plan(scratch, jobs)


def test_scenarios_by_hand(scratch):
    known = scenarios.load(scratch)
    assert list(known) == ["first", "aborts", "after_it", "differs", "elsewhere"]
    assert scenarios.choose(known, ()) == tuple(known)
    with pytest.raises(SystemExit, match="no scenario is named lsat; there are: first, aborts"):
        scenarios.choose(known, ("first", "lsat"))
    scratch.write_text(_SCENARIOS + "@scenario\ndef first(strategy, folder): ...")
    with pytest.raises(ValueError, match="two scenarios are named first"):
        scenarios.load(scratch.rename(scratch.with_name("twice_scenarios.py")))
