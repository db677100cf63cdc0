"""``tfdist serve --to``: what other servers take, in a folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click

from tfdist.cli import voice
from tfdist.cli.console import progress_bar, stdout
from tfdist.cli.export import write_for_tf_serving
from tfdist.cli.option_table import refuse_others
from tfdist.compat import follow_program, import_tensorflow
from tfdist.errors import TfdistError
from tfdist.export.kinds import TF_SERVING
from tfdist.runs import ranks
from tfdist.serving.served import Served
from tfdist.serving.serving import Serving
from tfdist.training.engine import model_path

RAY, SAGEMAKER = "ray", "sagemaker"
TARGETS = (RAY, TF_SERVING, SAGEMAKER)
_OF_MODEL = {"source", "to", "model", "trained_on"}
_OF_RAY = _OF_MODEL | {
    *("name", "min_replicas", "max_replicas", "target_requests", "up_delay_s", "down_delay_s"),
    *("max_batch", "batch_wait_ms", "check", "timeout_s", "max_body_mb"),
}


def check_options(target: str) -> None:
    """Raises OptionError: an option that only our own server has a use for."""
    refuse_others(
        _OF_RAY if target == RAY else _OF_MODEL,
        f"--to {target} must go with options that its server has",
        beside=f"--to {target}",
    )


def write(target: str, folder: Path, found: Served, how: Serving) -> None:
    """Writes what a server of others takes of a model.

    Args:
        target: one of ``TARGETS``.
        folder: that is written.
        how: of which an application of Ray's takes what it has a use for.
    """
    if target == RAY:
        _to_ray(folder, found, how)
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    follow_program(os.environ, model_path.parts(found.model)[0], found.weights)
    if target == TF_SERVING:
        write_for_tf_serving(lambda: _trained(found), folder, data=found.trained_on)
    else:
        _to_sagemaker(folder, found)


def _trained(found: Served) -> Any:
    from tfdist.serving.handler import trained

    try:
        return trained(found)
    except TfdistError:
        raise
    except (Exception, SystemExit) as error:
        event = (
            None
            if getattr(error, "code", None) == 128 + signal.SIGTERM
            else ranks.mistake_of(error)
        )
        if event is None:
            raise
        ranks.raise_mistake(event)


def _to_ray(folder: Path, found: Served, how: Serving) -> None:
    from tfdist.serving.applications import ray_folder
    from tfdist.serving.applications.hosting import Hosting

    hosting = Hosting(
        served=found,
        max_batch=how.max_batch,
        batch_wait_s=how.batch_wait_s,
        body_bytes=how.body_bytes,
        timeout_s=how.timeout_s,
        options=ray_folder.deployment_options(how.scaling, how.max_batch),
    )
    compared = ray_folder.write(hosting, folder, how.check, click.echo)
    voice.result(to=RAY, path=str(folder), name=found.name, compared=compared)
    if compared:
        click.echo(f"{compared} records are answered as by tfdist predict")
    _told(f"written {folder}", f"serve deploy {folder / ray_folder.CONFIG}")


def _to_sagemaker(folder: Path, found: Served) -> None:
    assert found.trained_on is not None
    with progress_bar("") as bar:
        bar.add_task("writing and comparing with Keras", total=None)
        import_tensorflow()
        from tfdist.aws import saved_model

        path, version = saved_model.write_archive(_trained(found), folder, data=found.trained_on)
    difference = version.largest_difference
    voice.result(to=SAGEMAKER, path=str(path), records=version.records, difference=difference)
    compared = f"{version.records} records within {difference:.1e} of Keras"
    _told(f"written {path}: {compared}", f"aws s3 cp {path} s3://BUCKET/{found.name}/")


def _told(written: str, command: str) -> None:
    stdout().print(f"{written}\nnext: {command}")
