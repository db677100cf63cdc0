"""A processing step on this machine: its inputs, its own start script, its outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfdist.aws.rehearsal.agent import Machine

CONTAINER_DIR = "/opt/ml/processing"


def run_processing(request: dict[str, Any], folder: Path, machine: Machine) -> dict[str, Any]:
    """Carries out a CreateProcessingJob request; returns its properties.

    Args:
        folder: a new folder that stands for /opt/ml/processing in the command.

    Raises:
        LaunchError: the script failed.
    """

    def here(text: str) -> str:
        return text.replace(CONTAINER_DIR, str(folder))

    for item in request.get("ProcessingInputs", []):
        source = item["S3Input"]
        target = Path(here(source["LocalPath"]))
        target.mkdir(parents=True, exist_ok=True)
        machine.storage.fetch(machine.storage.keys(source["S3Uri"]), source["S3Uri"], target)
    outputs = request["ProcessingOutputConfig"]["Outputs"]
    for item in outputs:
        Path(here(item["S3Output"]["LocalPath"])).mkdir(parents=True, exist_ok=True)
    app = request["AppSpecification"]
    command = [here(text) for text in (*app["ContainerEntrypoint"], *app["ContainerArguments"])]
    machine.run_script("the processing script", command)
    for item in outputs:
        place = item["S3Output"]
        machine.storage.store(Path(here(place["LocalPath"])), place["S3Uri"])
    return {
        "ProcessingJobStatus": "Completed",
        "ProcessingOutputConfig": {"Outputs": {item["OutputName"]: item for item in outputs}},
    }


def property_files(
    step: dict[str, Any], request: dict[str, Any], folder: Path
) -> dict[tuple[str, str], Any]:
    """Returns (step, property file) -> its JSON, from the step's outputs."""
    places = {
        item["OutputName"]: item["S3Output"]["LocalPath"].replace(CONTAINER_DIR, str(folder))
        for item in request["ProcessingOutputConfig"]["Outputs"]
    }
    return {
        (step["Name"], file["PropertyFileName"]): json.loads(
            (Path(places[file["OutputName"]]) / file["FilePath"]).read_text()
        )
        for file in step.get("PropertyFiles", [])
    }
