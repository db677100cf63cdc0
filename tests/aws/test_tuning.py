"""A search for hyperparameters: its request, and its rehearsal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from definition_references import mistakes_in

from tfdist.aws import config, definition, job, pipeline
from tfdist.aws.rehearsal import run
from tfdist.errors import LaunchError, OptionError

ROOT = Path(__file__).parents[2]
CODE = "s3://tfdist-example/digits/code/HASH/sourcedir.tar.gz"
RANGES = "lr: {min: 0.001, max: 0.1, scale: log}, global_batch_size: {min: 32, max: 64}"


def built(ranges=RANGES, more="", *changes):
    fixed = (f"model={ROOT / 'examples' / 'digits.py'}:model_fn",)
    search = f"tuning={{ranges: {{{ranges}}}{more}}}"
    wanted = config.load(ROOT / "sagemaker" / "config.yaml", (*fixed, search, *changes))
    value = pipeline.build(wanted, CODE)
    problems = definition.check(value, name=wanted.name, role=wanted.role)
    assert [str(problem) for problem in problems] == mistakes_in(value) == []
    return value, {step["Name"]: step for step in definition.all_steps(value["Steps"])}


def test_a_search_takes_the_place_of_the_training():
    value, steps = built(
        f"{RANGES}, augment: {{values: [crop, 'crop,flip']}}",
        ", metric: validation:accuracy, larger_is_better: true, early_stopping: false",
    )
    assert "Train" not in steps
    search = steps["Tune"]["Arguments"]["HyperParameterTuningJobConfig"]
    objective = {"Type": "Maximize", "MetricName": "validation:accuracy"}
    assert search["HyperParameterTuningJobObjective"] == objective
    assert search["TrainingJobEarlyStoppingType"] == "Off"
    ranges = search["ParameterRanges"]
    assert ranges["ContinuousParameterRanges"] == [
        {"Name": "lr", "MinValue": "0.001", "MaxValue": "0.1", "ScalingType": "Logarithmic"}
    ]
    assert ranges["IntegerParameterRanges"][0]["Name"] == "global-batch-size"
    assert ranges["CategoricalParameterRanges"][0]["Values"] == ['"crop"', '"crop,flip"']
    one = steps["Tune"]["Arguments"]["TrainingJobDefinition"]
    static = one["StaticHyperParameters"]
    assert "global-batch-size" not in static
    assert static["epochs"]["Std:Join"]
    # They would go on from each other's: AWS copies one place in S3 into each training.
    assert "CheckpointConfig" not in one
    assert "checkpoint-dir" not in static
    # The best one's model is what is evaluated and registered.
    resolver = definition.Resolver(definition.defaults(value))
    resolver.steps["Tune"] = {"BestTrainingJob": {"TrainingJobName": "b"}}
    best = "s3://tfdist-example/digits/output/b/output/model.tar.gz"
    inputs = steps["Evaluate"]["Arguments"]["ProcessingInputs"]
    assert best in [resolver.resolve(item["S3Input"]["S3Uri"]) for item in inputs]
    register = resolver.resolve(steps["Register-RegisterModel"]["Arguments"])
    assert register["InferenceSpecification"]["Containers"][0]["ModelDataUrl"] == best


def test_epochs_that_are_searched_are_no_parameter():
    value, steps = built("epochs: {min: 1, max: 9}")
    assert "Epochs" not in definition.defaults(value)
    static = steps["Tune"]["Arguments"]["TrainingJobDefinition"]["StaticHyperParameters"]
    assert "epochs" not in static


@pytest.mark.parametrize(
    ("ranges", "more", "message"),
    [
        (
            "rl: {min: 1, max: 2}",
            "",
            "setting in tuning.ranges must be .* lr, warmup_epochs",
        ),
        ("lr: {min: -0.1, max: 0.1}", "", "lr must be a number above 0, but found -0.1"),
        ("global_batch_size: {min: 32, max: 64.5}", "", "invalid int value: '64.5'"),
        ("class_weight: {values: ['0=often']}", "", "class_weight.*often"),
        ("lr_scaling: {values: [none, cubic]}", "", "invalid choice: 'cubic'"),
        ("lr: {min: 2, max: 1}", "", "a range must have min and a larger max, or values"),
        ("lr: {min: 1}", "", "a range must have min and a larger max, or values"),
        ("lr: {min: 0, max: 1, scale: log}", "", "scale log must begin above 0"),
        ("lr: {min: 1, max: 2, scale: exp}", "", "scale of a range must be a known one"),
        ("lr: {from: 1}", "", "key of 'tuning.ranges.lr' must be a known one"),
        ("", "", "tuning.ranges must name a setting"),
        (
            RANGES,
            ", metric: accuracy, larger_is_better: true",
            "tuning.metric must be a known one.*validation:accuracy",
        ),
        (RANGES, ", max_jobs: 1", "tuning.max_jobs must be at least 2"),
        (RANGES, ", jobs: 1", "key of 'tuning' must be a known one"),
    ],
)
def test_a_mistake_is_named(ranges, more, message):
    with pytest.raises(OptionError, match=message):
        built(ranges, more)


def test_a_metric_of_a_split_that_is_not_there():
    with pytest.raises(OptionError, match=r"tuning\.metric must be a known one"):
        built(RANGES, "", "data.split='train=8,test=2'", "data.channels={}")
    with pytest.raises(OptionError, match="a search keeps no logs in S3, but found logs"):
        built(RANGES, "", "training.profile=logs")


def test_a_script_of_ones_own_keeps_its_hyperparameters(tmp_path):
    values = {"max-run-s": 5, "checkpoint-dir": "here"}
    own = "training={entry_point: mine.py, hyperparameters: " + json.dumps(values) + "}"
    _, steps = built("lr: {min: 1, max: 2}", "", own)
    one = steps["Tune"]["Arguments"]["TrainingJobDefinition"]
    assert one["StaticHyperParameters"].keys() > values.keys()


def test_train_py_takes_what_awss_toolkit_adds():
    """sagemaker-tensorflow-training 20.4.1 gives each training of a search a model_dir."""
    job.parse(["--model", "a.py:b", "--model_dir", "None/job-001/model"])


class Trainings:
    """Stands for the container: one metric for each training, and what it was given."""

    def __init__(self, monkeypatch, *printed):
        self.printed, self.given = list(printed), []
        monkeypatch.setattr(run, "run_training", self)

    def __call__(self, job_name, request, folder, machine):
        self.given.append(request["HyperParameters"])
        return {}, self.printed.pop(0)


@pytest.mark.parametrize(("more", "best"), [("", "n-002"), (", larger_is_better: true", "n-001")])
def test_a_rehearsed_search_tries_the_ends_and_takes_the_better(monkeypatch, more, best):
    value, steps = built(RANGES, more)
    request = definition.Resolver(definition.defaults(value)).resolve(steps["Tune"]["Arguments"])
    trainings = Trainings(monkeypatch, {"validation:loss": 0.5}, {"validation:loss": 0.4})
    properties, metrics = run.run_tuning("n", request, Path(), None)
    assert properties["BestTrainingJob"]["TrainingJobName"] == best
    assert metrics["validation:loss"] == (0.4 if best == "n-002" else 0.5)
    first, second = trainings.given
    assert (first["lr"], first["global-batch-size"]) == ("0.001", "32")
    assert (second["lr"], second["global-batch-size"]) == ("0.1", "64")
    # As the toolkit reads them, which leaves to the script all but its own.
    of_script = {k: v for k, v in second.items() if not k.startswith(("sagemaker_", "_"))}
    arguments = [f"--{key}={_read(text)}" for key, text in of_script.items()]
    assert job.parse(arguments).global_batch_size == 64


def _read(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_a_search_whose_metric_is_not_printed(monkeypatch):
    value, steps = built()
    request = definition.Resolver(definition.defaults(value)).resolve(steps["Tune"]["Arguments"])
    Trainings(monkeypatch, {"train:loss": 1.0})
    with pytest.raises(LaunchError, match="must print its metric, but found no validation:loss"):
        run.run_tuning("n", request, Path(), None)
