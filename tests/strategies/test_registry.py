"""Strategies by name, and their options."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import tfdist
from tfdist.compat.keras import VARIABLE
from tfdist.errors import EngineMissingError, OptionError
from tfdist.strategies import (
    REGISTRY,
    Spec,
    check_takes_keras,
    known_options,
    parse_options,
    register,
    strategy_class,
)
from tfdist.strategies.base import Strategy


@pytest.mark.parametrize("name", REGISTRY)
def test_registered_names_are_the_names_of_their_classes(name):
    cls = strategy_class(name)
    assert issubclass(cls, Strategy)
    assert cls.name == name
    assert isinstance(tfdist.strategy(name), cls)
    assert set(known_options(name)) >= {"lr_scaling", "warmup_epochs"}


def test_a_strategy_of_keras_2_alone_refuses_keras_3(monkeypatch):
    monkeypatch.setitem(REGISTRY, "single", replace(REGISTRY["single"], takes_keras_3=False))
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(
        EngineMissingError,
        match=r"strategy 'single' must have models of Keras 2, .* or use one of mirrored",
    ):
        check_takes_keras("single")


def test_an_unknown_strategy_lists_the_known():
    with pytest.raises(
        OptionError, match=r"Did you mean 'horovod'\? Choose one of single, mirrored"
    ):
        tfdist.strategy("horovot")


@pytest.mark.parametrize("name", REGISTRY)
def test_an_unknown_option_lists_the_known(name):
    with pytest.raises(OptionError, match=f"option of strategy '{name}'.*warmup_epochs"):
        tfdist.strategy(name, warmup=2)
    with pytest.raises(OptionError, match=f"option of strategy '{name}'.*warmup_epochs"):
        parse_options(name, ["warmup=2"])


@pytest.mark.parametrize("name", REGISTRY)
def test_each_option_has_a_meaning(name):
    """Which is what the class's docstring says of it."""
    assert [o.name for o in known_options(name).values() if len(o.meaning) < 5] == []


def test_a_name_is_of_one_strategy():
    register(REGISTRY["single"])  # As it is already.
    with pytest.raises(OptionError, match="a name of its own, but found 'single' for here:Other"):
        register(Spec(name="single", path="here:Other", summary="another one"))


def test_a_launcher_is_a_known_one():
    with pytest.raises(OptionError, match=r"launcher of strategy 'x'.*'ssh'.*mpi, gloo, tasks"):
        Spec(name="x", path="x:X", summary="", launchers=("ssh",))


def test_options_are_read_as_literals_or_words():
    pairs = ["compression=fp16", "accumulate_steps=2", "warmup_epochs=0.5", "threads=none"]
    assert parse_options("horovod", pairs) == {
        "compression": "fp16",
        "accumulate_steps": 2,
        "warmup_epochs": 0.5,
        "threads": None,
    }
    with pytest.raises(OptionError, match="key=value"):
        parse_options("horovod", ["compression"])


@pytest.mark.parametrize("none", ["none", "None"])
def test_none_is_a_word_where_the_default_is_one(none):
    words = {"shard": "none", "offload": "none", "recompute": "none"}
    for name, own in (("horovod", {"compression": "none"}), ("auto", {})):
        pairs = [f"{key}={none}" for key in (*words, *own, "precision")]
        assert parse_options(name, pairs) == {**words, **own, "precision": None}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mirrored", {"devices": 0}),
        ("mirrored", {"devices": "two"}),
        ("mirrored", {"devices": True}),
        ("horovod", {"op": "median"}),
        ("horovod", {"compression": "int8"}),
        ("horovod", {"stall_timeout_s": -1}),
        ("horovod", {"threads": 0}),
        ("horovod", {"threads": 1.5}),
        *[(name, {"lr_scaling": "cubic"}) for name in REGISTRY],
        *[(name, {"warmup_epochs": -1}) for name in REGISTRY],
        *[(name, {"warmup_epochs": "soon"}) for name in REGISTRY],
    ],
    ids=str,
)
def test_values_that_cannot_hold_are_refused_before_anything_starts(name, options):
    with pytest.raises(OptionError):
        tfdist.strategy(name, **options)


def test_what_an_option_takes_is_told():
    kinds = {name: option.kind for name, option in known_options("mirrored").items()}
    assert kinds["devices"] == "int"
    assert kinds["warmup_epochs"] == "float"
    assert kinds["sync_batch_norm"] == "true or false"
    assert kinds["recompute"] == "text or list of texts"
    for name in REGISTRY:
        assert all(option.kind for option in known_options(name).values()), name


def test_making_a_strategy_takes_no_device_and_no_engine():
    program = (
        "import sys, tfdist\n"
        "for name in ('single', 'mirrored', 'horovod'): tfdist.strategy(name)\n"
        "assert 'horovod' not in sys.modules\n"
        "context = sys.modules.get('tensorflow.python.eager.context')\n"
        "assert context is None or context.context()._context_handle is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_can_be_given_is_known_without_tensorflow():
    """The command line asks, in a process where an import of it would take seconds and lines."""
    program = (
        "import sys\n"
        "from tfdist.strategies import REGISTRY, known_options\n"
        "for name in REGISTRY: known_options(name)\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", ["mesh", "pipeline", "parameter_server", "federated"])
def test_steps_that_are_made_for_one_shape_refuse_several_lengths(name):
    refused = {"pad_to": "batch", "bucket_by_length": True}
    with pytest.raises(OptionError, match=r"one length, .* pad_to='batch', bucket_by_length=True"):
        tfdist.strategy(name).dataset(([0.0], [0]), global_batch_size=1, **refused)
