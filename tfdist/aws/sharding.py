"""The body of ``sagemaker/shard.py``: raw data to shards, laid out as the channels need them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfdist.aws.container import MANIFEST_CHANNEL
from tfdist.aws.entry import Parser
from tfdist.records.format.manifest import COMPRESSIONS, MANIFEST_NAME, Manifest

#: What the section data of a configuration tells the script, by the names of ``records.write``.
OPTIONS = ("num_shards", "split", "stratify", "compression", "label")


def layout(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yields (file, folder) for the files of a folder of shards: a folder for each channel.

    The manifest lies apart: among sharded keys only one host would get it.
    """
    yield MANIFEST_NAME, MANIFEST_CHANNEL
    for name, split in manifest.splits.items():
        for shard in split.shards:
            yield shard.file, name


def parser() -> Parser:
    """Returns the arguments of the script."""
    arguments = Parser("Writes raw data as shards.")
    add = arguments.add_argument
    add("--source", required=True, help="as for `tfdist shard`: a folder, .csv, .npz, or digits")
    add("--output", type=Path, required=True)
    add("--num-shards", type=int, default=4)
    add("--split", default="train=8,validation=1,test=1")
    add("--stratify", choices=("true", "false"), default="false")
    add("--seed", type=int, default=0)
    add("--compression", choices=COMPRESSIONS, default="none")
    add("--label", default=None)
    return arguments


def main(arguments: list[str]) -> None:
    """Writes the folders ``manifest`` and one for each split into ``--output``.

    Raises:
        TfdistError: arguments or a source that cannot be written.
    """
    from tfdist.records.writing.writer import write

    options = parser().parse(arguments)
    options.stratify = options.stratify == "true"
    how = {name: getattr(options, name) for name in ("seed", *OPTIONS)}
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.output, prefix=".shards-") as folder:
        manifest = write(options.source, folder, **how)
        for file, channel in layout(manifest):
            (options.output / channel).mkdir(exist_ok=True)
            os.replace(Path(folder) / file, options.output / channel / file)
    for name, split in manifest.splits.items():
        print(f"tfdist {name}: {split.records} records in {len(split.shards)} shards", flush=True)
