"""The pipeline and single jobs as the SDK makes them; moto takes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import boto3
import pytest

from tfdist.aws import bundle, config, definition, estimator, pipeline, sessions, validate
from tfdist.aws.instances import PriceTable
from tfdist.errors import DataError, OptionError
from tfdist.records import write

# The SDK tells of what it does not do, which is what a pipeline is about.
pytestmark = pytest.mark.filterwarnings("ignore:Running within a PipelineSession")

ROOT = Path(__file__).parents[2]
MODEL = f"model={ROOT / 'examples' / 'digits.py'}:model_fn"


def load(*changes):
    return config.load(ROOT / "sagemaker" / "config.yaml", (MODEL, *changes))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return bundle.collect(load(), tmp_path_factory.mktemp("bundle") / "code")


@pytest.fixture(scope="module")
def session():
    with sessions.offline("us-east-1", "tfdist-example", "digits") as session:
        yield session


def built(source, session, *changes):
    wanted = load(*changes)
    value = json.loads(pipeline.build(wanted, source, session).definition())
    problems = definition.check(value, name=wanted.name, role=wanted.role)
    return value, [str(problem) for problem in problems]


def by_name(value):
    return {step["Name"]: step for step in definition.all_steps(value["Steps"])}


def test_the_shipped_pipeline_is_valid(source, session):
    value, problems = built(source, session)
    assert problems == []
    assert [(step["Name"], step["Type"]) for step in definition.all_steps(value["Steps"])] == [
        ("Shard", "Processing"),
        ("Train", "Training"),
        ("Evaluate", "Processing"),
        ("Decide", "Condition"),
        ("Register-RegisterModel", "RegisterModel"),
        ("Refuse", "Fail"),
    ]
    assert definition.defaults(value) == {
        "Threshold": 0.9,
        "ApprovalStatus": "PendingManualApproval",
        "Epochs": 5,
    }


def test_what_the_training_step_asks_for(source, session):
    train = by_name(built(source, session)[0])["Train"]["Arguments"]
    values = train["HyperParameters"]
    assert values["sagemaker_mpi_num_of_processes_per_host"] == "2"
    assert values["strategy"] == '"horovod"'
    assert "model_dir" not in values
    assert train["EnableManagedSpotTraining"] is True
    assert train["StoppingCondition"]["MaxWaitTimeInSeconds"] == 7200
    channels = {c["ChannelName"]: c["DataSource"]["S3DataSource"] for c in train["InputDataConfig"]}
    assert list(channels) == ["manifest", "train", "validation"]
    assert "Steps.Shard." in channels["train"]["S3Uri"]["Get"]


def test_no_execution_finds_what_another_one_left(source, session):
    # Checkpoints of an earlier execution would be resumed, and shards of it read with the new ones.
    steps = by_name(built(source, session)[0])
    checkpoints = steps["Train"]["Arguments"]["CheckpointConfig"]["S3Uri"]
    outputs = steps["Shard"]["Arguments"]["ProcessingOutputConfig"]["Outputs"]
    outputs += steps["Evaluate"]["Arguments"]["ProcessingOutputConfig"]["Outputs"]
    uris = [checkpoints, *(item["S3Output"]["S3Uri"] for item in outputs)]
    for uri in uris:
        assert {"Get": "Execution.PipelineExecutionId"} in uri["Std:Join"]["Values"]


def test_shards_that_are_uploaded_need_no_first_step(source, session, tmp_path):
    write("digits", tmp_path / "d", split="train=8,validation=1,test=1", num_shards=4)
    data = f"data={{folder: {tmp_path / 'd'}, channels: {{train: {{mode: Pipe, distribution: "
    value, problems = built(
        source, session, data + "ShardedByS3Key}}}", "training.instance_count=2"
    )
    assert problems == []
    steps = by_name(value)
    assert "Shard" not in steps
    channels = steps["Train"]["Arguments"]["InputDataConfig"]
    assert [c["ChannelName"] for c in channels] == [
        "manifest",
        "train_r0",
        "train_r1",
        "validation",
    ]
    sent = channels[1]
    assert sent["InputMode"] == "Pipe"
    assert sent["DataSource"]["S3DataSource"] == {
        "S3DataType": "S3Prefix",
        "S3Uri": "s3://tfdist-example/digits/data/train/",
        "S3DataDistributionType": "ShardedByS3Key",
    }


def test_raw_data_in_s3(source, session):
    data = "data={source: s3://raw/iris.csv, label: species, split: 'train=3,test=1'}"
    value, problems = built(source, session, data)
    assert problems == []
    shard = by_name(value)["Shard"]["Arguments"]
    arguments = shard["AppSpecification"]["ContainerArguments"]
    assert arguments[:2] == ["--source", "/opt/ml/processing/input/raw/iris.csv"]
    assert arguments[-2:] == ["--label", "species"]
    assert shard["ProcessingInputs"][0]["S3Input"]["S3Uri"] == "s3://raw/iris.csv"


def test_what_aws_would_refuse_is_found(source, session):
    changes = ("registration.approval=Maybe", "evaluation.instance_type=ml.p4d.24xlarge")
    _, problems = built(source, session, *changes)
    assert len(problems) == 2
    assert any("Register-RegisterModel.ModelApprovalStatus" in text for text in problems)
    assert any("Evaluate.ProcessingResources" in text for text in problems)


def test_shards_that_do_not_divide_by_hosts(source, session):
    changes = (
        "data.channels.train.distribution=ShardedByS3Key",
        "training.instance_count=3",
    )
    with pytest.raises(DataError, match="--num-shards 6"):
        built(source, session, *changes)


def test_an_evaluation_needs_its_split(source, session):
    with pytest.raises(OptionError, match="Choose one of train, validation"):
        built(source, session, "data.split=train=4,validation=1")


def test_a_smaller_value_may_be_the_better_one(source, session):
    changes = (
        "evaluation={metric: regression_metrics.rmse.value, threshold: 2.5, "
        "larger_is_better: false}",
    )
    value, problems = built(source, session, *changes)
    assert problems == []
    (condition,) = by_name(value)["Decide"]["Arguments"]["Conditions"]
    assert condition["Type"] == "LessThanOrEqualTo"


def test_what_the_sdk_refuses_is_a_users_mistake(source, session):
    changes = ("training.image_uri=null", "training.strategy=single")
    with pytest.raises(OptionError, match=r"Unsupported tensorflow version: 9\.9"):
        built(source, session, *changes, "training.framework_version='9.9'")


def test_moto_takes_it_twice_and_starts_it(source, session):
    wanted = load()
    made = pipeline.build(wanted, source, session)
    first = made.upsert(role_arn=wanted.role)["PipelineArn"]
    assert made.upsert(role_arn=wanted.role)["PipelineArn"] == first
    execution = made.start()
    assert execution.describe()["PipelineArn"] == first
    client = session.sagemaker_client
    stored = client.describe_pipeline(PipelineName=wanted.name)
    assert json.loads(stored["PipelineDefinition"])["Steps"][0]["Name"] == "Shard"


JOBS = {
    "horovod": (),
    "multi worker": ("training.strategy=multi_worker", "training.instance_count=2"),
    "parameter server": ("training.strategy=parameter_server", "training.instance_count=2"),
    "AWS's image": ("training.strategy=single", "training.image_uri=null"),
    "data parallel": (
        "training.distribution=smdistributed_data_parallel",
        "training.framework_version=2.11.0",
        "training.py_version=py39",
        "training.instance_type=ml.p4d.24xlarge",
        "training.processes_per_host=8",
        "training.entry_point=inference.py",
        "training.image_uri=null",
    ),
    "model parallel": (
        "training.distribution=smdistributed_model_parallel",
        "training.distribution_options={partitions: 2, microbatches: 4, pipeline: interleaved, "
        "optimize: memory, horovod: true}",
        "training.framework_version=2.6.3",
        "training.py_version=py38",
        "training.instance_type=ml.p3.16xlarge",
        "training.processes_per_host=8",
        "training.entry_point=inference.py",
        "training.image_uri=null",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_single_job_as_aws_gets_it(name, source, session):
    """``fit`` of an ordinary session: moto takes the job, the service model agrees."""
    import sagemaker

    wanted = load(*JOBS[name])
    requests = []
    client = boto3.Session(region_name="us-east-1").client("sagemaker")
    client.meta.events.register(
        "provide-client-params.sagemaker.CreateTrainingJob",
        lambda params, **_: requests.append(params),
    )
    plain = sagemaker.Session(
        boto_session=session.boto_session,
        sagemaker_client=client,
        default_bucket="tfdist-example",
    )
    instance = PriceTable.load()[wanted.training.instance_type]
    made = estimator.make(
        wanted, instance, source, plain, checkpoints="s3://tfdist-example/digits/checkpoints"
    )
    job_name = "job-" + name.replace(" ", "-").replace("'", "")
    made.fit("s3://tfdist-example/digits/data/train", wait=False, job_name=job_name)
    (request,) = requests
    assert validate.check_request("CreateTrainingJob", request, name) == []
    values = request["HyperParameters"]
    expected = {
        "horovod": ("sagemaker_mpi_enabled", "true"),
        "multi worker": ("sagemaker_multi_worker_mirrored_strategy_enabled", "true"),
        "parameter server": ("sagemaker_parameter_server_enabled", "true"),
        "AWS's image": ("strategy", '"single"'),
        "data parallel": ("sagemaker_distributed_dataparallel_enabled", "true"),
        "model parallel": ("sagemaker_mpi_num_of_processes_per_host", "8"),
    }
    key, value = expected[name]
    assert values[key] == value, values
    if name == "model parallel":
        parameters = json.loads(values["mp_parameters"])
        assert parameters["pipeline"] == "interleaved"
    assert client.describe_training_job(TrainingJobName=job_name)["TrainingJobStatus"]


def test_nothing_of_the_users_environment_leads_past_the_stand_in(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "real")
    monkeypatch.setenv("AWS_PROFILE", "real")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://example.invalid")
    with sessions.offline("eu-west-1", "bucket", "p") as made:
        assert os.environ["AWS_ACCESS_KEY_ID"] != "real"
        assert "AWS_PROFILE" not in os.environ
        assert "AWS_ENDPOINT_URL" not in os.environ
        assert made.boto_session.client("s3").list_buckets()["Buckets"]
    assert os.environ["AWS_ACCESS_KEY_ID"] == "real"
