"""What is wanted of AWS: one YAML file, checked before anything is sent.

Every section is a dataclass; an unknown key is an error that lists the known ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tfdist.aws.instances import PriceTable, device
from tfdist.aws.sections import (
    CostConfig,
    EndpointConfig,
    RegistrationConfig,
    TransformConfig,
    TuningConfig,
    among,
    at_least,
)
from tfdist.errors import OptionError, TfdistError, unknown_choice
from tfdist.planning import yaml_file
from tfdist.records.format.manifest import COMPRESSIONS
from tfdist.runs.settings import Settings

MODES = ("File", "FastFile", "Pipe")
DISTRIBUTIONS = ("FullyReplicated", "ShardedByS3Key")
# Families with disks of their own, of which AWS takes no VolumeKmsKeyId.
_LOCAL_STORAGE = re.compile(r"ml\.([a-z]+\d+[a-z]*d[a-z]*|g5|g6e?|p5e?n?|trn1n?|trn2)\.")

_INSTANCE_TYPE = re.compile(r"ml\.[^.\s]+\.[^.\s]+")


@dataclass(frozen=True, kw_only=True)
class ChannelConfig:
    """How one split reaches the hosts."""

    mode: str = "File"
    distribution: str = "FullyReplicated"

    def __post_init__(self) -> None:
        among("mode", self.mode, MODES)
        among("distribution", self.distribution, DISTRIBUTIONS)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data: a folder of shards to upload, or raw data that a first step shards.

    Attributes:
        folder: a folder that ``tfdist shard`` wrote; ``tfdist aws upload`` sends it.
        source: instead: raw data, "digits" or an S3 URI of what ``tfdist shard`` takes.
        num_shards, split, stratify, label, compression: of that first step, as ``tfdist shard``.
        channels: split -> how it reaches the hosts.
    """

    folder: str | None = None
    source: str | None = None
    num_shards: int = 4
    split: str = "train=8,validation=1,test=1"
    stratify: bool = False
    label: str | None = None
    compression: str = "none"
    instance_type: str = "ml.m5.xlarge"
    channels: dict[str, ChannelConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.source is None):
            raise OptionError(
                "data must have a folder of shards, or a source to shard",
                received="both" if self.folder else "neither",
                mend="Give data.folder (made by `tfdist shard`) or data.source",
            )
        at_least("data.num_shards", self.num_shards, 1)
        among("data.compression", self.compression, COMPRESSIONS)


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """What a company may ask of every job.

    Attributes:
        subnets, security_group_ids: of the VPC that the containers run in.
        network_isolation: no container reaches a network; all comes through channels, so
            ``training.image_uri`` must hold what tfdist needs.
        encrypt_between_containers: what the hosts of a job send each other.
        volume_kms_key, output_kms_key: keys of the volumes, and of what is written to S3, the code
            that is sent included.
        tags: of the pipeline and of each job.
    """

    subnets: list[str] = field(default_factory=list)
    security_group_ids: list[str] = field(default_factory=list)
    network_isolation: bool = False
    encrypt_between_containers: bool = False
    volume_kms_key: str | None = None
    output_kms_key: str | None = None
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.subnets) != bool(self.security_group_ids):
            given = "subnets" if self.subnets else "security_group_ids"
            raise OptionError(
                "security.subnets and security.security_group_ids must be given together",
                received=f"{given} alone",
                mend="Give both, or neither",
            )
        for key in ("subnets", "security_group_ids"):
            for value in getattr(self, key):
                _begins(f"security.{key}", value, "subnet-" if key == "subnets" else "sg-")
        for key, value in self.tags.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise OptionError(
                    "security.tags must be texts", received=f"{key!r}: {value!r}", mend="Quote it"
                )
            if key.lower().startswith("aws:"):
                raise OptionError(
                    "a tag must not begin with aws:, which AWS keeps",
                    received=key,
                    mend="Choose another key",
                )


def _begins(what: str, value: object, beginning: str) -> None:
    if not isinstance(value, str) or not value.startswith(beginning):
        raise OptionError(
            f"{what} must begin with {beginning}",
            received=repr(value),
            mend=f"Write it whole, with {beginning} in front",
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """The training job: all settings of ``tfdist.train``, with its meanings, and what is of AWS.

    Attributes:
        channels: more channels, name -> S3 URI: each reaches the program as a folder.
        init_weights: CHANNEL/FILE of one of them.
        tensorboard, profile: folders below the configuration's place in S3.
        processes_per_host: of MPI; None for one for each GPU.
        keras: 2 or 3: which Keras the model is of; None for the one that its file imports, and 2
            where that tells nothing. Keras 2 (tf_keras) is brought into the job where the image has
            none.
        framework_version: of TensorFlow, in AWS's image, as "2.21"; None for the newest. See
            tables/images.yaml.
        image_uri: an image of one's own; strategy horovod needs one, see sagemaker/Dockerfile.
        spot: use spot instances.
        max_run_s: longest time of the job; one that keeps checkpoints writes one before it is over.
        max_wait_s: longest time with waiting for spot instances; None for twice ``max_run_s``.
        metrics: names of the model's loss and metrics to show in CloudWatch.
    """

    strategy: str = "multi_worker"
    strategy_options: dict[str, Any] = field(default_factory=dict)
    entry_point: str = "train.py"
    instance_type: str = "ml.c5.2xlarge"
    instance_count: int = 1
    processes_per_host: int | None = None
    keras: int | None = None
    image_uri: str | None = None
    framework_version: str | None = None
    spot: bool = True
    max_run_s: int = 3600
    max_wait_s: int | None = None
    volume_gb: int = 30
    channels: dict[str, str] = field(default_factory=dict)
    lr_scaling: str = "none"
    warmup_epochs: float = 0.0
    tflite: str = "none"
    metrics: list[str] = field(default_factory=lambda: ["loss", "accuracy"])
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?", self.framework_version or "0.0"):
            raise OptionError(
                "training.framework_version must be a version as '2.21'",
                received=repr(self.framework_version),
                mend="Leave it out, for AWS's newest image",
            )
        for setting in dataclasses.fields(Settings):
            value = getattr(self, setting.name)
            if setting.metadata["in_job"] == "never" and value is not None:
                raise OptionError(
                    f"training.{setting.name} must be left out, for nobody reads it in a container",
                    received=value,
                    mend="See training.metrics, which CloudWatch shows",
                )
        if Path(self.entry_point).name != self.entry_point:
            raise OptionError(
                "training.entry_point must be a file among the scripts, which are sent as one "
                "folder",
                received=self.entry_point,
                mend="Put it beside train.py, and give its name alone",
            )
        for name, uri in self.channels.items():
            _begins(f"training.channels.{name}", uri, "s3://")
        if self.init_weights and self.init_weights.partition("/")[0] not in self.channels:
            raise OptionError(
                "training.init_weights must be CHANNEL/FILE, of one of training.channels",
                received=self.init_weights,
                mend="Write channels: {pretrained: s3://BUCKET/PLACE} and init_weights: "
                "pretrained/model.keras",
            )
        if self.keras not in (None, 2, 3):
            raise OptionError(
                "training.keras must be 2 or 3",
                received=self.keras,
                mend="Leave it out: the job takes the Keras that the model's file imports",
            )
        for name in ("instance_count", "epochs", "global_batch_size", "max_run_s", "volume_gb"):
            at_least(f"training.{name}", getattr(self, name), 1)
        at_least("training.processes_per_host", self.processes_per_host, 1)
        at_least("training.warmup_epochs", self.warmup_epochs, 0)
        if self.max_wait_s is not None and self.max_wait_s < self.max_run_s:
            raise OptionError(
                "training.max_wait_s must be at least training.max_run_s",
                received=f"{self.max_wait_s} for {self.max_run_s}",
                mend="Leave training.max_wait_s out, for twice max_run_s, or choose a larger one",
            )

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the job keeps checkpoints in S3: on spot instances, and where it is asked to."""
        return self.spot or self.checkpoint_every is not None


#: Metrics of a report of which less is better.
_ERRORS = ("mae", "mse", "rmse", "false_positive_rate")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The evaluation step, and what a model must reach to be registered.

    Attributes:
        metric: a place in the report, see ``evaluation``.
        larger_is_better: of the metric; None tells it by its name.
    """

    split: str = "test"
    instance_type: str = "ml.m5.xlarge"
    metric: str = "multiclass_classification_metrics.accuracy.value"
    threshold: float = 0.9
    larger_is_better: bool | None = None

    def __post_init__(self) -> None:
        if not all(self.metric.split(".")):
            raise OptionError(
                "evaluation.metric must be a place in the report, names with a dot between them",
                received=repr(self.metric),
                mend="Leave it out, or write binary_classification_metrics.auc.value",
            )

    @property
    def wants_larger(self) -> bool:
        """Whether a model must reach the threshold from below."""
        if self.larger_is_better is not None:
            return self.larger_is_better
        return self.metric.removesuffix(".value").rpartition(".")[2] not in _ERRORS


@dataclass(frozen=True, kw_only=True)
class Config:
    """All of it.

    Attributes:
        name: of the pipeline, and the beginning of the names of its jobs.
        role: ARN of the role that SageMaker takes.
        bucket, prefix: where data, code and results lie in S3.
        model: FILE.py:NAME; the file is sent with the scripts.
        prices: a price table instead of tfdist's own.
        scripts: the folder of train.py and the other scripts; the configuration's own.
    """

    name: str
    region: str
    role: str
    bucket: str
    prefix: str
    model: str
    data: DataConfig
    training: TrainingConfig
    registration: RegistrationConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    tuning: TuningConfig | None = None
    transform: TransformConfig | None = None
    endpoint: EndpointConfig | None = None
    security: SecurityConfig = SecurityConfig()
    cost: CostConfig = field(default_factory=CostConfig)
    prices: str | None = None
    scripts: str = ""

    def __post_init__(self) -> None:
        if self.security.network_isolation and self.training.image_uri is None:
            raise OptionError(
                "jobs without a network must have an image that holds what tfdist needs",
                received="security.network_isolation without training.image_uri",
                mend="Build sagemaker/Dockerfile, which tfdist init --sagemaker writes",
            )
        if self.security.volume_kms_key is not None:
            parts = (self.training, self.evaluation, self.data, self.transform)
            kinds = {part.instance_type for part in parts if part} | {self.endpoint_type or ""}
            for kind in sorted(kinds):
                if _LOCAL_STORAGE.match(kind):
                    raise OptionError(
                        "security.volume_kms_key must be left out for instances with disks of "
                        "their own, which encrypt them themselves",
                        received=kind,
                        mend="Leave it out, or choose instances without them, as ml.m5.xlarge",
                    )
        closed = self.security.network_isolation or self.security.subnets
        if closed and self.endpoint and self.endpoint.serverless:
            raise OptionError(
                "a serverless endpoint must do without security.subnets and "
                "security.network_isolation, which AWS has not for it",
                received="endpoint.serverless with them",
                mend="Choose an endpoint on instances",
            )
        registered = self.registration.instance_types[0]
        wanted = self.endpoint_type or ("ml.serverless.cpu" if self.endpoint else registered)
        if device(wanted) != device(registered):
            raise OptionError(
                "an endpoint must be of the device of registration.instance_types, GPU or CPU, "
                "whose image the registered model has",
                received=f"{self.endpoint_type or 'serverless'} for {registered}",
                mend="Register such a type first, and run the pipeline before you deploy",
            )
        if self.tuning and (logs := self.training.tensorboard or self.training.profile):
            raise OptionError(
                "tuning must do without training.tensorboard and training.profile, for a search "
                "keeps no logs in S3",
                received=logs,
                mend="Leave them out, or leave tuning out",
            )

    @property
    def price_table(self) -> PriceTable:
        """The price table, a user's or tfdist's own. Raises TfdistError: it cannot be read."""
        return PriceTable.load(None if self.prices is None else Path(self.prices))

    @property
    def endpoint_type(self) -> str | None:
        """The kind of instances that an endpoint runs on; None where there are none."""
        if self.endpoint is None or self.endpoint.serverless:
            return None
        return self.endpoint.instance_type or self.registration.instance_types[0]

    @property
    def root(self) -> str:
        """The S3 URI under which everything lies, without a slash at the end."""
        return f"s3://{self.bucket}/{self.prefix.strip('/')}".rstrip("/")

    @property
    def data_root(self) -> str:
        """The S3 URI of the shards: a folder for each channel."""
        return f"{self.root}/data"


def load(path: str | Path, changes: tuple[str, ...] = ()) -> Config:
    """Reads a configuration.

    Args:
        changes: ``section.key=value`` texts that replace what the file says; values are YAML.

    Raises:
        OptionError: the file cannot be read, a key is unknown or missing, or a value is wrong.
    """
    path = Path(path)
    try:
        value = yaml_file.load(path.read_text(encoding="utf-8"))
        for change in changes:
            _change(value, change)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"{path} must be a YAML file",
            received=f"an error: {reason}",
            mend="Give a file as tfdist init --sagemaker writes one",
        ) from None
    except yaml.YAMLError as error:
        raise OptionError(
            f"{path} must be YAML",
            received=f"an error: {error}",
            mend="Correct the line that the error names, in the file or in --set",
        ) from None
    if isinstance(value, dict):
        value.setdefault("scripts", str(path.parent))
    try:
        return _read(Config, value, "")
    except TfdistError as error:
        raise OptionError(
            f"{path}: {error.rule}", received=error.received, mend=error.mend
        ) from None


def _change(value: Any, change: str) -> None:
    place, equals, text = change.partition("=")
    *sections, key = place.split(".")
    if not equals or not key:
        raise OptionError(
            "a change must be written as section.key=value",
            received=repr(change),
            mend="Write for example evaluation.threshold=0.5",
        )
    for section in sections:
        value = value.setdefault(section, {}) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        raise OptionError(
            "a change must name a section of the configuration",
            received=repr(change),
            mend="Write for example evaluation.threshold=0.5",
        )
    value[key] = yaml_file.load(text)


def _read(cls: type, value: Any, where: str) -> Any:
    """Returns the dataclass ``cls`` made of a mapping, its values checked against its types."""
    named = f"'{where}'" if where else "a configuration"
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{named} must be a mapping",
            received=f"a value of type {type(value).__name__}",
            mend="Write keys with a value each, as in the file that tfdist init --sagemaker writes",
        )
    hints = typing.get_type_hints(cls)
    known = {item.name: item for item in dataclasses.fields(cls)}
    for key in value:
        if key not in known:
            raise unknown_choice(f"key of {named}", key, list(known))
    missing = [
        name
        for name, item in known.items()
        if name not in value
        and item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise OptionError(
            f"{named} must have {', '.join(missing)}",
            received=f"no {', '.join(missing)}",
            mend="Add each, as in the file that tfdist init --sagemaker writes",
        )
    prefix = f"{where}." if where else ""
    return cls(**{key: _value(hints[key], item, prefix + key) for key, item in value.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if value is None:
            return None
        fitting = [kind for kind in kinds if type(value) is _plain(kind)]
        # What is no number of any kind is named as such.
        return _value(
            (fitting or [kind for kind in kinds if kind is float] or kinds)[0], value, where
        )
    if dataclasses.is_dataclass(hint):
        return _read(hint, value, where)
    if origin is dict and isinstance(value, dict) and dataclasses.is_dataclass(arguments[1]):
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    kind = _plain(hint)
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and (type(value) is not float or not math.isfinite(value)):
        raise OptionError(
            f"'{where}' must be a number",
            received=f"{value!r} ({type(value).__name__})",
            mend="Write 0.0001 or 1.0e-4: YAML reads 1e-4 as text" if type(value) is str else None,
        )
    if kind is not Any and type(value) is not kind:
        raise OptionError(
            f"'{where}' must be of type {kind.__name__}",
            received=f"{value!r} ({type(value).__name__})",
            mend="Write text in quotes, numbers and true or false without, a list as [a, b]",
        )
    if "instance_type" in where and kind is str and not _INSTANCE_TYPE.fullmatch(value):
        raise OptionError(
            f"'{where}' must be a type of instance, as 'ml.m5.large'",
            received=repr(value),
            mend="Write it whole, from ml. to the size",
        )
    if kind is list:
        (of,) = typing.get_args(hint)
        return [_value(of, item, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def _plain(hint: Any) -> Any:
    """Returns the type that YAML gives for a hint."""
    kind = typing.get_origin(hint) or hint
    return {abc.Sequence: list, abc.Mapping: dict}.get(kind, kind)
