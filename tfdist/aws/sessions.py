"""Sessions of boto3: with AWS, or with a stand-in for it on loopback."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.aws.upload import sending
from tfdist.errors import OptionError, extra_module

# Never a user's own: nothing that is only looked at may reach an account.
_DUMMY = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",
}
# They would lead past the stand-in.
_HIDDEN = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CA_BUNDLE")


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Changes ``os.environ`` for the block: botocore reads credentials and endpoints there."""
    before = dict(os.environ)
    os.environ.update(changes)
    # The endpoint of one service goes before that of all.
    of_services = [name for name in before if name.startswith("AWS_ENDPOINT_URL_")]
    for name in (*_HIDDEN, *of_services):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def loopback(region: str, bucket: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yields a session with a moto server on loopback, and the environment that leads there.

    Processes that get the environment see the same stand-in: real S3 traffic, on this machine. It
    begins empty.
    """
    import boto3

    moto = extra_module("moto.server", "moto", "a stand-in for AWS", "sagemaker")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
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
            "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false",
            # Python reads the second before the first.
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        with _environment(leads_there):
            session = boto3.Session(region_name=region)
            where = {"CreateBucketConfiguration": {"LocationConstraint": region}}
            where = {} if region == "us-east-1" else where
            session.client("s3").create_bucket(Bucket=bucket, **where)
            yield session, leads_there
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


def with_aws(region: str) -> Any:
    """Returns a session of boto3's usual credentials.

    Raises:
        OptionError: there are none.
        UploadError: a profile or a region that is none.
    """
    import boto3

    with sending("the profile and the region"):
        session = boto3.Session(region_name=region)
        session.client("sagemaker")  # Looks at the region.
        credentials = session.get_credentials()
    if credentials is None:
        raise OptionError(
            "AWS must be reached with credentials",
            received="none",
            mend="Configure them with `aws configure`, or stay here with --dry-run or rehearse",
        )
    return session
