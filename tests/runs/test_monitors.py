"""What --early-stopping and --save-best are given."""

from __future__ import annotations

import pytest

from tfdist.errors import OptionError
from tfdist.runs import monitors


def test_arguments_are_read_as_those_of_keras():
    text = "val_loss,patience=3,min_delta=0.01,restore_best_weights=true,start_from_epoch=2"
    read = {
        "monitor": "val_loss",
        "mode": "min",
        "patience": 3,
        "min_delta": 0.01,
        "restore_best_weights": True,
        "start_from_epoch": 2,
    }
    assert monitors.watched("early_stopping", text) == read
    assert monitors.watched("early_stopping", read) == read


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        *(("loss", "min"), ("val_loss", "min"), ("val_mean_absolute_error", "min"), ("mae", "min")),
        *(("accuracy", "max"), ("val_auc_1", "max"), ("val_f1_score", "max"), ("recall", "max")),
        *(("val_binary_io_u", "max"), ("reward,mode=max", "max")),
    ],
)
def test_whether_less_or_more_is_better(monitor, mode):
    assert monitors.watched("save_best", monitor) == {
        "monitor": monitor.partition(",")[0],
        "mode": mode,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("val_reward", "must say whether less or more .* found 'val_reward'.*mode=max"),
        ("val_loss,patence=3", "part of early_stopping must be a known one.*'patience'"),
        ("val_brier_score", "'val_brier_score', which can be either"),
        ("neg_mean_squared_error", "'neg_mean_squared_error', which can be either"),
        ("val_los", r"'val_los', which can be either\. Did you mean 'val_loss'\? If not, write"),
        ("val_acuracy", "Did you mean 'val_accuracy'"),
        ("val_loss,patience=-1", "patience of early_stopping must be a whole number"),
        ("val_loss,patience=1.5", "patience of early_stopping must be a whole number"),
        ("val_loss,min_delta=nan", "min_delta of early_stopping must be a number"),
        ("val_loss,mode=auto", "mode of early_stopping must be min or max"),
        ("val_loss,restore_best_weights=maybe", "must be true or false"),
        ("val_loss,patience=3,patience=5", "patience of early_stopping must be given once"),
        ("val_loss,monitor=val_accuracy", "monitor of early_stopping must be given once"),
        ("", "must begin with the name"),
        ("patience=3", "must begin with the name"),
        ({"patience": 3}, "must begin with the name"),
        (3, "must begin with the name"),
    ],
)
def test_what_cannot_be(given, words):
    with pytest.raises(OptionError, match=words):
        monitors.watched("early_stopping", given)
