"""The body of ``sagemaker/evaluate.py``: a trained model's quality on a split, as JSON.

The model is asked through its serving signature, so what is measured is what will be served. The
JSON has the form of SageMaker's model quality metrics, which the model registry shows.
"""

from __future__ import annotations

import json
import math
import os
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.aws.entry import Parser
from tfdist.compat import import_tensorflow, keras
from tfdist.errors import DataError, ModelError, extra_module
from tfdist.records.reading.stored import Stored
from tfdist.runs.files import write_json

if TYPE_CHECKING:
    import numpy as np

ARCHIVE = "model.tar.gz"
REPORT = "evaluation.json"
_BATCH_SIZE = 256
# What describes a model in model.json -> what the registry calls its metrics.
_GROUPS = {
    "binary": "binary_classification_metrics",
    "multiclass": "multiclass_classification_metrics",
    "regression": "regression_metrics",
}
# The form has a place for it; one evaluation knows none.
_UNKNOWN = "NaN"


def parser() -> Parser:
    """Returns the arguments of the script."""
    arguments = Parser("Evaluates model.tar.gz on one split.")
    add = arguments.add_argument
    add("--model", type=Path, required=True, help=f"folder of {ARCHIVE}")
    add("--manifest", type=Path, required=True, help="folder of manifest.json")
    add("--data", type=Path, required=True, help="folder of the split's shards")
    add("--split", default="test")
    add("--output", type=Path, required=True, help=f"folder for {REPORT}")
    return arguments


def main(arguments: list[str]) -> None:
    """Writes evaluation.json.

    Raises:
        TfdistError: arguments, data or a model that cannot be evaluated.
    """
    options = parser().parse(arguments)
    archive = options.model / ARCHIVE
    if not archive.is_file():
        raise DataError(
            f"--model must be a folder with {ARCHIVE}",
            received=f"none in {options.model}",
            mend="Give the folder that holds the training job's output",
        )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        stored = Stored(manifest=options.manifest, split=options.split, folder=options.data)
        report = evaluate(Path(folder), stored)
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / REPORT, report)
    for group in report.values():
        shown = {k: v["value"] for k, v in group.items() if isinstance(v, dict) and "value" in v}
        print("tfdist " + " ".join(f"{k}={v:.6g}" for k, v in shown.items()), flush=True)


def evaluate(model_folder: Path, stored: Stored) -> dict[str, Any]:
    """Returns the metrics of the model in ``model_folder`` on all records of a split.

    Raises:
        ModelError: the model does not give one class or one number a record, or gives NaN.
        DataError: the shards cannot be read, or have no labels.
    """
    import numpy as np

    about = json.loads((model_folder / "tfdist" / "model.json").read_text())
    if about["problem"] is None:
        raise ModelError(
            "a model to evaluate must give one class or one number a record",
            received="another one",
            mend="Evaluate it with a script of your own",
        )
    labels, outputs, weights = _predict(model_folder / "1", stored)
    unknown = int(np.isnan(outputs).any(axis=-1).sum())
    if unknown:
        raise ModelError(
            "a model to evaluate must give numbers",
            received=f"NaN for {unknown:,} of {len(outputs):,} records",
            mend="Train it with a lower learning rate, or look for NaN in the inputs",
        )
    if about["problem"] == "regression":
        report = _regression(labels, outputs[:, 0], weights)
    elif about["problem"] == "binary":
        threshold = 0.0 if about["from_logits"] else 0.5
        report = _binary(labels, outputs[:, 0], threshold, weights)
    else:
        report = _multiclass(labels, outputs.argmax(axis=-1), outputs.shape[-1], weights)
    return {_GROUPS[about["problem"]]: _known(report)}


def _known(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics that the records tell; JSON has no number for the others."""
    unknown = [name for name, each in report.items() if math.isnan(each.get("value", 0.0))]
    if unknown:
        print(
            f"tfdist: warning: {', '.join(unknown)} cannot be told of these records, as of one "
            "class alone: left out",
            flush=True,
        )
    return {name: each for name, each in report.items() if name not in unknown}


def _predict(model_folder: Path, stored: Stored) -> tuple[np.ndarray, np.ndarray, Any]:
    """Returns labels [n], outputs [n, k], and sample weights [n] or None."""
    import numpy as np

    from tfdist.export.saved_model import signature_names
    from tfdist.records.format.manifest import load_manifest
    from tfdist.records.reading.reader import explain_read_error, open_records

    # It asks the SavedModel, and no Keras: the image's own will do.
    os.environ.setdefault(keras.VARIABLE, keras.KERAS_3[0])
    tf = import_tensorflow()
    records = open_records(stored)
    names = signature_names(load_manifest(stored.manifest).schema)
    if len(records.element_spec) < 2:
        raise DataError(
            "data to evaluate on must have labels",
            received="records without any",
            mend="Shard it with labels: `tfdist shard SOURCE OUT --label NAME`",
        )
    loaded = tf.saved_model.load(str(model_folder))
    ask = loaded.signatures["serving_default"]
    rows = []
    batches = records.batches(0, records.num_records, _BATCH_SIZE, shuffle=False, seed=0, epoch=0)
    try:
        for x, y, *weight in batches:
            given = x if len(names) > 1 else dict.fromkeys(names, x)
            answers = ask(**{names[name]: tensor for name, tensor in given.items()})
            if len(answers) != 1:
                raise ModelError(
                    "a model to evaluate must have one output",
                    received=len(answers),
                    mend="Give the model one output: keras.Model(inputs, output)",
                )
            (outputs,) = answers.values()
            rows.append((y.numpy().reshape(-1), outputs.numpy(), *(w.numpy() for w in weight)))
    except tf.errors.OpError as error:
        explained = explain_read_error(error, records)
        if explained is None:
            raise
        raise explained from error
    columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
    return (*columns, None) if len(columns) == 2 else tuple(columns)


def _sklearn_metrics() -> Any:
    return extra_module("sklearn.metrics", "scikit-learn", "scores", "sagemaker")


def _metric(value: float) -> dict[str, Any]:
    return {"value": float(value), "standard_deviation": _UNKNOWN}


def _confusion(labels: Any, guesses: Any, count: int, weights: Any) -> dict[str, dict[str, float]]:
    metrics = _sklearn_metrics()
    ids = list(range(count))
    table = metrics.confusion_matrix(labels, guesses, labels=ids, sample_weight=weights)
    return {str(a): {str(b): table[a, b].item() for b in ids} for a in ids}


def _multiclass(labels: Any, guesses: Any, count: int, weights: Any) -> dict[str, Any]:
    metrics = _sklearn_metrics()
    scored = {"average": "weighted", "zero_division": 0, "sample_weight": weights}
    beta = {
        f"weighted_f{name}": _metric(metrics.fbeta_score(labels, guesses, beta=beta, **scored))
        for name, beta in (("0_5", 0.5), ("1", 1.0), ("2", 2.0))
    }
    return {
        "confusion_matrix": _confusion(labels, guesses, count, weights),
        "accuracy": _metric(metrics.accuracy_score(labels, guesses, sample_weight=weights)),
        "weighted_recall": _metric(metrics.recall_score(labels, guesses, **scored)),
        "weighted_precision": _metric(metrics.precision_score(labels, guesses, **scored)),
        **beta,
    }


def _binary(labels: Any, scores: Any, threshold: float, weights: Any) -> dict[str, Any]:
    metrics = _sklearn_metrics()
    guesses = (scores > threshold).astype(int)
    scored = {"zero_division": 0, "sample_weight": weights}
    report = {
        "confusion_matrix": _confusion(labels, guesses, 2, weights),
        "accuracy": _metric(metrics.accuracy_score(labels, guesses, sample_weight=weights)),
        "precision": _metric(metrics.precision_score(labels, guesses, **scored)),
        "recall": _metric(metrics.recall_score(labels, guesses, **scored)),
        "true_positive_rate": _metric(metrics.recall_score(labels, guesses, **scored)),
        "false_positive_rate": _metric(_false_alarms(labels, guesses, weights)),
        "f1": _metric(metrics.f1_score(labels, guesses, **scored)),
    }
    if len(set(labels.tolist())) == 2:
        report["auc"] = _metric(metrics.roc_auc_score(labels, scores, sample_weight=weights))
    return report


def _false_alarms(labels: Any, guesses: Any, weights: Any) -> float:
    import numpy as np

    each = np.where(labels == 0, 1.0 if weights is None else weights, 0.0)
    return np.average(guesses, weights=each) if each.any() else float("nan")


def _regression(labels: Any, guesses: Any, weights: Any) -> dict[str, Any]:
    metrics = _sklearn_metrics()
    scored = {"sample_weight": weights}
    squared = metrics.mean_squared_error(labels, guesses, **scored)
    return {
        "mae": _metric(metrics.mean_absolute_error(labels, guesses, **scored)),
        "mse": _metric(squared),
        "rmse": _metric(squared**0.5),
        "r2": _metric(metrics.r2_score(labels, guesses, **scored)),
    }
