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


def test_a_password_is_not_repeated():
    with pytest.raises(DataError, match=r"no password.*one for host:8080\.") as refusal:
        url_of("https://me:hunter2@host:8080/data")
    assert "hunter2" not in str(refusal.value)
    assert url_of("https://host/data@2:3") == "https://host/data@2:3"
