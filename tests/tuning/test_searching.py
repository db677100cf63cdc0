"""What a search makes of what it finds in its folder, without a process of a trial."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tfdist.launch.jobs import Where
from tfdist.runs.settings import Settings
from tfdist.tuning import space
from tfdist.tuning.folder import SearchFolder
from tfdist.tuning.request import Request, Search
from tfdist.tuning.searching import Searching
from tfdist.tuning.study import Study


@pytest.mark.parametrize(
    ("last", "state", "name"), [(0.5, "done", "COMPLETE"), (math.nan, "ended early", "PRUNED")]
)
def test_a_trial_whose_last_epoch_was_seen_before_a_kill_ends(tmp_path, last, state, name):
    def study() -> Study:
        settings = {"mode": "min", "seed": 0, "pruner": "halving", "grace": 2, "reduction": 2}
        return Study(tmp_path / "journal.log", **settings)

    begun = study()
    begun.trial(begun.ask()).suggest_float("lr", 0.1, 1)
    begun.note(0, {1: 0.75, 2: last})
    request = Request(
        model="model.py:model_fn",
        data="data",
        output=Path("search"),
        space=space.parsed({"lr": {"low": 0.1, "high": 1}}),
        search=Search(trials=1),
        settings=Settings(epochs=2),
        where=Where(strategy="single"),
    )
    searching = Searching(request, SearchFolder(tmp_path), study(), ["data"], lambda row: None)
    searching.run()
    (row,) = searching.rows
    assert (row.state, row.epoch) == (state, 2)
    assert [each.state.name for each in study().trials] == [name]
