"""Sends a folder of shards to S3, laid out as the channels need it; resumable and verified."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.aws.container import MANIFEST_CHANNEL
from tfdist.aws.sharding import layout
from tfdist.errors import CorruptShardError, DataError, TfdistError
from tfdist.records.format.files import sums
from tfdist.records.format.manifest import MANIFEST_NAME, load_manifest

# S3 takes no more in one request; larger files go in parts, each with a checksum of its own.
_ONE_REQUEST_BYTES = 5 << 30
# In an object's metadata: the key that it is encrypted by, as it was given.
_KEY = "kms-key"


@dataclass(frozen=True)
class Uploaded:
    """What an upload did: files sent, and files that were there already."""

    sent: int
    kept: int
    bytes_sent: int


class UploadError(TfdistError):
    """AWS refused something, or could not be reached."""


@contextlib.contextmanager
def sending(what: str) -> Iterator[None]:
    """Raises UploadError where AWS refuses what the block sends."""
    import botocore.exceptions

    try:
        yield
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise UploadError(
            f"AWS must take {what}",
            received=f"an error: {error}",
            mend="Mend that, and run the same again",
        ) from error


def encryption(kms_key: str | None) -> dict[str, str]:
    """Returns what S3 must be told of each object, to encrypt it by a key of one's own."""
    return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}


def upload(
    folder: Path,
    bucket: str,
    prefix: str,
    client: Any,
    *,
    kms_key: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Uploaded:
    """Sends all shards of ``folder``, then its manifest; what is there already is not sent again.

    S3 checks the crc32c of each shard that it receives against the manifest's, and so does this
    function for the file before it is sent.

    Args:
        prefix: the shards of split s become ``prefix/s/...``, the manifest ``prefix/manifest/...``.
        client: boto3's for S3.
        kms_key: encrypts them; None for the bucket's own. What another key has encrypted is sent
            again.
        progress: called with (bytes done, bytes in all).

    Raises:
        CorruptShardError: a file here is not as it was written.
        DataError: S3 holds other objects there, which a job would read too.
        UploadError: AWS refused.
    """
    import botocore.exceptions

    manifest = load_manifest(folder)
    prefix = prefix.strip("/")
    checksums = {
        shard.file: shard.checksum for split in manifest.splits.values() for shard in split.shards
    }
    checksums[MANIFEST_NAME] = sums.of(folder / MANIFEST_NAME)
    # The manifest last: where it is, the shards are.
    files = sorted(layout(manifest), key=lambda item: item[1] == MANIFEST_CHANNEL)
    keys = {f"{prefix}/{channel}/{file}": file for file, channel in files}
    shards = manifest.shard_folder(folder)
    paths = {
        key: folder / file if file == MANIFEST_NAME else shards / file for key, file in keys.items()
    }
    total = sum(path.stat().st_size for path in paths.values() if path.exists())
    sent = kept = bytes_sent = done = 0
    try:
        _refuse_foreign(client, bucket, prefix, {channel for _, channel in files}, set(keys))
        for key, file in keys.items():
            path = paths[key]
            if not path.is_file():
                raise CorruptShardError(
                    "every shard of the manifest must exist",
                    received=f"no {path}",
                    mend="Copy it there, or write the data again with `tfdist shard`",
                )
            size = path.stat().st_size
            if _is_there(client, bucket, key, size, checksums[file], kms_key):
                kept += 1
            else:
                _send(client, bucket, key, path, checksums[file], encryption(kms_key))
                sent += 1
                bytes_sent += size
            done += size
            if progress is not None:
                progress(done, total)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise UploadError(
            f"s3://{bucket}/{prefix} must be writable",
            received=f"an error: {error}",
            mend="Mend that, and upload again, where what has been sent is not sent again",
        ) from error
    return Uploaded(sent, kept, bytes_sent)


def _refuse_foreign(
    client: Any, bucket: str, prefix: str, channels: set[str], keys: set[str]
) -> None:
    for channel in sorted(channels):
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=f"{prefix}/{channel}/"
        )
        for page in pages:
            for item in page.get("Contents", []):
                if item["Key"] not in keys:
                    raise DataError(
                        "a channel's place in S3 must hold the shards of this manifest alone",
                        received=f"s3://{bucket}/{item['Key']}",
                        mend="Remove it, or upload to another prefix",
                    )


def _is_there(
    client: Any, bucket: str, key: str, size: int, checksum: str, kms_key: str | None
) -> bool:
    import botocore.exceptions

    try:
        head = client.head_object(Bucket=bucket, Key=key)
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
            return False
        raise
    if head["ContentLength"] != size or head["Metadata"].get("crc32c") != checksum:
        return False
    # S3 tells the ARN of a key, whose id or alias may have been given.
    given = head["Metadata"].get(_KEY)
    return given is None if kms_key is None else kms_key in (given, head.get("SSEKMSKeyId"))


def _send(
    client: Any, bucket: str, key: str, path: Path, checksum: str, more: dict[str, str]
) -> None:
    found = sums.of(path)
    if found != checksum:
        raise CorruptShardError(
            f"{path} must have checksum {checksum}",
            received=found,
            mend=f"See all faults with `tfdist inspect {path.parent} --check`",
        )
    given = {_KEY: more["SSEKMSKeyId"]} if more else {}
    more = {**more, "Metadata": {"crc32c": checksum, **given}}
    if path.stat().st_size > _ONE_REQUEST_BYTES:
        client.upload_file(str(path), bucket, key, ExtraArgs=more)
        return
    with open(path, "rb") as file:
        client.put_object(
            Bucket=bucket,
            Key=key,
            Body=file,
            ChecksumCRC32C=base64.b64encode(bytes.fromhex(checksum)).decode(),
            **more,
        )
