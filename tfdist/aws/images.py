"""AWS's images with TensorFlow: which there are, where they lie, and until when they are patched.

The table is a data file with a date: tables/images.yaml.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass
from typing import Any

from tfdist.aws.instances import TABLES, device
from tfdist.compat.versions import minor_version
from tfdist.errors import OptionError, unknown_choice
from tfdist.planning.yaml_file import read_yaml


@functools.cache
def _table() -> dict[str, Any]:
    return read_yaml(TABLES / "images.yaml")


@dataclass(frozen=True)
class Image:
    """One image.

    Attributes:
        version: of its TensorFlow.
        patched_until: the last day of its security patches; of an image whose own is not known
            that of the next newer one, before which it was.
    """

    version: str
    uri: str
    patched_until: datetime.date | None


def version_of(wanted: str | None) -> str:
    """Returns the whole version of a training image: of "2.21" too, and of None, the newest.

    Raises:
        OptionError: AWS has no such image.
    """
    known = list(_table()["training"])
    found = [each for each in known if wanted in (None, each, each.rpartition(".")[0])]
    if not found:
        raise OptionError(
            "training.framework_version must be one that AWS has an image of",
            received=repr(wanted),
            mend=f"Choose one of {', '.join(known)}, or give training.image_uri",
        )
    return found[0]


def training(wanted: str | None, region: str, instance_type: str) -> Image:
    """Returns AWS's image to train and to process data in.

    Raises:
        OptionError: see ``version_of``; or AWS has none in the region.
    """
    return _image("training", version_of(wanted), region, instance_type)


def serving(version: str | None, region: str, instance_type: str) -> Image:
    """Returns AWS's image with TensorFlow Serving of ``version``, or else with the newest one."""
    known = list(_table()["inference"])
    like = [each for each in known if version and minor_version(each) == minor_version(version)]
    return _image("inference", (like or known)[0], region, instance_type)


def outdated(image: Image, today: datetime.date) -> str | None:
    """Returns a line of warning of an image that is patched no more; None of another one."""
    if image.patched_until is None or today <= image.patched_until:
        return None
    return (
        f"AWS's image of TensorFlow {image.version} has had no security patches since "
        f"{image.patched_until}, or earlier. Leave out training.framework_version to have "
        f"{version_of(None)}"
    )


def _image(scope: str, version: str, region: str, instance_type: str) -> Image:
    import botocore.session

    table = _table()
    accounts = table["accounts"]
    if region not in accounts:
        raise unknown_choice("region of AWS's images", region, list(accounts))
    session = botocore.session.Session()
    resolver = session.get_component("endpoint_resolver")
    domain = resolver.get_partition_dns_suffix(session.get_partition_for_region(region))
    host = f"{accounts[region]}.dkr.ecr.{region}.{domain}"
    rows = table[scope]
    newer = [rows[each] for each in rows if minor_version(each) >= minor_version(version)]
    ends = [row["patched_until"] for row in newer if "patched_until" in row]
    uri = f"{host}/tensorflow-{scope}:{rows[version]['tag'].format(device=device(instance_type))}"
    return Image(version, uri, ends[-1] if ends else None)
