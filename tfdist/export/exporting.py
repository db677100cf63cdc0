"""``tfdist.export.tflite``: converts, compares with Keras, and writes only what is good enough."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import ExportError, OptionError, unknown_choice
from tfdist.export.c_array import c_array, is_c_array
from tfdist.export.converter import Conversion, convert
from tfdist.export.flatbuffer import is_tflite
from tfdist.export.interpreter import TfliteModel
from tfdist.export.kinds import AUTO, FORMATS, INPUT_TYPES, NEEDS_DATA, OUTPUT_TYPES, QUANTIZATIONS
from tfdist.export.latency import benchmark as measured
from tfdist.export.layers import layer_errors
from tfdist.export.models import PlainModel, open_model
from tfdist.export.parity import Judge
from tfdist.export.reports import Candidate, ParityError, Report
from tfdist.export.samples import Samples, open_samples
from tfdist.keras.layers import layers_in

if TYPE_CHECKING:
    import tensorflow as tf

Progress = Callable[[str, int, "int | None"], None]

_WORST_NAMED = 3


def tflite(
    model: tf.keras.Model | str | os.PathLike,
    path: str | os.PathLike,
    *,
    quantize: str = "none",
    data: Any = None,
    samples: int = 200,
    parity_samples: int = 1000,
    max_drop: float = 0.01,
    input_type: str = "auto",
    output_type: str = "float32",
    rescale: tuple[float, float] | None = None,
    layers: bool = True,
    benchmark: bool = False,
    format: str = "tflite",
    trust: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Writes a model as a TFLite file that was proved to give Keras' answers.

    The file takes batches of one. It takes raw records: a Rescaling or Normalization layer of the
    model is inside of it, and so is ``rescale``. With uint8 records the input of an int8 file is
    uint8, scale 1 and zero point 0: an app copies the bytes of an image into it.

    Args:
        model: a Keras model as any strategy builds it, or a .keras or .h5 file or the folder of a
            SavedModel that Keras wrote; also in a bucket.
        path: of the file to write; it is replaced when it exists.
        quantize: a name of ``QUANTIZATIONS``, or "auto": tries all and keeps the smallest that is
            good enough.
        data: a folder of shards, whose split train is calibrated on and validation judged on;
            "DIR/SPLIT", arrays or an unbatched tf.data.Dataset serve for both. None: int8,
            int16x8 and auto are refused, and nothing is compared.
        samples: records to calibrate on, at most.
        parity_samples: records to judge on, at most.
        max_drop: the largest drop that is good enough: of accuracy (0.01 is one record in a
            hundred) where the model classifies; else the relative growth of its loss; without
            labels the mean difference of outputs relative to their mean size.
        input_type: "float32", "uint8" or "int8" (int8 files only), or "auto".
        output_type: "float32", or "uint8" or "int8" for int8 files.
        rescale: (scale, offset) that the file shall multiply raw values by and add to them, for a
            model that was trained on scaled inputs.
        layers: whether to report the worst layers of an int8 file.
        benchmark: whether to measure latency and memory.
        format: "tflite", or "c" for a C header with the file as an array.
        trust: whether a file may run code of its own when it is loaded: Lambda layers, objects of
            other modules, the graph functions of a SavedModel.
        progress: called with (what is done, steps done, steps in all or None).

    Returns:
        The report: sizes, parity, layers, speed; ``print`` shows it as tables.

    Raises:
        ParityError: the drop is above ``max_drop``; nothing was written, an older file is left.
        ExportError: the model cannot be converted. ModelError: no model there. DataError: no data
            there, or not of the model's shapes. OptionError: an option that does not exist, or
            ``path`` holds something else than an older export: that is never replaced.
    """
    job = _Job(
        quantize=quantize,
        max_drop=max_drop,
        layers=layers,
        benchmark=benchmark,
        progress=progress or (lambda what, done, total: None),
    )
    _check_choice("--format", format, FORMATS)
    _check_choice("--input-type", input_type, INPUT_TYPES)
    _check_choice("--output-type", output_type, OUTPUT_TYPES)
    job.check(data)
    target = _checked_target(path, model)
    _check_rescale(rescale)
    job.progress("loading the model", 0, None)
    plain = open_model(model, trust=trust)
    found = None
    if data is not None:
        job.progress("reading records", 0, None)
        found = open_samples(data, plain.inputs, samples=samples, parity_samples=parity_samples)
    how = Conversion(
        quantization="none",
        calibration=None if found is None else found.calibration,
        input_type=input_type,
        output_type=output_type,
        rescale=rescale,
    )
    report, content = job.run(plain, how, found)
    if content is None:
        raise _not_good_enough(report)
    text = c_array(content, target).encode() if format == "c" else content
    with _replacing(target) as temporary:
        temporary.write_bytes(text)
    return replace(report, path=target)


@dataclass(frozen=True)
class _Job:
    quantize: str
    max_drop: float
    layers: bool
    benchmark: bool
    progress: Progress

    def check(self, data: Any) -> None:
        _check_choice("quantization", self.quantize, (*QUANTIZATIONS, AUTO))
        if not isinstance(self.max_drop, (int, float)) or not self.max_drop >= 0:
            raise OptionError(
                "max_drop must be a number of at least 0",
                received=self.max_drop,
                mend="Leave it out, for 0.01",
            )
        if data is None and self.quantize in (AUTO, *NEEDS_DATA):
            why = "compare the files with Keras" if self.quantize == AUTO else "learn ranges from"
            raise OptionError(
                f"quantization {self.quantize} must have records, to {why}",
                received="no data",
                mend="Give --data DIR (data= in Python), or choose dynamic or float16",
            )

    def run(
        self, model: PlainModel, how: Conversion, samples: Samples | None
    ) -> tuple[Report, bytes | None]:
        """Returns the report, and the file that was chosen."""
        judge = None
        if samples is not None:
            self.progress("computing with Keras", 0, None)
            judge = Judge(model, samples.held_out, how.rescale)
        names = list(QUANTIZATIONS) if self.quantize == AUTO else [self.quantize]
        self.progress("converting to float32", 0, None)
        plain = replace(how, quantization="none", input_type="float32", output_type="float32")
        floats = convert(model, plain)
        contents: dict[str, bytes] = {}
        candidates = []
        for name in names:
            named = replace(how, quantization=name, progress=self._counted(f"calibrating {name}"))
            is_plain = name == "none" and how.input_type in ("auto", "float32")
            is_plain = is_plain and how.output_type == "float32"
            try:
                self.progress(f"converting to {name}", 0, None)
                contents[name] = floats if is_plain else convert(model, named)
                candidates.append(
                    self._examined(model, named, contents[name], floats, judge, samples)
                )
            except (ExportError, OptionError) as error:
                if self.quantize != AUTO:
                    raise
                candidates.append(Candidate(name, problem=str(error)))
        good = [c for c in candidates if c.bytes is not None and c.problem is None]
        chosen = min(good, key=lambda c: c.bytes).quantization if good else None
        report = Report(
            path=None,
            chosen=chosen,
            float_bytes=len(floats),
            candidates=tuple(candidates),
            place=None if samples is None else f"{len(samples.held_out)} of {samples.place}",
            max_drop=self.max_drop,
            note=_note(model, how, samples),
        )
        return report, None if chosen is None else contents[chosen]

    def _examined(
        self,
        model: PlainModel,
        how: Conversion,
        content: bytes,
        floats: bytes,
        judge: Judge | None,
        samples: Samples | None,
    ) -> Candidate:
        name = how.quantization
        file = TfliteModel(content)
        parity = problem = None
        if judge is not None:
            parity = judge.compare(file, self._counted(f"comparing {name} with Keras"))
            # A NaN is no number that is small enough.
            if not parity.drop <= self.max_drop:
                problem = f"drop above {self.max_drop:g}"
        errors = ()
        if name == "int8" and (self.layers or problem):
            counted = self._counted("comparing int8 layers")
            with contextlib.suppress(ExportError):  # The file itself was compared all the same.
                errors = layer_errors(model, how, content, floats, counted)
        speed = None
        if self.benchmark:
            self.progress(f"measuring {name}", 0, None)
            speed = measured(content, _one_record(file, samples))
        return Candidate(name, len(content), parity, errors, speed, problem)

    def _counted(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(what, done, total)


def _one_record(file: TfliteModel, samples: Samples | None) -> dict[str, np.ndarray]:
    if samples is not None:
        return {name: column[:1] for name, column in samples.held_out.x.items()}
    return {
        name: np.zeros(details["shape"], details["dtype"]) for name, details in file.inputs.items()
    }


def _not_good_enough(report: Report) -> ExportError:
    tried = [c for c in report.candidates if c.parity is not None]
    if not tried:
        return ExportError(
            "at least one quantization must be able to convert the model",
            received="; ".join(f"{c.quantization}: {c.problem}" for c in report.candidates),
            mend="Choose one, as --quantize dynamic (quantize= in Python), and mend what it says",
        )
    drops = ", ".join(f"{c.quantization} {c.parity.drop:+.4f} of {c.parity.metric}" for c in tried)
    worst = next((c.layers for c in tried if c.layers), ())
    named = ", ".join(f"{e.layer} ({e.operator})" for e in worst[:_WORST_NAMED])
    mend = "Try --quantize auto, more --samples, or tfdist.export.quantize_aware"
    return ParityError(
        report, received=drops + (f"; the worst layers are {named}" if named else ""), mend=mend
    )


def _note(model: PlainModel, how: Conversion, samples: Samples | None) -> str | None:
    """Says when bytes go into a model that nothing scales: the commonest mistake of all."""
    import tensorflow as tf

    if samples is None or how.rescale is not None:
        return None
    scaling = (
        tf.keras.layers.Rescaling,
        tf.keras.layers.Normalization,
        tf.keras.layers.BatchNormalization,
        tf.keras.layers.Embedding,
    )
    has_scaling = any(isinstance(layer, scaling) for layer in layers_in(model.keras))
    of_bytes = [name for name, column in samples.held_out.x.items() if column.dtype == np.uint8]
    if has_scaling or not of_bytes:
        return None
    return (
        f"the records of '{of_bytes[0]}' are bytes and the model scales nothing: if it was trained "
        "on scaled images, put the scale into the file with --rescale (rescale= in Python)"
    )


def _check_choice(what: str, received: str, known: tuple[str, ...]) -> None:
    if received not in known:
        raise unknown_choice(what, received, known)


def _check_rescale(rescale: Any) -> None:
    if rescale is None:
        return
    try:
        scale, offset = (float(value) for value in rescale)
    except (TypeError, ValueError):
        scale = offset = math.nan
    if not (math.isfinite(scale) and math.isfinite(offset)):
        raise OptionError(
            "rescale must be (scale, offset), two numbers",
            received=rescale,
            mend="Write rescale=(1 / 255, 0)",
        )


def _checked_target(path: str | os.PathLike, model: Any) -> Path:
    target = Path(path)
    problem = None
    if not target.parent.is_dir():
        problem = f"{target}, in a folder that does not exist"
    elif target.is_dir():
        problem = f"{target}, which is a folder"
    elif target.exists() and not target.is_file():  # Reading a pipe may never end.
        problem = f"{target}, which is a pipe or a device"
    elif not os.access(target.parent, os.W_OK):
        problem = f"{target}, in a folder that cannot be written to"
    elif isinstance(model, (str, os.PathLike)) and target.exists() and Path(model).exists():
        problem = f"{target}, which is the model" if target.samefile(model) else None
    if problem:
        raise OptionError(
            "the exported file must be given as a file in a folder that exists and can be "
            "written to",
            received=problem,
            mend="Choose another file, such as model.tflite in the current folder",
        )
    if target.exists() and not _is_exported(target):
        raise OptionError(
            "the exported file must be a new one, or take the place of an older export",
            received=f"{target}, which is something else",
            mend="Choose another name, or remove that file yourself",
        )
    return target


def _is_exported(file: Path) -> bool:
    """Whether a file is empty, a TFLite file or a header that ``c_array`` wrote."""
    with open(file, "rb") as opened:
        begin = opened.read(200)
    return not begin or is_tflite(begin) or is_c_array(begin)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``target`` that takes its place when all went well."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            written = Path(folder) / target.name
            yield written
            os.replace(written, target)
    except OSError as error:
        raise OptionError(
            "the exported file must be writable",
            received=f"an error: {error}",
            mend="Make room, or choose another place",
        ) from error
