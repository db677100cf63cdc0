"""``tfdist aws approve`` and ``deploy``: from a registered model to an endpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tfdist.cli import voice
from tfdist.cli.aws_options import with_config

if TYPE_CHECKING:
    from tfdist.aws.config import Config

EXIT_REFUSED = 1
_EPILOG = """\b
Examples:
  tfdist aws deploy --dry-run --config sagemaker/config.yaml --set endpoint.max_instances=4
  tfdist aws deploy --config mine.yaml
"""


_package_option = click.option(
    "--package", metavar="ARN", help="A model in the registry; the newest one unless given."
)


@click.command("approve", short_help="Approve of a registered model, or reject it.")
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


@click.command("deploy", short_help="Make an endpoint of a registered model.", epilog=_EPILOG)
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
