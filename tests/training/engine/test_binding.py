"""One owner of what is put on a built model, and its order."""

from __future__ import annotations

import numpy as np
import pytest
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError
from tfdist.strategies.single import Alone
from tfdist.training.assemble import assemble
from tfdist.training.engine.binding import Binding, Engine, binding_of, known_of
from tfdist.training.model.scaling import Scaling

X, Y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)


def new_model() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model


def assembled(engine: Engine) -> keras.Model:
    return assemble(
        Binding(new_model(), Alone()),
        engine=engine,
        scaling=Scaling(None, 0, num_replicas=1),
        strategy_name="single",
        dataset=lambda *_, **__: None,
    )


def test_the_order_is_that_of_the_docstring():
    with tfdist.strategy("single", accumulate_steps=2) as strategy:
        model = strategy.build(new_model)
    put_on = binding_of(model, needed_by="a test").put_on
    assert put_on == [
        ("Sequential", "get_metrics_result"),
        ("BatchNormalization", "call"),
        ("Sequential", "train_step"),
        *(("Sequential", loop) for loop in ("fit", "evaluate", "predict")),
        *(("Sequential", f"{kind}_on_batch") for kind in ("train", "test", "predict")),
        ("Sequential", "compile"),
        ("Sequential", "load_weights"),
    ]


def test_nothing_else_takes_the_place_of_a_method():
    plain = set(vars(new_model()))
    with tfdist.strategy("single", accumulate_steps=2) as strategy:
        model = strategy.build(new_model)
    binding = binding_of(model, needed_by="a test")
    new = {name for name in set(vars(model)) - plain if callable(getattr(type(model), name, None))}
    assert new == {name for owner, name in binding.put_on if owner == "Sequential"}


def test_an_engine_encloses_keras_loops_within_and_those_of_tfdist_without():
    told = []

    def telling(where):
        def enclosed(fit):
            def run(*args, **options):
                told.append(where)
                return fit(*args, **options)

            return run

        return enclosed

    engine = Engine(
        within=((("fit",), telling("within")),), around=((("fit",), telling("around")),)
    )
    assembled(engine).fit(X, Y, verbose=0)
    assert told == ["around", "within"]


def test_a_new_compilation_is_told_to_all_in_their_order():
    told = []
    model = assembled(Engine(compiled=lambda: told.append("engine")))
    binding = binding_of(model, needed_by="a test")
    binding.when_compiled(lambda: told.append("later"))
    assert binding.times_compiled == 0
    model.compile("adam", "mae")
    assert (binding.times_compiled, told) == (1, ["engine", "later"])


def test_a_model_of_nobody_or_of_another_engine_is_refused():
    with pytest.raises(ModelError, match=r"a model that strategy\.build"):
        binding_of(new_model(), needed_by="describe")
    with pytest.raises(ModelError, match="a model that this strategy"):
        known_of(assembled(Engine(knows="a plan")), int, needed_by="describe")
