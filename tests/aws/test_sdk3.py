"""The request of the training step, as SageMaker's SDK 3 sends it."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from tfdist.aws import config, model_trainer, sdk3, sessions
from tfdist.errors import EngineMissingError, OptionError
from tfdist.records import write

ROOT = Path(__file__).parents[2]
_CODE = "s3://tfdist-example/digits/code/0/sourcedir.tar.gz"
_ALL = (
    "training.tensorboard=logs",
    "training.image_uri=image",
    "security={subnets: [subnet-1], security_group_ids: [sg-1], network_isolation: true, "
    "encrypt_between_containers: true, output_kms_key: a, volume_kms_key: b, tags: {Team: Digits}}",
)
_JOBS = {
    "multi_worker": (),
    "all": _ALL,
    "on demand": ("training.spot=false", "training.checkpoint_every=null"),
    "no VPC": ("security={encrypt_between_containers: true}",),
    "horovod": ("training.strategy=horovod", "training.image_uri=image"),
}
# What ModelTrainer has no place for.
_LEFT_OUT = ("ProfilerConfig", "EnableSageMakerMetricsTimeSeries")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    write("digits", folder, split="train=8,validation=1,test=1", num_shards=4)
    return folder


@pytest.fixture(params=_JOBS)
def wanted(folder, request):
    return load(f"data={{folder: {folder}}}", *_JOBS[request.param])


def load(*changes):
    model = f"model={ROOT / 'examples' / 'digits.py'}:model_fn"
    return config.load(ROOT / "sagemaker" / "config.yaml", (model, *changes))


def leaves(value):
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key not in _LEFT_OUT]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_no_member_of_the_request_is_lost(wanted):
    request = sdk3.request(wanted, _CODE, "first")
    found = [leaf for leaf in leaves(sdk3.arguments(request)) if leaf is not None]
    assert sorted(map(repr, leaves(request))) == sorted(map(repr, found))


# By hand, where SDK 3 is: pytest --noconftest -c /dev/null tests/aws/test_sdk3.py
@pytest.mark.long
def test_model_trainer_sends_the_request(wanted, monkeypatch):
    defaults = pytest.importorskip(
        "sagemaker.train.defaults", reason="SageMaker's SDK 3 is in an environment of its own"
    )
    # It asks IAM, of which moto knows less.
    monkeypatch.setattr(
        defaults, "resolve_and_validate_role", lambda provided_role, **_: provided_role
    )
    sent = []
    with sessions.loopback("us-east-1", "tfdist-example") as (session, _):
        event = "provide-client-params.sagemaker.CreateTrainingJob"
        session.events.register(event, lambda params, **_: sent.append(params))
        model_trainer(wanted, run="first", boto_session=session).train(wait=False, logs=False)
        (job,) = session.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
        (archive,) = session.client("s3").list_objects_v2(Bucket="tfdist-example")["Contents"]
    expected = sdk3.request(wanted, f"s3://tfdist-example/{archive['Key']}", "first")
    del expected["ProfilerConfig"]
    del expected["AlgorithmSpecification"]["EnableSageMakerMetricsTimeSeries"]
    assert sent == [expected | {"TrainingJobName": job["TrainingJobName"]}]


def test_data_that_the_pipeline_shards():
    with pytest.raises(OptionError, match=r"shards that are in S3, but found data\.source"):
        sdk3.request(load(), _CODE, "first")


@pytest.mark.parametrize(
    ("version", "found"),
    [("2.257.7", "sagemaker 2.257.7, which has no ModelTrainer of SDK 3"), (None, "import of")],
)
def test_without_sdk_3(monkeypatch, version, found):
    def version_of(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setitem(sys.modules, "sagemaker.core", None)
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    mend = re.escape("Run pip install 'tfdist[sagemaker3]'")
    with pytest.raises(EngineMissingError, match=f"sagemaker 3 must .*{found}.*{mend}"):
        model_trainer(load(), run="first")
