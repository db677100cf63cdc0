"""What is wrong with a pipeline's definition in itself, which would be a mistake of ours."""

from __future__ import annotations

import re

from tfdist.aws.definition import MADE, all_steps, split_path
from tfdist.aws.validate import service_model

_EXECUTION = ("PipelineName", "PipelineExecutionId")
_STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PARAMETER_TYPES = {"String": str, "Integer": int, "Float": (int, float), "Boolean": bool}


def mistakes_in(definition):
    """Returns a line for each name, type or reference that cannot be."""
    parameters, steps = definition["Parameters"], list(all_steps(definition["Steps"]))
    found = [
        f"parameter {each['Name']} must have a default of type {each['Type']}"
        for each in parameters
        if not isinstance(each["DefaultValue"], _PARAMETER_TYPES[each["Type"]])
    ]
    names = [step["Name"] for step in steps]
    found += [f"{name!r} is no name" for name in names if not _STEP_NAME.fullmatch(name)]
    found += [f"{name} twice" for name in set(names) if names.count(name) > 1]
    declared = {each["Name"] for each in parameters}
    by_name = {each["Name"]: each for each in steps}
    for step in steps:
        found += [f"{name} is no step" for name in step.get("DependsOn", ()) if name not in names]
        for reference in _references(step["Arguments"]):
            if not _is_known(reference, step["Name"], declared, by_name):
                found.append(f"{reference} in step {step['Name']} is nothing")
    return found


def _is_known(reference, own, declared, by_name):
    kind, name, *path = split_path(reference)
    if kind == "Parameters":
        return name in declared
    if kind == "Execution":
        return name in _EXECUTION
    return kind == "Steps" and name in by_name and name != own and _has(by_name[name], path)


def _references(value):
    if isinstance(value, dict):
        if set(value) == {"Get"}:
            yield value["Get"]
            return
        # The steps inside a condition are looked at by themselves.
        value = [item for key, item in value.items() if key not in ("IfSteps", "ElseSteps")]
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def _has(step, path):
    if path[0] == "PropertyFiles":
        return path[1] in [item["PropertyFileName"] for item in step.get("PropertyFiles", [])]
    if step["Type"] not in MADE:
        return False
    shape = service_model().operation_model(f"Describe{MADE[step['Type']]}").output_shape
    for part in path:
        if shape.type_name == "structure" and part in shape.members:
            shape = shape.members[part]
        elif shape.type_name == "list":
            shape = shape.member  # An output is named or numbered.
        elif shape.type_name == "map":
            shape = shape.value
        else:
            return False
    return True
