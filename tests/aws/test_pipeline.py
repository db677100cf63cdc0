"""The pipeline and single jobs as AWS gets them: as SageMaker's SDK made them; moto takes them."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from pathlib import Path

import pytest
from definition_references import mistakes_in

from tfdist.aws import bundle, config, definition, pipeline, sessions, training, validate
from tfdist.aws.channels import Channel
from tfdist.aws.instances import PriceTable
from tfdist.errors import DataError, OptionError
from tfdist.records import write

ROOT = Path(__file__).parents[2]
MODEL = f"model={ROOT / 'examples' / 'digits.py'}:model_fn"


def load(*changes):
    return config.load(ROOT / "sagemaker" / "config.yaml", (MODEL, *changes))


CODE = "s3://tfdist-example/digits/code/HASH/sourcedir.tar.gz"


def built(*changes):
    wanted = load(*changes)
    value = pipeline.build(wanted, CODE)
    problems = definition.check(value, name=wanted.name, role=wanted.role)
    assert mistakes_in(value) == []
    return value, [str(problem) for problem in problems]


def by_name(value):
    return {step["Name"]: step for step in definition.all_steps(value["Steps"])}


def test_the_shipped_pipeline_is_valid():
    value, problems = built()
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


def test_what_the_training_step_asks_for():
    train = by_name(built()[0])["Train"]["Arguments"]
    values = train["HyperParameters"]
    assert values["sagemaker_multi_worker_mirrored_strategy_enabled"] == "true"
    assert values["strategy"] == '"multi_worker"'
    assert "model_dir" not in values
    assert train["EnableManagedSpotTraining"] is True
    assert train["StoppingCondition"]["MaxWaitTimeInSeconds"] == 7200
    channels = {c["ChannelName"]: c["DataSource"]["S3DataSource"] for c in train["InputDataConfig"]}
    assert list(channels) == ["manifest", "train", "validation"]
    # With a slash, as pipes do not look at names: "train" is not "train2".
    first, end = channels["train"]["S3Uri"]["Std:Join"]["Values"]
    assert "Steps.Shard." in first["Get"]
    assert end == "/"


def test_no_execution_finds_what_another_one_left():
    # Checkpoints of an earlier execution would be resumed, and shards of it read with the new ones.
    steps = by_name(built()[0])
    checkpoints = steps["Train"]["Arguments"]["CheckpointConfig"]["S3Uri"]
    outputs = steps["Shard"]["Arguments"]["ProcessingOutputConfig"]["Outputs"]
    outputs += steps["Evaluate"]["Arguments"]["ProcessingOutputConfig"]["Outputs"]
    uris = [checkpoints, *(item["S3Output"]["S3Uri"] for item in outputs)]
    for uri in uris:
        assert {"Get": "Execution.PipelineExecutionId"} in uri["Std:Join"]["Values"]


def test_shards_that_are_uploaded_need_no_first_step(tmp_path):
    write("digits", tmp_path / "d", split="train=8,validation=1,test=1", num_shards=4)
    data = f"data={{folder: {tmp_path / 'd'}, channels: {{train: {{mode: Pipe, distribution: "
    value, problems = built(*HOROVOD, data + "ShardedByS3Key}}}", "training.instance_count=2")
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


def test_raw_data_in_s3():
    data = "data={source: s3://raw/iris.csv, label: species, split: 'train=3,test=1'}"
    value, problems = built(data)
    assert problems == []
    shard = by_name(value)["Shard"]["Arguments"]
    arguments = shard["AppSpecification"]["ContainerArguments"]
    assert arguments[:2] == ["--source", "/opt/ml/processing/input/raw/iris.csv"]
    assert arguments[-2:] == ["--label", "species"]
    assert shard["ProcessingInputs"][0]["S3Input"]["S3Uri"] == "s3://raw/iris.csv"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        *(("a.jsonl", "/a.jsonl"), ("A.CSV", "/A.CSV"), ("a.csv.gz", "/a.csv.gz")),
        *(("a.tar", "/a.tar"), ("photos", ""), ("photos.d/2", "")),
    ],
)
def test_a_file_in_s3_is_called_by_its_own_name(file, source):
    value, _ = built(f"data={{source: s3://raw/{file}, split: 'train=3,test=1'}}")
    arguments = by_name(value)["Shard"]["Arguments"]["AppSpecification"]["ContainerArguments"]
    assert arguments[1] == f"/opt/ml/processing/input/raw{source}"


def test_a_tflite_model_needs_records_that_can_be_read_again(tmp_path):
    write("digits", tmp_path / "d", split="train=8,validation=1,test=1", num_shards=1)
    data = f"data={{folder: {tmp_path / 'd'}, channels: {{train: {{mode: Pipe}}}}}}"
    built(data)
    with pytest.raises(OptionError, match=r"tflite int8, and a channel 'train' of mode Pipe"):
        built(data, "training.tflite=int8")


def test_what_aws_would_refuse_is_found():
    changes = (
        "registration.instance_types=[ml.c5.large]",
        "evaluation.instance_type=ml.p4d.24xlarge",
    )
    _, problems = built(*changes)
    assert len(problems) == 2
    assert any("Register-RegisterModel.InferenceSpecification" in text for text in problems)
    assert any("Evaluate.ProcessingResources" in text for text in problems)


@pytest.mark.parametrize("options", ["{shrad: weights}", "{replicas: horovod}"])
def test_options_that_the_strategy_has_not_are_refused_before_it_is_paid_for(options):
    with pytest.raises(OptionError, match=r"Did you mean 'shard'|'multi_worker', whose processes"):
        built(f"training.strategy_options={options}")


def test_shards_that_do_not_divide_by_hosts():
    changes = (
        "data.channels.train.distribution=ShardedByS3Key",
        "training.instance_count=3",
    )
    with pytest.raises(DataError, match="--num-shards 6"):
        built(*changes)


def test_an_evaluation_needs_its_split():
    with pytest.raises(OptionError, match="Choose one of train, validation"):
        built("data.split=train=4,validation=1")


def test_a_transform_of_a_split():
    value, problems = built("transform={}", "registration.approval=automatic")
    assert problems == []
    assert definition.defaults(value)["ApprovalStatus"] == "Approved"
    (decide,) = (step for step in value["Steps"] if step["Name"] == "Decide")
    names = [step["Name"] for step in decide["Arguments"]["IfSteps"]]
    assert names == ["Register-RegisterModel", "Model", "Transform"]
    transform = by_name(value)["Transform"]["Arguments"]
    source = transform["TransformInput"]["DataSource"]
    # AWS takes the frames away from records that it sends one by one.
    assert (transform["BatchStrategy"], transform["TransformOutput"]["AssembleWith"]) == (
        "MultiRecord",
        "None",
    )
    # Not all that begins as the split is called.
    assert source["S3DataSource"]["S3Uri"]["Std:Join"]["Values"][1] == "/"
    # The container is that of the instances that answer.
    steps = by_name(built("transform.instance_type=ml.g5.xlarge")[0])
    (registered,) = steps["Register-RegisterModel"]["Arguments"]["InferenceSpecification"][
        "Containers"
    ]
    assert "-gpu" in steps["Model"]["Arguments"]["PrimaryContainer"]["Image"]
    assert "-cpu" in registered["Image"]
    with pytest.raises(OptionError, match=r"transform\.split must be a split of the data"):
        built("transform.split=other")


@pytest.mark.parametrize(
    ("metric", "more", "compared"),
    [
        ("regression_metrics.rmse.value", "", "LessThanOrEqualTo"),
        ("regression_metrics.r2.value", "", "GreaterThanOrEqualTo"),
        ("regression_metrics.r2.value", ", larger_is_better: false", "LessThanOrEqualTo"),
    ],
)
def test_a_smaller_value_may_be_the_better_one(metric, more, compared):
    value, problems = built(f"evaluation={{metric: {metric}, threshold: 2.5{more}}}")
    assert problems == []
    (condition,) = by_name(value)["Decide"]["Arguments"]["Conditions"]
    assert condition["Type"] == compared


def test_a_metric_that_no_report_has_is_told_with_those_that_it_has():
    report = {"regression_metrics": {"mse": {"value": 1.0}}}
    resolver = definition.Resolver({}, files={("Evaluate", "EvaluationReport"): report})
    place = {"Get": "Steps.Evaluate.PropertyFiles.EvaluationReport"}
    path = "regression_metrics.accuracy.value"
    with pytest.raises(OptionError, match=f"found {path}, where 'accuracy' is none of mse"):
        resolver.resolve({"Std:JsonGet": {"PropertyFile": place, "Path": path}})
    left = {"Std:JsonGet": {"PropertyFile": place, "Path": "regression_metrics.mse"}}
    condition = {"Type": "LessThanOrEqualTo", "LeftValue": left, "RightValue": 2.0}
    with pytest.raises(OptionError, match=r"must name a number .* found a part of it"):
        resolver.holds(condition)
    left["Std:JsonGet"]["Path"] += ".value"
    assert resolver.holds(condition)


def test_all_may_lie_at_the_root_of_a_bucket():
    assert load("prefix=''").data_root == "s3://tfdist-example/data"


def test_a_version_that_aws_has_no_image_of():
    with pytest.raises(OptionError, match=r"one that AWS has an image of, but found '9\.9'"):
        built("training.framework_version='9.9'")


def test_moto_keeps_what_is_upserted():
    wanted = load()
    code = bundle.pack(wanted)
    value = pipeline.build(wanted, code.uri)
    with sessions.loopback("us-east-1", "tfdist-example") as (session, _):
        first = pipeline.upsert(wanted, value, code, session)
        assert pipeline.upsert(wanted, value, code, session) == first
        client = session.client("sagemaker")
        execution = client.start_pipeline_execution(PipelineName=wanted.name)
        found = client.describe_pipeline_execution(
            PipelineExecutionArn=execution["PipelineExecutionArn"]
        )
        assert found["PipelineArn"] == first
        stored = client.describe_pipeline(PipelineName=wanted.name)
        assert json.loads(stored["PipelineDefinition"]) == value
        key = code.uri.removeprefix("s3://tfdist-example/")
        sent = session.client("s3").get_object(Bucket="tfdist-example", Key=key)["Body"].read()
    assert sent == code.archive


def test_the_same_files_make_the_same_archive():
    code = bundle.pack(load())
    assert bundle.pack(load()) == code
    with tarfile.open(fileobj=io.BytesIO(code.archive)) as archive:
        assert {"train.py", "digits.py", "tfdist/__init__.py"} < set(archive.getnames())


def leaves(value, place=""):
    """Yields (place, value) of all that a definition holds; references are whole."""
    if isinstance(value, dict) and not set(value) & {"Get", "Std:Join", "Std:JsonGet"}:
        for key, item in value.items():
            yield from leaves(item, f"{place}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            of_item = item if isinstance(item, dict) else {}
            names = [of_item[key] for key in of_item if key in NAMES]
            yield from leaves(item, f"{place}[{names[0] if names else number}]")
    else:
        yield place, value


NAMES = ("Name", "ChannelName", "InputName", "OutputName")
HOROVOD = (
    "training.strategy=horovod",
    "training.image_uri=your-repository/tfdist:2.19-cpu",
    "training.instance_count=1",
    "training.processes_per_host=2",
)
OF_SDK_2 = (*HOROVOD, "training.framework_version=2.19.0")
# All that is otherwise than SageMaker's SDK 2.257.7 made it.
CHANGED = [
    # A line of bash starts a script, which was a file of its own in S3, and an input.
    r"\.ContainerEntrypoint\[[123]\]",
    r"\.ProcessingInputs\[entrypoint\]\..*",
    r"\.ProcessingInputs\[code\]\.S3Input\.LocalPath",  # A slash at its end.
    r"\.InputDataConfig\[(manifest|train|validation)\]\.DataSource\.S3DataSource\.S3Uri",  # Too.
    # AWS's own defaults, which need not be said.
    r".*\.AppManaged",
    r".*\.S3CompressionType",
    r"\.Steps\[(Shard|Evaluate)\]\..*\.S3DataDistributionType",
    r".*\.SkipModelValidation",
    r"\.HyperParameters\.(keras|max-run-s)",  # New.
]


def test_the_definition_is_the_one_of_sagemakers_sdk():
    made = json.loads(Path(__file__).with_name("made_by_sdk_2.json").read_text())
    value, _ = built("model=examples/digits.py:model_fn", *OF_SDK_2)
    expected, found = dict(leaves(made)), dict(leaves(value))
    other = [k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k)]
    unnamed = [k for k in other if not any(re.search(f"{name}$", k) for name in CHANGED)]
    assert unnamed == []
    assert len(expected) > 100


JOBS = {
    "horovod": HOROVOD,
    "multi worker": ("training.strategy=multi_worker", "training.instance_count=2"),
    "parameter server": ("training.strategy=parameter_server", "training.instance_count=2"),
    "AWS's image": ("training.strategy=single", "training.instance_count=1"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_single_job_as_aws_gets_it(name):
    wanted = load(*JOBS[name])
    instance = PriceTable.load()[wanted.training.instance_type]
    inputs = [Channel(name="train", uri="s3://bucket/train/")]
    request = training.request(wanted, instance, CODE, inputs, "s3://bucket/checkpoints")
    request["TrainingJobName"] = "job"
    assert validate.check_request("CreateTrainingJob", request, name) == []
    values = request["HyperParameters"]
    expected = {
        "horovod": ("sagemaker_mpi_enabled", "true"),
        "multi worker": ("sagemaker_multi_worker_mirrored_strategy_enabled", "true"),
        "parameter server": ("sagemaker_parameter_server_enabled", "true"),
        "AWS's image": ("strategy", '"single"'),
    }
    key, value = expected[name]
    assert values[key] == value, values


KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"
COMPANY = (
    "security={subnets: [subnet-1], security_group_ids: [sg-1], network_isolation: true, "
    f"encrypt_between_containers: true, volume_kms_key: '{KEY}', output_kms_key: '{KEY}', "
    "tags: {team: vision}}",
    "training.image_uri=mine",
)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        HOROVOD,
        (*HOROVOD, "training.strategy=pipeline", "training.strategy_options={replicas: horovod}"),
    ],
    ids=["multi_worker", "horovod", "pipeline with replicas"],
)
def test_what_a_company_asks_for_is_in_every_step(changes):
    searched, problems = built(*changes, *COMPANY, "tuning.ranges.lr={min: 0.001, max: 0.1}")
    assert problems == []
    value, problems = built(*changes, *COMPANY, "transform={}")
    assert problems == []
    steps = {name: step["Arguments"] for name, step in by_name(value).items()}
    network = {
        "VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]},
        "EnableNetworkIsolation": True,
        "EnableInterContainerTrafficEncryption": True,
    }
    for name in ("Shard", "Evaluate"):
        assert steps[name]["NetworkConfig"] == network
        assert steps[name]["ProcessingResources"]["ClusterConfig"]["VolumeKmsKeyId"] == KEY
        assert steps[name]["ProcessingOutputConfig"]["KmsKeyId"] == KEY
    assert steps["Transform"]["TransformResources"]["VolumeKmsKeyId"] == KEY
    assert steps["Transform"]["TransformOutput"]["KmsKeyId"] == KEY
    assert steps["Model"]["VpcConfig"] == network["VpcConfig"]
    assert steps["Model"]["EnableNetworkIsolation"] is True
    train, tune = steps["Train"], by_name(searched)["Tune"]["Arguments"]
    for one in (train, tune["TrainingJobDefinition"]):
        assert {key: one[key] for key in network} == network
        assert one["ResourceConfig"]["VolumeKmsKeyId"] == one["OutputDataConfig"]["KmsKeyId"] == KEY
    # The container cannot fetch its code.
    assert train["InputDataConfig"][-1]["DataSource"]["S3DataSource"]["S3Uri"] == CODE
    submitted = train["HyperParameters"]["sagemaker_submit_directory"]
    assert submitted == '"/opt/ml/input/data/code/sourcedir.tar.gz"'
    tags = [{"Key": "team", "Value": "vision"}]
    tagged = [steps[name] for name in ("Shard", "Train", "Evaluate", "Model", "Transform")]
    assert [each["Tags"] for each in (*tagged, tune)] == [tags] * 6


def test_what_is_sent_is_encrypted_and_the_pipeline_has_its_tags():
    wanted = load(*COMPANY)
    value, code, _ = pipeline.checked(wanted)
    with sessions.loopback("us-east-1", "tfdist-example") as (session, _):
        arn = pipeline.upsert(wanted, value, code, session)
        tags = session.client("sagemaker").list_tags(ResourceArn=arn)["Tags"]
        key = code.uri.removeprefix("s3://tfdist-example/")
        sent = session.client("s3").head_object(Bucket="tfdist-example", Key=key)
    assert tags == [{"Key": "team", "Value": "vision"}]
    assert (sent["ServerSideEncryption"], sent["SSEKMSKeyId"]) == ("aws:kms", KEY)


def test_more_channels_and_weights_to_begin_with():
    changes = (
        "training.channels={pretrained: s3://zoo/v1}",
        "training.init_weights=pretrained/m.keras",
    )
    value, problems = built(*changes, "training.tensorboard=logs")
    assert problems == []
    train = by_name(value)["Train"]["Arguments"]
    (channel,) = (c for c in train["InputDataConfig"] if c["ChannelName"] == "pretrained")
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://zoo/v1"
    values = train["HyperParameters"]
    assert values["init-weights"] == '"/opt/ml/input/data/pretrained/m.keras"'
    assert values["tensorboard"] == '"/opt/ml/output/tensorboard"'
    assert train["TensorBoardOutputConfig"] == {
        "LocalPath": "/opt/ml/output/tensorboard",
        "S3OutputPath": "s3://tfdist-example/digits/logs",
    }
    # Train.py looks for these two by name, also where pipes have others.
    pipes = "data.channels={train: {mode: Pipe}}"
    no_split = ("data.split=train=1", "data.channels={}")
    for name, more in (("train", ()), ("train", (pipes,)), ("validation", no_split)):
        message = f"names that no channel of the job has, but found {name}"
        with pytest.raises(OptionError, match=message):
            built(f"training.channels={{{name}: s3://zoo/v1}}", *more, "evaluation.split=train")


def test_steps_are_traced_where_a_job_keeps_its_logs():
    for asked, folder in (("steps=2:6", "profile"), ("'traces,steps=2:6'", "traces")):
        value, problems = built(f"training.profile={asked}")
        assert problems == []
        train = by_name(value)["Train"]["Arguments"]
        wanted = '"/opt/ml/output/tensorboard,steps=2:6"'
        assert train["HyperParameters"]["profile"] == wanted
        place = train["TensorBoardOutputConfig"]["S3OutputPath"]
        assert place == f"s3://tfdist-example/digits/{folder}"


def test_a_job_has_one_place_of_its_logs():
    one = ("training.tensorboard=logs", "training.profile='logs,steps=2:6'")
    assert built(*one)[1] == []
    with pytest.raises(OptionError, match=r"must name one folder.*, but found logs and traces"):
        built(one[0], "training.profile=traces")


def test_nothing_of_the_users_environment_leads_past_the_stand_in(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "real")
    monkeypatch.setenv("AWS_PROFILE", "real")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://example.invalid")
    # One service's own goes before that, and this passes over it.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://example.invalid")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", ".corp")  # Read before NO_PROXY.
    with sessions.loopback("eu-west-1", "bucket") as (made, _):
        assert os.environ["AWS_ACCESS_KEY_ID"] != "real"
        assert "AWS_PROFILE" not in os.environ
        assert os.environ["AWS_ENDPOINT_URL"].startswith("http://127.0.0.1:")
        assert made.client("s3").list_buckets()["Buckets"]
    assert os.environ["AWS_ACCESS_KEY_ID"] == "real"
    assert os.environ["AWS_ENDPOINT_URL_S3"] == "https://example.invalid"
