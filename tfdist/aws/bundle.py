"""What is sent into a container: the scripts, tfdist itself and the model's file, in one archive.

tfdist is sent as source: no image has to hold it, and what runs is what was tested here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tfdist
from tfdist.aws.config import Config
from tfdist.errors import OptionError
from tfdist.training.engine import model_path

_SCRIPTS = ("train.py", "evaluate.py", "shard.py", "inference.py")
_LISTS = ("requirements.txt", "serving-requirements.txt")
_SENT_SUFFIXES = (".py", ".yaml", ".npz")
ARCHIVE = "sourcedir.tar.gz"


@dataclass(frozen=True)
class Code:
    """What containers run, as one archive.

    Attributes:
        uri: its place in S3, in a folder that is called by what it holds.
    """

    uri: str
    archive: bytes

    def upload(self, s3: Any, encryption: dict[str, str]) -> None:
        """Sends it to its place, through boto3's client; see ``upload.encryption``."""
        bucket, _, key = self.uri.removeprefix("s3://").partition("/")
        s3.put_object(Bucket=bucket, Key=key, Body=self.archive, **encryption)


def pack(config: Config) -> Code:
    """Returns what the configuration sends; the same files make the same archive.

    Raises:
        TfdistError: see ``collect``.
    """
    packed = io.BytesIO()
    with (
        tempfile.TemporaryDirectory() as scratch,
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        folder = collect(config, Path(scratch) / "code")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                entry.size, entry.mode = path.stat().st_size, 0o644
                with path.open("rb") as file:
                    archive.addfile(entry, file)
    content = packed.getvalue()
    name = hashlib.sha256(content).hexdigest()
    return Code(f"{config.root}/code/{name}/{ARCHIVE}", content)


def shipped(name: str) -> str:
    """Returns FILE.py:NAME as it is called beside the scripts, the file being sent with them."""
    place, function = model_path.parts(name)
    return f"{Path(place).name}:{function}" if place.endswith(".py") else name


def collect(config: Config, folder: Path) -> Path:
    """Copies into the new ``folder`` what a container needs; returns it.

    Raises:
        TfdistError: a script or the model's file is missing, or files would hide each other.
    """
    scripts = Path(config.scripts)
    folder.mkdir(parents=True)
    for name in dict.fromkeys((*_SCRIPTS, *_LISTS, config.training.entry_point)):
        if not (scripts / name).is_file():
            raise OptionError(
                "the scripts must lie beside the configuration",
                received=f"no {scripts / name}",
                mend="Run tfdist init --sagemaker, or give `scripts:` in the configuration",
            )
        shutil.copy(scripts / name, folder)
    if config.security.network_isolation:  # Nothing can be fetched: inference.py does without.
        (folder / "serving-requirements.txt").write_text("")
    job = config.training
    for kind, name in ((model_path.MODEL, config.model), (model_path.CALLBACKS, job.callbacks)):
        file = Path(model_path.parts(name or "")[0])
        if name is None or (file.suffix != ".py" and job.entry_point != "train.py"):
            continue  # A script of one's own may call them as it likes.
        model_path.check(name, kind)
        if file.suffix != ".py":
            if job.image_uri is None:
                raise OptionError(
                    f"{kind.what} of a job must be given as FILE.py:NAME, for files are sent",
                    received=f"module {file}",
                    mend="Name its file, or give a training.image_uri that holds the module",
                )
            continue
        sent = folder / file.name
        if sent.exists() and sent.read_bytes() != file.read_bytes():
            raise OptionError(
                f"the file of {kind.what} must not be called as another one that is sent",
                received=file.name,
                mend="Rename it",
            )
        shutil.copy(file, folder)
    package = Path(tfdist.__file__).parent
    for path in sorted(package.rglob("*")):
        if path.suffix in _SENT_SUFFIXES and "__pycache__" not in path.parts:
            target = folder / "tfdist" / path.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return folder
