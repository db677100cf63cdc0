"""What space.yaml may hold, and what is said of anything else."""

from __future__ import annotations

import pytest
from optuna.trial import FixedTrial

from tfdist.errors import DataError, OptionError
from tfdist.planning.yaml_file import read_yaml
from tfdist.tuning import space
from tfdist.tuning.space import Choice, Range

_GOOD = """
lr: {low: 1e-4, high: 0.1, log: true}
width: [8, 16, 32]
layers: {low: 1, high: 4, int: true}
rate: [1e-3, 0.5]
activation: [relu, null]
train:
  lr: {low: 1.0e-3, high: 1e-2}
  global_batch_size: [64, 128]
"""


def test_ranges_and_choices(tmp_path):
    (tmp_path / "space.yaml").write_text(_GOOD)
    found = space.parsed(read_yaml(tmp_path / "space.yaml"))
    assert found.model == {
        "lr": Range(1e-4, 0.1, log=True),
        "width": Choice((8, 16, 32)),
        "layers": Range(1, 4, int=True),
        "rate": Choice((1e-3, 0.5)),
        "activation": Choice(("relu", None)),
    }
    assert found.train == {"lr": Range(1e-3, 1e-2), "global_batch_size": Choice((64, 128))}


def test_names_of_both_kinds_do_not_meet():
    chosen = {"lr": 0.01, "train.lr": 0.002}
    ends = {"low": 1e-3, "high": 0.1}
    found = space.parsed({"lr": ends, "train": {"lr": ends}})
    assert found.suggested(FixedTrial(chosen)) == ({"lr": 0.01}, {"lr": 0.002})


def test_an_option_of_whole_numbers_has_whole_ones():
    ends = {"low": 32, "high": 64}
    found = space.parsed({"train": {"global_batch_size": ends, "pad_to": ends}, "rate": ends})
    assert found.train["global_batch_size"] == found.train["pad_to"] == Range(32, 64, int=True)
    assert found.model["rate"] == Range(32, 64)
    with pytest.raises(OptionError, match="whole ones where it counts"):
        space.parsed({"train": {"seed": {"low": 0.5, "high": 2}}})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "a space must name what is chosen"),
        ([1], "a space must name what is chosen"),
        ({"width": 8}, r"width in a space must be a range .* but found 8\. Write width:"),
        ({"width": []}, "width in a space must be a range"),
        ({"width": [[1]]}, "width in a space must be a range"),
        ({"width": [1, True]}, "width in a space must have each value once, .* found .1, True"),
        ({"lr": {"low": 1}}, "lr in a space must be a range"),
        ({"lr": {"low": 1, "high": 2, "lgo": True}}, "part of lr .* Choose one of low"),
        ({"lr": {"low": "a", "high": 2}}, "lr in a space must have numbers"),
        ({"lr": {"low": 1, "high": float("inf")}}, "lr in a space must have numbers"),
        ({"n": {"low": 1, "high": 10**400, "int": True}}, "n in a space must have numbers"),
        ({"n": {"low": 0.5, "high": 2, "int": True}}, "n in a space must have numbers"),
        ({"n": {"low": 1, "high": 2, "log": 1}}, "n in a space must have numbers"),
        ({"lr": {"low": 2, "high": 1}}, "low of lr in a space must be less"),
        ({"lr": {"low": 0, "high": 1, "log": True}}, "low of lr in a space must be less"),
        ({"two words": [1]}, "must name arguments"),
        ({"train": [1]}, "train in a space must be a section"),
        ({"train": {"epochs": [1]}}, "option in train of a space must be a known one"),
        ({"train": {"lr": 1}}, "train.lr in a space must be a range"),
    ],
)
def test_what_is_no_space(given, told):
    with pytest.raises(OptionError, match=told) as found:
        space.parsed(given)
    assert "\n" not in str(found.value)


def test_a_name_that_stands_twice(tmp_path):
    (tmp_path / "space.yaml").write_text("width: [8]\ndepth: [1]\nwidth: [16, 32]\n")
    with pytest.raises(DataError, match=r"must be YAML.*'width' twice"):
        read_yaml(tmp_path / "space.yaml")
    text = "a: &a {low: 1, high: 2}\nb: &b {<<: *a, high: 3}\nc: {<<: [*b, *a], high: 4}\n"
    (tmp_path / "space.yaml").write_text(text)
    assert read_yaml(tmp_path / "space.yaml")["c"] == {"low": 1, "high": 4}
