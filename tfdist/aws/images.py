"""AWS's images with TensorFlow: which there are, where they lie, and until when they are patched.

The table is a data file with a date: tables/images.yaml.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass
from typing import Any

from tfdist.aws.instances import TABLES, read_table
from tfdist.compat.versions import minor_version
from tfdist.errors import OptionError, unknown_choice


@functools.cache
def _table() -> dict[str, Any]:
    return read_table(TABLES / "images.yaml")


def default_version() -> str:
    """Returns the newest TensorFlow that AWS has a training image of."""
    return next(iter(_table()["training"]))


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


def training(version: str, region: str, instance_type: str) -> Image:
    """Returns AWS's image to train and to process data in.

    Args:
        version: of TensorFlow, as "2.21.0" or "2.21".

    Raises:
        OptionError: AWS has no such image, or none in the region.
    """
    known = list(_table()["training"])
    found = next((each for each in known if each == version or _is_minor(each, version)), None)
    if found is None:
        raise OptionError(
            "training.framework_version must be one that AWS has an image of",
            received=repr(version),
            mend=f"Choose one of {', '.join(known)}, or give training.image_uri",
        )
    return _image("training", found, region, instance_type)


def serving(version: str, region: str, instance_type: str) -> Image:
    """Returns AWS's image with TensorFlow Serving of ``version``, or else with the newest one."""
    known = list(_table()["inference"])
    like = ".".join(version.split(".")[:2])
    found = next((each for each in known if _is_minor(each, like)), known[0])
    return _image("inference", found, region, instance_type)


def _is_minor(version: str, like: str) -> bool:
    return version.rpartition(".")[0] == like


def _image(scope: str, version: str, region: str, instance_type: str) -> Image:
    table = _table()
    accounts = table["accounts"]
    if region not in accounts:
        raise unknown_choice("region of AWS's images", region, list(accounts))
    # Families of instances with GPUs: g4dn, g5, p3, p4d and so on.
    device = "gpu" if instance_type.split(".")[1][:1] in ("g", "p") else "cpu"
    host = f"{accounts[region]}.dkr.ecr.{region}.{_domain(region)}"
    rows = table[scope]
    newer = [rows[each] for each in rows if minor_version(each) >= minor_version(version)]
    ends = [row["patched_until"] for row in newer if "patched_until" in row]
    uri = f"{host}/tensorflow-{scope}:{rows[version]['tag'].format(device=device)}"
    return Image(version, uri, ends[-1] if ends else None)


def _domain(region: str) -> str:
    import botocore.session

    session = botocore.session.Session()
    resolver = session.get_component("endpoint_resolver")
    return resolver.get_partition_dns_suffix(session.get_partition_for_region(region))
