"""A training step on this machine, run by SageMaker's own toolkit."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.aws.rehearsal.agent import SEE_ALL, Machine, Storage, parse_uri, pipes
from tfdist.errors import DataError, LaunchError, OptionError
from tfdist.launch import local, mpi, tf_cluster

CONTAINER_DIR = "/opt/ml"
MAX_PROCESSES = 8
# The toolkit looks its hosts up, and this name is always known.
_ONLY_HOST = "localhost"
_MULTI_WORKER = "sagemaker_multi_worker_mirrored_strategy_enabled"


def run_training(
    job_name: str, request: dict[str, Any], folder: Path, machine: Machine
) -> tuple[dict[str, Any], dict[str, float]]:
    """Carries out a CreateTrainingJob request.

    One instance runs the toolkit's whole program. Several are simulated: ranks on this machine,
    each with the data that its host would get.

    Args:
        folder: a new folder; ``folder/algo-1`` is /opt/ml of the first host.

    Returns:
        The properties of the job, as far as pipelines use them, and the last value of each metric.

    Raises:
        LaunchError: the script failed; the message is its ``failure`` file.
    """
    storage, environ = machine.storage, machine.environ
    hosts = request["ResourceConfig"]["InstanceCount"]
    values = request["HyperParameters"]
    per_host = int(values.get("sagemaker_mpi_num_of_processes_per_host", "1"))
    has_mpi = values.get("sagemaker_mpi_enabled") == "true"
    if hosts > 1 and not has_mpi and _MULTI_WORKER not in values:
        raise OptionError(
            "a rehearsed job of several instances must be one of MPI or multi_worker",
            received=f"{hosts} instances of another one",
            mend="Rehearse on one with --set training.instance_count=1",
        )
    if hosts * per_host > MAX_PROCESSES:
        raise OptionError(
            f"a rehearsal must start at most {MAX_PROCESSES} processes",
            received=f"{hosts} instances x {per_host}",
            mend="Rehearse with fewer by --set training.instance_count=2 "
            "--set training.processes_per_host=1",
        )
    names = [_ONLY_HOST] if hosts == 1 else [f"algo-{number + 1}" for number in range(hosts)]
    feeds: dict[Path, list[bytes]] = {}
    for number, name in enumerate(names):
        base = folder / f"algo-{number + 1}"
        _make_base(base, request, names, name)
        feeds |= _bring_data(base, request, storage, number, hosts)
        _bring_checkpoints(base, request, storage)
    log: list[str] = []
    module = [sys.executable, "-m", "tfdist.aws.rehearsal"]
    if hosts == 1:
        command, job = [*module[:2], f"{module[2]}.toolkit"], local.job
        environ = {**environ, "SAGEMAKER_BASE_DIR": str(folder / "algo-1")}
    else:
        command = [*module[:2], f"{module[2]}.host_rank", str(folder)]
        job = functools.partial(mpi.job, workers=hosts * per_host)
        if not has_mpi:  # AWS's image gives each host such a TF_CONFIG.
            job = functools.partial(tf_cluster.job, workers=hosts)
        for number in range(hosts):
            _bring_code(folder / f"algo-{number + 1}", values, storage)
    with pipes(feeds):
        code = machine.run(command, environ, job, log.append)
    if code != 0:
        raise LaunchError(
            "the training script must end with success",
            received=_reason(folder, code),
            mend=SEE_ALL,
        )
    bucket_uri = f"{request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{job_name}/output"
    first = folder / "algo-1"
    storage.store_archive(first / "model", f"{bucket_uri}/model.tar.gz", folder)
    storage.store_archive(first / "output" / "data", f"{bucket_uri}/output.tar.gz", folder)
    if "CheckpointConfig" in request:
        storage.store(first / "checkpoints", request["CheckpointConfig"]["S3Uri"])
    properties = {
        "TrainingJobName": job_name,
        "TrainingJobStatus": "Completed",
        "ModelArtifacts": {"S3ModelArtifacts": f"{bucket_uri}/model.tar.gz"},
    }
    definitions = request["AlgorithmSpecification"].get("MetricDefinitions", [])
    return properties, read_metrics(log, definitions)


def read_metrics(log: list[str], definitions: list[dict[str, str]]) -> dict[str, float]:
    """Returns the last value of each metric whose pattern finds one in the log."""
    found = {}
    for definition in definitions:
        for line in log:
            if match := re.search(definition["Regex"], line):
                found[definition["Name"]] = float(match.group(1))
    return found


def _make_base(base: Path, request: dict[str, Any], names: list[str], name: str) -> None:
    """Makes what a container finds under /opt/ml."""
    for part in ("code", "model", "output/data", "output/intermediate", "input/config"):
        (base / part).mkdir(parents=True)
    (base / "input" / "data").mkdir()
    (base / "checkpoints").mkdir()
    # Paths of a container lead into the folder that stands for it.
    values = {
        key: value.replace(f'"{CONTAINER_DIR}/', f'"{base}/')
        for key, value in request["HyperParameters"].items()
    }
    kind = request["ResourceConfig"]["InstanceType"]
    group = {"instance_group_name": "homogeneousCluster", "instance_type": kind, "hosts": names}
    files = {
        "hyperparameters": values,
        "resourceconfig": {
            "current_host": name,
            "current_instance_type": kind,
            "current_group_name": "homogeneousCluster",
            "hosts": names,
            "instance_groups": [group],
            "network_interface_name": "lo",
        },
        "inputdataconfig": {
            channel["ChannelName"]: {
                "ContentType": channel.get("ContentType", ""),
                "TrainingInputMode": channel.get("InputMode", "File"),
                "S3DistributionType": channel["DataSource"]["S3DataSource"][
                    "S3DataDistributionType"
                ],
                "RecordWrapperType": channel.get("RecordWrapperType", "None"),
            }
            for channel in request["InputDataConfig"]
        },
    }
    for file, value in files.items():
        (base / "input" / "config" / f"{file}.json").write_text(json.dumps(value))


def _bring_data(
    base: Path, request: dict[str, Any], storage: Storage, host: int, hosts: int
) -> dict[Path, list[bytes]]:
    """Downloads this host's channels; returns what must go through pipes instead."""
    feeds = {}
    for channel in request["InputDataConfig"]:
        source = channel["DataSource"]["S3DataSource"]
        objects = storage.keys(source["S3Uri"])
        if source["S3DataDistributionType"] == "ShardedByS3Key":
            objects = objects[host::hosts]
        target = base / "input" / "data" / channel["ChannelName"]
        if channel.get("InputMode") == "Pipe":
            feeds[target] = [storage.read(*item) for item in objects]
        else:
            storage.fetch(objects, source["S3Uri"], target)
    return feeds


def _bring_checkpoints(base: Path, request: dict[str, Any], storage: Storage) -> None:
    """Brings what an interrupted attempt has left."""
    if "CheckpointConfig" in request:
        uri = request["CheckpointConfig"]["S3Uri"]
        with contextlib.suppress(DataError):  # There is none: the first attempt.
            storage.fetch(storage.keys(uri), uri, base / "checkpoints")


def _bring_code(base: Path, values: Mapping[str, str], storage: Storage) -> None:
    """Does what the toolkit does before it starts a script: brings the code."""
    place = json.loads(values["sagemaker_submit_directory"])
    archive = base / "sourcedir.tar.gz"
    if place.startswith(CONTAINER_DIR):  # A channel has brought it.
        archive = base / Path(place).relative_to(CONTAINER_DIR)
    else:
        archive.write_bytes(storage.read(*parse_uri(place)))
    with tarfile.open(archive) as packed:
        packed.extractall(base / "code", filter="data")


def _reason(folder: Path, code: int) -> str:
    for base in sorted(folder.glob("algo-*")):
        with contextlib.suppress(OSError):
            if text := " ".join((base / "output" / "failure").read_text().split()):
                return text
    return f"exit code {code}"
