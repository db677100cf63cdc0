"""``tfdist aws rehearse``: the pipeline carried out on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfdist.cli import voice
from tfdist.cli.aws_options import warn, with_config
from tfdist.errors import OptionError

if TYPE_CHECKING:
    from tfdist.aws.config import Config

_EXIT_FAILED = 1
_EPILOG = """\b
Examples:
  tfdist aws rehearse --config sagemaker/config.yaml
  tfdist aws rehearse --config sagemaker/config.yaml --set evaluation.threshold=0.999
  tfdist aws rehearse --config sagemaker/config.yaml --set training.instance_count=2
      --set training.processes_per_host=1 --set data.channels.train.distribution=ShardedByS3Key
"""


@click.command("rehearse", short_help="Carry out the pipeline here.", epilog=_EPILOG)
@with_config
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="A new folder for what the containers hold; a temporary one unless given.",
)
@click.option("--verbose", is_flag=True, help="Show all that the steps print.")
def rehearse(config: Config, output: Path | None, verbose: bool) -> int:
    """Carries out the pipeline on this machine, without AWS and without Docker.

    The definition is the one that AWS would get. SageMaker's own training toolkit runs the training
    step of one instance, with horovod as real MPI ranks; the other steps run their own start
    scripts; the condition reads the evaluation's JSON; S3 and the model registry are moto's.
    Several instances are simulated by ranks that each have the data of their host. Exit code 1 when
    a step fails or the model is refused.
    """
    if output and output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise OptionError(
            "--output must be a new folder",
            received=f"{output}, which exists",
            mend="Choose another",
        )
    from tfdist.aws.rehearsal import toolkit

    if importlib.util.find_spec("sagemaker_training") is None:
        raise toolkit.missing("no package sagemaker_training")
    with contextlib.ExitStack() as stack:
        if output is None:
            output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-")))
        return _rehearse(config, output.resolve(), verbose)


def _rehearse(config: Config, folder: Path, verbose: bool) -> int:
    from tfdist.aws import pipeline, sessions
    from tfdist.aws.rehearsal.agent import Machine, Storage, parse_uri
    from tfdist.aws.rehearsal.run import Rehearsal
    from tfdist.aws.upload import upload

    with sessions.loopback(config.region, config.bucket) as (session, leads_there):
        s3, sagemaker = session.client("s3"), session.client("sagemaker")
        if config.data.folder is not None:
            bucket, prefix = parse_uri(config.data_root)
            sent = upload(Path(config.data.folder), bucket, prefix, s3)
            _line("Upload", "moto", "Succeeded", f"{sent.sent} files to {config.data_root}")
        value, code, problems = pipeline.checked(config)
        voice.result(problems=problems)
        warn(config, problems)
        if problems:
            return _EXIT_FAILED
        pipeline.upsert(config, value, code, session)
        started = sagemaker.start_pipeline_execution(PipelineName=config.name)
        arn = started["PipelineExecutionArn"]
        _line("Pipeline", "moto", "Succeeded", f"valid, upserted, started: {arn}")
        rehearsal = Rehearsal(
            definition=value,
            folder=folder,
            machine=Machine(Storage(s3), _environment(leads_there), _runner(verbose)),
            sagemaker=sagemaker,
            name=config.name,
            tell=lambda name, kind: click.echo(f"{name} ({kind}) ...", err=True),
        )
        failed = False
        for outcome in rehearsal.outcomes():
            failed = outcome.status == "Failed"
            voice.tell("stage", **dataclasses.asdict(outcome))
            where = f"{outcome.kind}, {outcome.seconds:.1f} s"
            _line(outcome.name, where, outcome.status, outcome.detail)
        status = "Failed" if failed else "Succeeded"
        voice.result(status=status)
        click.echo(f"execution: {status}")
        return _EXIT_FAILED if failed else 0


def _line(name: str, where: str, status: str, detail: str) -> None:
    click.echo(f"{name} ({where}): {status}. {detail}")


def _environment(leads_there: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the steps: as here, but no package is ever fetched or removed."""
    environ = {**os.environ, **leads_there, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    environ |= {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if os.geteuid() == 0:
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environ


def _runner(verbose: bool) -> Callable[..., int]:
    from tfdist.launch import supervisor

    def run(
        command: list[str],
        environ: Mapping[str, str],
        job: Callable[..., supervisor.Job],
        on_line: Callable[[str], None],
    ) -> int:
        def take(rank: int | None, stream: str, text: str) -> None:
            on_line(text)
            if verbose:
                click.echo(f"  {text}", err=True)

        outcome = supervisor.run(job(command, environ=environ), on_line=take)
        if outcome.exit_code != 0 and not verbose:
            for line in outcome.last_lines:
                click.echo(f"  {line}", err=True)
        return outcome.exit_code

    return run
