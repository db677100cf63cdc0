"""A training's newest numbers for Prometheus, as a file of node_exporter's textfile collector."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tfdist.errors import OptionError
from tfdist.records.replacing import check_replaceable
from tfdist.runs import prometheus
from tfdist.runs.resource_log import SOURCES
from tfdist.training.engine.failure_notices import ToldOnce

_PREFIX = "tfdist_training"
_HELP = {
    "epoch": "The epoch, counted from 1.",
    "epochs": "Epochs of the whole training.",
    "step": "Steps of the epoch that have been taken.",
    "steps_per_epoch": "Steps of an epoch.",
    "samples_per_second": "Records of a second, in the epoch so far.",
    "data_wait_ratio": "The share of the steps' time that waited for data, of the last epoch.",
    "metric": "A number of the last epoch.",
    "cpu_cores": "Cores that a rank used on average, in the last epoch.",
    "memory_peak_bytes": "The most memory that a rank held, in the last epoch.",
    "gpu_ratio": "The share of the time that a rank's GPUs computed, in the last epoch.",
    "gpu_memory_peak_bytes": "The most memory that was held on a rank's GPUs, in the last epoch.",
    "energy_joules_total": "Energy of a rank's epochs so far, by what tells it.",
    "warnings_total": "Warnings so far.",
    "restarts_total": "Times that all ranks were started again.",
    "updated_seconds": "When these numbers were written, in seconds since 1970.",
}
_MIB = 2**20
# Of a rank: the column of resources.csv -> the number here, and how often it is one there.
_OF_RANK = {
    "cpu_cores": ("cpu_cores", 1),
    "memory_peak_mib": ("memory_peak_bytes", _MIB),
    "gpu": ("gpu_ratio", 1),
    "gpu_memory_peak_mib": ("gpu_memory_peak_bytes", _MIB),
}
_COUNTED = {"warning": "warnings_total", "restart": "restarts_total"}


class MetricsFile:
    """Listens to a training, and writes the file anew, whole, with each event.

    Args:
        path: should end with ".prom", which the collector asks for.
        output: of the training, a label of each number.

    Raises:
        OptionError: there is no such folder, or the file is a pipe or a device.
    """

    def __init__(self, path: str | os.PathLike, output: str):
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise OptionError(
                "--metrics-file must lie in a folder that exists",
                received=f"no folder {self._path.parent}",
                mend="Make it first",
            )
        check_replaceable(self._path)
        self._labels = {"output": output}
        self._values: dict[str, float] = dict.fromkeys(_COUNTED.values(), 0)
        #: Name -> labels, as pairs -> value.
        self._labelled: dict[str, dict[tuple, float]] = defaultdict(lambda: defaultdict(float))
        self._failures = ToldOnce()

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in _COUNTED:
            self._values[_COUNTED[kind]] += 1
        for name in ("epoch", "epochs", "step", "steps_per_epoch"):
            if isinstance(event.get(name), int):
                self._values[name] = event[name]
        for field, name in (
            ("samples_per_s", "samples_per_second"),
            ("data_wait", "data_wait_ratio"),
        ):
            if field in event:
                self._values[name] = event[field]
        for name, value in event.get("metrics", {}).items():
            self._labelled["metric"][("name", name),] = value
        if kind == "resources":
            self._take_resources(event)
        self._values["updated_seconds"] = time.time()
        self._write()

    def _take_resources(self, event: dict[str, Any]) -> None:
        rank = ("rank", str(event["rank"]))
        for column, (name, times) in _OF_RANK.items():
            if column in event:
                self._labelled[name][rank,] = event[column] * times
        for column, source in SOURCES.items():
            if column in event:
                self._labelled["energy_joules_total"][rank, ("source", source)] += event[column]

    def _write(self) -> None:
        # The collector reads all that ends with ".prom": what is half-written must not.
        temporary = self._path.with_name(f".{self._path.name}-{os.getpid()}.tmp")
        try:
            temporary.write_text(self.text(), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._failures.failed(
                f"{self._path} cannot be written, and the training goes on: {error.strerror}"
            )

    def text(self) -> str:
        """Returns the numbers in Prometheus' text format."""
        lines = []
        for name, meaning in _HELP.items():
            rows = [(dict(labels), value) for labels, value in self._labelled[name].items()]
            rows += [({}, self._values[name])] if name in self._values else []
            if rows:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += prometheus.head(f"{_PREFIX}_{name}", kind, meaning)
            rows = [(self._labels | labels, value) for labels, value in rows]
            lines += prometheus.numbers(f"{_PREFIX}_{name}", rows)
        return "\n".join(lines) + "\n"
