"""AWS's images: which one a job gets, where it lies, and what is said of one that has ended."""

from __future__ import annotations

import datetime

import pytest

from tfdist.aws import images
from tfdist.errors import OptionError


@pytest.mark.parametrize(
    ("wanted", "region", "kind", "uri"),
    [
        # As SageMaker's SDK 3.27.0 answers.
        (None, "us-east-1", "ml.c5.xlarge", "763104351884.dkr.ecr.us-east-1.amazonaws.com/{}-cpu-"),
        (
            "2.21",
            "cn-north-1",
            "ml.g5.xlarge",
            "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/{}-gpu-",
        ),
        (
            "2.21.0",
            "us-gov-west-1",
            "ml.p4d.24xlarge",
            "442386744353.dkr.ecr.us-gov-west-1.amazonaws.com/{}-gpu-",
        ),
    ],
)
def test_the_image_of_a_version(wanted, region, kind, uri):
    found = images.training(wanted, region, kind)
    assert found.uri == uri.format("tensorflow-training:2.21.0") + "py312"


def test_serving_is_of_the_same_version_or_the_newest():
    serving = [
        images.serving(each, "eu-west-1", "ml.m5.large").version
        for each in ("2.19.0", "2.21", None)
    ]
    assert serving == ["2.19.0", "2.20.0", "2.20.0"]


def test_what_there_is_not():
    with pytest.raises(OptionError, match=r"'2\.11'\. Choose one of .*2\.16\.2, or"):
        images.version_of("2.11")
    with pytest.raises(OptionError, match=r"'2\.17'\. Choose one of 2\.21\.0, .*image_uri"):
        images.version_of("2.17")
    with pytest.raises(OptionError, match="region of AWS's images must be a known one"):
        images.training(None, "mars-1", "ml.m5.large")


@pytest.mark.parametrize("version", ["2.19", "2.18"])
def test_an_image_past_its_end_is_named_with_the_date(version):
    image = images.training(version, "us-east-1", "ml.m5.large")
    last = datetime.date(2026, 3, 11)
    assert images.outdated(image, last) is None
    told = images.outdated(image, last + datetime.timedelta(days=1))
    assert f"TensorFlow {image.version} has had no security patches since 2026-03-11" in told
    assert told.endswith("to have 2.21.0")
