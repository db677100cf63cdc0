"""``tfdist aws``: training on Amazon SageMaker, and rehearsing it without."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist.cli import voice
from tfdist.cli.aws_cost import before_start, cost
from tfdist.cli.aws_options import speed_options, warn, with_config
from tfdist.cli.aws_rehearse import rehearse
from tfdist.cli.console import megabytes, progress_bar
from tfdist.errors import OptionError

if TYPE_CHECKING:
    from tfdist.aws.config import Config

EXIT_REFUSED = 1
# The longest wait for an execution.
_LONGEST_S = 24 * 3600

_PIPELINE_EPILOG = """\b
Examples:
  tfdist aws pipeline --dry-run --config sagemaker/config.yaml
  tfdist aws pipeline --upsert --start --wait --config mine.yaml
  tfdist aws pipeline --dry-run --config mine.yaml --set training.instance_count=4
"""
_DEPLOY_EPILOG = """\b
Examples:
  tfdist aws deploy --dry-run --config sagemaker/config.yaml --set endpoint.max_instances=4
  tfdist aws deploy --config mine.yaml
"""


@click.group("aws")
def command() -> None:
    """Trains on Amazon SageMaker, and rehearses it on this machine.

    Nothing but `upload`, `pipeline --upsert, --start, --wait`, `approve` and `deploy` reaches AWS.
    """


command.add_command(rehearse)
command.add_command(cost)


@command.command("upload", short_help="Send shards to S3; resumable, checksums verified.")
@with_config
def upload(config: Config) -> None:
    """Sends the shards of data.folder and their manifest to S3.

    What is there already is not sent again. Each shard's checksum is verified here and by S3.
    """
    from tfdist.aws import sessions
    from tfdist.aws.rehearsal.agent import parse_uri
    from tfdist.aws.upload import upload as send

    if config.data.folder is None:
        raise OptionError(
            "the configuration must have data.folder, whose shards upload sends",
            received=f"data.source {config.data.source}, which the pipeline shards by itself",
            mend="Shard it here with `tfdist shard`, and give data.folder",
        )
    bucket, prefix = parse_uri(config.data_root)
    session = sessions.with_aws(config.region)
    with progress_bar("bytes") as bar:
        task = bar.add_task("Uploading", total=None)
        done = send(
            Path(config.data.folder),
            bucket,
            prefix,
            session.client("s3"),
            kms_key=config.security.output_kms_key,
            progress=lambda sent, total: bar.update(task, completed=sent, total=total),
        )
    voice.result(to=config.data_root, **dataclasses.asdict(done))
    click.echo(
        f"{config.data_root}: {done.sent} files sent ({megabytes(done.bytes_sent)}), "
        f"{done.kept} were there already"
    )


@command.command(
    "pipeline", short_help="Print, check and start the pipeline.", epilog=_PIPELINE_EPILOG
)
@with_config
@click.option("--dry-run", is_flag=True, help="Print the definition and check it; without AWS.")
@click.option("--upsert", is_flag=True, help="Create or update the pipeline.")
@click.option("--start", is_flag=True, help="Start it.")
@click.option("--wait", is_flag=True, help="Wait until it has ended.")
@speed_options
def pipeline(
    config: Config, dry_run: bool, upsert: bool, start: bool, wait: bool, **measured: Any
) -> int:
    """Makes the pipeline: shard, train or tune, evaluate, decide, register, transform.

    Every step is checked against the service model of SageMaker's API, with its enums and patterns;
    nothing is sent that AWS would refuse. Exit code 1 when something would be refused, or when an
    execution has failed.
    """
    from tfdist.aws import definition
    from tfdist.aws import pipeline as pipelines
    from tfdist.aws.upload import sending

    if dry_run and (upsert or start or wait):
        raise OptionError(
            "--dry-run must stand without --upsert, --start and --wait",
            received="both",
            mend="Leave --dry-run out, or the others",
        )
    if not (dry_run or upsert or start):
        raise OptionError(
            "pipeline must have something to do",
            received="none of --dry-run, --upsert, --start",
            mend="Give --dry-run to look at it, or --upsert --start to run it",
        )
    if wait and not start:
        raise OptionError(
            "--wait must go with --start, whose execution it waits for",
            received="no --start",
            mend="Add --start",
        )
    session = None if dry_run else _session(config)
    value, code, problems = pipelines.checked(config)
    voice.result(definition=value, problems=problems)
    if dry_run:
        click.echo(json.dumps(value, indent=1))
    warn(config, problems)
    if problems:
        return EXIT_REFUSED
    count = len(list(definition.all_steps(value["Steps"])))
    version = importlib.metadata.version("botocore")
    # On stderr: stdout is the definition's.
    click.echo(f"valid: {count} steps checked against the API of botocore {version}", err=True)
    if session is None:
        return 0
    if start:
        before_start(config, **measured)  # Before anything is sent, for it may refuse.
    client = session.client("sagemaker")
    with sending("the pipeline"):
        if upsert:
            arn = pipelines.upsert(config, value, code, session)
            voice.result(pipeline=arn)
            click.echo(f"pipeline {arn}")
        if not start:
            return 0
        if not upsert:
            _check_is_there(client, config.name, value)
        started = client.start_pipeline_execution(PipelineName=config.name)
        execution = started["PipelineExecutionArn"]
        voice.result(execution=execution)
        click.echo(f"started {execution}")
        return _follow(client, execution) if wait else 0


def _session(config: Config) -> Any:
    """Returns a session with AWS for a configuration that could be started there."""
    from tfdist.aws import sessions
    from tfdist.strategies import strategy_class

    if config.training.strategy != "auto":
        strategy_class(config.training.strategy)  # The script would refuse it on a paid instance.
    return sessions.with_aws(config.region)


def _check_is_there(client: Any, name: str, value: dict[str, Any]) -> None:
    """Raises OptionError: AWS would start another pipeline than the one that was checked here."""
    held = json.loads(client.describe_pipeline(PipelineName=name)["PipelineDefinition"])
    ours = json.loads(json.dumps(value))
    if held != ours:
        others = [part for part in ours if held.get(part) != ours[part]]
        raise OptionError(
            "--start without --upsert must find in AWS what the configuration says",
            received=f"a pipeline {name} with other {' and '.join(others) or 'parts'}, as of "
            "another configuration, model or version of tfdist",
            mend="Add --upsert",
        )


def _follow(client: Any, execution: str, every_s: float = 30) -> int:
    """Waits until the execution has ended; prints how its steps did, the first one first."""
    place = {"PipelineExecutionArn": execution}
    deadline = time.monotonic() + _LONGEST_S
    while True:
        found = client.describe_pipeline_execution(**place)
        status = found["PipelineExecutionStatus"]
        if status not in ("Executing", "Stopping") or time.monotonic() > deadline:
            break
        time.sleep(every_s)
    pages = client.get_paginator("list_pipeline_execution_steps").paginate(
        **place, SortOrder="Ascending"
    )
    for step in (step for page in pages for step in page["PipelineExecutionSteps"]):
        name, state, reason = step["StepName"], step["StepStatus"], step.get("FailureReason", "")
        voice.tell("stage", name=name, status=state, detail=reason)
        click.echo(f"{name}: {state} {reason}".rstrip())
    voice.result(status=status)
    is_over = status not in ("Executing", "Stopping")
    why = found.get("FailureReason", "") if is_over else "after a day, and is waited for no longer"
    click.echo(f"execution: {status} {why}".rstrip())
    return 0 if status == "Succeeded" else EXIT_REFUSED


# From a registered model to an endpoint ---------------------------------------------------------

_package_option = click.option(
    "--package", metavar="ARN", help="A model in the registry; the newest one unless given."
)


@command.command("approve", short_help="Approve of a registered model, or reject it.")
@with_config
@_package_option
@click.option("--reject", is_flag=True, help="Reject it instead.")
def approve(config: Config, package: str | None, reject: bool) -> None:
    """Approves of the newest model in the registry that waits for it."""
    from tfdist.aws import serving, sessions
    from tfdist.aws.upload import sending

    client = sessions.with_aws(config.region).client("sagemaker")
    package = package or serving.newest(config, "PendingManualApproval", client)
    status = "Rejected" if reject else "Approved"
    with sending("the approval"):
        client.update_model_package(ModelPackageArn=package, ModelApprovalStatus=status)
    voice.result(package=package, status=status)
    click.echo(f"{package}: {status}")


@command.command(
    "deploy", short_help="Make an endpoint of a registered model.", epilog=_DEPLOY_EPILOG
)
@with_config
@_package_option
@click.option("--dry-run", is_flag=True, help="Print the requests and check them; without AWS.")
def deploy(config: Config, package: str | None, dry_run: bool) -> int:
    """Makes the endpoint of the configuration, or has it take the newest model that is approved.

    Every request is checked against the service model of AWS's API; waits until it answers. Exit
    code 1 when something would be refused.
    """
    from tfdist.aws import serving, sessions

    session = None if dry_run else sessions.with_aws(config.region)
    if session is None:
        # Which one is the newest only the registry knows: its first one stands for it.
        _, partition, _, _, account, *_ = [*config.role.split(":"), *[""] * 5]
        place = f"arn:{partition}:sagemaker:{config.region}:{account}:model-package"
        package = package or f"{place}/{config.registration.group}/1"
    elif package is None:
        package = serving.newest(config, "Approved", session.client("sagemaker"))
    made = serving.requests(config, package)
    problems = serving.check(made)
    voice.result(requests=made, problems=problems)
    if dry_run:
        click.echo(json.dumps(made, indent=1))
    for problem in problems:
        click.echo(f"tfdist: {problem}", err=True)
    if problems:
        return EXIT_REFUSED
    if session is None:
        return 0
    click.echo(f"endpoint {config.name} of {package} ...", err=True)
    serving.deploy(config, made, session)
    voice.result(endpoint=config.name, package=package)
    click.echo(
        f"endpoint {config.name} answers. It costs until `aws sagemaker delete-endpoint "
        f"--endpoint-name {config.name} --region {config.region}`"
    )
    return 0
