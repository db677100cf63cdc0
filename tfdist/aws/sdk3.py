"""The training job of a configuration as a ``ModelTrainer`` of SageMaker's SDK 3."""

from __future__ import annotations

import importlib.metadata
import uuid
from typing import Any

from tfdist.aws import bundle, pipeline, sessions, training
from tfdist.aws.config import Config
from tfdist.aws.upload import encryption
from tfdist.errors import EngineMissingError, OptionError, package_missing


def model_trainer(config: Config, *, run: str | None = None, boto_session: Any = None) -> Any:
    """Returns SDK 3's ``ModelTrainer`` of the training step, and sends the code that it names.

    It asks for what the pipeline's step asks for, and the image's own toolkit starts the script.
    Its ``train()`` starts a job; the data must be in S3, by ``tfdist aws upload``.

    Args:
        run: a name for the checkpoints; a job of the same name goes on. None for a new one.
        boto_session: None for one of boto3's usual credentials.

    Raises:
        EngineMissingError: SDK 3 is not installed.
        OptionError: data that a first step is to shard, a configuration that AWS would refuse, or
            no credentials.
    """
    try:
        from sagemaker.core import shapes
        from sagemaker.core.helper.session_helper import Session

        from sagemaker.train import ModelTrainer
    except ImportError as error:
        raise _missing(error) from None
    session = boto_session or sessions.with_aws(config.region)
    code = bundle.pack(config)
    values = arguments(request(config, code.uri, run or uuid.uuid4().hex))
    metrics, logs = values.pop("metric_definitions"), values.pop("tensorboard_output_config")
    code.upload(session.client("s3"), encryption(config.security.output_kms_key))
    made = ModelTrainer(
        sagemaker_session=Session(boto_session=session, default_bucket=config.bucket),
        base_job_name=config.name,
        **values,
    )
    made.with_metric_definitions([shapes.MetricDefinition(**metric) for metric in metrics])
    if logs is not None:
        made.with_tensorboard_output_config(shapes.TensorBoardOutputConfig(**logs))
    return made


def request(config: Config, code_uri: str, run: str) -> dict[str, Any]:
    """Returns the CreateTrainingJob request, but for the job's name.

    Raises:
        OptionError: see ``model_trainer``.
    """
    if config.data.folder is None:
        raise OptionError(
            "a ModelTrainer must have shards that are in S3",
            received=f"data.source {config.data.source}, which the pipeline shards by itself",
            mend="Shard it here with `tfdist shard`, and send data.folder with tfdist aws upload",
        )
    instance = config.price_table[config.training.instance_type]
    checkpoints = f"{config.root}/runs/{run}/checkpoints"
    inputs = pipeline.training_channels(config)
    return training.request(config, instance, code_uri, inputs, checkpoints)


def arguments(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the same as arguments of ``ModelTrainer``, and of two of its methods ``with_...``.

    Two members have no place there, and are AWS's to choose: ProfilerConfig, and
    EnableSageMakerMetricsTimeSeries.
    """
    algorithm = request["AlgorithmSpecification"]

    def among(*names: str) -> dict[str, Any]:
        return {name: request[name] for name in names if name in request}

    network = among("EnableNetworkIsolation", "EnableInterContainerTrafficEncryption")
    values = {
        "TrainingImage": algorithm["TrainingImage"],
        "TrainingInputMode": algorithm["TrainingInputMode"],
        "Role": request["RoleArn"],
        "Compute": request["ResourceConfig"] | among("EnableManagedSpotTraining"),
        "Networking": network | request.get("VpcConfig", {}) or None,
        "MetricDefinitions": algorithm["MetricDefinitions"],
        "TensorboardOutputConfig": request.get("TensorBoardOutputConfig"),
    }
    values |= among("InputDataConfig", "OutputDataConfig", "StoppingCondition", "CheckpointConfig")
    values |= among("Tags")
    # The names of hyperparameters stay as they are.
    return _snaked(values) | {"hyperparameters": request["HyperParameters"]}


def _snaked(value: Any) -> Any:
    from botocore import xform_name

    if isinstance(value, list):
        return [_snaked(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {xform_name(key): _snaked(item) for key, item in value.items()}


def _missing(error: ImportError) -> EngineMissingError:
    try:
        version = importlib.metadata.version("sagemaker")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version.startswith("2."):
        error = ImportError(f"sagemaker {version}, which has no ModelTrainer of SDK 3")
    return package_missing("sagemaker 3", "a ModelTrainer", "sagemaker3", error)
