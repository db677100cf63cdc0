"""A batch transform on this machine: its model, its shards, what is asked, and its outputs."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.aws.evaluation import ARCHIVE
from tfdist.aws.rehearsal.agent import Storage, parse_uri
from tfdist.aws.rehearsal.processing import check_end
from tfdist.aws.rehearsal.training import Runner
from tfdist.launch import local


def run_transform(
    request: dict[str, Any],
    artifacts: str,
    folder: Path,
    storage: Storage,
    environ: Mapping[str, str],
    run: Runner,
) -> int:
    """Carries out a CreateTransformJob request; returns how many objects it wrote.

    Args:
        artifacts: S3 URI of the model's model.tar.gz.
        folder: a new folder.

    Raises:
        LaunchError: inference.py, or the model, failed.
    """
    places = [folder / name for name in ("model", "input", "output")]
    for place in places:
        place.mkdir(parents=True)
    archive = folder / ARCHIVE
    archive.write_bytes(storage.read(*parse_uri(artifacts)))
    with tarfile.open(archive) as packed:
        packed.extractall(places[0], filter="data")
    source = request["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
    storage.fetch(storage.keys(source), source, places[1])
    module = f"{__name__.rpartition('.')[0]}.serving"
    command = [sys.executable, "-m", module, json.dumps(request), *map(str, places)]
    log: list[str] = []
    code = run(command, environ, local.job, log.append)
    check_end("a batch transform", code, log)
    return storage.store(places[2], request["TransformOutput"]["S3OutputPath"])
