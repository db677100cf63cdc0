"""Input channels of a training job: which data reaches which host, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfdist.aws.config import ChannelConfig
from tfdist.aws.container import MANIFEST_CHANNEL, pipe_channel
from tfdist.errors import DataError, OptionError
from tfdist.records.format.manifest import Manifest

# An AWS limit of CreateTrainingJob.
MAX_CHANNELS = 20
# What the fullest host may get over an equal share: all others wait for it in every step.
MAX_IMBALANCE = 1.2


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One channel of CreateTrainingJob.

    Attributes:
        uri: S3 prefix of its objects, with a slash at the end: "train" must not match "train-2".
    """

    name: str
    uri: str
    mode: str = "File"
    distribution: str = "FullyReplicated"


@dataclass(frozen=True)
class Shape:
    """The shards of one split: known from a manifest, or planned.

    Attributes:
        shard_records, shard_bytes: of each shard; None when the shards are not written yet.
    """

    num_shards: int
    compression: str
    shard_records: tuple[int, ...] | None = None
    shard_bytes: tuple[int, ...] | None = None


def shapes(manifest: Manifest) -> dict[str, Shape]:
    """Returns the shape of each split of a manifest."""
    return {
        name: Shape(
            len(split.shards),
            manifest.compression,
            tuple(shard.records for shard in split.shards),
            tuple(shard.bytes for shard in split.shards),
        )
        for name, split in manifest.splits.items()
    }


def check_tflite(kind: str, *, is_pipe: bool) -> None:
    """Raises OptionError where the records that a TFLite model is proved on come only once.

    Args:
        kind: of the model; "none" is none.
        is_pipe: whether the channel "train" is one of mode Pipe.
    """
    if kind != "none" and is_pipe:
        raise OptionError(
            "a job that writes a TFLite model must have records that can be read again, to prove "
            "it on",
            received=f"tflite {kind}, and a channel 'train' of mode Pipe",
            mend="Choose mode File or FastFile, or run `tfdist export` after the job",
        )


def channels(
    splits: Mapping[str, Shape],
    wanted: Mapping[str, ChannelConfig],
    root: str,
    *,
    hosts: int,
    processes_per_host: int,
) -> list[Channel]:
    """Returns the channels of a job: the manifest, "train", and "validation" where there is one.

    Args:
        splits: the data's.
        wanted: how splits reach the hosts; a split that is not named comes whole, as files.
        root: S3 URI under which ``tfdist aws upload`` put a folder for each channel.
        hosts: number of instances.
        processes_per_host: each needs pipes of its own.

    Raises:
        DataError: no split "train", or shards that do not divide by the hosts.
        OptionError: a channel for an unknown split, or more channels than AWS allows.
    """
    unknown = set(wanted) - set(splits)
    if unknown:
        raise OptionError(
            "channels must be for splits of the data",
            received=", ".join(sorted(unknown)),
            mend=f"Choose among {', '.join(splits)}",
        )
    check_has_train(splits)
    found = [Channel(name=MANIFEST_CHANNEL, uri=f"{root}/{MANIFEST_CHANNEL}/")]
    for split in ("train", "validation"):
        if split in splits:
            config = wanted.get(split, ChannelConfig())
            check_shards(split, splits[split], config, hosts)
            found.extend(_of_split(split, config, root, processes_per_host))
    if len(found) > MAX_CHANNELS:
        raise OptionError(
            f"a job must have at most {MAX_CHANNELS} channels, and Pipe needs one for each process",
            received=f"{len(found)} for {processes_per_host} processes a host",
            mend="Choose mode FastFile",
        )
    return found


def check_has_train(splits: Mapping[str, object]) -> None:
    """Raises DataError where data has no split "train"."""
    if "train" not in splits:
        raise DataError(
            "data to train on must have a split 'train'",
            received=f"only {', '.join(splits)}",
            mend="Shard with --split train=8,validation=1,test=1, or say so as data.split",
        )


def _of_split(
    split: str, config: ChannelConfig, root: str, processes_per_host: int
) -> Iterator[Channel]:
    names = [split]
    if config.mode == "Pipe":
        names = [pipe_channel(split, rank) for rank in range(processes_per_host)]
    for name in names:
        yield Channel(
            name=name,
            uri=f"{root}/{split}/",
            mode=config.mode,
            distribution=config.distribution,
        )


def check_shards(split: str, shape: Shape, config: ChannelConfig, hosts: int) -> None:
    """Checks that the shards of a split can reach the hosts as wanted.

    Raises:
        DataError: they do not divide by the hosts, or are compressed where they must not be.
    """
    if config.mode == "Pipe" and shape.compression != "none":
        raise DataError(
            f"shards that come through pipes must not be compressed (split '{split}')",
            received=shape.compression,
            mend="Shard with --compression none, or choose mode File or FastFile",
        )
    if config.distribution != "ShardedByS3Key":
        return
    if shape.num_shards % hosts:
        above = -(-shape.num_shards // hosts) * hosts
        raise DataError(
            f"the shards of split '{split}' must divide by the {hosts} hosts that share them",
            received=f"{shape.num_shards} shards",
            mend=f"Write them again with `tfdist shard --num-shards {above}`, or choose "
            "distribution FullyReplicated",
        )
    worst = balance(shape, hosts)
    if worst is not None and max(worst) > MAX_IMBALANCE:
        raise DataError(
            f"a host must get at most {MAX_IMBALANCE:g} times an equal share of split '{split}'",
            received=f"{worst[0]:.2f} times in records, {worst[1]:.2f} in bytes",
            mend="Write shards of equal size with `tfdist shard`, or choose distribution "
            "FullyReplicated",
        )


def balance(shape: Shape, hosts: int) -> tuple[float, float] | None:
    """Returns how unequal hosts can be, in records and in bytes; None before shards are written.

    That is the most one can get of sharded keys over an equal share, 1.0 being equal. AWS does not
    say which host gets which keys, only that each gets as many: so the worst case.
    """
    if shape.shard_records is None or shape.shard_bytes is None:
        return None
    each = shape.num_shards // hosts

    def worst(sizes: tuple[int, ...]) -> float:
        return sum(sorted(sizes)[-each:]) * hosts / sum(sizes)

    return worst(shape.shard_records), worst(shape.shard_bytes)
