"""The mesh: slices, memory, layouts, files and refusals. Its fit is in tests/conformance too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scenario_plugin import selected
from tiers import long

import tfdist
from tfdist.errors import OptionError
from tfdist.strategies import parse_options

_SCRIPT = Path(__file__).with_name("mesh_scenarios.py")
_TOLERANCE = 1e-5
_TIMEOUT_S = 560

# The first test waits for all scenarios, on a machine that may be busy.
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Runs the scenarios in one process: it needs logical CPUs, which this one may not have."""
    out = tmp_path_factory.mktemp("mesh") / "results.json"
    wanted = [*selected(request, "model_on_mesh"), *selected(request, "mixed_on_mesh")]
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(out), *wanted],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert out.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


def of(results, scenario):
    result = results[scenario]
    assert "error" not in result, result["error"]
    return result


def test_each_device_holds_half_of_weights_and_slots(results):
    memory = of(results, "memory")
    assert memory["whole"] > 100e6
    assert len(memory["per_device"]) == 2
    for num_bytes in memory["per_device"]:
        assert num_bytes == pytest.approx(memory["whole"] / 2, rel=0.02)
    assert memory["slices"] == memory["slots"] == [[1024, 720], [1024, 720]]
    assert memory["held"] == [2, 1]  # What logical CPUs hold alike is there once.
    for devices in memory["devices"]:
        assert [name.rpartition("device:")[2] for name in devices] == ["CPU:0", "CPU:1"]


def test_the_host_copy_can_be_released(results):
    memory = of(results, "memory")
    assert memory["host"] == [0, 0]
    bytes_per_device, measured = memory["described"]
    assert measured == {"CPU:0": bytes_per_device, "CPU:1": bytes_per_device}
    assert memory["readable"]
    assert memory["moved"] > 0


@pytest.mark.parametrize(
    "model_on_mesh",
    [
        *("images 2x2", "sequences 2x2", "padded 2x2", "clipped 1x2", "masked_by_ones_own 2x2"),
        *long("nested 2x2", "masked 2x2", "normalized 1x2", "towers 1x2"),
        *long("vision 2x2", "clipped 2x2", "recurrent 2x2", "reshaped 2x2"),
        *long("nested 1x2", "images 1x2", "masked 1x2", "towers 2x2"),
    ],
)
def test_layers_are_exact(model_on_mesh, results):
    assert of(results, "exact")[model_on_mesh] <= _TOLERANCE


def test_settings_of_layers_count_as_they_are(results):
    found = of(results, "settings_of_layers")
    assert found["difference"] <= _TOLERANCE
    assert found["read"] == 0


def test_a_layout_is_the_users_where_he_gives_one(results):
    layout = of(results, "layout")
    assert layout["difference"] <= _TOLERANCE
    assert layout["splits"]["first/kernel"] == ["model", None]
    assert layout["splits"]["first/bias"] == [None]
    assert layout["splits"]["second/kernel"] == [None, "model"]
    # Forward: the rows of the first and the last layer; backward: the columns of the second.
    assert layout["collectives"] == [["all-reduce", "model", 3]]


@pytest.mark.parametrize(
    "what",
    [
        "resumed on another mesh",
        "gone on with in plain Keras",
        "weights of the layers",
        "a model object gone on with",
        "a loaded model gone on with",
        "weights read before a step",
        "weights read with their slots",
    ],
)
def test_files_are_those_of_one_device(what, results):
    assert of(results, "files")[what] <= _TOLERANCE


def test_dropout_draws_the_same_where_devices_hold_the_same(results):
    assert of(results, "dropout")["moved"] > 0
    assert of(results, "dropout")["unequal"] == []


def test_rows_drop_out_whole_where_the_noise_has_that_shape(results):
    found = of(results, "dropout_of_rows")
    assert 0.2 < found["dropped"] < 0.8
    assert found["torn"] == 0


@pytest.mark.parametrize(
    ("mixed_on_mesh", "dtype", "prediction", "weights"),
    [
        *long(("mixed_bfloat16 mixed_tokens", "bfloat16", 2e-2, 1e-2)),
        ("mixed_float16 mixed_images", "float16", 1e-2, 2e-3),
    ],
)
def test_mixed_precision_is_that_of_keras(mixed_on_mesh, dtype, prediction, weights, results):
    """Broken off on 1x2 and resumed on 2x2; tolerances are some roundings of the precision."""
    mixed = of(results, "mixed")[mixed_on_mesh]
    assert mixed["dtypes"] == [dtype, dtype]
    assert mixed["prediction"] <= prediction
    assert mixed["weights"] <= weights
    assert mixed["moved"] > 10 * weights
    resumed, expected = mixed["loss_scales"]
    assert resumed == expected
    assert expected < 2**30 if dtype == "float16" else expected == 1


def test_callbacks_see_what_they_see_on_one_device(results):
    callbacks = of(results, "callbacks")
    assert callbacks["epochs"][0] == callbacks["epochs"][1]
    for what in ("val_loss", "weights", "kept"):
        assert callbacks[what] <= _TOLERANCE, what


def test_callbacks_read_and_set_weights_within_a_fit(results):
    found = of(results, "weights_of_callbacks")
    assert len(found) == 6
    assert max(found.values()) <= _TOLERANCE, found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no layer", ["UnsupportedLayerError", "(GaussianNoise)", "Use Activation"]),
        ("rnn", ["(LSTM)", "draws random numbers"]),
        ("stateful", ["(GRU)", "from batch to batch"]),
        ("adafactor", ["Adafactor", "SGD, Adam"]),
        ("nadam", ["counts its variables", "keras Nadam"]),
        ("legacy", ["Choose one of tf.keras.optimizers"]),
        ("ema", ["use_ema=True"]),
        ("regularizer", ["Mean of dense", "L1, L2 or L1L2"]),
        ("activation", ["activation '<lambda>'"]),
        ("eagerly", ["run_eagerly"]),
        ("constraint", ["constraint of dense"]),
        ("added loss", ["adds a loss"]),
        ("mask", ["(BatchNormalization)", "follows a mask"]),
        ("noise", ["noise_shape", "all rows"]),
        ("unknown shape", ["unknown dimension"]),
        ("nothing matches", ["'conv.*'", "Choose from the paths dense"]),
        ("rank", ["each dimension of dense", "which has 2"]),
        ("axis", ["'modle'", "Did you mean 'model'?"]),
        ("divides", ["dimension 1 of dense", "splits, 15 in", "[1, 3, 5, 15]"]),
        ("no graph", ["layer 'encoder' (OfItsOwn)", "without a graph", "shard='optimizer'"]),
        ("repeated", ["tile of a weight", "tf.shape(x)[0]"]),
        ("draws in a call", ["(DropsPath)", "once for all steps"]),
        ("draws between", ["tf.random.normal", "once for all steps"]),
        ("always in training", ["(Dropout)", "evaluate and predict, too", "training=True"]),
        ("inner activity", ["(TimeDistributed)", "inside of it has an activity regularizer"]),
        ("joins rows", ["reshape works over the rows"]),
        ("over the rows", ["nn.softmax works over the rows"]),
        ("sparse", ["must be dense", "SparseTensorSpec", "Leave sparse=True"]),
        ("takes rows apart", ["tf.reshape", "one tensor [batch, ...]"]),
        ("rows of zeros", ["tf.concat", "a row for each record, but is constant"]),
        ("of no layer", ["a weight of a layer", "1 in operations between layers"]),
        ("clipped table", ["clipvalue and", "Use clipnorm"]),
        ("compiled again", ["the Adam of an earlier compile", "Make a new one"]),
        ("by hand", ["apply_gradients outside", "fit or train_on_batch"]),
        ("nothing to split", ["mesh axis 'model' must divide"]),
    ],
)
def test_what_a_mesh_cannot_do_is_refused_when_the_model_is_built(case, words, results):
    message = of(results, "refusals")[case]
    assert message.startswith(("OptionError", "ModelError", "UnsupportedLayerError"))
    for word in words:
        assert word in message


def test_an_id_that_an_embedding_has_no_row_for_is_named(results):
    told = of(results, "ids_of_no_row")
    assert len(told) == 6
    for message in told:
        assert "'words'" in message
        assert "0 to 15, but found id 4294967297" in message


def test_two_outputs_may_be_one_tensor(results):
    found = of(results, "outputs_of_one_tensor")
    assert max(found.values()) <= _TOLERANCE, found


def test_an_output_without_a_loss_is_left_alone(results):
    found = of(results, "outputs_without_a_loss")
    layers = {name.partition("/")[0].rstrip("_0123456789") for name in found["moved"]}
    assert layers == {"embedding", "dense", "told", "regular"}
    assert found["difference"] <= _TOLERANCE


@pytest.mark.parametrize("options", [{"batch": 0}, {"model": "two"}, {"model": True}])
def test_an_axis_is_a_whole_number(options):
    with pytest.raises(OptionError, match="whole number of at least 1"):
        tfdist.strategy("mesh", **options)


@pytest.mark.parametrize("devices", [2, [0, 1], {"CPU:0": 1}])
def test_devices_are_names(devices):
    with pytest.raises(OptionError, match=r"devices of a mesh must be names, but found .*GPU:0"):
        tfdist.strategy("mesh", devices=devices)


@pytest.mark.parametrize("devices", [["cpu0", "cpu1"], ["CPU", "CPU:x"]])
def test_devices_that_do_not_exist(devices, results):
    del results  # Which are made first: this process gets its devices here.
    strategy = tfdist.strategy("mesh", model=2, devices=devices)
    with pytest.raises(OptionError, match="the devices of a mesh must exist, but found"):
        strategy.start()


def test_devices_on_the_command_line():
    tfdist.strategy("mesh", **parse_options("mesh", ["devices=CPU:0,CPU:1"]))
    with pytest.raises(OptionError, match="must have 2 different devices, but found 1: CPU:0"):
        tfdist.strategy("mesh", **parse_options("mesh", ["devices=CPU:0"]))


def test_a_mesh_larger_than_its_devices_is_refused():
    with pytest.raises(
        OptionError, match=r"must have 4 different devices, but found 2: CPU:0, CPU:1"
    ):
        tfdist.strategy("mesh", batch=2, model=2, devices=["CPU:0", "CPU:1"])
