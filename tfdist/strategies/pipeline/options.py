"""What a user can ask of a pipeline, checked before TensorFlow is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import ModelError, OptionError, unknown_choice
from tfdist.strategies.pipeline import output_cache, schedule
from tfdist.strategies.spec import check_shard

BATCH_NORMS = ("synchronized", "per_microbatch")
RECOMPUTE = ("none", "blocks")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``Pipeline``, under the same names.

    Raises:
        OptionError: they cannot hold, alone or together.
    """

    stages: int
    microbatches: int
    schedule: str
    chunks_per_stage: int | None
    cut_after: Sequence[str] | str | None
    optimize: str
    balance: str
    recompute: str | None
    batch_norm: str
    freeze_until: str | None
    frozen_cache: str | None
    frozen_cache_dir: str | os.PathLike | None
    replicas: str | None = None
    shard: str = "none"

    def __post_init__(self) -> None:
        schedule.check(
            self.schedule,
            stages=self.stages,
            microbatches=self.microbatches,
            chunks_per_stage=self.chunks_per_stage,
        )
        for what, chosen, known in (
            ("optimize", self.optimize, GOALS),
            ("balance", self.balance, SOURCES),
            ("batch_norm", self.batch_norm, BATCH_NORMS),
            ("recompute", self.recompute or "none", RECOMPUTE),
        ):
            if chosen not in known:
                raise unknown_choice(what, chosen, known)
        check_shard(self.shard, self.replicas, "pipeline")
        cuts = () if self.cut_after is None else self.cut_after
        if not isinstance(cuts, Sequence) or not all(isinstance(name, str) for name in cuts):
            raise OptionError(
                "cut_after must name layers",
                received=repr(self.cut_after),
                mend='Write ["conv1", "dense2"], or -o cut_after=conv1,dense2',
            )
        if self.cut_names is not None and len(self.cut_names) != self.parts - 1:
            raise OptionError(
                f"cut_after must name one layer fewer than there are parts, here {self.parts - 1}",
                received=f"{len(self.cut_names)}: {', '.join(self.cut_names)}",
                mend=f"Name {self.parts - 1}, or choose another number of stages",
            )
        self._check_cache()
        self._check_replicas()

    def _check_replicas(self) -> None:
        if self.replicas is None:
            return
        if self.batch_norm == "per_microbatch":
            raise OptionError(
                "batch_norm must be 'synchronized' with replicas, or each rank would move its own "
                "statistics",
                received="batch_norm='per_microbatch'",
                mend="Leave it out, or leave replicas out",
            )
        if self.frozen_cache is not None:
            raise OptionError(
                "frozen_cache must be left out with replicas, since each rank would keep all "
                "records",
                received=f"frozen_cache={self.frozen_cache!r}",
                mend="Leave one of them out; freeze_until alone goes with replicas",
            )

    def _check_cache(self) -> None:
        if self.frozen_cache is not None and self.frozen_cache not in output_cache.KINDS:
            raise unknown_choice("frozen_cache", self.frozen_cache, output_cache.KINDS)
        if self.frozen_cache is not None and self.freeze_until is None:
            raise OptionError(
                "frozen_cache must go with freeze_until, which names the layers whose outputs it "
                "keeps",
                received=f"frozen_cache={self.frozen_cache!r} without freeze_until",
                mend="Give freeze_until, or leave frozen_cache out",
            )
        if (self.frozen_cache == "disk") != (self.frozen_cache_dir is not None):
            raise OptionError(
                "frozen_cache='disk' and frozen_cache_dir must come together",
                received=f"frozen_cache={self.frozen_cache!r}, "
                f"frozen_cache_dir={self.frozen_cache_dir!r}",
                mend="Give a folder for 'disk', and none for 'memory'",
            )
        folder = self.frozen_folder
        if folder is not None and folder.exists() and not folder.is_dir():
            raise OptionError(
                "frozen_cache_dir must be a folder",
                received=f"the file {folder}",
                mend="Name another",
            )
        if folder is not None and not folder.is_dir() and not folder.parent.is_dir():
            raise OptionError(
                "the folder above frozen_cache_dir must exist",
                received=f"no folder {folder.parent}",
                mend="Make it first",
            )

    @property
    def recomputes(self) -> bool:
        return self.recompute == "blocks"

    @property
    def frozen_folder(self) -> Path | None:
        return None if self.frozen_cache_dir is None else Path(self.frozen_cache_dir)

    @property
    def parts(self) -> int:
        """Chunks of the model, over all stages."""
        chunks = (self.chunks_per_stage or 2) if self.schedule == "interleaved" else 1
        return self.stages * chunks

    @property
    def cut_names(self) -> tuple[str, ...] | None:
        if self.cut_after is None:
            return None
        # On the command line: -o cut_after=conv1,dense2
        is_text = isinstance(self.cut_after, str)
        return tuple(self.cut_after.split(",") if is_text else self.cut_after)


GOALS = ("speed", "memory")
SOURCES = ("estimated", "measured")


def cuts_after(named: Sequence[tuple[str, Sequence[int]]], count: int) -> tuple[int, ...]:
    """Returns the cuts after named items; see ``balance``.

    Args:
        named: name and items of the last layer of each part but the last.
        count: number of all items.

    Raises:
        OptionError: names out of order.
    """
    names = [name for name, _ in named]
    cuts = [max(items) + 1 for _, items in named]
    if cuts != sorted(set(cuts)):
        raise OptionError(
            "cut_after must name layers in the order of the model",
            received=", ".join(names),
            mend="Name them in the order in which the model calls them, each once",
        )
    if cuts and cuts[-1] == count:
        raise OptionError(
            "the last stage must have a layer too",
            received=f"a cut after the last layer, {names[-1]}",
            mend=f"Name a layer before {names[-1]} in its place",
        )
    return tuple(cuts)


def check_enough(
    num_calls: int, parts: int, stages: int, name: str, whole: Sequence[str] = ()
) -> None:
    """Checks that each part gets a layer. Raises ModelError: fewer layers than parts.

    Args:
        whole: submodels of a class of their own, which no stage can have a part of.
    """
    if parts > num_calls:
        of_chunks = "" if parts == stages else f" of {parts // stages} chunks each"
        raise ModelError(
            f"a model for {stages} stages{of_chunks} must have at least {parts} layers",
            received=f"model '{name}' with {num_calls}"
            + (f", where {whole[0]}, of a class of its own, counts as one" if whole else ""),
            mend="Use strategy 'mirrored', 'horovod' or 'multi_worker', which hold it whole"
            + (f", or write {whole[0]} as a Functional model" if whole else "")
            + (f", or choose at most {num_calls} stages" if num_calls > 1 else ""),
        )
