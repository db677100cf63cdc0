"""What is a URL and what is a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist.errors import DataError
from tfdist.records.buckets.urls import refuse_url, url_of


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/data", "s3://bucket/data"),
        ("S3://bucket/data/train/", "s3://bucket/data/train"),
        (Path("s3://bucket/data"), "s3://bucket/data"),
        ("gs://bucket/a b", "gs://bucket/a b"),
        ("https://host/data", "https://host/data"),
        ("data/train", None),
        ("/data/s3", None),
        ("s3:", None),
        ("C:/data", None),
        (("x", "y"), None),
        (None, None),
    ],
)
def test_urls(given, url):
    assert url_of(given) == url


def test_a_folder_with_such_a_name_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    assert url_of("s3://bucket") is None


def test_unknown_kinds_list_the_known():
    with pytest.raises(DataError, match=r"one of s3://, gs://.*found ftp://host/x"):
        url_of("ftp://host/x")


def test_what_must_be_a_folder_here():
    refuse_url("out", "the output")
    with pytest.raises(DataError, match=r"the output must be a folder of this machine.*s3://b/out"):
        refuse_url(Path("s3://b/out"), "the output")


@pytest.mark.parametrize(
    ("given", "received"),
    [
        ("https://me:hunter2@host:8080/data", "one before @ for host:8080/data"),
        ("https://hunter2@host/data", "one before @ for host/data"),
        ("s3://key:hunter2@bucket", "one before @ for bucket"),
        ("https://host/a/x.tar?X-Amz-Signature=hunter2", "a query for host/a/x.tar"),
        ("https://host/data?hunter2", "a query for host/data"),
        ("https://host?sig=a/b@hunter2", "a query for host"),
        ("az://container/data?sv=1&sig=hunter2", "a query for container/data"),
        ("ftp://me:hunter2@host/x", "one before @ for host/x"),
    ],
)
def test_a_secret_is_not_repeated(given, received):
    with pytest.raises(
        DataError, match=f"no password, token or signature.*{received}\\."
    ) as refusal:
        url_of(given)
    assert "hunter2" not in str(refusal.value)


def test_what_looks_like_a_secret():
    assert url_of("https://host/data@2:3") == "https://host/data@2:3"
    assert url_of("s3://bucket/what?/data") == "s3://bucket/what?/data"
