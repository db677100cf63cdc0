"""Sessions of the SageMaker SDK: with AWS, with a stand-in in memory, or with one on loopback."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.errors import EngineMissingError, OptionError

# Never a user's own: nothing that is only looked at may reach an account.
_DUMMY = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",
}
# They would lead past the stand-in.
_HIDDEN = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CA_BUNDLE", "AWS_ENDPOINT_URL")


def import_sdk() -> Any:
    """Returns the package sagemaker, its notices silenced.

    Raises:
        EngineMissingError: it is not installed.
    """
    # It tells of its configuration files, and warns of what a pipeline always does.
    for name in ("sagemaker", "sagemaker.config", "sagemaker.workflow", "botocore", "boto3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="sagemaker")
    try:
        import sagemaker
    except ImportError as error:
        raise EngineMissingError(
            "the SageMaker SDK must be installed to make pipelines",
            received=f"an error: {str(error).splitlines()[0]}",
            mend="Run pip install 'tfdist[sagemaker]'",
        ) from error
    if not hasattr(sagemaker, "Session"):
        raise EngineMissingError(
            "the package sagemaker must be the SageMaker SDK",
            received=f"another one at {list(getattr(sagemaker, '__path__', []))}",
            mend="Run pip install 'tfdist[sagemaker]'",
        )
    import sagemaker.utils

    # It checks its configuration at each look-up, of which a pipeline makes a hundred: 8 s.
    if not hasattr(sagemaker.utils.validate_sagemaker_config, "checks_once"):
        check = _checking_once(sagemaker.utils.validate_sagemaker_config)
        sagemaker.utils.validate_sagemaker_config = check
    return sagemaker


def _checking_once(check: Callable[[Any], None]) -> Callable[[Any], None]:
    checked: list[Any] = []

    def once(config: Any = None) -> None:
        if not any(config is known for known in checked):
            check(config)
            checked.append(config)

    once.checks_once = True
    return once


@contextlib.contextmanager
def sdk_errors() -> Iterator[None]:
    """Turns what the SDK refuses of a configuration into a user's mistake."""
    try:
        yield
    except ValueError as error:
        text = " ".join(str(error).split())
        raise OptionError(
            "the SageMaker SDK must be able to take the configuration",
            received=f"an error: {text[:500]}",
        ) from error


@contextlib.contextmanager
def environment(changes: Mapping[str, str], hidden: tuple[str, ...] = ()) -> Iterator[None]:
    """Changes ``os.environ`` for the block: botocore reads credentials and endpoints there."""
    before = dict(os.environ)
    os.environ.update(changes)
    for name in hidden:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def offline(region: str, bucket: str, prefix: str) -> Iterator[Any]:
    """Yields a PipelineSession whose every call ends in moto, in this process's memory."""
    import_sdk()
    import boto3

    moto = _import_moto()
    with environment({**_DUMMY, "AWS_DEFAULT_REGION": region}, _HIDDEN), moto.mock_aws():
        _make_bucket(boto3.Session(region_name=region), bucket, region)
        yield _stand_in_session(region, bucket, prefix)


@contextlib.contextmanager
def loopback(region: str, bucket: str, prefix: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yields a PipelineSession for a moto server on loopback, and the environment that leads there.

    Processes that get the environment see the same stand-in: real S3 traffic, on this machine. It
    begins empty.
    """
    import_sdk()
    import boto3

    _import_moto()
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        host, port = server.get_host_and_port()
        _forget_everything(host, port)
        leads_there = {
            **_DUMMY,
            "AWS_DEFAULT_REGION": region,
            "AWS_REGION": region,
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        with environment(leads_there, tuple(set(_HIDDEN) - set(leads_there))):
            _make_bucket(boto3.Session(region_name=region), bucket, region)
            yield _stand_in_session(region, bucket, prefix), leads_there
    finally:
        server.stop()


def _forget_everything(host: str, port: int) -> None:
    """Empties moto's memory, which all of its servers in a process share."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("POST", "/moto-api/reset")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def _stand_in_session(region: str, bucket: str, prefix: str) -> Any:
    """Returns a PipelineSession that tells AWS nothing: the SDK reports what it is used for."""
    from sagemaker.config import load_sagemaker_config

    config = load_sagemaker_config()
    modules = config.setdefault("SageMaker", {}).setdefault("PythonSDK", {})
    modules.setdefault("Modules", {})["TelemetryOptOut"] = True
    return pipeline_session(region, bucket, prefix, {"SchemaVersion": "1.0", **config})


def pipeline_session(
    region: str, bucket: str, prefix: str, sdk_config: dict[str, Any] | None = None
) -> Any:
    """Returns a PipelineSession of boto3's usual credentials.

    Args:
        sdk_config: the SDK's own configuration; None for that of its files.
    """
    import_sdk()
    import boto3
    from sagemaker.workflow.pipeline_context import PipelineSession

    session = boto3.Session(region_name=region)
    if session.get_credentials() is None:
        raise OptionError(
            "AWS must be reached with credentials",
            received="none",
            mend="Configure them with `aws configure`, or stay here with --dry-run or rehearse",
        )
    return PipelineSession(
        boto_session=session,
        sagemaker_client=session.client("sagemaker"),
        default_bucket=bucket,
        default_bucket_prefix=prefix.strip("/") or None,
        sagemaker_config=sdk_config,
    )


def _import_moto() -> Any:
    try:
        import moto
    except ImportError as error:
        raise EngineMissingError(
            "moto, the stand-in for AWS, must be installed",
            received=f"an error: {str(error).splitlines()[0]}",
            mend="Run pip install 'tfdist[sagemaker]'",
        ) from error
    return moto


def _make_bucket(session: Any, bucket: str, region: str) -> None:
    where = (
        {}
        if region == "us-east-1"
        else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    )
    session.client("s3").create_bucket(Bucket=bucket, **where)
