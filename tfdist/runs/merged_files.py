"""Files of predictions, one after the other as one: streamed, whatever their kind."""

from __future__ import annotations

import contextlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tfdist.errors import DataError, extra_module

_COPIED_BYTES = 4 << 20


def rows_of(file: Path) -> int | None:
    """Returns how many records a file has; None of one of lines, which its checksum tells of."""
    if file.suffix == ".parquet":
        return parquet().read_metadata(file).num_rows
    if file.suffix in (".npy", ".npz"):
        with _arrays(file) as arrays:
            return next(iter(arrays.values()))[0][0]
    return None


def parquet() -> Any:
    """Returns pyarrow's module of parquet files. Raises EngineMissingError: there is none."""
    return extra_module("pyarrow.parquet", "pyarrow", "parquet files", "tables")


def join(files: Sequence[Path], output: Path) -> None:
    """Writes the records of ``files`` as those of one file of the same kind.

    Raises:
        DataError: the files do not have the same columns or arrays.
    """
    if output.suffix == ".parquet":
        _join_parquet(files, output)
        return
    with output.open("wb") as out:
        if output.suffix == ".npy":
            _join_arrays(files, "", out)
        elif output.suffix == ".npz":
            with zipfile.ZipFile(out, "w", allowZip64=True) as archive:
                for name in _names(files):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        _join_arrays(files, name, member)
        else:
            _join_lines(files, out, has_header=output.suffix == ".csv")


def _join_lines(files: Sequence[Path], out: BinaryIO, *, has_header: bool) -> None:
    first = None
    for file in files:
        with file.open("rb") as part:
            line = part.readline()
            names = line if has_header else list(json.loads(line))
            _check_alike(file, names, names if first is None else first)
            if first is None or not has_header:
                out.write(line)
            first = names
            shutil.copyfileobj(part, out, _COPIED_BYTES)


def _join_parquet(files: Sequence[Path], output: Path) -> None:
    schema = parquet().read_schema(files[0])
    with parquet().ParquetWriter(output, schema) as writer:
        for file in files:
            part = parquet().ParquetFile(file)
            with contextlib.closing(part):
                _check_alike(file, part.schema_arrow, schema)
                for number in range(part.num_row_groups):
                    writer.write_table(part.read_row_group(number))


def _names(files: Sequence[Path]) -> list[str]:
    first = None
    for file in files:
        with _arrays(file) as arrays:
            first = list(arrays) if first is None else first
            _check_alike(file, list(arrays), first)
    return first


def _join_arrays(files: Sequence[Path], name: str, out: BinaryIO) -> None:
    """Writes the array ``name`` of all files, as ``np.save`` does."""
    import numpy as np

    count, first, dtypes = 0, None, []
    for file in files:
        with _arrays(file) as arrays:
            (rows, *of_row), dtype, _ = arrays[name]
        # Of texts, each part has the width of its longest.
        alike = of_row, "text" if dtype.kind == "U" else dtype
        first = first or alike
        _check_alike(file, alike, first)
        count += rows
        dtypes.append(dtype)
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    header = {
        "descr": np.lib.format.dtype_to_descr(widest),
        "fortran_order": False,
        "shape": (count, *first[0]),
    }
    np.lib.format.write_array_header_1_0(out, header)
    at_once = max(1, _COPIED_BYTES // widest.itemsize)
    for file, dtype in zip(files, dtypes, strict=True):
        with _arrays(file) as arrays:
            while block := arrays[name][2].read(at_once * dtype.itemsize):
                out.write(np.frombuffer(block, dtype).astype(widest, copy=False).tobytes())


@contextlib.contextmanager
def _arrays(file: Path) -> Iterator[dict[str, tuple]]:
    """Gives (shape, dtype, file at the first value) of each array by its name; "" in a .npy."""
    with contextlib.ExitStack() as opened:
        if file.suffix == ".npy":
            members = {"": opened.enter_context(file.open("rb"))}
        else:
            archive = opened.enter_context(zipfile.ZipFile(file))
            names = archive.namelist()
            members = {n.removesuffix(".npy"): opened.enter_context(archive.open(n)) for n in names}
        yield {name: (*_header(file, member), member) for name, member in members.items()}


def _header(file: Path, member: BinaryIO) -> tuple:
    import numpy as np

    version = np.lib.format.read_magic(member)
    assert version == (1, 0), version
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(member)
    assert not is_fortran or sum(size > 1 for size in shape) < 2, file
    return shape, dtype


def _check_alike(file: Path, found: object, first: object) -> None:
    if found != first:
        raise DataError(
            "all parts must have the same columns or arrays",
            received=f"others in {file} than in the first",
            mend="Look whether an output of the model is no probability in some of them, and "
            "write .npz",
        )
