"""The study on its file: what it suggests, and what is left of it after a kill."""

from __future__ import annotations

import errno
import fcntl
import sys

import pytest

from tfdist.errors import DataError, EngineMissingError
from tfdist.tuning import study
from tfdist.tuning.folder import MARK, SearchFolder
from tfdist.tuning.study import Study

SETTINGS = {"mode": "max", "seed": 3, "pruner": "halving", "grace": 1, "reduction": 2}


def ask(kept: Study) -> tuple[int, float]:
    number = kept.ask()
    return number, kept.trial(number).suggest_float("lr", 0, 1)


def test_what_is_suggested_depends_on_the_history_alone(tmp_path):
    unbroken = Study(tmp_path / "a.log", **SETTINGS)
    expected = [ask(unbroken) for _ in range(6)]
    broken = [ask(Study(tmp_path / "b.log", **SETTINGS)) for _ in range(6)]
    assert broken == expected
    assert len({lr for _, lr in expected}) == 6
    other = Study(tmp_path / "c.log", **SETTINGS | {"seed": 4})
    assert ask(other)[1] != expected[0][1]


def test_a_running_trial_is_found_again_with_what_it_was_given(tmp_path):
    number, lr = ask(Study(tmp_path / "a.log", **SETTINGS))
    again = Study(tmp_path / "a.log", **SETTINGS)
    assert [each.state.name for each in again.trials] == ["RUNNING"]
    trial = again.trial(number)
    assert trial.suggest_float("lr", 0, 1) == lr
    assert 0 <= trial.suggest_float("momentum", 0, 1) <= 1  # It was killed before this one.


def test_one_in_so_many_goes_on(tmp_path):
    kept = Study(tmp_path / "a.log", **SETTINGS)
    goes_on = {}
    for value in (0.5, 0.4, 0.6, 0.55):
        number = kept.ask()
        goes_on[value] = kept.note(number, {1: value})
    # Of the first two the best; of three one, of four two.
    assert goes_on == {0.5: True, 0.4: False, 0.6: True, 0.55: True}
    assert kept.note(0, {1: 9.0, 2: 0.7})
    assert kept.trials[0].intermediate_values == {1: 0.5, 2: 0.7}


def test_those_worse_than_the_median_end(tmp_path):
    kept = Study(tmp_path / "a.log", **SETTINGS | {"pruner": "median", "grace": 2})
    for value in (0.1, 0.2, 0.3, 0.4, 0.5):  # Without five that ended there is no median.
        number = kept.ask()
        assert kept.note(number, {1: 0.0, 2: value})
        kept.end(number, "COMPLETE", value)
    goes_on = {}
    for value in (0.29, 0.31):
        number = kept.ask()
        assert kept.note(number, {1: 0.0})  # Within the grace.
        goes_on[value] = kept.note(number, {2: value})
    assert goes_on == {0.29: False, 0.31: True}
    none = Study(tmp_path / "b.log", **SETTINGS | {"pruner": "none"})
    assert [none.note(none.ask(), {1: value}) for value in (0.5, 0.4)] == [True, True]


def test_a_line_that_was_written_in_part_is_removed(tmp_path):
    journal = tmp_path / "a.log"
    number, lr = ask(Study(journal, **SETTINGS))
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"work')
    study.mend(journal)
    assert journal.read_bytes() == whole
    again = Study(journal, **SETTINGS)
    assert again.trials[number].params == {"lr": lr}
    assert again.ask() == 1
    assert len(Study(journal, **SETTINGS).trials) == 2


@pytest.mark.parametrize("line", [b"garbage", b"null", b"{}", b"\xff\xfe"])
def test_a_damaged_line_is_one_line(tmp_path, line):
    ask(Study(tmp_path / "a.log", **SETTINGS))
    first, *others = (tmp_path / "a.log").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.log").write_bytes(b"".join([first, line, b"\n", *others]))
    with pytest.raises(DataError, match=r"a\.log must be as tfdist tune wrote it"):
        Study(tmp_path / "a.log", **SETTINGS)


@pytest.mark.parametrize("text", ["null", "[]", "[3]", "{"])
def test_damaged_settings_are_one_line(tmp_path, text):
    (tmp_path / MARK).touch()
    (tmp_path / "search.json").write_text(text)
    with (
        pytest.raises(DataError, match=r"search\.json must be as tfdist tune wrote it"),
        SearchFolder(tmp_path).taken({}, resume=True),
    ):
        pass


def test_a_lock_of_a_killed_process_does_not_stay(tmp_path):
    (tmp_path / "a.lock").touch()
    assert ask(Study(tmp_path / "a.log", **SETTINGS))[0] == 0


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert ask(Study(tmp_path / "a.log", **SETTINGS))[0] == 0


def test_optuna_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(EngineMissingError, match=r"pip install 'tfdist\[tune\]'"):
        Study(tmp_path / "a.log", **SETTINGS)
