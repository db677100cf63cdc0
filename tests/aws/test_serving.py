"""What answers with a model: a transform of shards, an endpoint, the registry."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tensorflow import keras

import tfdist
from tfdist.aws import config, pipeline, serving, sessions
from tfdist.aws.channels import Shape
from tfdist.aws.rehearsal.serving import transform
from tfdist.errors import DataError, OptionError, TfdistError
from tfdist.export.saved_model import write as write_saved_model
from tfdist.records import write
from tfdist.training.engine import model_path

ROOT = Path(__file__).parents[2]
DIGITS = f"{ROOT / 'examples' / 'digits.py'}:model_fn"
PACKAGE = "arn:aws:sagemaker:us-east-1:123456789012:model-package/tfdist-digits/1"
_SCALING = "application-autoscaling"
# The second is what ``Updates`` makes of an update.
DEREGISTER, DELETED = "DeregisterScalableTarget", "DeleteEndpoint"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"


def load(*changes):
    return config.load(ROOT / "sagemaker" / "config.yaml", changes)


# Transform --------------------------------------------------------------------------------------


def transformed(folder, compression):
    """Real shards through the request of the pipeline; returns (the shards, the answers)."""
    shards = folder / "digits"
    written = write("digits", shards, split="train=3,test=1", num_shards=2, compression=compression)
    model = model_path.load(DIGITS)()
    model.save(folder / "model.keras")
    (folder / "served").mkdir()
    write_saved_model(model, written.schema, folder / "served" / "1")
    shutil.copytree(ROOT / "sagemaker", folder / "served" / "code")
    wanted = load("transform={}", f"data={{folder: {shards}}}")
    shape = pipeline.splits(wanted)["test"]
    request = serving.transform(wanted, wanted.transform, shape, "model", "s3://a/b", "s3://a/c")
    (folder / "source").mkdir()
    files = [shard.file for shard in written.splits["test"].shards]
    for file in files:
        shutil.copy(shards / file, folder / "source")
    transform(request, folder / "served", folder / "source", folder / "out")
    answers = "".join((folder / "out" / f"{file}.out").read_text() for file in files)
    return shards, np.array([json.loads(line) for line in answers.splitlines()])


def test_a_transform_answers_for_each_record_in_its_order(tmp_path):
    shards, found = transformed(tmp_path, "none")
    batches = tfdist.records.read(shards / "test", batch_size=64)
    model = keras.models.load_model(tmp_path / "model.keras")
    expected = model.predict(batches.map(lambda x, *_: x), verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_transform_gives_what_tfdist_predict_does(tmp_path, compression):
    shards, found = transformed(tmp_path, compression)
    files = (tmp_path / "model.keras", shards / "test", tmp_path / "predictions.npy")
    (expected,) = tfdist.predict(DIGITS, *files, strategy="single").load().values()
    assert found.shape == expected.shape == (len(expected), 10)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (Shape(4, "zlib"), "transform={}", "compressed with gzip or not at all, but found zlib"),
        (Shape(1, "none"), "transform.instance_count=2", "2 instances for 1 shards"),
    ],
)
def test_shards_that_aws_cannot_divide_or_read(shape, changes, message):
    wanted = load(changes)
    with pytest.raises(DataError, match=message):
        serving.transform(wanted, wanted.transform, shape, "model", "s3://a/b", "s3://a/c")


# Endpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        (("endpoint={}",), {"InstanceType": "ml.m5.large", "InitialInstanceCount": 1}),
        (
            ("endpoint={instance_type: ml.c5.xlarge, instance_count: 2, max_instances: 4}",),
            {"InstanceType": "ml.c5.xlarge", "InitialInstanceCount": 2},
        ),
        (
            ("endpoint={serverless: {memory_mb: 3072, max_concurrency: 9}}",),
            {"ServerlessConfig": {"MemorySizeInMB": 3072, "MaxConcurrency": 9}},
        ),
        (
            (
                "endpoint={max_instances: 2}",
                "security={subnets: [subnet-1], security_group_ids: [sg-1], network_isolation: "
                "true, encrypt_between_containers: true, volume_kms_key: '" + KEY + "', "
                "tags: {team: vision}}",
                "training.image_uri=mine",
                f"name={'n' * 60}",
            ),
            {"InstanceType": "ml.m5.large", "InitialInstanceCount": 1},
        ),
    ],
    ids=["plain", "scaled", "serverless", "company"],
)
def test_what_an_endpoint_asks_for(changes, variant):
    made = serving.requests(load(*changes), PACKAGE)
    assert [str(problem) for problem in serving.check(made)] == []
    (found,) = made["CreateEndpointConfig"]["ProductionVariants"]
    assert found.items() > variant.items()
    assert made["CreateModel"]["PrimaryContainer"] == {"ModelPackageName": PACKAGE}
    if "security" in str(changes):
        assert made["CreateEndpointConfig"]["KmsKeyId"] == KEY
        assert made["CreateModel"]["EnableNetworkIsolation"] is True
        assert made["CreateModel"]["VpcConfig"]["Subnets"] == ["subnet-1"]
        assert made["CreateEndpoint"]["Tags"] == [{"Key": "team", "Value": "vision"}]
    scaled = "max_instances" in str(changes)
    assert ("RegisterScalableTarget" in made) == scaled
    # What is the same is called the same, and nothing else is.
    names = {
        serving.requests(load(*changes, *more), package)["CreateModel"]["ModelName"]
        for more, package in (((), PACKAGE), ((), PACKAGE), ((), PACKAGE[:-1] + "2"))
    }
    assert len(names) == 2


def test_an_endpoint_that_aws_would_refuse():
    made = serving.requests(load("endpoint={instance_type: ml.m5.none, max_instances: 2}"), PACKAGE)
    made["PutScalingPolicy"]["PolicyType"] = "Some"
    found = [str(problem) for problem in serving.check(made)]
    assert [text.split(" ")[0] for text in found] == [
        "CreateEndpointConfig.ProductionVariants[0].InstanceType",
        "PutScalingPolicy.PolicyType",
    ]
    with pytest.raises(OptionError, match="must have a section endpoint"):
        serving.requests(load(), PACKAGE)


class Updates:
    """Takes the request that moto does not know."""

    def __init__(self, client):
        self.client, self.updated = client, []

    def __getattr__(self, name):
        return getattr(self.client, name)

    def update_endpoint(self, **request):
        self.updated.append(request)
        self.client.delete_endpoint(EndpointName=request["EndpointName"])
        del request["RetainAllVariantProperties"]
        self.client.create_endpoint(**request)


def recorded(*clients):
    """Returns the list that all operations of these clients will be in, in their order."""
    called = []
    for client in clients:
        client.meta.events.register(
            "provide-client-params", lambda model, **_: called.append(model.name)
        )
    return called


def targets(scaling):
    return scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]


def test_moto_keeps_an_endpoint_and_what_scales_it(monkeypatch):
    wanted = load("endpoint={max_instances: 4, requests_per_instance: 600}")
    with sessions.loopback("us-east-1", "tfdist-example") as (session, _):
        client = Updates(session.client("sagemaker"))
        scaling = session.client(_SCALING)
        monkeypatch.setattr(session, "client", {"sagemaker": client, _SCALING: scaling}.get)
        made = serving.requests(wanted, PACKAGE)
        serving.deploy(wanted, made, session)
        name = made["CreateModel"]["ModelName"]
        found = client.describe_endpoint(EndpointName="tfdist-digits")
        assert (found["EndpointConfigName"], found["EndpointStatus"]) == (name, "InService")
        (target,) = targets(scaling)
        assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
        (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")[
            "ScalingPolicies"
        ]
        assert policy["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 600
        # Again, and nothing is new; then the endpoint takes what is, and no scaling is left.
        called = recorded(client, scaling)
        serving.deploy(wanted, made, session)
        assert client.updated == []
        assert DEREGISTER not in called
        wanted = load("endpoint={instance_count: 2}")
        serving.deploy(wanted, serving.requests(wanted, PACKAGE[:-1] + "2"), session)
        (request,) = client.updated
        assert request["EndpointConfigName"] != name
        assert len(client.list_models()["Models"]) == 2
        assert not targets(scaling)
        assert called.index(DEREGISTER) < called.index(DELETED)
        # What a user set is the user's.
        target = made["RegisterScalableTarget"]
        scaling.register_scalable_target(**target)
        scaling.put_scaling_policy(**made["PutScalingPolicy"] | {"PolicyName": "mine"})
        serving.deploy(wanted, serving.requests(wanted, PACKAGE), session)
        assert len(targets(scaling)) == 1


def test_an_endpoint_of_another_kind_does_not_scale_while_it_changes(monkeypatch):
    with sessions.loopback("us-east-1", "tfdist-example") as (session, _):
        client, scaling = Updates(session.client("sagemaker")), session.client(_SCALING)
        monkeypatch.setattr(session, "client", {"sagemaker": client, _SCALING: scaling}.get)
        called = recorded(client, scaling)
        for kind in ("ml.m5.large", "ml.c5.xlarge"):
            wanted = load(f"endpoint={{instance_type: {kind}, max_instances: 4}}")
            serving.deploy(wanted, serving.requests(wanted, PACKAGE), session)
        last = called[called.index(DEREGISTER) :]
        assert [each for each in last if each in (DELETED, "RegisterScalableTarget")] == [
            DELETED,
            "RegisterScalableTarget",
        ]
        assert len(targets(scaling)) == 1


def test_an_endpoint_that_goes_back_to_the_model_before(monkeypatch):
    wanted = load("endpoint={}")
    with sessions.loopback("us-east-1", "tfdist-example") as (session, _):
        serving.deploy(wanted, serving.requests(wanted, PACKAGE), session)
        client = session.client("sagemaker")
        monkeypatch.setattr(client, "update_endpoint", lambda **request: None, raising=False)
        clients = {"sagemaker": client, _SCALING: session.client(_SCALING)}
        monkeypatch.setattr(session, "client", clients.get)
        with pytest.raises(TfdistError, match="come up with the new model, but found the one be"):
            serving.deploy(wanted, serving.requests(wanted, PACKAGE[:-1] + "2"), session)


def test_the_newest_model_of_a_state():
    wanted = load()
    with sessions.loopback("us-east-1", "tfdist-example") as (session, _):
        client = session.client("sagemaker")
        with pytest.raises(TfdistError, match="a model that is Approved, but found none"):
            serving.newest(wanted, "Approved", client)
        client.create_model_package_group(ModelPackageGroupName="tfdist-digits")
        made = [
            client.create_model_package(
                ModelPackageGroupName="tfdist-digits", ModelApprovalStatus=status
            )["ModelPackageArn"]
            for status in ("Approved", "PendingManualApproval", "Approved", "Rejected")
        ]
        assert serving.newest(wanted, "Approved", client) == made[2]
        assert serving.newest(wanted, "PendingManualApproval", client) == made[1]
