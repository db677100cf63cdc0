"""What a search makes of what it finds in its folder, without a process of a trial."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist.errors import TfdistError
from tfdist.launch.jobs import Where
from tfdist.runs.folder import RunFolder
from tfdist.runs.settings import Settings
from tfdist.tuning import space
from tfdist.tuning.folder import SearchFolder
from tfdist.tuning.request import Request, Search
from tfdist.tuning.searching import Searching
from tfdist.tuning.study import Study


def study_in(folder: Path) -> Study:
    settings = {"mode": "min", "seed": 0, "pruner": "halving", "grace": 2, "reduction": 2}
    return Study(folder / "journal.log", **settings)


def searching_in(folder: Path) -> Searching:
    request = Request(
        model="model.py:model_fn",
        data="data",
        output=Path("search"),
        space=space.parsed({"lr": {"low": 0.1, "high": 1}}),
        search=Search(trials=1),
        settings=Settings(epochs=2),
        where=Where(strategy="single"),
    )
    return Searching(request, SearchFolder(folder), study_in(folder), ["data"], lambda row: None)


@pytest.fixture
def searching(tmp_path) -> Searching:
    return searching_in(tmp_path)


@pytest.mark.parametrize(
    ("last", "state", "name"), [(0.5, "done", "COMPLETE"), (math.nan, "ended early", "PRUNED")]
)
def test_a_trial_whose_last_epoch_was_seen_before_a_kill_ends(tmp_path, last, state, name):
    begun = study_in(tmp_path)
    begun.trial(begun.ask()).suggest_float("lr", 0.1, 1)
    begun.note(0, {1: 0.75, 2: last})
    searching = searching_in(tmp_path)
    searching.run()
    (row,) = searching.rows
    assert (row.state, row.epoch) == (state, 2)
    assert [each.state.name for each in study_in(tmp_path).trials] == [name]


def test_the_first_trial_that_fails_ends_a_search_only_where_no_other_may_train(searching):
    def fails(number: int) -> None:
        running = SimpleNamespace(number=number, last={"event": "failed", "text": "7 heads."})
        assert searching._goes_on(running, 1) is False

    numbers = [searching._study.ask() for _ in range(4)]
    searching._running = {1: "another"}
    fails(numbers[0])
    with pytest.raises(TfdistError, match=r"7 heads"):  # As the one before.
        fails(numbers[1])
    history = RunFolder(searching._folder.trial(numbers[2])).history
    history.parent.mkdir(parents=True)
    history.write_text("epoch,loss,val_loss,seconds,samples_per_s\n1,0.5,0.5,1,1\n")
    fails(numbers[3])  # Another has had an epoch.
    assert [row.number for row in searching.rows if row.state == "failed"] == [0, 3]
