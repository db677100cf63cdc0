"""``tfdist aws`` as a user calls it; nothing reaches AWS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.aws import config
from tfdist.cli import aws, aws_cost
from tfdist.errors import EngineMissingError
from tfdist.records import write
from tfdist.strategies import REGISTRY

ROOT = Path(__file__).parents[2]
CONFIG = ("--config", str(ROOT / "sagemaker" / "config.yaml"))
MODEL = ("--set", f"model={ROOT / 'examples' / 'digits.py'}:model_fn")
_TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """A test may not find the credentials of whoever runs it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_a_dry_run_prints_the_definition(run_cli):
    # From the root of the repository, as the README says it.
    done = run_cli("aws", "pipeline", "--dry-run", *CONFIG, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert [step["Name"] for step in value["Steps"]] == ["Shard", "Train", "Evaluate", "Decide"]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("valid: 6 steps checked against the API of botocore ")


def test_the_script_beside_the_configuration_does_the_same():
    done = subprocess.run(
        [sys.executable, "sagemaker/pipeline.py", "--dry-run", *MODEL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["Version"] == "2020-12-01"


def test_what_aws_would_refuse_is_named(tfdist):
    command = (
        *("aws", "pipeline", "--dry-run", *CONFIG, *MODEL),
        *("--set", "registration.instance_types=[ml.c5.large]"),
    )
    code, out, err = tfdist(*command)
    assert code == 1
    told = json.loads(tfdist(*command, "--json")[1].splitlines()[-1])
    assert (told["event"], told["exit_code"]) == ("end", 1)
    names = [[step["Name"] for step in of["Steps"]] for of in (told["definition"], json.loads(out))]
    assert names[0] == names[1]
    assert "'ml.c5.large'" in told["problems"][0]
    assert "Register-RegisterModel.InferenceSpecification" in err
    assert "'ml.c5.large'" in err
    assert "valid" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipeline", *CONFIG), "pipeline must have something to do"),
        (("pipeline", "--dry-run", "--start", *CONFIG), "--dry-run must stand without"),
        (("pipeline", "--upsert", "--wait", *CONFIG), "--wait must go with --start"),
        (("pipeline", "--dry-run"), "--config"),
        (("pipeline", "--dry-run", "--config", "nowhere.yaml"), "No such file"),
        (("pipeline", "--dry-run", *CONFIG, "--set", "epochs"), "section.key=value"),
        (("pipeline", "--dry-run", *CONFIG, "--set", "training.epoch=1"), "Did you mean 'epochs'"),
        (("pipeline", "--dry-run", *CONFIG), "the file of a model must exist"),
        (
            ("pipeline", "--dry-run", *CONFIG, *MODEL, "--set", "training.strategy=horovod"),
            "sagemaker/Dockerfile",
        ),
        (("pipeline", "--upsert", *CONFIG, *MODEL), "AWS must be reached with credentials"),
        (("upload", *CONFIG), "which the pipeline shards by itself"),
        (("cost", *CONFIG), "costs must be computed from a measured speed"),
        (("cost", *CONFIG, "--samples-per-s", "fast"), "SPEED or INSTANCES:SPEED"),
        (("cost", *CONFIG, "--samples-per-s", "10"), "Give --records"),
        (("cost", *CONFIG, "--set", "cost={start_s: 9}"), "cost must have the date of its numbers"),
        (("cost", *CONFIG, "--measured", "none.json"), "metrics.json of `tfdist train`"),
        (("rehearse", *CONFIG, "--output", "."), "--output must be a new folder"),
        (("deploy", "--dry-run", *CONFIG), "must have a section endpoint"),
        (("deploy", *CONFIG), "AWS must be reached with credentials"),
        (("approve", *CONFIG), "AWS must be reached with credentials"),
        (("approve", *CONFIG, "--set", "region=x y"), "AWS must take the profile and the region"),
        (("cost", *CONFIG, "--samples-per-s", "nan", "--records", "1"), "samples a second, above"),
        (
            ("cost", *CONFIG, "--samples-per-s", "10", "--records", "1", "--efficiency", "0"),
            "of a doubling must be above 0.5",
        ),
        (
            ("cost", *CONFIG, "--samples-per-s", "10", "--samples-per-s", "1:20"),
            "once for each number of instances, but found 10 and 20 samples a second on 1",
        ),
        (("nothing",), "No such command 'nothing'"),
    ],
)
def test_a_mistake_is_one_line(tfdist, tmp_path, arguments, message):
    (tmp_path / "a file").touch()
    code, out, err = tfdist("aws", *arguments)
    assert code == 2, (out, err)
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_profile_that_is_none_is_one_line(tfdist, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nope")
    code, _, err = tfdist("aws", "approve", *CONFIG)
    assert (code, err.count("\n")) == (2, 1)
    assert "AWS must take the profile and the region, but found an error: The config profile" in err


def test_no_verb_shows_the_help(tfdist):
    code, out, err = tfdist("aws")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")
    assert "\n  rehearse " in err


def test_help(tfdist):
    code, out, _ = tfdist("aws", "--help")
    assert code == 0
    for verb in ("upload", "pipeline", "rehearse", "cost", "approve", "deploy"):
        assert f"\n  {verb} " in out
        assert tfdist("aws", verb, "--help")[0] == 0


def test_a_job_that_its_script_would_refuse_is_not_started(tfdist, monkeypatch):
    monkeypatch.delitem(REGISTRY, "parameter_server", raising=False)
    code, _, err = tfdist(
        *("aws", "pipeline", "--upsert", "--start", *CONFIG, *MODEL),
        *("--set", "training.strategy=parameter_server"),
    )
    assert code == 2
    assert "the strategy must be a known one, but found 'parameter_server'" in err


COST = ("--records", "1000000", "--samples-per-s", "1:1000", "--samples-per-s", "4:3000")


def test_cost_as_json(tfdist):
    code, out, _ = tfdist("aws", "cost", *CONFIG, *COST, "--instances", "6", "--json")
    assert code == 0
    value = json.loads(out)
    assert [item["instances"] for item in value["estimates"]] == [1, 2, 4, 6]
    first = value["estimates"][0]
    assert first["samples_per_s"] == pytest.approx(1000)
    assert first["usd"] == pytest.approx(5 * 1000 / 3600 * 0.408)
    assert first["kg_co2"] == pytest.approx(5 * 1000 / 3600 * 0.040 * 0.2448 * 1.15)
    assert value["estimates"][2]["samples_per_s"] == pytest.approx(3000)
    assert value["prices_of"] == "2026-11-21"
    # 1 / (8 / 9 / n + 1 / 9) thousand: the second adds 0.8 of the first, the fifth less than half.
    assert value["last_that_pays"] == 4


def test_cost_as_a_table(tfdist):
    code, out, _ = tfdist("aws", "cost", *CONFIG, *COST)
    assert code == 0
    assert "fitted by Amdahl's law" in out
    assert "diminishing returns: beyond 4 an added instance gives less than half" in out
    # A ninth of the first one's time stays whole: 1389 s become 309, on eight.
    assert "8 instances against 1: 1.08 hours less (-78%), 0.441 USD more (+78%), 0.0122 kg" in out
    assert "for no spot price is given as cost.spot_usd_per_hour; no start-up" in out


GIVEN = "cost={spot_usd_per_hour: 0.1, start_s: 360, date: 2026-11-20}"


def test_a_spot_price_and_a_start_as_they_are_given(tfdist):
    arguments = ("aws", "cost", *CONFIG, *COST, "--set", GIVEN)
    _, out, _ = tfdist(*arguments, "--json")
    value = json.loads(out)
    hours = 0.1 + 5 * 1000 / 3600
    assert value["estimates"][0]["hours"] == pytest.approx(hours)
    assert value["estimates"][0]["usd"] == pytest.approx(hours * 0.1)
    assert value["last_against_one"]["hours"] == pytest.approx(hours * 2 / 9 - hours, abs=0.1)
    _, out, _ = tfdist(*arguments)
    assert "spot price as the configuration gives it, of 2026-11-20; 360 s of start-up" in out
    _, out, _ = tfdist(*arguments, "--set", "training.spot=false", "--json")
    assert json.loads(out)["estimates"][0]["usd"] == pytest.approx(hours * 0.408)


def test_a_speed_of_one_gpu_is_not_that_of_an_instance_with_four(tfdist, tmp_path):
    (tmp_path / "metrics.json").write_text('{"samples_per_s": 1000, "replicas": 1}')
    arguments = ("--records", "1000", "--measured", str(tmp_path / "metrics.json"), "--json")
    speeds = []
    for kind in ("ml.g5.xlarge", "ml.g5.12xlarge", "ml.c5.xlarge"):
        instances = ("--set", f"training.instance_type={kind}")
        _, out, _ = tfdist("aws", "cost", *CONFIG, *arguments, *instances)
        speeds.append(json.loads(out)["estimates"][0]["samples_per_s"])
    assert speeds == pytest.approx([1000, 4000 * 0.88**2, 1000])


def test_prices_of_ones_own(tfdist, tmp_path):
    row = "{vcpus: 8, gpus: 0, usd_per_hour: 36, watts: 1}"
    (tmp_path / "prices.yaml").write_text(
        f"date: 2030-01-01\nregion: here\ninstances:\n  ml.c5.2xlarge: {row}\n"
    )
    arguments = ("--set", "prices=prices.yaml", "--json")
    _, out, _ = tfdist("aws", "cost", *CONFIG, *COST, *arguments)
    assert json.loads(out)["estimates"][0]["usd"] == pytest.approx(5 * 10)


def test_the_cost_is_said_before_a_start(tfdist, monkeypatch):
    """With a stand-in: the estimate, upload of the code, upsert, start, wait."""
    import boto3

    from tfdist.aws import sessions

    def follow(client, execution):
        print(client.describe_pipeline_execution(PipelineExecutionArn=execution))
        return 0

    monkeypatch.setattr(aws, "_follow", follow)  # moto lists no steps.
    with sessions.loopback("us-east-1", "tfdist-example"):
        start = ("aws", "pipeline", "--upsert", "--start", *CONFIG, *MODEL)
        code, out, err = tfdist(*start, "--samples-per-s", "5000")
        assert (code, out) == (2, ""), err
        assert "the number of records must be given for shards that are not here" in err
        assert boto3.client("sagemaker").list_pipelines()["PipelineSummaries"] == []
        code, out, err = tfdist(
            *(*start, "--wait"),
            *("--samples-per-s", "5000", "--records", "1437"),
        )
        assert code == 0, err
        boto3.client("sagemaker").describe_pipeline(PipelineName="tfdist-digits")
        changed = ("--set", "evaluation.threshold=0.5")
        refused, _, told = tfdist("aws", "pipeline", "--start", *CONFIG, *MODEL, *changed)
        assert refused == 2
        assert "--start without --upsert must find in AWS what the configuration says" in told
        assert tfdist("aws", "pipeline", "--start", *CONFIG, *MODEL)[0] == 0
    texts = ("kg CO2e", "at most 0.82 USD on demand", "pipeline arn:aws", "started arn:aws")
    places = [out.index(text) for text in (*texts, "PipelineExecutionStatus")]
    assert places == sorted(places)


def test_a_search_costs_all_of_its_trainings(capsys, tfdist):
    search = "tuning={ranges: {lr: {min: 0.1, max: 1}}, max_jobs: 20}"
    assert (
        "5 epochs, each of 20 trainings"
        in tfdist("aws", "cost", *CONFIG, *COST, "--set", search)[1]
    )
    asked = {"records": None, "speeds": (), "measured": None, "efficiency": None}
    aws_cost.before_start(config.load(Path(CONFIG[1]), (search,)), **asked)
    assert (
        "training: 20 jobs of 2 x ml.c5.2xlarge, at most 3600 s (max_run_s): at most 16.32 USD"
        in (capsys.readouterr().out)
    )


def test_a_region_of_unknown_electricity_has_costs_and_no_carbon(capsys, tfdist):
    away = ("--set", "region=ca-central-1")
    code, out, _ = tfdist("aws", "cost", *CONFIG, *COST, *away, "--json")
    assert code == 0
    answer = json.loads(out)
    assert {each["kg_co2"] for each in answer["estimates"]} == {None}
    assert answer["last_against_one"].keys() == {"hours", "usd"}
    shown = tfdist("aws", "cost", *CONFIG, *COST, *away)[1]
    assert "carbon: nothing is known of ca-central-1" in shown
    asked = {"records": None, "speeds": (), "measured": None, "efficiency": None}
    aws_cost.before_start(config.load(Path(CONFIG[1]), away[1:]), **asked)
    told = "2026-11-21, us-east-1), and of the carbon in ca-central-1 nothing is known"
    assert told in capsys.readouterr().out


def test_requests_of_an_endpoint_without_aws(tfdist):
    endpoint = ("--set", "endpoint.max_instances=3")
    code, out, _ = tfdist("aws", "deploy", "--dry-run", *CONFIG, *endpoint)
    assert code == 0
    made = json.loads(out)
    package = "arn:aws:sagemaker:us-east-1:123456789012:model-package/tfdist-digits/1"
    assert made["CreateModel"]["PrimaryContainer"]["ModelPackageName"] == package
    assert made["RegisterScalableTarget"]["MaxCapacity"] == 3
    command = ("aws", "deploy", "--dry-run", *CONFIG, *endpoint, "--set", "role=me")
    code, _, err = tfdist(*command)
    assert code == 1
    assert "tfdist: CreateModel.ExecutionRoleArn must " in err


def test_a_model_is_approved_and_deployed(tfdist):
    import boto3

    from tfdist.aws import sessions

    with sessions.loopback("us-east-1", "tfdist-example"):
        client = boto3.client("sagemaker")
        code, _, err = tfdist("aws", "approve", *CONFIG)
        assert (code, err.count("\n")) == (2, 1)
        assert "a model that is PendingManualApproval" in err
        client.create_model_package_group(ModelPackageGroupName="tfdist-digits")
        first, second = (
            client.create_model_package(
                ModelPackageGroupName="tfdist-digits", ModelApprovalStatus="PendingManualApproval"
            )["ModelPackageArn"]
            for _ in range(2)
        )
        deploy = ("aws", "deploy", *CONFIG, "--set", "endpoint={}")
        code, _, err = tfdist(*deploy)
        assert code == 2
        assert "Approve of one with `tfdist aws approve`" in err
        assert tfdist("aws", "approve", *CONFIG)[1] == f"{second}: Approved\n"
        command = ("aws", "approve", *CONFIG, "--reject", "--package", first)
        assert tfdist(*command)[1] == f"{first}: Rejected\n"
        states = [
            client.describe_model_package(ModelPackageName=arn)["ModelApprovalStatus"]
            for arn in (first, second)
        ]
        assert states == ["Rejected", "Approved"]
        code, out, err = tfdist(*deploy)
        assert code == 0, err
        assert out.startswith(
            "endpoint tfdist-digits answers. It costs until `aws sagemaker delete"
        )
        (made,) = client.list_models()["Models"]
        container = client.describe_model(ModelName=made["ModelName"])["PrimaryContainer"]
        assert container["ModelPackageName"] == second


class Execution:
    """A client of an execution that is looked at once while it runs, and then has failed."""

    def __init__(self):
        self.states = [{"PipelineExecutionStatus": "Executing"}]
        self.states += [{"PipelineExecutionStatus": "Failed", "FailureReason": "a step failed"}]

    def describe_pipeline_execution(self, PipelineExecutionArn):
        return self.states.pop(0)

    def get_paginator(self, name):
        assert name == "list_pipeline_execution_steps"
        return self

    def paginate(self, **order):
        failed = {"StepStatus": "Failed", "FailureReason": "no such data"}
        yield {"PipelineExecutionSteps": [{"StepName": "Shard", "StepStatus": "Succeeded"}]}
        yield {"PipelineExecutionSteps": [{"StepName": "Train", **failed}]}


def test_an_execution_is_followed_to_its_end(capsys):
    assert aws._follow(Execution(), "arn", every_s=0) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Shard: Succeeded",
        "Train: Failed no such data",
        "execution: Failed a step failed",
    ]


def test_upload_and_its_second_time(tfdist, tmp_path):
    from tfdist.aws import sessions

    write("digits", tmp_path / "d", num_shards=2)
    arguments = ("upload", *CONFIG, "--set", "data={folder: d}")
    with sessions.loopback("us-east-1", "tfdist-example"):
        code, out, err = tfdist("aws", *arguments)
        assert code == 0, err
        assert "s3://tfdist-example/digits/data: 5 files sent" in out
        _, out, err = tfdist("aws", *arguments, "--json")
        assert "0 files sent (0.00 MB), 5 were there already" in err
    first, *_, last = map(json.loads, out.splitlines())
    assert (first["event"], first["verb"]) == ("start", "aws upload")
    assert (last["event"], last["sent"], last["kept"]) == ("end", 0, 5)


@pytest.mark.long
@pytest.mark.timeout(_TIMEOUT_S)
def test_a_rehearsal_registers_a_model(run_cli):
    done = run_cli("aws", "rehearse", *CONFIG, cwd=ROOT, timeout_s=_TIMEOUT_S - 20)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    starts = ("Pipeline", "Shard", "Train", "Evaluate", "Decide", "Register-", "execution")
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 7
    assert "validation:accuracy 0.9" in lines[2]
    assert "GreaterThanOrEqualTo 0.9 holds: Register-RegisterModel" in lines[4]
    assert "model-package/tfdist-digits/1, PendingManualApproval" in lines[5]
    assert lines[6] == "execution: Succeeded"


@pytest.mark.long
@pytest.mark.timeout(_TIMEOUT_S)
def test_a_rehearsed_search_and_transform(run_cli, tmp_path):
    changes = (
        *("training.epochs=1", "training.instance_count=1", "evaluation.threshold=0.1"),
        "tuning={ranges: {lr: {min: 0.00001, max: 0.05}}, metric: validation:loss}",
        "transform={}",
    )
    settings = [text for change in changes for text in ("--set", change)]
    done = run_cli(
        *("aws", "rehearse", *CONFIG, *MODEL, *settings, "--output", tmp_path / "out"),
        cwd=tmp_path,
        timeout_s=_TIMEOUT_S - 20,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Succeeded. both ends of all ranges were tried; best: lr 0.05: " in done.stdout
    assert "Succeeded. wrote 4 objects to s3://tfdist-example/digits/runs/" in done.stdout
    answers = [path.read_text() for path in (tmp_path / "out" / "Transform").glob("output/*.out")]
    rows = [json.loads(line) for text in answers for line in text.splitlines()]
    assert [len(row) for row in rows] == [10] * 180


@pytest.mark.long
@pytest.mark.timeout(_TIMEOUT_S)
def test_a_higher_threshold_refuses_it(run_cli, tmp_path):
    write("digits", tmp_path / "d", split="train=8,validation=1,test=1", num_shards=2)
    changes = ("evaluation.threshold=0.999", "training.epochs=1", "training.instance_count=1")
    settings = [text for change in changes for text in ("--set", change)]
    done = run_cli(
        *("aws", "rehearse", *CONFIG, *MODEL, *settings, "--set", "data={folder: d}", "--json"),
        cwd=tmp_path,
        timeout_s=_TIMEOUT_S - 20,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Upload (moto): Succeeded. 7 files" in done.stderr
    start, *_, decided, refused, end = map(json.loads, done.stdout.splitlines())
    assert (start["event"], start["verb"]) == ("start", "aws rehearse")
    assert "does not hold: Refuse" in decided["detail"]
    assert [refused[name] for name in ("event", "name", "kind")] == ["stage", "Refuse", "Fail"]
    assert refused["detail"].endswith("accuracy.value is below 0.999")
    assert (end["exit_code"], end["problems"], end["status"]) == (1, [], "Failed")


def test_a_rehearsal_without_its_toolkit_is_refused_at_once(monkeypatch):
    from tfdist.cli.aws_rehearse import rehearse

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineMissingError, match="toolkit must be installed for a rehearsal"):
        rehearse.callback.__wrapped__(None, None, verbose=False)
