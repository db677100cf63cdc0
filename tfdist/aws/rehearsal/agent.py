"""What SageMaker does around a container: brings data, fills pipes, takes results."""

from __future__ import annotations

import contextlib
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tfdist.errors import DataError, LaunchError
from tfdist.launch import local
from tfdist.launch.supervisor import Job

_TICK_S = 0.05
# What is to be done where a step's script has failed.
SEE_ALL = "See all that it has printed with tfdist aws rehearse --verbose"

#: (command, environment, job, on_line) -> exit code. The job is one of ``tfdist.launch``'s, such as
#: ``local.job``. Whatever was started has ended when it returns.
Runner = Callable[[list[str], Mapping[str, str], Callable[..., Job], Callable[[str], None]], int]


def parse_uri(uri: str) -> tuple[str, str]:
    """Returns (bucket, key) of "s3://bucket/key"."""
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")


class Storage:
    """S3, as a container's agent uses it."""

    def __init__(self, client: Any):
        self._client = client

    def keys(self, uri: str) -> list[tuple[str, str]]:
        """Returns (bucket, key) of all objects whose key begins as the URI's; sorted, as S3 does.

        Raises:
            DataError: there is none: SageMaker ends such a job at once.
        """
        bucket, prefix = parse_uri(uri)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        found = [(bucket, item["Key"]) for page in pages for item in page.get("Contents", [])]
        if not found:
            raise DataError(
                "an input must have objects in S3",
                received=f"none under {uri}",
                mend="Leave it out here: a rehearsal's S3 holds data.folder and its own results",
            )
        return found

    def fetch(self, objects: list[tuple[str, str]], uri: str, folder: Path) -> None:
        """Downloads objects into ``folder``, named by what follows the prefix of ``uri``."""
        prefix = parse_uri(uri)[1]
        for bucket, key in objects:
            name = key[len(prefix) :].lstrip("/") or key.rsplit("/", 1)[-1]
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self._client.download_file(bucket, key, str(target))

    def read(self, bucket: str, key: str) -> bytes:
        """Returns the bytes of one object."""
        return self._client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def store(self, folder: Path, uri: str) -> int:
        """Uploads all files under ``folder``; returns how many."""
        bucket, prefix = parse_uri(uri)
        count = 0
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix.rstrip('/')}/{path.relative_to(folder)}"
                self._client.upload_file(str(path), bucket, key)
                count += 1
        return count

    def store_archive(self, folder: Path, uri: str, scratch: Path) -> None:
        """Uploads ``folder`` as a .tar.gz."""
        archive = scratch / parse_uri(uri)[1].rsplit("/", 1)[-1]
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(folder, arcname=".")
        bucket, key = parse_uri(uri)
        self._client.upload_file(str(archive), bucket, key)


@dataclass(frozen=True)
class Machine:
    """This machine, in the place of AWS.

    Attributes:
        storage: the stand-in of S3.
        environ: leads processes to it.
        run: starts them.
    """

    storage: Storage
    environ: Mapping[str, str]
    run: Runner

    def run_script(self, what: str, command: list[str]) -> None:
        """Raises LaunchError, with the last line that was printed, where the script has failed."""
        log: list[str] = []
        code = self.run(command, self.environ, local.job, log.append)
        if code != 0:
            last = next((line for line in reversed(log) if line.strip()), "nothing was printed")
            raise LaunchError(
                f"{what} must end with success", received=f"exit code {code}: {last}", mend=SEE_ALL
            )


@contextlib.contextmanager
def pipes(feeds: dict[Path, list[bytes]]) -> Iterator[None]:
    """Keeps named pipes filled for the block: ``<path>_0``, then ``<path>_1``, and so on.

    Args:
        feeds: path of a channel -> the objects that each of its pipes gives.
    """
    stopping = threading.Event()
    threads = [
        threading.Thread(target=_feed, args=(path, objects, stopping), daemon=True)
        for path, objects in feeds.items()
    ]
    for path in feeds:
        os.mkfifo(f"{path}_0")
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _feed(path: Path, objects: list[bytes], stopping: threading.Event) -> None:
    number = 0
    while (pipe := _open(f"{path}_{number}", stopping)) is not None:
        number += 1
        os.mkfifo(f"{path}_{number}")
        with contextlib.suppress(BrokenPipeError):
            for data in objects:
                _write(pipe, data, stopping)
        os.close(pipe)


def _open(path: str, stopping: threading.Event) -> int | None:
    """Returns the write end as soon as somebody reads; None when it is time to stop."""
    while not stopping.is_set():
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # Nobody reads yet.
            time.sleep(_TICK_S)
    return None


def _write(pipe: int, data: bytes, stopping: threading.Event) -> None:
    view = memoryview(data)
    while view and not stopping.is_set():
        try:
            view = view[os.write(pipe, view) :]
        except BlockingIOError:  # It is full.
            time.sleep(_TICK_S / 10)
