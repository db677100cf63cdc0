"""What a saved model may take the place of."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.strategies.base import clone, save_atomically


class Silent(tf.keras.layers.Dense):
    def get_config(self):
        raise NotImplementedError


def test_an_error_that_says_nothing_is_told_by_its_name(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((2,)), Silent(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"NotImplementedError.* Give a function"):
        clone(model)
    with tfdist.strategy("single") as strategy, pytest.raises(NotImplementedError):
        strategy.save(strategy.build(lambda: model), tmp_path / "model.keras")


def test_a_folder_of_the_users_is_never_replaced(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "model.py").write_text("mine")
    for path in (project, tmp_path):
        with pytest.raises(OptionError, match="must replace nothing but a saved model"):
            save_atomically(model, path)
    assert (project / "src" / "model.py").read_text() == "mine"
    for _ in range(2):  # The second takes the place of the first.
        save_atomically(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "saved_model.pb").is_file()
