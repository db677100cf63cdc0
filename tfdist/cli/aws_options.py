"""The options that the verbs of ``tfdist aws`` share."""

from __future__ import annotations

import datetime
import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist.errors import package_missing

if TYPE_CHECKING:
    from tfdist.aws.config import Config
    from tfdist.aws.validate import Problem


def with_config(verb: Callable) -> Callable:
    """Adds --config and --set to a verb, which receives the configuration that they give."""

    @click.option(
        "--config",
        "config_path",
        required=True,
        type=click.Path(path_type=Path),
        help="A YAML file, as tfdist init --sagemaker writes one.",
    )
    @click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Change the configuration, as evaluation.threshold=0.5; may be given several times.",
    )
    @functools.wraps(verb)
    def configured(config_path: Path, changes: tuple[str, ...], **given: Any) -> Any:
        return verb(config=_load(config_path, changes), **given)

    return configured


def _load(path: Path, changes: tuple[str, ...]) -> Config:
    """Reads the configuration of a verb.

    Raises:
        EngineMissingError: the packages that all verbs of ``tfdist aws`` need are not installed.
        OptionError: the configuration is not one.
    """
    for package, module in (("PyYAML", "yaml"), ("boto3", "boto3")):
        if importlib.util.find_spec(module) is None:
            absent = f"No module named '{module}'"
            raise package_missing(package, "tfdist aws", "sagemaker", absent)
    from tfdist.aws import config

    return config.load(path, changes)


def warn(config: Config, problems: Sequence[Problem]) -> None:
    """Says that the image of the configuration is patched no more, if so, and each problem."""
    from tfdist.aws import training

    told = training.warning(config, datetime.date.today())
    for line in (*([told] if told else ()), *problems):
        click.echo(f"tfdist: {line}", err=True)


def speed_options(verb: Callable) -> Callable:
    """Adds what an estimate of costs is made from."""
    for decorate in (
        click.option(
            "--efficiency",
            type=float,
            help="Of each doubling of instances, with one measured speed.  [default: 0.88]",
        ),
        click.option("--records", type=click.IntRange(min=1), help="Records to train on."),
        click.option(
            "--measured",
            type=click.Path(path_type=Path),
            help="metrics.json of tfdist train, or history.json of a job on 1 instance.",
        ),
        click.option(
            "--samples-per-s",
            "speeds",
            multiple=True,
            metavar="[INSTANCES:]SPEED",
            help="A measured speed, as 2:9000; may be given several times.",
        ),
    ):
        verb = decorate(verb)
    return verb
