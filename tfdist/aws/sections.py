"""Sections of the configuration that need not be there: what a pipeline does beside a training."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from tfdist.errors import OptionError, unknown_choice

# How a range is searched -> AWS's word for it.
SCALES = {"auto": "Auto", "linear": "Linear", "log": "Logarithmic"}
# Who approves of a model -> the state in which it is registered.
APPROVALS = {"manual": "PendingManualApproval", "automatic": "Approved"}


def among(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raises OptionError: ``value`` is none of ``known``."""
    if value not in known:
        raise unknown_choice(what, value, known)


def at_least(what: str, value: float | None, least: float) -> None:
    """Raises OptionError: a number below ``least``; None is none."""
    if value is not None and value < least:
        raise OptionError(
            f"{what} must be at least {least:g}", received=value, mend=f"Choose {least:g} or more"
        )


@dataclass(frozen=True, kw_only=True)
class RangeConfig:
    """The values of one setting that a search tries: from ``min`` to ``max``, or ``values``."""

    min: int | float | None = None
    max: int | float | None = None
    scale: str = "auto"
    values: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        among("scale of a range", self.scale, tuple(SCALES))
        ends = [end for end in (self.min, self.max) if end is not None]
        if len(ends) != (0 if self.values else 2) or (ends and ends[0] >= ends[1]):
            raise OptionError(
                "a range must have min and a larger max, or values",
                received=f"min {self.min}, max {self.max}, values {self.values}",
                mend="Write {min: 0.0001, max: 0.1}, or {values: [32, 64]}",
            )
        if self.scale == "log" and min(ends, default=1) <= 0:
            raise OptionError(
                "a range of scale log must begin above 0",
                received=self.min,
                mend="Choose a min above 0, or scale: linear",
            )

    @property
    def ends(self) -> list[Any]:
        """What must hold as each value between them does."""
        return self.values or [self.min, self.max]


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """A search for hyperparameters in place of one training; the best training's model goes on.

    Attributes:
        ranges: setting of ``training`` -> its values.
        metric: what is compared, as CloudWatch calls it: its last value of a training.
        larger_is_better: of the metric; None for a loss alone.
        max_jobs, parallel_jobs: trainings in all, and at once.
        early_stopping: end a training that will hardly be among the best.
    """

    ranges: dict[str, RangeConfig]
    metric: str = "validation:loss"
    larger_is_better: bool | None = None
    max_jobs: int = 10
    parallel_jobs: int = 2
    early_stopping: bool = True

    def __post_init__(self) -> None:
        if not self.ranges:
            raise OptionError(
                "tuning.ranges must name a setting",
                received="none",
                mend="Write ranges: {lr: {min: 0.0001, max: 0.1, scale: log}}",
            )
        if self.larger_is_better is None and self.metric not in ("train:loss", "validation:loss"):
            raise OptionError(
                "tuning.larger_is_better must be given for a metric that is not the loss",
                received=f"only metric: {self.metric}",
                mend="Write larger_is_better: true, as for an accuracy, or false",
            )
        at_least("tuning.parallel_jobs", self.parallel_jobs, 1)
        at_least("tuning.max_jobs", self.max_jobs, self.parallel_jobs)


@dataclass(frozen=True, kw_only=True)
class RegistrationConfig:
    """The model registry.

    Attributes:
        approval: "manual", by ``tfdist aws approve``, or "automatic".
    """

    group: str
    approval: str = "manual"
    instance_types: list[str] = field(default_factory=lambda: ["ml.m5.large"])

    def __post_init__(self) -> None:
        among("registration.approval", self.approval, tuple(APPROVALS))
        if not self.instance_types:
            raise OptionError(
                "registration.instance_types must name a type of instance",
                received="none",
                mend="Leave it out, for ml.m5.large, or write [ml.c5.xlarge]",
            )


@dataclass(frozen=True, kw_only=True)
class TransformConfig:
    """Batch transform: what a model that is registered answers to each record of a split, in S3.

    Attributes:
        max_payload_mb: of one request, which holds as many whole records as it can.
    """

    split: str = "test"
    instance_type: str = "ml.m5.xlarge"
    instance_count: int = 1
    max_payload_mb: int = 6

    def __post_init__(self) -> None:
        at_least("transform.instance_count", self.instance_count, 1)
        if not 1 <= self.max_payload_mb <= 100:
            raise OptionError(
                "transform.max_payload_mb must be 1 to 100",
                received=self.max_payload_mb,
                mend="Leave it out, for 6",
            )


@dataclass(frozen=True, kw_only=True)
class ServerlessConfig:
    """An endpoint without instances: it costs while it answers."""

    memory_mb: int = 2048
    max_concurrency: int = 5

    def __post_init__(self) -> None:
        if self.memory_mb not in range(1024, 6145, 1024):
            raise OptionError(
                "endpoint.serverless.memory_mb must be 1024, 2048 and so on to 6144",
                received=self.memory_mb,
                mend="Leave it out, for 2048",
            )


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The endpoint that ``tfdist aws deploy`` makes: on instances, or serverless.

    Attributes:
        instance_type: None for the first of ``registration.instance_types``.
        instance_count: None for 1; the least, where there is ``max_instances``.
        max_instances: instances are added, up to so many, and taken away again, so that each gets
            ``requests_per_instance`` requests a minute; None for 1000.
    """

    instance_type: str | None = None
    instance_count: int | None = None
    max_instances: int | None = None
    requests_per_instance: int | None = None
    serverless: ServerlessConfig | None = None

    def __post_init__(self) -> None:
        at_least("endpoint.instance_count", self.instance_count, 1)
        at_least("endpoint.max_instances", self.max_instances, self.instance_count or 1)
        at_least("endpoint.requests_per_instance", self.requests_per_instance, 1)
        keys = ("instance_type", "instance_count", "max_instances")
        given = [key for key in keys if getattr(self, key) is not None]
        if self.serverless and given:
            raise OptionError(
                "endpoint must have serverless or instances",
                received=f"serverless and {', '.join(given)}",
                mend="Leave serverless out, or the others",
            )
        if self.requests_per_instance is not None and self.max_instances is None:
            raise OptionError(
                "endpoint.requests_per_instance must go with endpoint.max_instances",
                received="requests_per_instance alone",
                mend="Give endpoint.max_instances too, or leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class CostConfig:
    """Numbers that change or that only a job shows, for ``tfdist aws cost``, as they were read.

    Attributes:
        spot_usd_per_hour: of one training instance, where ``training.spot`` is.
        start_s: what is paid for before the first step: image, data and packages.
        date: of both, the day on which they were read.
    """

    spot_usd_per_hour: float | None = None
    start_s: float = 0.0
    date: datetime.date | None = None

    def __post_init__(self) -> None:
        at_least("cost.spot_usd_per_hour", self.spot_usd_per_hour, 0)
        at_least("cost.start_s", self.start_s, 0)
        if self.date is None and (self.start_s or self.spot_usd_per_hour is not None):
            raise OptionError(
                "cost must have the date of its numbers",
                received="none",
                mend="Write date: 2026-11-26",
            )
