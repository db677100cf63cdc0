"""What a step needs, told from its graph in processes of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from benchmarks import apart
from tfdist.errors import OptionError
from tfdist.runs.needs import find_needs

pytestmark = pytest.mark.timeout(180)
_ROOT = Path(__file__).parents[2]
_WIDTH, _DEPTH, _ROWS = 256, 4, 512
_MODEL = f"""
from tensorflow import keras

def model_fn():
    hidden = [keras.layers.Dense({_WIDTH}, "tanh") for _ in range({_DEPTH})]
    model = keras.Sequential([keras.Input(({_WIDTH},)), *hidden])
    model.compile("adam", "mse")
    return model
"""


def test_a_rank_needs_its_weights_and_its_share_of_the_rows(model):
    asked = [
        ("single", {}, 1),
        ("horovod", {}, 2),
        ("mirrored", {"accumulate_steps": 2}, 2),
        ("single", {"recompute": "nothing"}, 1),
        ("federated", {}, 2),
    ]
    single, horovod, mirrored, wrong, federated = find_needs(model, asked, rows=_ROWS)
    weights = 4 * _DEPTH * (_WIDTH * _WIDTH + _WIDTH)
    for needs in (single, horovod, mirrored):
        assert (needs.weights, needs.gradients) == (weights, weights)
        assert needs.slots == 2 * weights
        # A product forward, and two backward, but that of the inputs' gradient.
        assert needs.flops_per_row == (3 * _DEPTH - 1) * 2 * _WIDTH * _WIDTH
        assert needs.flops == 0
    kept = 4 * _WIDTH * (1 + _DEPTH)  # Of each row: what layers are given and give.
    assert kept <= single.per_row <= kept + 3 * 4 * _WIDTH
    assert 0.99 * kept / 2 <= horovod.per_row <= single.per_row / 2
    # Microbatches are parts of the rows of a replica, x and y, which stay as a whole; in the worst
    # order of threads a part of an output lies there besides.
    assert 0.99 * kept / 4 <= mirrored.per_row <= single.per_row / 4 + 6 * _WIDTH
    assert (single.summed, horovod.summed) == (0, weights)
    assert single.largest_batch(single.peak(_ROWS)) == _ROWS
    assert "nothing" in str(wrong)
    assert "a client takes what single takes" in str(federated)


_SOFTMAX = """
from tensorflow import keras

def model_fn(jit_compile=False, run_eagerly=False):
    hidden = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential([keras.Input((256,)), *hidden])
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", loss, jit_compile=jit_compile, run_eagerly=run_eagerly)
    return model
"""


@pytest.mark.long
def test_replicas_of_a_softmax_do_the_same_products(model, tmp_path):
    (tmp_path / "model.py").write_text(_SOFTMAX)
    single, horovod = find_needs(model, [("single", {}, 1), ("horovod", {}, 2)], rows=16)
    assert single.flops_per_row == horovod.flops_per_row == 2 * 2 * 256 * 64 + 3 * 2 * 64 * 10
    # In the worst order of threads the largest gradient lies there twice, whatever the rows: the
    # line of large batches holds for 16 rows, too.
    assert 4 * 256 * 64 <= single.fixed <= 1.05 * 4 * 256 * 64
    assert single.least == 0
    kept = 4 * (256 + 64 + 10)  # Of each row; and in the worst order the hidden gradient besides.
    assert kept <= single.per_row <= kept + 4 * 64
    assert kept / 2 <= horovod.per_row <= single.per_row / 2


@pytest.mark.long
def test_xla_is_seen_through_and_no_graph_is_refused(model, tmp_path):
    (tmp_path / "model.py").write_text(_SOFTMAX)
    (compiled,) = find_needs(f"{model}(jit_compile=True)", [("single", {}, 1)], rows=16)
    assert compiled.flops_per_row == 2 * 2 * 256 * 64 + 3 * 2 * 64 * 10
    (refusal,) = find_needs(f"{model}(run_eagerly=True)", [("single", {}, 1)], rows=16)
    assert "with run_eagerly=True" in str(refusal)


_FATAL = """
import os
import signal
import tensorflow as tf
from tensorflow import keras

def model_fn():
    print("a line of its own")
    if tf.distribute.has_strategy():
        os.kill(os.getpid(), signal.SIGKILL)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model
"""


def test_a_row_that_dies_takes_no_other_with_it(model, tmp_path, capfd):
    (tmp_path / "model.py").write_text(_FATAL)
    asked = [("single", {}, 1), ("mirrored", {}, 2), ("horovod", {}, 2)]
    single, mirrored, horovod = find_needs(model, asked, rows=16)
    assert "a process that ended with exit code 137 (SIGKILL)" in str(mirrored)
    assert single.weights == horovod.weights == 4 * (4 * 2 + 2)
    assert capfd.readouterr().out == ""


@pytest.mark.long
@pytest.mark.honest_start
def test_what_ends_a_plan_ends_its_processes(model):
    """Forks that trace the other rows are under way when the first one tells."""
    before, begun = set(psutil.Process().children(recursive=True)), set()

    def interrupt(row: int, event: dict) -> None:
        if event["event"] == "needs" and not begun:
            begun.update(set(psutil.Process().children(recursive=True)) - before)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        find_needs(model, [("single", {}, 1)] * 6, rows=_ROWS, on_event=interrupt)
    assert len(begun) > 3, "the guards, the program, and a fork"
    assert not any(process.is_running() for process in begun)


def test_rows_are_a_whole_number(model):
    with pytest.raises(OptionError, match="global_batch_size must be"):
        find_needs(model, [("single", {}, 1)], rows=0)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("single", {"recompute": "blocks"}), ("pipeline", {"stages": 2}), ("mirrored", {})],
)
def test_told_bytes_are_those_that_a_step_takes(strategy, options, monkeypatch):
    monkeypatch.chdir(_ROOT)
    found = apart.call(
        "benchmarks.plan", "told_and_measured", model="stack", strategy=strategy, options=options
    )
    assert found["told"] == pytest.approx(found["measured"], rel=0.05)
