"""Requests against the service model: what AWS would refuse, moto accepts."""

from __future__ import annotations

import pytest
from definition_references import mistakes_in

from tfdist.aws.definition import Resolver, check, split_path
from tfdist.aws.validate import AT_RUN_TIME, check_request, service_model

ROLE = "arn:aws:iam::123456789012:role/r"
REQUEST = {
    "TrainingJobName": "job-1",
    "RoleArn": ROLE,
    "AlgorithmSpecification": {"TrainingInputMode": "File", "TrainingImage": "image"},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
    "ResourceConfig": {
        "InstanceType": "ml.c5.2xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 30,
    },
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "HyperParameters": {"epochs": "1"},
    "EnableManagedSpotTraining": True,
}


def changed(path, value):
    request = {key: dict(v) if isinstance(v, dict) else v for key, v in REQUEST.items()}
    *sections, key = path
    place = request
    for section in sections:
        place = place[section]
    place[key] = value
    return request


def problems(request):
    return [str(problem) for problem in check_request("CreateTrainingJob", request, "Train")]


def test_a_good_request():
    assert problems(REQUEST) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["TrainingJobName"], "bad_name!", "Train.TrainingJobName must match"),
        (["RoleArn"], "arn:nothing", "Train.RoleArn"),
        (["ResourceConfig", "InstanceType"], "ml.c5.2xlrge", "must be one of ml.c5.2xlarge"),
        (["ResourceConfig", "InstanceCount"], "1", "must be a whole number"),
        (["ResourceConfig", "InstanceCount"], True, "must be a whole number"),
        (["ResourceConfig", "InstanceCount"], -1, "must be at least 0, but found -1"),
        (["ResourceConfig"], [], "must be an object"),
        (["AlgorithmSpecification", "TrainingInputMode"], "Files", "must be one of Pipe, File"),
        (["OutputDataConfig", "S3OutputPath"], "http://bucket", "must match"),
        (["HyperParameters"], {"epochs": 1}, "must be a text"),
        (["HyperParameters"], {"x" * 300: "1"}, "at most 256"),
        (["HyperParameters"], [], "must be a map"),
        (["EnableManagedSpotTraining"], "yes", "must be true or false"),
        (["Foo"], 1, "must have only"),
        (["InputDataConfig"], [{}] * 21, "at most 20 items"),
        (["InputDataConfig"], {}, "must be a list"),
    ],
)
def test_what_aws_would_refuse(path, value, message):
    found = problems(changed(path, value))
    assert any(message in problem for problem in found), found


def test_missing_members_are_named():
    assert "Train must have RoleArn, but found none." in problems(
        {key: value for key, value in REQUEST.items() if key != "RoleArn"}
    )


def test_a_value_of_the_run_time_is_not_judged():
    assert problems(changed(["RoleArn"], AT_RUN_TIME)) == []


def test_nearly_every_pattern_of_the_api_can_be_checked():
    from tfdist.aws.validate import _compiled

    model = service_model()
    patterns = {model.shape_for(name).metadata.get("pattern") for name in model.shape_names}
    patterns.discard(None)
    unchecked = [pattern for pattern in patterns if _compiled(pattern) is None]
    assert len(patterns) > 200
    assert len(unchecked) <= 3, unchecked


def definition(*steps, parameters=()):
    return {"Version": "2020-12-01", "Parameters": list(parameters), "Steps": list(steps)}


def step(name="Train", **changes):
    arguments = {k: v for k, v in REQUEST.items() if k != "TrainingJobName"}
    return {"Name": name, "Type": "Training", "Arguments": {**arguments, **changes}}


def found(*steps, **options):
    checked = check(definition(*steps, **options), name="pipeline", role=ROLE)
    return [str(problem) for problem in checked]


def test_a_good_definition():
    refers = {"S3OutputPath": {"Get": "Steps.First.ModelArtifacts.S3ModelArtifacts"}}
    parameters = ({"Name": "N", "Type": "Integer", "DefaultValue": 2},)
    config = {**REQUEST["ResourceConfig"], "InstanceCount": {"Get": "Parameters.N"}}
    first = step("First", ResourceConfig=config)
    second = step("Second", OutputDataConfig=refers)
    assert found(first, second, parameters=parameters) == []
    assert mistakes_in(definition(first, second, parameters=parameters)) == []


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([step("a b")], "'a b' is no name"),
        ([step(), step()], "Train twice"),
        ([step(RoleArn={"Get": "Parameters.R"})], "Parameters.R in step Train is nothing"),
        ([step(RoleArn={"Get": "Steps.Nobody.RoleArn"})], "is nothing"),
        ([step("A"), step("B", RoleArn={"Get": "Steps.A.Role"})], "is nothing"),
        ([step(RoleArn={"Get": "Execution.Id"})], "is nothing"),
        ([{**step(), "DependsOn": ["Nobody"]}], "Nobody is no step"),
    ],
)
def test_a_definition_that_holds_a_mistake_of_ours(steps, message):
    (mistake,) = mistakes_in(definition(*steps))
    assert message in mistake


def test_a_message_has_at_most_3072_characters():
    fail = {"Name": "F", "Type": "Fail", "Arguments": {"ErrorMessage": "x" * 4000}}
    assert ["at most 3072" in text for text in found(fail)] == [True]


def test_a_parameters_default_has_its_type_and_is_checked_where_it_is_used():
    wrong = {"Name": "N", "Type": "Integer", "DefaultValue": "2"}
    assert mistakes_in(definition(step(), parameters=(wrong,)))
    kind = {"Name": "T", "Type": "String", "DefaultValue": "ml.none"}
    config = {**REQUEST["ResourceConfig"], "InstanceType": {"Get": "Parameters.T"}}
    assert any("ml.none" in text for text in found(step(ResourceConfig=config), parameters=(kind,)))


def test_references_are_resolved():
    resolver = Resolver({"Threshold": 0.9}, {"PipelineExecutionId": "x1"})
    join = {"Std:Join": {"On": "/", "Values": ["s3://b", {"Get": "Execution.PipelineExecutionId"}]}}
    assert resolver.resolve({"Uri": join}) == {"Uri": "s3://b/x1"}
    later = {"Get": "Steps.Train.ModelArtifacts.S3ModelArtifacts"}
    assert (
        resolver.resolve([later, {"Std:Join": {"On": "", "Values": [later]}}]) == [AT_RUN_TIME] * 2
    )
    resolver.steps["Train"] = {"ModelArtifacts": {"S3ModelArtifacts": "s3://m"}}
    assert resolver.resolve(later) == "s3://m"
    assert split_path("Steps.A.Outputs['train'].S3Uri") == [
        "Steps",
        "A",
        "Outputs",
        "train",
        "S3Uri",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "holds"),
    [
        ("GreaterThanOrEqualTo", 0.9, True),
        ("GreaterThanOrEqualTo", 0.95, False),
        ("LessThanOrEqualTo", 0.9, True),
        ("LessThanOrEqualTo", 0.8, False),
    ],
)
def test_conditions(kind, value, holds):
    resolver = Resolver({"T": value}, files={("E", "R"): {"a": {"value": 0.9}}})
    left = {"Std:JsonGet": {"PropertyFile": {"Get": "Steps.E.PropertyFiles.R"}, "Path": "a.value"}}
    condition = {"Type": kind, "LeftValue": left, "RightValue": {"Get": "Parameters.T"}}
    assert resolver.holds(condition) is holds
