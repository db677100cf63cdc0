"""What trials are asked for, and what is written of the best: before any of them begins."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from click.testing import CliRunner

import tfdist
from tfdist.cli.train import command
from tfdist.errors import ModelError, OptionError
from tfdist.launch.jobs import Where
from tfdist.runs import monitors
from tfdist.runs.class_weights import class_weights
from tfdist.runs.settings import Settings
from tfdist.tuning import folds, results, space
from tfdist.tuning.folder import SearchFolder
from tfdist.tuning.request import Request, Search
from tfdist.tuning.results import Found

_MODEL = """
def model_fn(width):
    ...

def callbacks():
    return []
"""


@pytest.fixture
def request_of(tmp_path, monkeypatch):
    """Returns a request of trainings with some settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_of_request.py").write_text(_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    x = np.zeros((12, 2), np.float32)
    tfdist.records.write((x, np.arange(12) % 2), "data", num_shards=1, split="train=2,validation=1")

    def made(search=MappingProxyType({}), **settings) -> Request:
        return Request(
            model="model_of_request.py:model_fn",
            data="data",
            output=Path("search"),
            space=space.parsed({"width": [8]}),
            search=Search(**search),
            settings=Settings(**settings),
            where=Where(strategy="single"),
        )

    return made


def test_what_a_program_gave_is_written_as_the_command_reads_it(request_of):
    import model_of_request

    stopping = {"monitor": "val_loss", "patience": 3, "min_delta": 0.5, "mode": "min"}
    best = {"monitor": "val_cost", "mode": "max"}
    weights = {0: 1.5, 1: 2}
    request = request_of(
        early_stopping=stopping,
        save_best=best,
        class_weight=weights,
        pad_to=64,
        augment=["flip", "crop"],
        callbacks=model_of_request.callbacks,
    )
    results.write_options(SearchFolder(Path()), request.options_of_train({"width": 8}, {}))
    asked = ["--config", "best.yaml", "--output", "out"]
    with command.make_context("train", asked, resilient_parsing=False) as context:
        read = context.params
    assert monitors.watched("early_stopping", read["early_stopping"]) == stopping
    assert monitors.watched("save_best", read["save_best"]) == best
    assert class_weights(read["class_weight"], "data/train") == {"0": 1.5, "1": 2.0}
    assert (read["pad_to"], read["augment"]) == (64, "flip,crop")
    assert read["callbacks"] == "model_of_request:callbacks"
    assert read["model"] == "model_of_request.py:model_fn(width=8)"
    assert CliRunner().invoke(command, [*asked, "--print-config"]).exit_code == 0


def test_what_cannot_be_written_is_refused_before_a_trial(request_of):
    request_of().check()
    with pytest.raises(OptionError, match=r"must be True.*takes no bounds"):
        request_of(pad_to=8, bucket_by_length=[8, 16]).check()
    with pytest.raises(ModelError, match="other processes import"):
        request_of(callbacks=lambda: [None]).check()


def test_logs_of_a_trial_are_its_own(request_of):
    for profile, of_trial in (
        ("steps=2:3", "steps=2:3"),
        ("logs", "logs/007"),
        ("logs,steps=2:3", "logs/007,steps=2:3"),
    ):
        request = request_of(profile=profile, tensorboard="board")
        config = request.training(7, {"width": 8}, {}, "data", Path("trial"), 1)
        assert config["profile"] == of_trial
        assert config["tensorboard"] == "board/007"


def test_a_fold_is_trained_as_the_whole_split(request_of, tmp_path):
    x = np.zeros((12, 2), np.float32)
    tfdist.records.write((x, np.arange(12) % 3), "data/only", num_shards=2, split="train=1")
    watched = {"early_stopping": "val_loss,patience=2", "class_weight": "balanced"}
    request = replace(
        request_of(search={"folds": 2}, tensorboard="board", **watched), data="data/only"
    )
    request.check()
    (fold, _) = folds.write(request.data, 2, tmp_path / "folds")
    config = request.training(7, {"width": 8}, {}, fold, Path("trial/fold-0"), 1)
    assert config["class_weight"] == dict.fromkeys("012", 1.0)
    assert config["early_stopping"]["monitor"] == "val_loss"
    assert config["tensorboard"] == "board/007/fold-0"
    # `tfdist train` of this data has no validation to watch.
    assert "early-stopping" not in request.options_of_train({}, {})
    with pytest.raises(OptionError, match="where there is no validation"):
        replace(request_of(**watched), data="data/only").check()


def test_a_pruner_looks_at_epochs_of_its_own(request_of):
    for pruner, rungs in (
        ("halving", [2, 6, 7]),
        ("median", [2, 4, 6, 7]),
        ("none", [7]),
    ):
        assert request_of(search={"pruner": pruner, "grace": 2}, epochs=7).rungs == rungs


def test_the_best_stands_beside_whatever_folder(tmp_path, monkeypatch):
    place = tmp_path / "with space"
    place.mkdir()
    monkeypatch.chdir(place)
    found = Found(Path("."), [], None, [])
    told = ["--config", "best.yaml", "--output", str(tmp_path / "with space-best")]
    assert shlex.split(found.command)[2:] == told
    away = replace(found, folder=place)
    assert shlex.split(away.command)[3] == str(place / "best.yaml")
