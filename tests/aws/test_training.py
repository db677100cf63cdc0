"""From a configuration to the distribution, hyperparameters and metrics of a job."""

from __future__ import annotations

import dataclasses
import datetime
import re
from pathlib import Path

import numpy as np
import pytest

from tfdist.aws import training
from tfdist.aws.config import TrainingConfig, load
from tfdist.aws.instances import PriceTable
from tfdist.aws.job import metric_line
from tfdist.errors import OptionError
from tfdist.records.writing.writer import write
from tfdist.runs.settings import Settings

SHIPPED = Path(__file__).parents[2] / "sagemaker" / "config.yaml"
PRICES = PriceTable.load()


def distribution(**options):
    wanted = TrainingConfig(**options)
    return training.distribution(wanted, PRICES[wanted.instance_type])


@pytest.mark.parametrize("strategy", ["single", "mirrored", "mesh", "pipeline", "auto"])
def test_strategies_of_one_process(strategy):
    assert distribution(strategy=strategy) == {}
    with pytest.raises(OptionError, match="must run on one instance"):
        distribution(strategy=strategy, instance_count=2)


def test_horovod_has_a_process_for_each_gpu():
    image = {"strategy": "horovod", "image_uri": "image"}
    found = distribution(**image, instance_type="ml.g5.12xlarge")
    assert found == {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 4,
        "sagemaker_mpi_custom_mpi_options": "",
    }
    found = distribution(**image, instance_type="ml.c5.2xlarge", processes_per_host=2)
    assert found["sagemaker_mpi_num_of_processes_per_host"] == 2
    assert "mpi_yield_when_idle" in found["sagemaker_mpi_custom_mpi_options"]
    with pytest.raises(OptionError, match=r"5 processes on ml.g5.12xlarge with 4 GPUs"):
        distribution(**image, instance_type="ml.g5.12xlarge", processes_per_host=5)


def test_horovod_needs_an_image_with_it():
    with pytest.raises(OptionError, match=r"strategy 'horovod' must .*sagemaker/Dockerfile"):
        distribution(strategy="horovod")
    with pytest.raises(OptionError, match="strategy 'pipeline' must have an image with Horovod"):
        distribution(strategy="pipeline", strategy_options={"replicas": "horovod"})


def test_strategies_that_the_container_starts_itself():
    options = {"instance_count": 2}
    assert distribution(strategy="multi_worker", **options) == {
        "sagemaker_multi_worker_mirrored_strategy_enabled": True
    }
    assert distribution(strategy="parameter_server", **options) == {
        "sagemaker_parameter_server_enabled": True
    }
    with pytest.raises(OptionError, match="strategy must be a known one"):
        distribution(strategy="horovd")


def test_an_image_of_ones_own_is_enough():
    wanted = load(SHIPPED, ("training.image_uri=mine", "training.framework_version='1.15'"))
    assert training.image(wanted, "ml.m5.large") == "mine"
    assert training.warning(wanted, datetime.date(2030, 1, 1)) is None


@pytest.mark.parametrize(
    ("imports", "said", "keras"),
    [
        ("import keras", None, 3),
        ("from tf_keras import layers", None, 2),
        ("from tensorflow import keras", None, 2),
        ("from tensorflow import keras", 3, 3),
        ("import keras, tf_keras", None, 2),
        ("import keras", 3, 3),
        ("import keras", 2, "but found 2, and `import keras` in "),
        ("import tf_keras", 3, "Leave training.keras out"),
    ],
)
def test_a_job_has_the_keras_that_the_models_file_imports(tmp_path, imports, said, keras):
    (tmp_path / "own.py").write_text(imports)
    changes = (f"model={tmp_path / 'own.py'}:model_fn", f"training.keras={said or 'null'}")
    wanted = load(SHIPPED, changes)
    if isinstance(keras, int):
        assert training.hyperparameters(wanted)["keras"] == keras
        return
    with pytest.raises(OptionError, match=keras):
        training.hyperparameters(wanted)


def test_hyperparameters_are_those_of_the_script():
    values = training.hyperparameters(load(SHIPPED))
    training.check_hyperparameters(values)
    assert values["model"] == "digits.py:model_fn"
    assert values["checkpoint-dir"] == "/opt/ml/checkpoints"
    with pytest.raises(OptionError, match="tflite"):
        training.check_hyperparameters({**values, "tflite": "int4"})


def test_a_job_keeps_checkpoints_on_spot_instances_and_where_it_is_asked_to():
    def kept(*changes):
        values = training.hyperparameters(load(SHIPPED, changes))
        return values.get("checkpoint-dir"), values.get("max-run-s"), values.get("checkpoint-every")

    every = "training.checkpoint_every=null"
    assert kept(every) == ("/opt/ml/checkpoints", 3600, None)
    assert kept("training.spot=false") == ("/opt/ml/checkpoints", 3600, 50)
    assert kept("training.spot=false", every) == (None, None, None)


def test_every_setting_of_tfdist_train_reaches_a_job():
    from tfdist.aws import job

    known = {action.dest for action in job.parser()._actions}
    assert {setting.name for setting in dataclasses.fields(Settings)} < known
    changes = (
        f"training.callbacks={SHIPPED.parent / 'own.py'}:callbacks",
        "training.save_best={monitor: val_accuracy, mode: max}",
        "training.stop_on_nan=false",
        "training.keep=5",
    )
    values = training.hyperparameters(load(SHIPPED, changes))
    assert values["callbacks"] == "own.py:callbacks"
    training.check_hyperparameters(values)
    arguments = [t for key, value in values.items() for t in (f"--{key}", str(value))]
    options = job.parser().parse(arguments)
    assert options.save_best == {"monitor": "val_accuracy", "mode": "max"}
    assert (options.stop_on_nan, options.keep) == (False, 5)


def test_weights_of_classes_are_read_and_checked_here(tmp_path):
    write((np.zeros([4, 2]), np.array([0, 0, 0, 1])), tmp_path / "data", split="train=1")
    (tmp_path / "weights.json").write_text('{"0": 1, "1": 2}')

    def sent(given: str) -> object:
        data = (f"data.folder={tmp_path / 'data'}", "data.source=null")
        values = training.hyperparameters(
            load(SHIPPED, (*data, f"training.class_weight='{given}'"))
        )
        training.check_hyperparameters(values)
        return values["class-weight"]

    assert sent(str(tmp_path / "weights.json")) == {"0": 1, "1": 2}
    assert sent("0=1,1=2") == "0=1,1=2"
    assert sent("balanced") == "balanced"
    with pytest.raises(OptionError, match="class_weight must name classes of the data"):
        sent("0=1,1=2,7=3")


def test_hyperparameters_of_a_script_of_ones_own():
    changes = ("training.entry_point=mine.py", "training.hyperparameters={lr: 0.1}")
    assert training.hyperparameters(load(SHIPPED, changes)) == {"lr": 0.1}
    with pytest.raises(OptionError, match="a script of your own"):
        training.hyperparameters(load(SHIPPED, changes[1:]))


# Captured from rehearsals: a plain run, mpirun's prefix, and what the toolkit makes of that prefix
# when it reads mpirun's output.
EPOCH = (
    "tfdist epoch=2 loss=0.260481 accuracy=0.925539 val_loss=0.50679 val_accuracy=0.866667 "
    "learning_rate=0.05 seconds=0.147229 samples_per_s=9760.32"
)
PREFIXES = ("", "[1,0]<stdout>:", "[1,mpirank:0,algo-1]<stdout>:")
START = "tfdist strategy=horovod hosts=1 replicas=2 records=1437 steps_per_epoch=12"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_metrics_are_found_in_the_log(prefix):
    found = {}
    for definition in training.metric_definitions(["loss", "accuracy"]):
        assert not re.search(definition["Regex"], prefix + START)
        found[definition["Name"]] = float(re.search(definition["Regex"], prefix + EPOCH)[1])
    assert found == {
        "train:loss": 0.260481,
        "train:accuracy": 0.925539,
        "validation:loss": 0.50679,
        "validation:accuracy": 0.866667,
        "train:samples_per_s": 9760.32,
        "train:epoch_seconds": 0.147229,
    }


@pytest.mark.parametrize("value", [1e-7, 123456789.0, 0.0, 1.0, -2.5])
def test_every_number_is_found_whole(value):
    line = metric_line({"epoch": 1, "loss": value, "val_loss": 7})
    (definition, *_) = training.metric_definitions(["loss"])
    assert float(re.search(definition["Regex"], line)[1]) == pytest.approx(value, rel=1e-5)
