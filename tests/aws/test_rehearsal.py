"""Training steps run by SageMaker's own toolkit: on one host, on two, interrupted, resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tensorflow as tf

from tfdist.aws import bundle, config, pipeline, sessions
from tfdist.aws.definition import Resolver, defaults
from tfdist.aws.rehearsal.agent import Machine, Storage, parse_uri
from tfdist.aws.rehearsal.host_rank import host_folders, take_host
from tfdist.aws.rehearsal.run import Rehearsal
from tfdist.aws.rehearsal.training import run_training
from tfdist.aws.upload import upload
from tfdist.cli.aws_rehearse import _environment, _runner
from tfdist.errors import LaunchError, OptionError
from tfdist.launch import programs
from tfdist.records import write

pytestmark = pytest.mark.honest_start

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "digits"
    write("digits", out, split="train=8,validation=1,test=1", num_shards=4)
    return out


class Cloud:
    """A stand-in for AWS on loopback, with the shards in it."""

    def __init__(self, session, leads_there, shards, folder):
        self.session, self.folder = session, folder
        self.s3 = session.client("s3")
        self.storage = Storage(self.s3)
        self.environ = _environment(leads_there)
        self.shards = shards
        upload(shards, "tfdist-example", "digits/data", self.s3)
        self.code_uri = self.send(self.config())

    def config(self, *changes):
        fixed = (
            f"model={ROOT / 'examples' / 'digits.py'}:model_fn",
            f"data={{folder: {self.shards}}}",
            "training.checkpoint_every=5",
            "training.strategy=horovod",
            "training.image_uri=an-image",
            "training.processes_per_host=2",
            "training.instance_count=1",
        )
        return config.load(ROOT / "sagemaker" / "config.yaml", (*fixed, *changes))

    def send(self, wanted):
        """Sends the code; returns its place."""
        code = bundle.pack(wanted)
        code.upload(self.s3, {})
        return code.uri

    def request(self, execution, *changes):
        """Returns the CreateTrainingJob of the pipeline's training step."""
        wanted = self.config(*changes)
        value = pipeline.build(wanted, self.send(wanted))
        (train,) = (step for step in value["Steps"] if step["Name"] == "Train")
        resolver = Resolver(defaults(value), {"PipelineExecutionId": execution})
        return resolver.resolve(train["Arguments"])

    def train(self, name, *changes, execution=None, run=None):
        """Runs the training step; returns (its folder, its metrics)."""
        return self.run(name, self.request(execution or name, *changes), run)

    def run(self, name, request, run=None):
        folder = self.folder / name
        machine = Machine(self.storage, self.environ, run or _runner(verbose=False))
        _, metrics = run_training(name, request, folder, machine)
        return folder / "algo-1", metrics


@pytest.fixture(scope="module")
def cloud(shards, tmp_path_factory):
    with sessions.loopback("us-east-1", "tfdist-example") as (session, leads_there):
        yield Cloud(session, leads_there, shards, tmp_path_factory.mktemp("cloud"))


def weights(base):
    reader = tf.train.load_checkpoint(str(base / "model" / "1" / "variables" / "variables"))
    names = sorted(reader.get_variable_to_shape_map())
    found = {name: reader.get_tensor(name) for name in names}
    return {n: value for n, value in found.items() if getattr(value, "dtype", None) == np.float32}


def strike(command, environ, ranks, on_line):
    """Runs the toolkit as a container does that loses its spot instance within training."""
    base = Path(environ["SAGEMAKER_BASE_DIR"])
    with subprocess.Popen(
        command,
        env=programs.rank_environment(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as toolkit:
        family = []
        try:
            deadline = time.monotonic() + 120
            while not list((base / "checkpoints").glob("*.index")):
                assert time.monotonic() < deadline
                assert toolkit.poll() is None
                time.sleep(0.01)
            family = psutil.Process(toolkit.pid).children(recursive=True)
            toolkit.send_signal(signal.SIGTERM)
            return toolkit.wait(timeout=30)
        finally:
            # The container goes, and all that is left in it.
            for process in family:
                if process.is_running():
                    process.kill()
            if toolkit.poll() is None:
                os.killpg(toolkit.pid, signal.SIGKILL)


# Whose epoch of twelve steps takes longer than a job of 40 s.
_SLOW = """
import time
from tensorflow import keras


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(4)


def callbacks():
    return [Slow()]
"""
_EPOCHS = ("training.epochs=6",)
_ENDS = {
    "spot": ((), "must end with success", strike),
    # No other checkpoint is due, and the last one stands within the first epoch.
    "max_run_s": (
        ("training.max_run_s=40", "training.checkpoint_every=1000", "training.callbacks={}"),
        "within training.max_run_s, but found 40 s",
        None,
    ),
}


@pytest.fixture(scope="module")
def unbroken(cloud):
    base, metrics = cloud.train("unbroken", *_EPOCHS)
    assert metrics["validation:accuracy"] > 0.8
    assert (base / "output" / "success").exists()
    history = json.loads((base / "output" / "data" / "history.json").read_text())
    assert [row["epoch"] for row in history] == [1, 2, 3, 4, 5, 6]
    return weights(base)


@pytest.mark.timeout(2 * _TIMEOUT_S)
@pytest.mark.long
@pytest.mark.parametrize("end", _ENDS)
def test_two_ranks_interrupted_and_resumed_reach_the_weights_of_an_unbroken_run(
    cloud, unbroken, end, tmp_path
):
    changes, reason, run = _ENDS[end]
    (tmp_path / "slow.py").write_text(_SLOW)
    changes = [change.format(f"{tmp_path / 'slow.py'}:callbacks") for change in changes]
    with pytest.raises(LaunchError, match=reason):
        cloud.train(f"{end}-struck", *_EPOCHS, *changes, execution=end, run=run)
    struck = cloud.folder / f"{end}-struck" / "algo-1"
    assert not (struck / "model" / "1").exists()
    # SageMaker copies checkpoints to S3 all the time, and back before the next attempt.
    uri = cloud.request(end, *_EPOCHS)["CheckpointConfig"]["S3Uri"]
    assert cloud.storage.store(struck / "checkpoints", uri) > 0
    if end == "max_run_s":
        (kept,) = (struck / "checkpoints").glob("*.index")
        assert 1 <= int(kept.stem.removeprefix("ckpt-")) < 12

    resumed, _ = cloud.train(f"{end}-resumed", *_EPOCHS, execution=end)
    history = json.loads((resumed / "output" / "data" / "history.json").read_text())
    assert [row["epoch"] for row in history] == [1, 2, 3, 4, 5, 6]
    found = weights(resumed)
    assert unbroken.keys() == found.keys()
    assert len(unbroken) >= 10
    for name, value in unbroken.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.long
def test_two_hosts_share_keys_through_pipes(cloud):
    sharded = "{distribution: ShardedByS3Key, mode: Pipe}"
    changes = (
        "training.instance_count=2",
        "training.processes_per_host=1",
        "training.epochs=2",
        "training.spot=false",
        f"data.channels={{train: {sharded}, validation: {{distribution: ShardedByS3Key}}}}",
    )
    log = []

    def run(command, environ, ranks, on_line):
        def take(text):
            log.append(text)
            on_line(text)

        return _runner(verbose=False)(command, environ, ranks, take)

    first, metrics = cloud.train("hosts", *changes, run=run)
    assert any("hosts=2 replicas=2 records=1437 steps_per_epoch=12" in line for line in log)
    assert metrics["validation:accuracy"] > 0.3
    second = first.with_name("algo-2")
    files = [
        {path.name for path in (base / "input/data/validation").iterdir()}
        for base in (first, second)
    ]
    assert [len(names) for names in files] == [2, 2]
    assert not files[0] & files[1]
    # The chief alone writes the model; both hosts ended well.
    assert (first / "model" / "1" / "saved_model.pb").exists()
    assert not (second / "model" / "1").exists()


@pytest.mark.timeout(_TIMEOUT_S)
def test_the_failure_file_tells_why(cloud):
    request = cloud.request("refused", "training.spot=false")
    request["HyperParameters"]["strategy"] = '"horovd"'
    message = (
        "strategy must be a known one, but found 'horovd'. Did you mean 'horovod'? Choose one of"
    )
    with pytest.raises(LaunchError, match=re.escape(message)):
        cloud.run("refused", request)
    base = cloud.folder / "refused" / "algo-1"
    assert message in (base / "output" / "failure").read_text()
    assert not (base / "output" / "success").exists()


def test_hosts_of_parameter_servers_are_not_simulated(cloud):
    with pytest.raises(OptionError, match="2 instances of another one"):
        cloud.train("alone", "training.instance_count=2", "training.strategy=parameter_server")


def test_more_processes_than_a_machine_should_start(cloud):
    with pytest.raises(OptionError, match="4 instances x 4"):
        cloud.train("many", "training.instance_count=4", "training.processes_per_host=4")


@pytest.mark.parametrize(
    ("rank", "host", "local_rank"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
)
def test_ranks_of_simulated_hosts(rank, host, local_rank):
    environ = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4"}
    assert take_host(environ, 2) == host
    assert environ["OMPI_COMM_WORLD_LOCAL_RANK"] == str(local_rank)
    assert environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == "2"


def test_hosts_are_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, 1):
        (tmp_path / f"algo-{number}").mkdir()
    assert [path.name for path in host_folders(tmp_path)] == ["algo-1", "algo-2", "algo-10"]


# Decisions --------------------------------------------------------------------------------------


class Answers:
    """Stands for the scripts: each step's own output, as the definition names it."""

    def __init__(self, accuracy):
        self.accuracy = accuracy

    def __call__(self, command, environ, ranks, on_line):
        if "--output" not in command:  # Training.
            base = Path(environ["SAGEMAKER_BASE_DIR"])
            (base / "model" / "1").mkdir()
            (base / "model" / "1" / "saved_model.pb").touch()
            on_line("tfdist epoch=1 loss=0.5 samples_per_s=3")
            return 0
        report = {"multiclass_classification_metrics": {"accuracy": {"value": self.accuracy}}}
        output = Path(command[command.index("--output") + 1])
        (output / "evaluation.json").write_text(json.dumps(report))
        return 0


def rehearsed(cloud, folder, run, *changes):
    wanted = cloud.config(*changes)
    value = pipeline.build(wanted, cloud.code_uri)
    rehearsal = Rehearsal(
        definition=value,
        folder=folder,
        machine=Machine(cloud.storage, cloud.environ, run),
        sagemaker=cloud.session.client("sagemaker"),
        name=wanted.name,
    )
    return list(rehearsal.outcomes())


def test_a_good_model_is_registered(cloud, tmp_path):
    *_, decide, register = rehearsed(cloud, tmp_path, Answers(0.9))
    assert "0.9 GreaterThanOrEqualTo 0.9 holds: Register-RegisterModel" in decide.detail
    arn = register.detail.split(",")[0]
    found = cloud.session.client("sagemaker").describe_model_package(ModelPackageName=arn)
    assert found["ModelApprovalStatus"] == "PendingManualApproval"
    (container,) = found["InferenceSpecification"]["Containers"]
    bucket, key = parse_uri(container["ModelDataUrl"])
    assert key.endswith("model.tar.gz")
    assert cloud.s3.head_object(Bucket=bucket, Key=key)


def test_a_bad_model_is_refused(cloud, tmp_path):
    outcomes = rehearsed(cloud, tmp_path, Answers(0.89))
    assert [(o.name, o.status) for o in outcomes] == [
        ("Train", "Succeeded"),
        ("Evaluate", "Succeeded"),
        ("Decide", "Succeeded"),
        ("Refuse", "Failed"),
    ]
    assert outcomes[-1].detail.endswith("accuracy.value is below 0.9")
    assert "train:loss 0.5" in outcomes[0].detail


def test_a_step_that_fails_ends_it(cloud, tmp_path):
    def run(command, environ, ranks, on_line):
        on_line("no such thing")
        return 1

    (only,) = rehearsed(cloud, tmp_path, run)
    assert (only.name, only.status) == ("Train", "Failed")
    assert "exit code 1" in only.detail


def test_data_that_is_not_in_s3_ends_it(cloud, tmp_path):
    (only,) = rehearsed(cloud, tmp_path, Answers(1.0), "prefix=elsewhere")
    assert "none under s3://tfdist-example/elsewhere/data/manifest/" in only.detail
