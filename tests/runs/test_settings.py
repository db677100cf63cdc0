"""The table of options: what is written out beside it, for readers and type checkers, agrees."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tfdist.errors import OptionError
from tfdist.launch.jobs import Where
from tfdist.runs import ranks
from tfdist.runs.predicting import predict
from tfdist.runs.settings import Settings, Start
from tfdist.runs.training import train
from tfdist.runs.verifying import Comparing, verify
from tfdist.training.engine.options import check_values, picked

DOCS = Path(__file__).parents[2] / "docs"
CALLS = [(train, (Where, Settings, Start)), (predict, (Where,)), (verify, (Where, Comparing))]
# Of a call with processes of its own, an elastic one alone.
ELASTIC = {"min_workers", "max_workers", "host_discovery"}


@pytest.mark.parametrize(("call", "tables"), CALLS)
def test_a_call_has_the_options_of_its_tables(call, tables):
    parameters = inspect.signature(call).parameters
    for option in (each for table in tables for each in fields(table)):
        if call is not train and option.name in ELASTIC:
            continue
        parameter = parameters[option.name]
        if option.name != "strategy":  # Which has no default in ``verify``.
            assert parameter.default == option.default, option.name
        if option.name not in ("strategy", "stall_timeout_s"):
            assert parameter.annotation == option.type, option.name
        assert re.search(rf"^        {option.name}: ", call.__doc__, re.M), option.name


def test_what_is_no_option_of_processes_is_refused(tmp_path):
    (tmp_path / "model.py").touch()
    with pytest.raises(TypeError, match="worker"):
        ranks.asked("tfdist.evaluate", f"{tmp_path}/model.py:f", strategy="single", worker=2)


@pytest.mark.parametrize("table", [Where, Settings, Start, Comparing])
def test_an_option_of_another_type_is_named(table):
    check_values(table())
    for each in fields(table):
        with pytest.raises(OptionError, match=f"^{each.name} must be .*, but found <object"):
            check_values(replace(table(), **{each.name: object()}))


def test_values_of_options():
    check_values(Settings(lr=1, augment=["flip"], callbacks=list, wandb="", bucket_by_length=[8]))
    assert picked(Settings, {"tensorboard": Path("logs"), "no": 1}) == {"tensorboard": "logs"}
    for wrong in ({"epochs": True}, {"lr": True}, {"stop_on_nan": 1}, {"epochs": None}):
        with pytest.raises(OptionError, match="must be"):
            check_values(Settings(**wrong))


def test_the_documentation_says_what_a_resumed_training_must_share():
    text = (DOCS / "configuration.md").read_text().partition("**Resuming**")[2].partition(".")[0]
    said = {name.replace("-", "_") for name in re.findall(r"`([a-z-]+)`", text)}
    assert said == {each.name for each in fields(Settings) if each.metadata["same_on_resume"]}


def test_the_documentation_lists_options_that_there_are():
    text = (DOCS / "configuration.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
    said = {name.replace("-", "_") for row in rows for name in re.findall(r"--([a-z-]+)", row)}
    assert said
    assert said <= {each.name for each in fields(Settings)}
