"""Carries out a pipeline's definition, step by step."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.aws.definition import Resolver, defaults
from tfdist.aws.evaluation import ARCHIVE
from tfdist.aws.pipeline import PROCESSING_DIR
from tfdist.aws.rehearsal.agent import Machine, parse_uri
from tfdist.aws.rehearsal.training import run_training
from tfdist.aws.upload import sending
from tfdist.aws.validate import AT_RUN_TIME
from tfdist.errors import LaunchError, TfdistError

_EXECUTION_ID = "rehearsal"


@dataclass(frozen=True)
class StepOutcome:
    """How one step ended.

    Attributes:
        status: "Succeeded" or "Failed".
        detail: what it did, in one line.
    """

    name: str
    kind: str
    status: str
    detail: str
    seconds: float


@dataclass
class Rehearsal:
    """One execution of a pipeline on this machine.

    Args:
        definition: the pipeline's, as JSON.
        folder: a new folder for what the steps' containers would hold.
        machine: what carries it out.
        sagemaker: boto3's client, of the stand-in.
        tell: called with each step's name when it begins.
    """

    definition: Mapping[str, Any]
    folder: Path
    machine: Machine
    sagemaker: Any
    name: str
    tell: Callable[[str, str], None] = lambda name, kind: None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._resolver = Resolver(
            defaults(self.definition),
            {"PipelineName": self.name, "PipelineExecutionId": _EXECUTION_ID},
        )

    def outcomes(self) -> Iterator[StepOutcome]:
        """Yields the outcome of each step when it has ended; the last one may have failed."""
        yield from self._run(self.definition["Steps"])

    def _run(self, steps: list[dict[str, Any]]) -> Iterator[StepOutcome]:
        for step in steps:
            name, kind = step["Name"], step["Type"]
            self.tell(name, kind)
            begun = time.perf_counter()
            branch: list[dict[str, Any]] = []
            status = "Succeeded"
            try:
                if kind == "Condition":
                    detail, branch = self._decide(step)
                elif kind == "Fail":
                    status, detail = "Failed", self._known(step["Arguments"])["ErrorMessage"]
                else:
                    detail = self._carry_out(step)
            except TfdistError as error:
                status, detail = "Failed", str(error)
            yield StepOutcome(name, kind, status, detail, time.perf_counter() - begun)
            if status == "Failed":
                return
            yield from self._run(branch)

    def _known(self, arguments: Any) -> Any:
        resolved = self._resolver.resolve(arguments)
        assert AT_RUN_TIME not in _leaves(resolved), resolved
        return resolved

    def _carry_out(self, step: dict[str, Any]) -> str:
        kinds = {
            "Processing": self._process,
            "Training": self._train,
            "Tuning": self._tune,
            "RegisterModel": self._register,
            "Model": self._make_model,
            "Transform": self._transform,
        }
        return kinds[step["Type"]](step, self._known(step["Arguments"]))

    def _process(self, step: dict[str, Any], request: dict[str, Any]) -> str:
        """Brings the inputs, runs the step's own start script, and takes its outputs."""
        name, storage = step["Name"], self.machine.storage
        folder = self.folder / name

        def here(text: str) -> str:
            return text.replace(PROCESSING_DIR, str(folder))

        for item in request.get("ProcessingInputs", []):
            source = item["S3Input"]
            target = Path(here(source["LocalPath"]))
            target.mkdir(parents=True, exist_ok=True)
            storage.fetch(storage.keys(source["S3Uri"]), source["S3Uri"], target)
        outputs = request["ProcessingOutputConfig"]["Outputs"]
        places = {item["OutputName"]: Path(here(item["S3Output"]["LocalPath"])) for item in outputs}
        for place in places.values():
            place.mkdir(parents=True, exist_ok=True)
        app = request["AppSpecification"]
        command = [here(text) for text in (*app["ContainerEntrypoint"], *app["ContainerArguments"])]
        self.machine.run_script("the processing script", command)
        for item in outputs:
            storage.store(places[item["OutputName"]], item["S3Output"]["S3Uri"])
        self._resolver.steps[name] = {
            "ProcessingJobStatus": "Completed",
            "ProcessingOutputConfig": {"Outputs": {item["OutputName"]: item for item in outputs}},
        }
        for file in step.get("PropertyFiles", []):
            report = places[file["OutputName"]] / file["FilePath"]
            self._resolver.files[name, file["PropertyFileName"]] = json.loads(report.read_text())
        return "wrote " + ", ".join(item["S3Output"]["S3Uri"] for item in outputs)

    def _train(self, step: dict[str, Any], request: dict[str, Any]) -> str:
        name = step["Name"]
        job_name = f"{self.name}-{name}-{_EXECUTION_ID}"
        self._resolver.steps[name], self.metrics = run_training(
            job_name, request, self.folder / name, self.machine
        )
        artifacts = self._resolver.steps[name]["ModelArtifacts"]["S3ModelArtifacts"]
        return f"{self._shown()}; wrote {artifacts}"

    def _shown(self) -> str:
        return ", ".join(f"{metric} {value:.4g}" for metric, value in self.metrics.items())

    def _tune(self, step: dict[str, Any], request: dict[str, Any]) -> str:
        name = step["Name"]
        self._resolver.steps[name], self.metrics = run_tuning(
            f"{self.name}-{name}-{_EXECUTION_ID}", request, self.folder / name, self.machine
        )
        tried = self._resolver.steps[name]["BestTrainingJob"]["TunedHyperParameters"]
        best = ", ".join(f"{key} {value}" for key, value in tried.items())
        return f"both ends of all ranges were tried; best: {best}: {self._shown()}"

    def _make_model(self, step: dict[str, Any], request: dict[str, Any]) -> str:
        name = f"{self.name}-{_EXECUTION_ID}"
        with sending("the model"):
            self.sagemaker.create_model(ModelName=name, **request)
        self._resolver.steps[step["Name"]] = {"ModelName": name}
        return name

    def _transform(self, step: dict[str, Any], request: dict[str, Any]) -> str:
        """Has the model of model.tar.gz, and its inference.py, answer all records."""
        with sending("the transform"):
            made = self.sagemaker.describe_model(ModelName=request["ModelName"])
        folder, storage = self.folder / step["Name"], self.machine.storage
        places = [folder / name for name in ("model", "input", "output")]
        for place in places:
            place.mkdir(parents=True)
        archive = folder / ARCHIVE
        archive.write_bytes(storage.read(*parse_uri(made["PrimaryContainer"]["ModelDataUrl"])))
        with tarfile.open(archive) as packed:
            packed.extractall(places[0], filter="data")
        source = request["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
        storage.fetch(storage.keys(source), source, places[1])
        module = f"{__name__.rpartition('.')[0]}.serving"
        command = [sys.executable, "-m", module, json.dumps(request), *map(str, places)]
        self.machine.run_script("a batch transform", command)
        target = request["TransformOutput"]["S3OutputPath"]
        return f"wrote {storage.store(places[2], target)} objects to {target}"

    def _decide(self, step: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        conditions = step["Arguments"]["Conditions"]
        holds = all(self._resolver.holds(condition) for condition in conditions)
        texts = []
        for condition in conditions:
            sides = [self._resolver.resolve(condition.get(s)) for s in ("LeftValue", "RightValue")]
            texts.append(f"{sides[0]} {condition['Type']} {sides[1]}")
        branch = step["Arguments"]["IfSteps" if holds else "ElseSteps"]
        answer = "holds" if holds else "does not hold"
        then = ", ".join(item["Name"] for item in branch) or "nothing"
        return f"{' and '.join(texts)} {answer}: {then}", branch

    def _register(self, step: dict[str, Any], request: dict[str, Any]) -> str:
        group = request["ModelPackageGroupName"]
        with sending("the model into its registry"):
            known = self.sagemaker.list_model_package_groups()["ModelPackageGroupSummaryList"]
            if group not in [item["ModelPackageGroupName"] for item in known]:
                self.sagemaker.create_model_package_group(ModelPackageGroupName=group)
            arn = self.sagemaker.create_model_package(**request)["ModelPackageArn"]
            found = self.sagemaker.describe_model_package(ModelPackageName=arn)
        self._resolver.steps[step["Name"]] = found
        return f"{arn}, {found['ModelApprovalStatus']}"


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def run_tuning(
    name: str, request: dict[str, Any], folder: Path, machine: Machine
) -> tuple[dict[str, Any], dict[str, float]]:
    """Carries out two trainings of a search: all ranges at their beginning, and at their end.

    Each gets what AWS's service and its toolkit add to the hyperparameters of a search.

    Returns:
        The properties of the search, as far as pipelines use them, and the metrics of the best.

    Raises:
        LaunchError: a training failed, or did not print the metric.
    """
    search, one = request["HyperParameterTuningJobConfig"], dict(request["TrainingJobDefinition"])
    fixed = one.pop("StaticHyperParameters")
    objective = search["HyperParameterTuningJobObjective"]
    metric, found = objective["MetricName"], {}
    for number, tried in enumerate(_ends(search["ParameterRanges"]), 1):
        job_name = f"{name}-{number:03}"
        added = {"_tuning_objective_metric": metric, "model_dir": f"None/{job_name}/model"}
        trial = {**one, "HyperParameters": {**fixed, **tried, **added}}
        place = folder / f"{number:03}"
        _, metrics = run_training(job_name, trial, place, machine)
        if metric not in metrics:
            raise LaunchError(
                "a training of a search must print its metric",
                received=f"no {metric}",
                mend="Compile the model with it, or choose another tuning.metric",
            )
        found[job_name] = (metrics, tried)
    sign = 1 if objective["Type"] == "Maximize" else -1
    best = max(found, key=lambda each: sign * found[each][0][metric])
    metrics, tried = found[best]
    properties = {"BestTrainingJob": {"TrainingJobName": best, "TunedHyperParameters": tried}}
    return properties, metrics


def _ends(ranges: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    rows = [row for kind in ranges.values() for row in kind]
    keys = (("MinValue", 0), ("MaxValue", -1))
    return [
        {row["Name"]: row["Values"][at] if "Values" in row else row[key] for row in rows}
        for key, at in keys
    ]
