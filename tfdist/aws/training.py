"""The request for a training job, made from the configuration."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.aws import images
from tfdist.aws.bundle import ARCHIVE, shipped
from tfdist.aws.channels import Channel, check_tflite
from tfdist.aws.config import ChannelConfig, Config, SecurityConfig, TrainingConfig
from tfdist.aws.instances import Instance
from tfdist.compat.keras import imported_by
from tfdist.errors import OptionError
from tfdist.records.format.manifest import load_manifest
from tfdist.runs import class_weights
from tfdist.runs.settings import Settings
from tfdist.strategies import check_options, names_of, spec_of
from tfdist.traces import places, wish
from tfdist.training.engine import model_path

CHECKPOINT_DIR = "/opt/ml/checkpoints"
TENSORBOARD_DIR = "/opt/ml/output/tensorboard"
_INPUT_DIR = "/opt/ml/input/data"
# The channel of the code, for jobs that cannot fetch it.
_CODE = "code"
_LOGS = [s.name for s in dataclasses.fields(Settings) if s.metadata["in_job"] == "logs"]
# Settings that are sent although they are the default.
_ALWAYS = ("epochs", "global_batch_size", "seed")
# A number as ``job.metric_line`` prints it. The space keeps loss apart from val_loss.
_NUMBER = r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)"


def _kind(training: TrainingConfig) -> str | None:
    """Returns what starts the processes of a job; None for a job of one process."""
    if training.strategy == "auto":
        return None
    return spec_of(training.strategy, training.strategy_options).sagemaker


def processes_per_host(training: TrainingConfig, instance: Instance) -> int:
    """Returns how many processes a host runs: as configured, or one for each GPU, or one."""
    if _kind(training) != "mpi":
        return 1
    wanted = training.processes_per_host or max(1, instance.gpus)
    if instance.gpus and wanted > instance.gpus:
        raise OptionError(
            "each process of a host must have a GPU of its own",
            received=f"{wanted} processes on {instance.name} with {instance.gpus} GPUs",
            mend=f"Choose processes_per_host={instance.gpus} or fewer",
        )
    return wanted


def distribution(training: TrainingConfig, instance: Instance) -> dict[str, Any]:
    """Returns what tells the container's toolkit how to start the processes: hyperparameters.

    Raises:
        OptionError: an unknown strategy, or several hosts for a strategy of one process.
    """
    kind = _kind(training)
    if kind is None:
        if training.instance_count > 1:
            raise OptionError(
                f"strategy '{training.strategy}' must run on one instance",
                received=f"instance_count {training.instance_count}",
                mend=f"Choose one of {', '.join(names_of(lambda spec: spec.sagemaker))}",
            )
        return {}
    if kind != "mpi":
        return {f"sagemaker_{kind}_enabled": True}
    if training.image_uri is None:
        raise OptionError(
            f"strategy '{training.strategy}' must have an image with Horovod, which AWS's "
            "images have not",
            received="no training.image_uri",
            mend="Build sagemaker/Dockerfile, which tfdist init --sagemaker writes, and give its "
            "image_uri",
        )
    # On CPUs a waiting rank would spin on a core that another one computes on.
    options = "" if instance.gpus else "--mca mpi_yield_when_idle 1"
    return {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": processes_per_host(training, instance),
        "sagemaker_mpi_custom_mpi_options": options,
    }


def metric_definitions(metrics: list[str]) -> list[dict[str, str]]:
    """Returns CloudWatch's metrics: each one's name and the pattern that finds it in the log.

    The patterns read the line that rank 0 prints after each epoch, with or without the prefix that
    mpirun and the toolkit put before it.
    """
    names = {f"train:{name}": name for name in metrics}
    names |= {f"validation:{name}": f"val_{name}" for name in metrics}
    names |= {"train:samples_per_s": "samples_per_s", "train:epoch_seconds": "seconds"}
    return [
        {"Name": shown, "Regex": f"tfdist epoch=.* {re.escape(name)}={_NUMBER}"}
        for shown, name in names.items()
    ]


def hyperparameters(config: Config) -> dict[str, Any]:
    """Returns what the entry point gets: tfdist's own, or the user's for a script of the user's."""
    training = config.training
    if training.entry_point != "train.py":
        return dict(training.hyperparameters)
    if training.hyperparameters:
        raise OptionError(
            "train.py must have its hyperparameters from the configuration's own keys",
            received=f"training.hyperparameters with {', '.join(training.hyperparameters)}",
            mend="Give them as training.epochs and so on, or a script of your own as entry_point",
        )
    channel = config.data.channels.get("train", ChannelConfig())
    check_tflite(training.tflite, is_pipe=channel.mode == "Pipe")
    values = {
        "model": shipped(config.model),
        "strategy": training.strategy,
        "strategy-options": json.dumps(training.strategy_options),
        "lr-scaling": training.lr_scaling,
        "warmup-epochs": training.warmup_epochs,
        "tflite": training.tflite,
        "keras": _keras_of(config),
    }
    for setting in dataclasses.fields(Settings):
        value = getattr(training, setting.name)
        if value != setting.default or setting.name in _ALWAYS:
            values[setting.name.replace("_", "-")] = _in_container(setting, value)
    if training.class_weight is not None:
        values["class-weight"] = class_weight(config, training.class_weight)
    if training.keeps_checkpoints:
        values |= {"checkpoint-dir": CHECKPOINT_DIR, "max-run-s": training.max_run_s}
    return values


def class_weight(config: Config, given: str | Mapping[Any, Any]) -> str | Mapping[Any, Any]:
    """Returns the weights of classes as a job can read them, checked against data that is here."""
    given = class_weights.without_file(given)
    if config.data.folder is not None:
        class_weights.of_manifest(given, load_manifest(config.data.folder), "train")
    return given


def _keras_of(config: Config) -> int:
    """Returns which Keras the model is of: 2 or 3, as its file imports it, else as is said."""
    place = Path(model_path.parts(config.model)[0])
    found, said = imported_by(str(place), [place.parent]), config.training.keras
    if len(found) != 1:
        return said or 2
    (package,) = found
    kind = 3 if package == "keras" else 2
    if said not in (None, kind):
        raise OptionError(
            "training.keras must be the Keras that the model's file imports",
            received=f"{said}, and `import {package}` in {place}",
            mend="Leave training.keras out",
        )
    return kind


def _in_container(setting: dataclasses.Field, value: Any) -> Any:
    """Returns a setting as it is called where the job runs."""
    how = setting.metadata["in_job"]
    if how == "code":
        return shipped(value)
    if how == "channel":
        return f"{_INPUT_DIR}/{value}"
    if how == "logs":
        return str(dataclasses.replace(wish.parsed(value), folder=TENSORBOARD_DIR))
    return value


def check_hyperparameters(values: dict[str, Any]) -> None:
    """Checks values as train.py will, so that no instance is paid for to find a mistake.

    Raises:
        OptionError: an unknown or wrong one.
    """
    from tfdist.aws import job

    # Files and folders of the container are not here.
    places = [s.name for s in dataclasses.fields(Settings) if s.metadata["in_job"] != "value"]
    arguments = [
        text
        for key, value in values.items()
        if key.replace("-", "_") not in places
        for text in (f"--{key}", str(value))
    ]
    options = job.parse(arguments)
    check_options(options.strategy, job.strategy_options(options))


def request(
    config: Config, instance: Instance, code_uri: str, inputs: list[Channel], checkpoints: Any
) -> dict[str, Any]:
    """Returns the CreateTrainingJob request of the configuration, but for the job's name.

    Args:
        code_uri: of what ``bundle.pack`` made.
        checkpoints: S3 URI for the checkpoints of this job and of no other: one that is not new
            resumes.

    Raises:
        OptionError: see ``distribution`` and ``check_hyperparameters``.
    """
    training = config.training
    values = hyperparameters(config)
    security, submitted = config.security, code_uri
    taken = [_CODE, *(channel.name for channel in inputs)]
    if training.entry_point == "train.py":
        check_hyperparameters(values)
        # It looks for these by name, also where there are pipes or no such split.
        taken += ["train", "validation"]
    for name, uri in training.channels.items():
        if name in taken:
            raise OptionError(
                "training.channels must have names that no channel of the job has",
                received=name,
                mend="Choose another name",
            )
        inputs = [*inputs, Channel(name=name, uri=uri)]
    if security.network_isolation:
        inputs = [*inputs, Channel(name=_CODE, uri=code_uri)]
        submitted = f"{_INPUT_DIR}/{_CODE}/{ARCHIVE}"
    values |= {
        "sagemaker_submit_directory": submitted,
        "sagemaker_program": training.entry_point,
        "sagemaker_container_log_level": 20,
        "sagemaker_region": config.region,
        **distribution(training, instance),
    }
    made = {
        "AlgorithmSpecification": {
            "TrainingInputMode": "File",
            "TrainingImage": image(config, training.instance_type),
            "MetricDefinitions": metric_definitions(training.metrics),
            "EnableSageMakerMetricsTimeSeries": True,
        },
        # The toolkit reads each of them as JSON.
        "HyperParameters": {key: json.dumps(value) for key, value in values.items()},
        "InputDataConfig": [_input(channel) for channel in inputs],
        "OutputDataConfig": {"S3OutputPath": f"{config.root}/output"},
        "ResourceConfig": {
            "InstanceType": training.instance_type,
            "InstanceCount": training.instance_count,
            "VolumeSizeInGB": training.volume_gb,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": training.max_run_s},
        "RoleArn": config.role,
        "ProfilerConfig": {"DisableProfiler": True},
    }
    if training.spot:
        wait_s = training.max_wait_s or 2 * training.max_run_s
        made["StoppingCondition"]["MaxWaitTimeInSeconds"] = wait_s
        made["EnableManagedSpotTraining"] = True
    if training.keeps_checkpoints:
        made["CheckpointConfig"] = {"S3Uri": checkpoints, "LocalPath": CHECKPOINT_DIR}
    if logs := [getattr(training, name) for name in _LOGS if getattr(training, name)]:
        named = [folder for one in logs if (folder := wish.parsed(one).folder)]
        folders = list(dict.fromkeys(folder.rstrip("/") for folder in named))
        if len(folders) > 1:
            raise OptionError(
                "training.tensorboard and training.profile must name one folder, for a job has one "
                "place of its logs in S3",
                received=" and ".join(folders),
                mend=f"Give both as {folders[0]}",
            )
        folder = folders[0] if folders else places.FOLDER
        place = {"LocalPath": TENSORBOARD_DIR, "S3OutputPath": f"{config.root}/{folder}"}
        made["TensorBoardOutputConfig"] = place
    made |= network(security)
    made["ResourceConfig"] |= volume_key(security)
    made["OutputDataConfig"] |= output_key(security)
    return made | tags(security)


def network(security: SecurityConfig) -> dict[str, Any]:
    """Returns the members of a request that say how containers reach each other and the world."""
    made: dict[str, Any] = {}
    if security.subnets:
        groups = security.security_group_ids
        made["VpcConfig"] = {"SecurityGroupIds": groups, "Subnets": security.subnets}
    if security.network_isolation:
        made["EnableNetworkIsolation"] = True
    if security.encrypt_between_containers:
        made["EnableInterContainerTrafficEncryption"] = True
    return made


def volume_key(security: SecurityConfig) -> dict[str, str]:
    """Returns the key of volumes, as a member of what describes instances."""
    return {"VolumeKmsKeyId": security.volume_kms_key} if security.volume_kms_key else {}


def output_key(security: SecurityConfig) -> dict[str, str]:
    """Returns the key of results, as a member of what describes outputs."""
    return {"KmsKeyId": security.output_kms_key} if security.output_kms_key else {}


def tags(security: SecurityConfig) -> dict[str, Any]:
    """Returns the tags as a member of a request."""
    pairs = [{"Key": key, "Value": value} for key, value in security.tags.items()]
    return {"Tags": pairs} if pairs else {}


def image(config: Config, instance_type: str) -> str:
    """Returns the image to train and to process data in: one's own, or AWS's."""
    training = config.training
    if training.image_uri is not None:
        return training.image_uri
    return images.training(training.framework_version, config.region, instance_type).uri


def warning(config: Config, today: datetime.date) -> str | None:
    """Returns a line on an image of AWS that is patched no more; None where there is none."""
    training = config.training
    if training.image_uri is not None:
        return None
    used = images.training(training.framework_version, config.region, training.instance_type)
    return images.outdated(used, today)


def _input(channel: Channel) -> dict[str, Any]:
    return {
        "ChannelName": channel.name,
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": channel.uri,
                "S3DataDistributionType": channel.distribution,
            }
        },
        "ContentType": "application/x-tfrecord",
        "InputMode": channel.mode,
    }
