"""How the scripts begin and end; what is sent into a container runs there."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow

from tfdist.aws import bundle, config, evaluation, job, sharding
from tfdist.aws.container import Container
from tfdist.aws.training import check_hyperparameters
from tfdist.errors import EngineMissingError, ModelError, OptionError, TfdistError
from tfdist.records.writing.writer import write
from tfdist.strategies.registry import REGISTRY

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "sagemaker"


def collected(folder):
    """Collects in ``folder`` what is sent into a container."""
    wanted = config.load(
        SCRIPTS / "config.yaml", (f"model={ROOT / 'examples' / 'digits.py'}:model_fn",)
    )
    return bundle.collect(wanted, folder / "code")


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """The folder that is sent into a container; programs that run in it may leave caches there."""
    return collected(tmp_path_factory.mktemp("sent"))


def test_an_unknown_hyperparameter_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"'epoch'.*Did you mean 'epochs'.*global-batch-size"):
        job.parser().parse(["--model", "a.py:b", "--epoch", "3"])


@pytest.mark.parametrize(
    ("parser", "arguments", "message"),
    [
        (job.parser, ["--model", "a.py:b", "--epochs", "three"], "invalid int value"),
        (job.parser, ["--model", "a.py:b", "--tflite", "int4"], "invalid choice"),
        (job.parser, [], "required: --model"),
        (evaluation.parser, ["--model", "m"], "required: --manifest"),
        (sharding.parser, ["--source", "digits"], "required: --output"),
    ],
)
def test_a_wrong_value_is_a_users_mistake(parser, arguments, message):
    with pytest.raises(OptionError, match=message):
        parser().parse(arguments)


def run(body, folder):
    code = f"""
import sys
from pathlib import Path
from tfdist.aws import entry
from tfdist.errors import DataError
def body(arguments):
    {body}
entry.run(body, Path({str(folder)!r}))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_reason_goes_to_stderr_and_into_the_failure_file(tmp_path):
    done = run("raise DataError('data must exist', received='none')", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "tfdist: Error: data must exist, but found none.\n"
    assert (tmp_path / "failure").read_text() == "data must exist, but found none."


def test_the_first_rank_that_fails_tells_the_cause(tmp_path):
    (tmp_path / "failure").write_text("the cause")
    run("raise DataError('what follows')", tmp_path)
    assert (tmp_path / "failure").read_text() == "the cause"


def test_a_bug_keeps_its_traceback(tmp_path):
    done = run("1 / 0", tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert (tmp_path / "failure").read_text() == "ZeroDivisionError: division by zero"


def test_success_writes_no_failure(tmp_path):
    assert run("pass", tmp_path).returncode == 0
    assert not (tmp_path / "failure").exists()


def test_outside_of_a_container_the_script_says_so():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "train.py", "--model", "digits.py:model_fn"],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no SM_INPUT_DATA_CONFIG" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_sent_is_python_3_10(sent):
    files = sorted(sent.rglob("*.py"))
    assert len(files) > 50
    for path in files:
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


def test_what_is_sent_needs_neither_the_sdk_nor_tff(sent):
    # Only what it holds itself is on the path, and some packages cannot be imported at all.
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sagemaker", "boto3", "botocore", "tensorflow_federated", "moto"):
            raise ImportError(f"{name} is not in a container")
sys.meta_path.insert(0, Refuse())
import train, evaluate, shard, inference
import tensorflow
from tfdist.aws import saved_model
from tfdist.strategies.horovod import strategy
from tfdist.strategies import mirrored, single
from tfdist.training.checkpoints import checkpoint
from tfdist.training.loops import fit
import tfdist
print(tfdist.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=sent,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == sent / "tfdist"


def test_the_container_installs_what_tfdist_needs(sent):
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    needed = set(metadata["options"]["install_requires"].split())
    lines = (sent / "requirements.txt").read_text().splitlines()
    listed = {line for line in lines if not line.startswith("#")}
    # The image has a TensorFlow, which must stay: a newer tf_keras would bring its own. Images are
    # sharded there, and models scored.
    extras = metadata["options.extras_require"]
    needed |= set(extras["images"].split())
    needed |= {line for line in extras["sagemaker"].split() if line.startswith("scikit-learn")}
    assert {name for name in needed if not name.startswith(("tensorflow", "tf_keras"))} == listed


def test_scaling_reaches_the_strategy():
    arguments = ["--model", "a.py:b", "--strategy", "single", "--lr-scaling", "linear"]
    options = job.parser().parse([*arguments, "--warmup-epochs", "2"])
    scaling = job.strategy_of(options).scaling
    assert (scaling.rule, scaling.warmup_epochs) == ("linear", 2)
    options = job.parser().parse([*arguments, "--strategy-options", "[1]"])
    with pytest.raises(OptionError, match="a JSON object"):
        job.strategy_of(options)


_WITHOUT_CALL = """
from tensorflow import keras


class Own(keras.Model):
    def train_step(self, data):
        return {}


def model_fn():
    model = Own()
    model.compile("sgd")
    return model
"""


class _Stopped(Exception):
    pass


class _Strategy:
    """Takes what a job gives it, and stops where the training would begin."""

    name, num_replicas = "single", 1

    def __init__(self, is_chief):
        self.topology = SimpleNamespace(is_chief=is_chief)
        self.datasets, self.fitted = {}, {}

    def build(self, model_fn):
        self.model = model_fn()
        self.model.fit = self._fit
        return self.model

    def dataset(self, source, *, training, **options):
        self.datasets[source] = options
        numbers = dict.fromkeys(("num_records", "records_per_epoch", "steps_per_epoch"), 1)
        return SimpleNamespace(**numbers, callback_steps=1)

    def _fit(self, *_, **options):
        self.fitted = options
        raise _Stopped


def _fitted(tmp_path, *more, is_chief=False):
    """Returns what a job with these hyperparameters asks of a strategy."""
    write((np.zeros([4, 2]), np.array([0, 0, 0, 1])), tmp_path / "data", split="train=1")
    arguments = ["--model", "tfdist.examples.digits:model_fn", *more]
    strategy = _Strategy(is_chief)
    container = SimpleNamespace(
        source=lambda split, topology: split,
        manifest_folder=tmp_path / "data",
        model_dir=tmp_path,
        hosts=["algo-1"],
    )
    with pytest.raises(_Stopped):
        job.fit(strategy, job.parse(arguments), container, SCRIPTS)
    return strategy


def test_only_what_is_trained_on_is_augmented(tmp_path):
    found = _fitted(tmp_path, "--augment", "crop,flip").datasets
    assert list(found) == ["train", "validation"]
    assert callable(found["train"]["record_fn"])
    assert "record_fn" not in found["validation"]
    with pytest.raises(OptionError, match=r"augmentations must be one or more of .*'spin'"):
        job.parse(["--model", "a.py:b", "--augment", "spin"])


def test_a_job_takes_the_settings_of_tfdist_train(tmp_path):
    strategy = _fitted(
        tmp_path,
        *("--lr", "0.25", "--pad-to", "8", "--bucket-by-length", "16,32"),
        *("--class-weight", "balanced", "--early-stopping", "val_loss,patience=3"),
    )
    assert float(strategy.model.optimizer.learning_rate) == 0.25
    assert strategy.datasets["train"]["pad_to"] == strategy.datasets["validation"]["pad_to"] == 8
    assert strategy.datasets["train"]["bucket_by_length"] == [16, 32]
    assert strategy.fitted["class_weight"] == pytest.approx({0: 2 / 3, 1: 2.0})
    stopping = strategy.fitted["callbacks"][-1]
    assert (stopping.monitor, stopping.patience) == ("val_loss", 3)


@pytest.mark.parametrize(
    ("name", "value", "key", "found"),
    [
        ("bucket-by-length", True, "bucket_by_length", True),
        ("bucket-by-length", "true", "bucket_by_length", True),
        ("bucket-by-length", False, "bucket_by_length", False),
        ("bucket-by-length", [16, 32], "bucket_by_length", [16, 32]),
        ("bucket-by-length", "16", "bucket_by_length", [16]),
        ("augment", ["crop", "flip"], "augment", ["crop", "flip"]),
        ("augment", "crop,flip", "augment", "crop,flip"),
        ("class-weight", {"0": 1.0, "1": 2}, "class_weight", {"0": 1.0, "1": 2}),
        ("class-weight", "0=1,1=2", "class_weight", "0=1,1=2"),
        ("early-stopping", {"monitor": "loss"}, "early_stopping", {"monitor": "loss"}),
        ("strategy-options", {"sync_batch_norm": False}, "strategy_options", None),
        ("strategy-options", '{"sync_batch_norm": false}', "strategy_options", None),
    ],
)
def test_values_that_are_no_text_come_as_python_writes_them(name, value, key, found):
    """As SageMaker's training toolkit does."""
    options = job.parse(["--model", "a.py:b", "--pad-to", "batch", f"--{name}", str(value)])
    assert getattr(options, key) == ({"sync_batch_norm": False} if found is None else found)


def test_lengths_that_are_none_are_named():
    with pytest.raises(OptionError, match=r"lengths as 32,64, but is 'yes'"):
        job.parse(["--model", "a.py:b", "--bucket-by-length", "yes"])


def test_a_model_that_cannot_be_kept_is_refused_before_it_is_trained(tmp_path):
    (tmp_path / "own.py").write_text(_WITHOUT_CALL)
    with pytest.raises(ModelError, match="the model of a job must have a call"):
        _fitted(tmp_path, "--model", f"{tmp_path / 'own.py'}:model_fn", is_chief=True)


@pytest.mark.parametrize("is_chief", [True, False])
def test_the_chief_of_a_job_says_that_it_traces(tmp_path, is_chief):
    from tfdist.training.loops.tracing import TracingNotice

    callbacks = _fitted(tmp_path, is_chief=is_chief).fitted["callbacks"]
    assert any(isinstance(callback, TracingNotice) for callback in callbacks) == is_chief


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lr", "-1", "lr must be a number above 0"),
        ("early-stopping", "val_loss,patients=3", "patients"),
        ("pad-to", "some", "pad_to"),
        ("epochs", "0", "epochs"),
        ("class-weight", "no/weights.json", "class_weight must be balanced, CLASS=WEIGHT,"),
    ],
)
def test_a_setting_that_cannot_hold_is_found_before_an_instance_is_paid_for(name, value, told):
    with pytest.raises(OptionError, match=told):
        check_hyperparameters({"model": "a.py:b", name: value})


def test_what_keras_3_has_not_is_found_before_an_instance_is_paid_for(monkeypatch):
    words = ["--model", "a.py:b", "--keras", "3", "--tflite", "int8", "--strategy"]
    assert job.parse([*words, "pipeline"]).tflite == "int8"
    # A strategy of another package may not take it.
    of_keras_2 = dataclasses.replace(REGISTRY["pipeline"], takes_keras_3=False)
    monkeypatch.setitem(REGISTRY, "pipeline", of_keras_2)
    with pytest.raises(OptionError, match="strategy for a model of Keras 3 must be a known one"):
        job.parse([*words, "pipeline"])


@pytest.fixture
def pip(monkeypatch):
    """An image without tf_keras; returns the commands of pip, which brings it unless it fails."""
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    image = {"tf_keras": None}
    monkeypatch.setattr(importlib.util, "find_spec", image.get)

    def run(command, **options):
        commands.append(command)
        image["tf_keras"] = "there"
        return SimpleNamespace(returncode=commands.fails, stderr="no\nnetwork")

    class Commands(list):
        fails = 0

    commands = Commands()
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_keras_2_is_brought_alone_and_once(pip):
    job._take_keras(2)
    job._take_keras(2)
    ((*_, dependencies, wanted),) = pip
    assert dependencies == "--no-deps"
    assert wanted == "tf_keras~={}.{}.0".format(*tensorflow.__version__.split("."))
    assert os.environ["TF_USE_LEGACY_KERAS"] == "1"


def test_keras_3_needs_nothing(pip):
    job._take_keras(3)
    assert pip == []
    assert os.environ["TF_USE_LEGACY_KERAS"] == "0"


def test_keras_2_that_cannot_be_brought(pip):
    pip.fails = 1
    with pytest.raises(EngineMissingError, match=r"none, and of pip: no network\. Take an image"):
        job._take_keras(2)


@pytest.mark.parametrize(("kind", "quantize"), [("float32", "none"), ("int8", "int8")])
def test_the_exporter_is_asked(monkeypatch, kind, quantize):
    asked = []
    fake = SimpleNamespace(tflite=lambda *args, **options: asked.append((args, options)))
    monkeypatch.setitem(sys.modules, "tfdist.export", fake)
    whole = ("File", "FullyReplicated")
    container = Container.from_environ(environ(manifest=whole, train=whole))
    job.write_tflite("a model", kind, container)
    ((args, options),) = asked
    assert args == ("a model", Path("/opt/ml/model/model.tflite"))
    assert options["quantize"] == quantize
    assert options["data"].split == "train"


def environ(**channels):
    folders = {f"SM_CHANNEL_{name.upper()}": f"/opt/ml/input/data/{name}" for name in channels}
    inputs = {
        name: {"TrainingInputMode": mode, "S3DistributionType": distribution}
        for name, (mode, distribution) in channels.items()
    }
    return {
        **folders,
        "SM_INPUT_DATA_CONFIG": json.dumps(inputs),
        "SM_HOSTS": '["algo-1"]',
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DIR": "/opt/ml/output",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
    }


def test_all_that_is_sent(tmp_path):
    sent = collected(tmp_path)
    names = {path.name for path in sent.iterdir()}
    assert names == {
        *("train.py", "evaluate.py", "shard.py", "inference.py", "digits.py", "tfdist"),
        *("requirements.txt", "serving-requirements.txt"),
    }
    assert not list(sent.rglob("__pycache__"))
    assert (sent / "tfdist" / "aws" / "tables" / "instances.yaml").is_file()


def test_nothing_is_fetched_without_a_network(tmp_path):
    model = f"model={ROOT / 'examples' / 'digits.py'}:model_fn"
    changes = (model, "security={network_isolation: true}", "training.image_uri=mine")
    bundle.collect(config.load(SCRIPTS / "config.yaml", changes), tmp_path / "code")
    assert (tmp_path / "code" / "serving-requirements.txt").read_text() == ""


def test_a_module_of_an_image_of_ones_own(tmp_path):
    changes = ("model=nopkg.mod:fn", "training.image_uri=mine")
    bundle.collect(config.load(SCRIPTS / "config.yaml", changes), tmp_path / "code")


def test_the_folder_does_not_hide_the_sdk():
    # A package or a module of that name at the root would be imported instead of the SDK.
    assert not (SCRIPTS / "__init__.py").exists()
    assert not list(SCRIPTS.rglob("__init__.py"))
    assert not (ROOT / "sagemaker.py").exists()
    assert not list((ROOT / "tfdist").rglob("sagemaker*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model=nowhere.py:model_fn", "the file of a model must exist"),
        ("model=examples/digits.py", "a model must be given as FILE.py:NAME or MODULE:NAME"),
        ("model=''", "a model must be given as"),
        ("model=':f'", "a model must be given as"),
        ("model=nopkg.mod:fn", "for files are sent, but found module nopkg.mod"),
        ("training.callbacks=nopkg.mod:fn", "callbacks of a job must be given as FILE.py:NAME"),
        ("training.entry_point=mine.py", "no .*mine.py"),
    ],
)
def test_what_is_missing_is_named(tmp_path, change, message):
    model = f"model={ROOT / 'examples' / 'digits.py'}:model_fn"
    wanted = config.load(SCRIPTS / "config.yaml", (model, change))
    with pytest.raises(TfdistError, match=message):
        bundle.collect(wanted, tmp_path / "code")


def test_a_model_may_not_hide_a_script(tmp_path):
    (tmp_path / "train.py").touch()
    wanted = config.load(SCRIPTS / "config.yaml", (f"model={tmp_path / 'train.py'}:f",))
    with pytest.raises(OptionError, match="must not be called as another one that is sent"):
        bundle.collect(wanted, tmp_path / "code")
