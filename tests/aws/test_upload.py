"""Shards to S3: sent once, checked, resumed."""

from __future__ import annotations

import base64

import boto3
import numpy as np
import pytest
from moto import mock_aws

from tfdist.aws import sessions
from tfdist.aws.upload import UploadError, upload
from tfdist.errors import CorruptShardError, DataError
from tfdist.records import load_manifest, write


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


@pytest.fixture
def s3(credentials):
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client


@pytest.fixture
def folder(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (90, 5), np.uint8)
    write((x, np.arange(90) % 3), tmp_path / "shards", num_shards=3)
    return tmp_path / "shards"


def keys(s3):
    return [item["Key"] for item in s3.list_objects_v2(Bucket="bucket").get("Contents", [])]


def test_shards_and_manifest_are_sent(s3, folder):
    sums = {}
    s3.meta.events.register(
        "provide-client-params.s3.PutObject",
        lambda params, **_: sums.update({params["Key"]: params["ChecksumCRC32C"]}),
    )
    done = upload(folder, "bucket", "p/", s3)
    assert (done.sent, done.kept) == (7, 0)
    assert done.bytes_sent == sum(path.stat().st_size for path in folder.iterdir())
    manifest = load_manifest(folder)
    assert keys(s3) == sorted(
        [
            "p/manifest/manifest.json",
            *(
                f"p/{name}/{shard.file}"
                for name, split in manifest.splits.items()
                for shard in split.shards
            ),
        ]
    )
    shard = manifest.splits["train"].shards[0]
    key = f"p/train/{shard.file}"
    # S3 refuses a body that does not have it; moto does not look.
    assert base64.b64decode(sums[key]).hex() == shard.checksum
    body = s3.get_object(Bucket="bucket", Key=key)["Body"].read()
    assert body == (folder / shard.file).read_bytes()


def test_a_second_upload_sends_what_is_missing_or_other(s3, folder):
    upload(folder, "bucket", "p", s3)
    first, second = (shard.file for shard in load_manifest(folder).splits["train"].shards[:2])
    s3.delete_object(Bucket="bucket", Key=f"p/train/{first}")
    s3.put_object(Bucket="bucket", Key=f"p/train/{second}", Body=b"cut short")
    seen = []
    done = upload(
        folder, "bucket", "p", s3, progress=lambda sent, total: seen.append((sent, total))
    )
    assert (done.sent, done.kept) == (2, 5)
    assert seen[-1][0] == seen[-1][1]


def test_what_another_key_has_encrypted_is_sent_again(s3, folder):
    first, second = (f"arn:aws:kms:us-east-1:1:key/{number}" for number in (1, 2))
    sent = [
        upload(folder, "bucket", "p", s3, kms_key=key).sent for key in (None, first, first, second)
    ]
    assert sent == [7, 7, 0, 7]
    (head,) = {s3.head_object(Bucket="bucket", Key=key)["SSEKMSKeyId"] for key in keys(s3)}
    assert head == second
    assert [upload(folder, "bucket", "p", s3).sent for _ in range(2)] == [7, 0]


def test_a_broken_upload_leaves_no_manifest(s3, folder, monkeypatch):
    real = s3.put_object

    def put_object(**options):
        if options["Key"].endswith("validation-00001-of-00003.tfrecord"):
            raise s3.exceptions.ClientError({"Error": {"Code": "SlowDown"}}, "PutObject")
        return real(**options)

    monkeypatch.setattr(s3, "put_object", put_object)
    with pytest.raises(UploadError, match="what has been sent is not sent again"):
        upload(folder, "bucket", "p", s3)
    assert "p/manifest/manifest.json" not in keys(s3)
    monkeypatch.setattr(s3, "put_object", real)
    done = upload(folder, "bucket", "p", s3)
    assert (done.sent, done.kept) == (3, 4)


def test_a_damaged_shard_is_not_sent(s3, folder):
    path = folder / load_manifest(folder).splits["train"].shards[1].file
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptShardError, match=path.name):
        upload(folder, "bucket", "p", s3)
    path.unlink()
    with pytest.raises(CorruptShardError, match="every shard of the manifest must exist"):
        upload(folder, "bucket", "p", s3)


def test_other_objects_would_be_read_too(s3, folder):
    s3.put_object(Bucket="bucket", Key="p/train/old-00000-of-00008.tfrecord", Body=b"")
    with pytest.raises(DataError, match="old-00000"):
        upload(folder, "bucket", "p", s3)
    assert len(keys(s3)) == 1


def test_a_bucket_that_is_not_there(s3, folder):
    with pytest.raises(UploadError, match="NoSuchBucket"):
        upload(folder, "nowhere", "p", s3)


def test_each_stand_in_on_loopback_begins_empty():
    for _ in range(2):
        with sessions.loopback("us-east-1", "bucket") as (session, _):
            s3 = session.client("s3")
            assert keys(s3) == []
            s3.put_object(Bucket="bucket", Key="left", Body=b"")
            assert keys(s3) == ["left"]
