"""What SageMaker tells a training container: a pure function of the environment.

The training toolkit writes ``/opt/ml/input/config`` into ``SM_*`` variables. All paths come from
there, so the same program runs on AWS, in a test and in the rehearsal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import OptionError
from tfdist.records.reading.stored import Stored
from tfdist.topology import Topology

MANIFEST_CHANNEL = "manifest"
_SHARDED = "ShardedByS3Key"
_PIPE = "Pipe"


def pipe_channel(split: str, local_rank: int) -> str:
    """Returns the channel that one process of each host reads: a pipe cannot be shared."""
    return f"{split}_r{local_rank}"


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One input channel.

    Attributes:
        folder: where its files are; the path of its pipes without "_<number>".
        is_pipe: whether its data comes through pipes.
        is_sharded: whether each host has other keys.
    """

    folder: Path
    is_pipe: bool
    is_sharded: bool


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container of a training job.

    Attributes:
        hosts: names of all containers, in their order.
        channels: by name.
        model_dir: what lies here in the end becomes model.tar.gz.
        output_data_dir: what lies here in the end becomes output.tar.gz.
    """

    hosts: tuple[str, ...]
    channels: Mapping[str, Channel]
    model_dir: Path
    output_data_dir: Path

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Container:
        """Reads the ``SM_*`` variables.

        Raises:
            OptionError: one of them is missing: this is no training container.
        """

        def get(name: str) -> str:
            if name not in environ:
                raise OptionError(
                    "a training container must be described by SM_* variables",
                    received=f"no {name}",
                    mend="Start the script with SageMaker's toolkit (`train`), or rehearse it with "
                    "`tfdist aws rehearse`",
                )
            return environ[name]

        inputs = json.loads(get("SM_INPUT_DATA_CONFIG"))
        hosts = tuple(json.loads(get("SM_HOSTS")))
        channels = {
            name: Channel(
                folder=Path(get(f"SM_CHANNEL_{name.upper()}")),
                is_pipe=config.get("TrainingInputMode") == _PIPE,
                is_sharded=config.get("S3DistributionType") == _SHARDED,
            )
            for name, config in inputs.items()
        }
        return cls(
            hosts=hosts,
            channels=channels,
            model_dir=Path(get("SM_MODEL_DIR")),
            output_data_dir=Path(get("SM_OUTPUT_DATA_DIR")),
        )

    @property
    def manifest_folder(self) -> Path:
        """The folder of manifest.json.

        Raises:
            OptionError: there is no such channel.
        """
        if MANIFEST_CHANNEL not in self.channels:
            raise OptionError(
                f"a job must have the channel '{MANIFEST_CHANNEL}' with manifest.json",
                received=f"only the channels {', '.join(self.channels)}"
                if self.channels
                else "no channels",
                mend="Send the data with `tfdist aws upload`, and make the channels with tfdist",
            )
        return self.channels[MANIFEST_CHANNEL].folder

    def source(self, split: str, place: Topology) -> Stored | None:
        """Returns what a process reads of ``split``; None when the job has no channel for it."""
        channel = self.channels.get(split) or self.channels.get(
            pipe_channel(split, place.local_rank)
        )
        if channel is None:
            return None
        return Stored(
            manifest=self.manifest_folder,
            split=split,
            folder=channel.folder,
            pipes=channel.is_pipe,
            divided=channel.is_sharded and len(self.hosts) > 1,
            reader=place.local_rank,
            readers=place.local_size,
        )
