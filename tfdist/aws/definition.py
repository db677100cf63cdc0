"""A pipeline's definition as JSON: its references resolved, and every step checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.aws.validate import AT_RUN_TIME, Problem, check_request
from tfdist.errors import OptionError

# Type of a step -> what it makes, by which AWS calls the request that SageMaker makes of its
# arguments, the name that it fills in, and the request whose answer are the step's properties.
MADE = {
    "Training": "TrainingJob",
    "Processing": "ProcessingJob",
    "Tuning": "HyperParameterTuningJob",
    "Transform": "TransformJob",
    "Model": "Model",
    "RegisterModel": "ModelPackage",
}
_COMPARISONS = {
    "GreaterThanOrEqualTo": lambda left, right: left >= right,
    "LessThanOrEqualTo": lambda left, right: left <= right,
}
_PATH_PART = re.compile(r"\.?([A-Za-z0-9_:-]+)|\[['\"]?([^'\"\]]+)['\"]?\]")
_MAX_MESSAGE_CHARACTERS = 3072


def split_path(path: str) -> list[str]:
    """Returns the parts of "A.B['c'].D" or "A.B[0]"."""
    return [name or key for name, key in _PATH_PART.findall(path)]


@dataclass
class Resolver:
    """Puts values where a definition refers to them.

    Attributes:
        parameters: values of the pipeline's parameters.
        execution: values such as "PipelineExecutionId"; those that are missing come at run time.
        steps: properties of the steps that have run.
        files: (step, property file) -> its JSON, of the steps that have run.
    """

    parameters: Mapping[str, Any]
    execution: Mapping[str, Any] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    files: dict[tuple[str, str], Any] = field(default_factory=dict)

    def resolve(self, value: Any) -> Any:
        """Returns ``value`` without references; ``AT_RUN_TIME`` where a value is not known yet."""
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"Get"}:
            return self._get(split_path(value["Get"]))
        if set(value) == {"Std:Join"}:
            parts = [self.resolve(part) for part in value["Std:Join"]["Values"]]
            if any(part is AT_RUN_TIME for part in parts):
                return AT_RUN_TIME
            return value["Std:Join"]["On"].join(str(part) for part in parts)
        if set(value) == {"Std:JsonGet"}:
            _, step, _, file = split_path(value["Std:JsonGet"]["PropertyFile"]["Get"])
            path = split_path(value["Std:JsonGet"]["Path"])
            return _walk(self.files.get((step, file), AT_RUN_TIME), path)
        return {key: self.resolve(item) for key, item in value.items()}

    def _get(self, path: list[str]) -> Any:
        kind, name, *rest = path
        if kind == "Parameters":
            return self.parameters.get(name, AT_RUN_TIME)
        if kind == "Execution":
            return self.execution.get(name, AT_RUN_TIME)
        return _walk(self.steps.get(name, AT_RUN_TIME), rest)

    def holds(self, condition: Mapping[str, Any]) -> bool:
        """Returns whether a condition of a Condition step holds."""
        left, right = (self.resolve(condition[side]) for side in ("LeftValue", "RightValue"))
        if not isinstance(left, (int, float)):
            raise OptionError(
                "evaluation.metric must name a number of the evaluation's report",
                received="a part of it" if isinstance(left, Mapping) else repr(left),
                mend="Name the number itself, as multiclass_classification_metrics.accuracy.value",
            )
        return _COMPARISONS[condition["Type"]](left, right)


def _walk(value: Any, path: list[str]) -> Any:
    for part in path:
        if value is AT_RUN_TIME:
            return AT_RUN_TIME
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            there = ", ".join(value) if isinstance(value, Mapping) else type(value).__name__
            raise OptionError(
                "what a condition of the pipeline reads must be in the report of its step",
                received=f"{'.'.join(path)}, where '{part}' is none of {there}",
                mend="Name another metric: evaluation.metric",
            ) from error
    return value


def defaults(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a definition with their default values."""
    return {item["Name"]: item["DefaultValue"] for item in definition["Parameters"]}


def all_steps(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields all steps, those in the branches of conditions too."""
    for step in steps:
        yield step
        if step["Type"] == "Condition":
            for branch in ("IfSteps", "ElseSteps"):
                yield from all_steps(step["Arguments"][branch])


def check(definition: Mapping[str, Any], *, name: str, role: str) -> list[Problem]:
    """Returns all that AWS would refuse of a pipeline; empty when nothing is known to be wrong.

    Args:
        name: of the pipeline.
        role: ARN of its role.
    """
    request = {
        "PipelineName": name,
        "RoleArn": role,
        "PipelineDefinition": "{}" + " " * 8,
        "ClientRequestToken": "0" * 32,
    }
    problems = check_request("CreatePipeline", request, "pipeline")
    resolver = Resolver(defaults(definition))
    for step in all_steps(definition["Steps"]):
        problems.extend(_check_step(step, resolver))
    return problems


def _check_step(step: dict[str, Any], resolver: Resolver) -> Iterator[Problem]:
    name = step["Name"]
    if made := MADE.get(step["Type"]):
        request = {**resolver.resolve(step["Arguments"]), f"{made}Name": AT_RUN_TIME}
        yield from check_request(f"Create{made}", request, name)
    elif step["Type"] == "Fail":
        message = resolver.resolve(step["Arguments"]["ErrorMessage"])
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            yield Problem(name, "must have a message of at most 3072 characters", str(len(message)))
