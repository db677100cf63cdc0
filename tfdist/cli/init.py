"""tfdist init: a small project that trains as it stands."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from importlib import resources
from pathlib import Path

import click

from tfdist.errors import OptionError, cannot_write

# What systems say where a file system has no links.
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_EPILOG = """\b
Examples:
  tfdist init digits
  tfdist init digits --sagemaker
"""


@click.command("init", epilog=_EPILOG)
@click.argument("folder", type=click.Path(path_type=Path), default=".")
@click.option("--sagemaker", is_flag=True, help="Also write the folder for Amazon SageMaker.")
def command(folder: Path, sagemaker: bool) -> None:
    """Writes a model, its data and a README.md with lines to run into FOLDER (this one by default).

    A file that is there already is never replaced: one that differs ends the command before
    anything is written. So --sagemaker can be asked for later.
    """
    files = _project()
    if sagemaker:
        files |= {f"sagemaker/{name}": content for name, content in _sagemaker().items()}
    for name in _write(files, folder):
        click.echo(f"wrote {folder / name}")
    click.echo(f"next: the lines of {folder / 'README.md'}")


def _project() -> dict[str, bytes]:
    """Returns the files of a project: name -> content."""
    from tfdist.records.writing.raw_sources import digits_npz

    package = resources.files("tfdist")
    return {
        "README.md": (package / "cli" / "starter" / "README.md").read_bytes(),
        "model.py": (package / "examples" / "digits.py").read_bytes(),
        "script.py": (package / "cli" / "starter" / "script.py").read_bytes(),
        "digits.npz": digits_npz(),
    }


def _sagemaker() -> dict[str, bytes]:
    """Returns the files of the folder for SageMaker, whose model is the project's."""
    package = resources.files("tfdist")
    files = {
        path.name: path.read_bytes()
        for path in (package / "aws" / "scripts").iterdir()
        if path.is_file()
    }
    ours, theirs = b"model: examples/digits.py:", b"model: model.py:"
    assert files["config.yaml"].count(ours) == 1
    files["config.yaml"] = files["config.yaml"].replace(ours, theirs)
    files["README.md"] = (package / "cli" / "starter" / "SAGEMAKER.md").read_bytes()
    return dict(sorted(files.items()))


def _write(files: dict[str, bytes], folder: Path) -> list[str]:
    """Writes those of ``files`` that are not there yet, all of them or none; returns their names.

    Raises:
        OptionError: a file is there with another content, or the folder cannot be one.
        WriteError: the files cannot be written.
    """
    missing = [name for name, content in files.items() if not _is_there(folder / name, content)]
    if not missing:
        return []
    try:
        with contextlib.ExitStack() as undo:  # What was made goes again, the last one first.
            _make_folders(folder, undo)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".tfdist-init-") as staging:
                for number, name in enumerate(missing):
                    (Path(staging) / str(number)).write_bytes(files[name])
                for number, name in enumerate(missing):
                    _make_folders((folder / name).parent, undo)
                    _put(Path(staging) / str(number), folder / name, undo)
            undo.pop_all()
    except (FileExistsError, NotADirectoryError) as error:
        raise _in_the_way(Path(error.filename2 or error.filename)) from None
    except OSError as error:
        raise cannot_write(folder, error) from error
    return missing


def _put(file: Path, to: Path, undo: contextlib.ExitStack) -> None:
    """Gives a file its place, and never that of another; raises OSError."""
    try:
        # A link, unlike a rename, never takes the place of a file.
        os.link(file, to)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        with to.open("xb") as new:
            undo.callback(_remove, to)
            new.write(file.read_bytes())
        return
    undo.callback(_remove, to)


def _is_there(path: Path, content: bytes) -> bool:
    """Whether ``path`` is the file that would be written. Raises OptionError when it is another."""
    if not os.path.lexists(path):
        return False
    try:
        is_same = path.is_file() and path.read_bytes() == content
    except OSError:
        is_same = False
    if not is_same:
        raise _in_the_way(path)
    return True


def _in_the_way(path: Path) -> OptionError:
    return OptionError(
        "a new project must replace no file",
        received=f"{path}, which is there already",
        mend="Choose another folder: tfdist init FOLDER",
    )


def _make_folders(folder: Path, undo: contextlib.ExitStack) -> None:
    for path in reversed((folder, *folder.parents)):
        if not path.is_dir():
            path.mkdir()
            undo.callback(_remove, path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()
