"""The body of ``sagemaker/train.py``: one process of a training job."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import topology
from tfdist.aws.channels import check_tflite
from tfdist.aws.container import Container
from tfdist.aws.entry import Parser
from tfdist.compat import import_tensorflow, keras
from tfdist.compat.versions import minor_version, tensorflow_version
from tfdist.errors import (
    DataError,
    DivergedError,
    EngineMissingError,
    LaunchError,
    ModelError,
    OptionError,
    read_json,
    unknown_choice,
)
from tfdist.records.format.manifest import load_manifest
from tfdist.runs import class_weights
from tfdist.runs.files import write_json
from tfdist.runs.fitting import Fitting, say, writing
from tfdist.runs.results_text import told
from tfdist.runs.settings import Settings
from tfdist.runs.trackers import tracked
from tfdist.strategies import REGISTRY, names_of

if TYPE_CHECKING:
    from tfdist.runs.epoch_rows import EpochRows
    from tfdist.strategies.base import Strategy

_INSTALL_S = 300
# Before max_run_s is over: this, or a twentieth of it if that is less. AWS kills 120 s after it.
_LAST_CALL_S = 60.0
_BEST = "best.keras"
_HISTORY = "history.json"
TFLITE_KINDS = ("none", "float32", "dynamic", "float16", "int8")


def parser() -> Parser:
    """Returns the hyperparameters of the script: all settings of ``tfdist.train``, and its own."""
    hyperparameters = Parser("Trains a Keras model in a SageMaker container.")
    add = hyperparameters.add_argument
    add("--model", required=True, metavar="FILE.py:NAME", help="a function that returns a model")
    add("--strategy", default="auto", help=f"{', '.join(REGISTRY)}, or auto")
    add("--strategy-options", type=_listed, default={}, metavar="JSON")
    for setting in dataclasses.fields(Settings):
        name, read = setting.name.replace("_", "-"), _READERS.get(setting.type, _listed)
        add(f"--{name}", type=read, default=setting.default)
    add("--lr-scaling", choices=("none", "linear", "sqrt"), default="none")
    add("--warmup-epochs", type=float, default=0.0)
    add("--checkpoint-dir", help="the folder that SageMaker keeps in S3")
    add("--max-run-s", type=int, help="the longest time of the job")
    add("--keras", type=int, choices=(2, 3), default=2, help="which one the model is of")
    # AWS's toolkit for TensorFlow gives it to each training of a search; SM_MODEL_DIR is the place.
    add("--model_dir", help=argparse.SUPPRESS)
    add("--tflite", choices=TFLITE_KINDS, default="none", help="also write this TFLite model")
    return hyperparameters


def _length(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _value(text: str) -> Any:
    """Returns what SageMaker was given: it writes true, lists and dicts as Python does."""
    with contextlib.suppress(ValueError):
        return read_json(text)
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text


def _listed(text: str) -> Any:
    """Returns a list or a dict, or the text itself."""
    value = _value(text)
    return value if isinstance(value, (list, dict)) else text


def _lengths(text: str) -> bool | list[int]:
    value = _value(text)
    if isinstance(value, bool):
        return value
    lengths = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(type(length) is int for length in lengths):
        raise argparse.ArgumentTypeError(f"must be true, or lengths as 32,64, but is {text!r}")
    return lengths


def _flag(text: str) -> bool:
    value = _value(text)
    if not isinstance(value, bool):
        raise argparse.ArgumentTypeError(f"must be true or false, but is {text!r}")
    return value


# Annotation of a setting -> what reads it as SageMaker gives it; all others are ``_listed``.
_READERS = {
    "int": int,
    "int | None": int,
    "float | None": float,
    "bool": _flag,
    "str | None": str,
    "int | str | None": _length,
    "bool | Sequence[int]": _lengths,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the hyperparameters, each checked as far as it can be without the data.

    Raises:
        OptionError: an unknown or wrong one.
    """
    options = parser().parse(arguments)
    _settings(options).to_config(dict.fromkeys(("train", "validation"), ""))
    if options.class_weight is not None:
        class_weights.without_file(options.class_weight)
    if options.keras == 3:
        others = names_of(lambda spec: spec.takes_keras_3)
        if options.strategy not in (*others, "auto"):
            raise unknown_choice("strategy for a model of Keras 3", options.strategy, others)
    return options


def _settings(options: argparse.Namespace) -> Settings:
    """Returns what is trained, but for the weights of classes, which need the manifest."""
    names = [setting.name for setting in dataclasses.fields(Settings)]
    given = {name: getattr(options, name) for name in names}
    return Settings(**given | {"class_weight": None})


def train(arguments: list[str], code_folder: Path) -> None:
    """Trains, and leaves what SageMaker keeps: see ``_write_model``.

    Args:
        arguments: the hyperparameters, as ``--name value``.
        code_folder: where the script lies, with the files for serving beside it.

    Raises:
        TfdistError: hyperparameters, data or a model that cannot be trained as they are.
    """
    options = parse(arguments)
    container = Container.from_environ(os.environ)
    place = topology.current()
    _check_hosts(container, place)
    _take_keras(options.keras)
    import_tensorflow()
    strategy = strategy_of(options)
    from tfdist.training.engine import model_path

    model_path.check(options.model)
    source = container.source("train", place)
    if source is None:
        raise DataError(
            "a job must have a channel 'train'",
            received=f"only channels {', '.join(container.channels)}",
            mend="Start the job with its training data as the channel 'train'",
        )
    check_tflite(options.tflite, is_pipe=source.pipes)
    with strategy:
        fit(strategy, options, container, code_folder)


def _check_hosts(container: Container, place: topology.Topology) -> None:
    """Raises:
    OptionError: hosts that are paid for have no rank, and their part of the data no reader.
    """
    hosts = len(container.hosts)
    if place.launcher == "mpi" and place.world_size < hosts * place.local_size:
        wanted = str(hosts * place.local_size)
        raise OptionError(
            "a job of MPI must have ranks on each of its hosts",
            received=f"{place.world_size} in all, of {place.local_size} on a host, for {hosts}",
            mend="SDK 3's MPI starts those of one host alone: give it "
            f"mpi_additional_options=['-np', '{wanted}']",
        )


def _take_keras(kind: int) -> None:
    """Has ``tf.keras`` be Keras 2 or 3. Brings tf_keras where the image has none: from 2.21 on.

    Without what it asks for: that would be a second TensorFlow beside the image's tensorflow_cpu.
    One process of a host installs it; the others wait for that.

    Raises:
        EngineMissingError: it cannot be installed.
    """
    os.environ[keras.VARIABLE] = keras.KERAS_2[0] if kind == 2 else keras.KERAS_3[0]
    version = tensorflow_version()
    if kind == 3 or version is None or importlib.util.find_spec("tf_keras") is not None:
        return
    wanted = "tf_keras~={}.{}.0".format(*minor_version(version))
    with (Path(tempfile.gettempdir()) / "tfdist-tf_keras.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        importlib.invalidate_caches()
        if importlib.util.find_spec("tf_keras") is None:
            command = [sys.executable, "-m", "pip", "install", "--no-deps", wanted]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
            if done.returncode != 0:
                raise EngineMissingError(
                    f"a model of Keras 2 must have {wanted} in the image",
                    received=f"none, and of pip: {' '.join(done.stderr.split())[-500:]}",
                    mend="Take an image with it as training.image_uri, or a model of Keras 3 with "
                    "training.keras: 3",
                )
            importlib.invalidate_caches()


def strategy_of(options: argparse.Namespace) -> Strategy:
    """Returns the strategy that the hyperparameters name, with what they scale the rate by.

    Raises:
        OptionError: no such strategy, or options that it does not take.
    """
    import tfdist

    return tfdist.strategy(options.strategy, **strategy_options(options))


def strategy_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the strategy that hyperparameters name.

    Raises:
        OptionError: they are no JSON object.
    """
    if not isinstance(options.strategy_options, dict):
        raise OptionError(
            "strategy-options must be a JSON object",
            received=repr(options.strategy_options),
            mend="""Write for example {"shard": "optimizer"}""",
        )
    chosen = dict(options.strategy_options)
    if options.lr_scaling != "none":
        chosen["lr_scaling"] = options.lr_scaling
    if options.warmup_epochs:
        chosen["warmup_epochs"] = options.warmup_epochs
    return chosen


def fit(
    strategy: Strategy, options: argparse.Namespace, container: Container, code_folder: Path
) -> None:
    """Fits the model; the chief writes it, and the history beside it.

    Args:
        strategy: whose block has been entered.
        options: the hyperparameters.
        code_folder: as in ``train``.

    Raises:
        TfdistError: see ``train``.
    """
    channels = ("train", "validation")
    found = {name: container.source(name, strategy.topology) for name in channels}
    sources = {name: source for name, source in found.items() if source}
    config = _settings(options).to_config(dict.fromkeys(sources, "")) | {"model": options.model}
    if options.class_weight is not None:
        manifest = load_manifest(container.manifest_folder)
        config["class_weight"] = class_weights.of_manifest(options.class_weight, manifest, "train")
    fitting = Fitting(strategy, config, sources)
    _check_can_be_served(fitting.model)
    is_chief = strategy.topology.is_chief
    checkpoints = kept_rows = None
    if options.checkpoint_dir:
        kept_rows = Path(options.checkpoint_dir) / _HISTORY
    lines = _lines(fitting, is_chief, options.epochs, kept_rows)
    if options.checkpoint_dir:
        checkpoints = fitting.checkpoints(options.checkpoint_dir, resume=True)
    feed = fitting.feed
    if is_chief:
        say(
            f"tfdist strategy={strategy.name} hosts={len(container.hosts)} "
            f"replicas={strategy.num_replicas} records={feed.num_records} "
            f"steps_per_epoch={feed.steps_per_epoch} global_batch_size={options.global_batch_size}"
        )
    # What SageMaker keeps of an attempt that is interrupted.
    best = Path(options.checkpoint_dir or container.model_dir) / _BEST
    with (
        tracked(config | {"output": options.model}, lines)
        if is_chief
        else contextlib.nullcontext(),
        _ends_in_time(options.max_run_s) if checkpoints else contextlib.nullcontext(),
    ):
        fitted = fitting.fit(lines, checkpoints, lambda: best)
    if lines.diverged is not None:  # On every process: it is the whole job's.
        raise DivergedError(
            "the loss of a training must stay finite",
            received=f"{lines.diverged['loss']} in the last epoch",
            mend="Lower the learning rate, clip the gradients, or look for such values in the data",
        )
    weights = fitting.model.get_weights()  # On every process: it may gather.
    problem = None
    if is_chief:
        try:
            with writing():
                _write_model(fitting, weights, options, container, code_folder)
                if fitted.best is not None and best.parent != container.model_dir:
                    shutil.copyfile(best, container.model_dir / _BEST)
                write_json(container.output_data_dir / _HISTORY, lines.rows)
        except Exception as error:
            problem = error
    # No rank leaves before the model is there: the first one to leave may end the others.
    failed = strategy.from_chief(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise OptionError(
            "rank 0 must write the model",
            received="an error there",
            mend="Read the error of rank 0 in the job's log",
        )


@contextlib.contextmanager
def _ends_in_time(max_run_s: int | None) -> Iterator[None]:
    """Encloses a fit that keeps checkpoints: the process gives itself the notice that SIGTERM is.

    SageMaker sends that when ``max_run_s`` is over, and two minutes later kills. Its toolkit is
    process 1 of the container, has no handler, and passes nothing on to its script.

    Raises:
        LaunchError: the fit was not over; its last checkpoint has been written.
    """
    from tfdist.training.checkpoints import last_call

    if max_run_s is None:
        yield
        return
    notice = threading.Timer(
        max(0.0, _seconds_left(max_run_s)), os.kill, (os.getpid(), signal.SIGTERM)
    )
    notice.daemon = True
    with last_call.listening():  # Before the fit does: the time may be over already.
        notice.start()
        try:
            yield
        except SystemExit:
            if not notice.finished.is_set():  # Another's notice, or another rank's.
                raise
            raise LaunchError(
                "a training must end within training.max_run_s",
                received=f"{max_run_s} s that are nearly over",
                mend="Start the job again, which goes on from its last checkpoint, or give more",
            ) from None
        finally:
            notice.cancel()


def _seconds_left(max_run_s: int) -> float:
    import psutil

    # The toolkit's, which has installed packages before it started this; with MPI that of mpirun
    # or orted, which it starts after that.
    begun = psutil.Process(os.getppid()).create_time()
    return begun + max_run_s - min(_LAST_CALL_S, max_run_s / 20) - time.time()


def _check_can_be_served(model: Any) -> None:
    """Raises:
    ModelError: what a job keeps cannot be made of ``model``; not after hours of training.
    """
    from tfdist.keras.layers import can_be_called

    if not can_be_called(model):
        raise ModelError(
            "the model of a job must have a call, for a SavedModel is kept of it",
            received=f"{type(model).__name__}, whose class has none",
            mend="Write call(self, inputs) in the class: what an endpoint is to answer",
        )


def _lines(fitting: Fitting, is_chief: bool, epochs: int, kept: Path | None) -> EpochRows:
    """Returns a callback that prints a line an epoch, which CloudWatch's metrics are read from.

    It ends a training whose loss is no number any more: no instance is paid for to go on. Its
    ``rows`` are of all epochs, also of those before an interruption.

    Args:
        kept: the file beside the checkpoints that rows are kept in; None: there is none.
    """
    from tfdist.runs.epoch_rows import EpochRows

    class Lines(EpochRows):
        def __init__(self, **of_rows: Any):
            super().__init__(**of_rows)
            self.listeners: list[Callable[[dict[str, Any]], None]] = []
            self.rows = [] if kept is None else _rows_in(kept)

        def keep(self, row: dict[str, float]) -> None:
            if is_chief:
                self.rows = [*(one for one in self.rows if one["epoch"] < row["epoch"]), row]
                if kept is not None:
                    write_json(kept, self.rows)
                say(metric_line(row))
                event = {"event": "epoch", "row": row, "step_ms": self.step_ms()}
                for take in self.listeners:
                    take(told(event, 0, epochs, None))

    return Lines(**fitting.for_rows)


def _rows_in(history: Path) -> list[dict[str, float]]:
    """Returns the rows of a history; none where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [row for row in read_json(history.read_text()) if "epoch" in row]
    return []


def metric_line(row: dict[str, float]) -> str:
    """Returns what one epoch prints: ``tfdist epoch=1 loss=0.25 val_loss=0.3 ...``."""
    return "tfdist " + " ".join(f"{name}={value:.6g}" for name, value in row.items())


def _write_model(
    fitting: Fitting,
    weights: list[Any],
    options: argparse.Namespace,
    container: Container,
    code_folder: Path,
) -> None:
    """Writes what becomes model.tar.gz: 1/ (a SavedModel), code/ for serving, tfdist/, a TFLite."""
    from tfdist.aws import saved_model
    from tfdist.export.saved_model import write

    manifest = load_manifest(container.manifest_folder)
    plain = saved_model.plain(fitting.model_fn, weights, fitting.feed)
    write(plain, manifest.schema, container.model_dir / "1")
    saved_model.write_about(container.model_dir, plain, manifest, code_folder)
    if options.tflite != "none":
        write_tflite(plain, options.tflite, container)


def write_tflite(plain: Any, kind: str, container: Container) -> None:
    """Writes ``plain`` as the TFLite model of ``kind``, one of ``TFLITE_KINDS``."""
    from tfdist.export import tflite

    # It learns the ranges of int8 from the data, and proves the file against the model on it.
    data = container.source("train", topology.current())
    quantize = "none" if kind == "float32" else kind
    tflite(plain, container.model_dir / "model.tflite", quantize=quantize, data=data)
