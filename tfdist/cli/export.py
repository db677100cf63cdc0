"""``tfdist export``: a Keras model as a TFLite file that gives the same answers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tfdist.cli import completion, voice
from tfdist.cli.console import progress_bar, stdout
from tfdist.cli.option_table import refuse_others
from tfdist.compat import follow_file, import_tensorflow
from tfdist.errors import OptionError
from tfdist.export.kinds import (
    AUTO,
    FORMATS,
    INPUT_TYPES,
    OUTPUT_TYPES,
    QUANTIZATIONS,
    TF_SERVING,
)

EXIT_DROP = 1

_EPILOG = """\b
Quantizations:
{quantizations}
  auto      tries all, and keeps the smallest file whose drop is at most --max-drop
\b
Examples:
  tfdist export runs/digits/model.keras digits.tflite
  tfdist export runs/digits/model.keras digits.tflite --quantize int8 --data data/digits
  tfdist export model.keras model.tflite --quantize auto --data data/digits --benchmark
  tfdist export model.keras model.h --format c --quantize int8 --data data/digits
  tfdist export runs/digits/model.keras serving/digits --format tf-serving --data data/digits
\b
Into the file go raw records: a Rescaling or Normalization layer of the model is inside of it, and
so is --rescale. With uint8 records an int8 file has a uint8 input of scale 1 and zero point 0: copy
the bytes of an image into it. A float32 input takes the same values as floats.
""".format(quantizations="\n".join(f"  {name:9} {text}" for name, text in QUANTIZATIONS.items()))


@click.command("export", epilog=_EPILOG)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--quantize",
    default="none",
    metavar="|".join((*QUANTIZATIONS, AUTO)),
    help="How weights and activations are stored; see below.",
)
@click.option(
    "--data",
    metavar="DIR",
    shell_complete=completion.data,
    help="Shards written by tfdist shard: the split train gives the ranges of int8, validation "
    "the comparison with Keras. DIR/SPLIT serves for both. Without it nothing is compared.",
)
@click.option("--samples", type=int, default=200, help="Records to learn ranges from.")
@click.option(
    "--parity-samples", type=int, default=1000, help="Records to compare with Keras on, at most."
)
@click.option(
    "--max-drop",
    type=float,
    default=0.01,
    help="Largest drop of accuracy against Keras, or relative growth of the loss of a model that "
    "does not classify. Above it nothing is written and the exit code is 1.",
)
@click.option(
    "--input-type",
    type=click.Choice(INPUT_TYPES),
    default="auto",
    help="auto: uint8 for int8 files where the records are uint8, else float32.",
)
@click.option("--output-type", type=click.Choice(OUTPUT_TYPES), default="float32")
@click.option(
    "--rescale",
    metavar="SCALE[,OFFSET]",
    help="Let the file compute raw * SCALE + OFFSET first, for a model trained on scaled inputs; "
    "1/255 is understood.",
)
@click.option("--benchmark", is_flag=True, help="Measure latency at 1 and 2 threads, and memory.")
@click.option(
    "--format",
    type=click.Choice((*FORMATS, TF_SERVING)),
    default="tflite",
    help="c: a C header with the file as an array and an arena size, for microcontrollers; "
    "tf-serving: a SavedModel, the next version in the folder OUT, for TensorFlow Serving.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Let MODEL run code of its own: Lambda layers, objects of other modules, the graph "
    "functions of a SavedModel. Only for files of people that you trust.",
)
def command(model: Path, out: Path, rescale: str | None, **given: Any) -> int:
    """Writes the Keras model MODEL as the TFLite file OUT, and proves that both are the same.

    MODEL is a .keras or .h5 file or a SavedModel, of any strategy; also in a bucket, as
    s3://BUCKET/RUN/model.keras. With --data the file is compared
    with Keras on real records: differences, the drop of accuracy, and the worst layers of int8.
    """
    if given["format"] == TF_SERVING:
        return _for_tf_serving(model, out, data=given["data"], trust=given["trust"])
    scaling = None if rescale is None else _parse_rescale(rescale)
    # Its log is not what the user asked for.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with progress_bar("") as bar:
        task = bar.add_task("starting", total=None)
        follow_file(os.environ, Path(model))
        import_tensorflow()
        from tfdist.export.exporting import tflite
        from tfdist.export.reports import ParityError

        def shown(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        try:
            report = tflite(model, out, rescale=scaling, progress=shown, **given)
            failure = None
        except ParityError as error:
            report, failure = error.report, error
    voice.result(report=dataclasses.asdict(report))
    console = stdout()
    for table in report.tables():
        console.print(table)
    for line in report.lines():
        console.print(line)
    if failure is not None:
        click.echo(f"tfdist: {failure}", err=True)
        return EXIT_DROP
    best = report.best
    console.print(f"written {report.path} ({report.chosen}, {best.bytes:,} bytes of TFLite)")
    return 0


def _for_tf_serving(model: Path, out: Path, *, data: str | None, trust: bool) -> int:
    refuse_others(
        {"model", "out", "format", "data", "trust"},
        "a model for TensorFlow Serving must be exported as it is",
        beside=f"--format {TF_SERVING}",
    )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    follow_file(os.environ, model)
    write_for_tf_serving(lambda: model, out, data=data, trust=trust)
    return 0


def write_for_tf_serving(
    model: Callable[[], Any], out: Path, *, data: str | None, trust: bool = False
) -> None:
    """Writes the next version of a model for TensorFlow Serving, and tells of it.

    Args:
        model: returns a file or a model of Keras; it is called when TensorFlow is there.
        out, data, trust: as in ``tfdist.export.tf_serving``, which tells what is raised.
    """
    with progress_bar("") as bar:
        bar.add_task("writing and comparing with Keras", total=None)
        import_tensorflow()
        from tfdist.export.versions import tf_serving

        found = tf_serving(model(), out, data=data, trust=trust)
    voice.result(**{name: str(v) if isinstance(v, Path) else v for name, v in vars(found).items()})
    kept = f"kept {found.config} as it was\n" if found.is_config_kept else ""
    stdout().print(
        f"written {found.path}: version {found.version} of {found.name}, {found.records} records "
        f"within {found.largest_difference:.1e} of Keras\n{kept}"
        f"serve it: tensorflow_model_server --rest_api_port=8501 "
        f"--model_config_file={found.config}"
    )


def _parse_rescale(text: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        if len(parts) > 2:
            raise ValueError
        scale, offset = (*(_number(part) for part in parts), 0.0)[:2]
    except (ValueError, ZeroDivisionError):
        raise OptionError(
            "--rescale must be SCALE or SCALE,OFFSET", received=text, mend="Write --rescale 1/255"
        ) from None
    return scale, offset


def _number(text: str) -> float:
    top, slash, bottom = text.partition("/")
    return float(top) / float(bottom) if slash else float(top)
