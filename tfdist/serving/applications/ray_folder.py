"""Writes a model as an application of Ray Serve, in a folder that needs nothing of this machine."""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tfdist.compat import follow_program
from tfdist.compat.keras import files_of
from tfdist.errors import OptionError, cannot_write, extra_module
from tfdist.launch.jobs import Where
from tfdist.records.buckets.cache import scratch_folder
from tfdist.runs import ranks
from tfdist.serving import gate
from tfdist.serving.applications.hosting import MODEL, Hosting
from tfdist.serving.scaling import LOOK_BACK_S, MOST_INSIDE, Scaling
from tfdist.serving.served import Served
from tfdist.serving.watched import EXPECTED
from tfdist.training.engine import model_path

_PROGRAM = "tfdist.serving.applications.rehearsal"
#: What `serve deploy` takes.
CONFIG = "serve.yaml"
_NEEDED = ("tfdist", "ray[serve]", "pillow")
_APP = '''"""The model {name} on Ray Serve; written by `tfdist serve --to ray`."""

from tfdist.serving.applications.on_ray import application

app = application(__name__)
'''
_HEAD = """\
# `serve deploy serve.yaml` puts the model on the cluster that RAY_DASHBOARD_ADDRESS names.
# Each node has this folder at the place in PYTHONPATH. Where they share none: make a zip of its
# files, put it where nodes can fetch it, and write `working_dir: URI` in the place of env_vars.
# Requests come from the nodes themselves: `host: 0.0.0.0` lets in all others, without a token.
"""


def deployment_options(scaling: Scaling, max_batch: int) -> dict[str, Any]:
    """Returns the options of Ray's deployment that have it do what our own server does."""
    return {
        # One batch is answered while the next one comes.
        "max_ongoing_requests": max(2 * max_batch, math.ceil(scaling.target)),
        "max_queued_requests": MOST_INSIDE,
        "autoscaling_config": {
            "min_replicas": scaling.least,
            "max_replicas": scaling.most,
            "initial_replicas": scaling.first,
            "target_ongoing_requests": scaling.target,
            "upscale_delay_s": scaling.up_delay_s,
            "downscale_delay_s": scaling.down_delay_s,
            "look_back_period_s": LOOK_BACK_S,
            "metrics_interval_s": LOOK_BACK_S / 4,
        },
    }


def write(hosting: Hosting, folder: Path, check: int, tell: Callable[[str], None]) -> int:
    """Writes the folder, once the model in it answers as ``tfdist predict`` does.

    Args:
        hosting: its model as this machine has it.
        folder: a new one.
        check: records that are compared; 0: none.
        tell: is told in one line why nothing was compared.

    Returns:
        How many records were compared.

    Raises:
        OptionError: the folder cannot be had. EngineMissingError: Ray Serve is not installed.
        TfdistError: the model cannot be loaded from there, or answers otherwise.
        WriteError: the disk is full, or the folder cannot be written.
    """
    extra_module("ray.serve", "ray[serve]", "an application of Ray's", "ray")
    folder = folder.absolute()
    if folder.exists() or not folder.parent.is_dir():
        raise OptionError(
            "the folder of an application must be a new one, in a folder that exists",
            received=f"{folder}, which is there" if folder.exists() else f"no {folder.parent}",
            mend="Give another one: --to ray DIR",
        )
    if ":" in str(folder) or "$" in str(folder):
        raise OptionError(
            "the folder of an application must have a path without ':' and '$'",
            received=str(folder),
            mend="Give another one: --to ray DIR",
        )
    served = hosting.served
    follow_program(os.environ, model_path.parts(served.model)[0], served.weights)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
            written = Path(place) / folder.name
            written.mkdir()
            _fill(written, hosting, folder)
            compared = _rehearsed(served, written, check, tell)
            os.replace(written, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return compared


def _fill(written: Path, hosting: Hosting, folder: Path) -> None:
    # Apart from the program, which the user's file may be called as.
    files = written / MODEL
    files.mkdir()
    served = hosting.served
    place, called = model_path.parts(served.model)
    model = served.model
    if place.endswith(".py"):
        source = Path(place).resolve()
        for file in files_of(source):
            if file.is_relative_to(source.parent):
                target = files / file.relative_to(source.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        model = f"{source.name}:{called}"
    shutil.copyfile(served.weights, files / served.weights.name)
    weights = Path(served.weights.name)
    there = replace(served, model=model, file=weights, weights=weights, trained_on=None)
    replace(hosting, served=there).write(files)
    (written / "app.py").write_text(_APP.format(name=served.name))
    (written / CONFIG).write_text(_HEAD + yaml.safe_dump(_schema(hosting, folder)))
    (written / "requirements.txt").write_text("".join(f"{pin}\n" for pin in pins(_NEEDED)))


def _schema(hosting: Hosting, folder: Path) -> dict[str, Any]:
    application = {
        "name": hosting.served.name,
        "route_prefix": "/",
        "import_path": "app:app",
        "runtime_env": {"env_vars": {"PYTHONPATH": f"{folder}:${{PYTHONPATH}}"}},
        "deployments": [{"name": "Model", **hosting.options}],
    }
    http = {"host": "127.0.0.1", "port": 8000, "request_timeout_s": hosting.timeout_s}
    return {"http_options": http, "applications": [application]}


def _rehearsed(served: Served, written: Path, check: int, tell: Callable[[str], None]) -> int:
    """Returns how many answers of the folder were compared. Raises TfdistError: see ``write``."""
    found: list[int] = []

    def take(rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "rehearsed":
            found.append(event["compared"])

    with scratch_folder() as scratch:
        is_compared = gate.prepare(served, check, scratch, tell)
        if is_compared:
            gate.expect(served, scratch, scratch / EXPECTED)
        config = {"folder": str(written / MODEL), "gate": str(scratch) if is_compared else None}
        ranks.run(
            _PROGRAM, config, Where(strategy="single", options={}, stall_timeout_s=None), take
        )
    assert found
    return found[0]


def pins(needed: tuple[str, ...]) -> list[str]:
    """Returns NAME==VERSION of what is installed of packages, and of all that they need, sorted."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    open_ends = list(needed)
    for text in open_ends:  # Which grow.
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        if text in seen:
            continue
        seen.add(text)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # Of what a package can do without.
        found[name] = package.version
        for line in package.requires or ():
            needs = Requirement(line)
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if needs.marker is None or any(map(needs.marker.evaluate, extras)):
                more = f"[{','.join(sorted(needs.extras))}]" if needs.extras else ""
                open_ends.append(f"{needs.name}{more}")
    return [f"{name}=={version}" for name, version in sorted(found.items())]
