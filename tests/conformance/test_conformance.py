"""Every registered strategy against one device. A new engine joins by adding a row."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import conformance_cases as cases
import conformance_observed as observed
import numpy as np
import pytest

from tfdist.compat.keras import VARIABLE
from tfdist.strategies import REGISTRY

TOLERANCE = 1e-5
_TIMEOUT_S = 560

# The first case of a row waits for the whole job and for the reference, on a machine that may be
# busy.
pytestmark = pytest.mark.timeout(2 * _TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a strategy is run, and which cases it takes part in: all, where nothing is said.

    Attributes:
        strategy: its registered name.
        options: of the strategy.
        launcher: arguments before the script; empty where one process is all.
        num_replicas: what the strategy must report, so that no row compares one device to itself.
        batches: how it forms its steps; of ``conformance_observed.BATCHES``.
        models: that the row is for; another row of the same strategy has the others.
        leaves_out: pattern of cases that mean nothing on this strategy -> why.
        refuses: pattern of cases that it refuses -> what the error says.
        keras: 2, or 3 for both it and the one device.
        only: the cases of which it has all that it does not leave out.
        short: those of them that are run without ``make test-all``.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    num_replicas: int
    batches: str = "one_process"
    models: tuple[str, ...] = cases.MODELS
    leaves_out: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    keras: int = 2
    only: tuple[str, ...] = cases.CASES
    short: tuple[str, ...] = cases.SHORT

    @property
    def cases(self) -> list[str]:
        """Those that are run."""
        return [case for case in self._of_models() if not _matching(self.leaves_out, case)]

    @property
    def left_out(self) -> list[str]:
        return [case for case in self._of_models() if _matching(self.leaves_out, case)]

    @property
    def is_whole(self) -> bool:
        """Whether it is for all that its strategy does, not for an option of it or a Keras."""
        return self.only == cases.CASES

    def refusal(self, case: str) -> str | None:
        return _matching(self.refuses, case)

    def _of_models(self) -> list[str]:
        return [case for case in self.only if case.split("-")[1] in self.models]

    def __str__(self) -> str:
        more = "" if self.models == cases.MODELS else f" {self.models[0]}"
        if "replicas" in self.options:
            more += f" on each rank of {self.options['replicas']}"
        if "shard" in self.options:
            more += f" divided {self.options['shard']}"
        if "offload" in self.options:
            more += " offload"
        if "device_speeds" in self.options:
            more += " at unlike speeds"
        return f"{self.strategy}{more}{'' if self.keras == 2 else ' keras 3'}"


def _matching(patterns: Mapping[str, str], case: str) -> str | None:
    return next((text for pattern, text in patterns.items() if fnmatchcase(case, pattern)), None)


def _launched(strategy: str, workers: int) -> tuple[str, ...]:
    arguments = f"-m tfdist launch --strategy {strategy} --workers {workers} --"
    return (sys.executable, *arguments.split())


def _own_step(strategy: str) -> dict[str, str]:
    return {"train_step-*": f"strategy '{strategy}' must have Keras' own train_step"}


def _own_loss(strategy: str) -> dict[str, str]:
    says = f"a model of strategy '{strategy}' must have Keras' own compute_loss"
    return {"*-own_loss*": says, "*-super_loss*": says}


#: The batches of two processes have other rows, and a loss that shows itself counts batches alike.
_OTHER_BATCHES = {"evaluate-own_loss": "a mean over batches, which have other rows here"}
#: Replicas of several processes run the steps of mirrored ones on the batches of horovod's.
_AS_ON_MIRRORED = {
    f"*-{model}*": "steps as on mirrored, batches as on horovod: both rows have it"
    for model in ("two_inputs", "list_outputs", "own_loss", "saturated")
}


#: What a model that is divided in each rank does otherwise than in one process.
_OF_TWO_RANKS = (
    "train-convnet-tail_of_1-clipnorm",
    "train-mlp-tail_of_1-adam",
    "train-mlp-weights-adam",
    "train-mlp-tail_of_1-clipnorm",
    "train-mlp-tail_of_1-global_clipnorm",
    "train-convnet-even-adam",
    "train-convnet-tail_of_1-adam",
    "train-two_inputs-weights-adagrad",
    "train-dict_outputs-weights_by_output-rmsprop",
    "train-list_outputs-weights-adamw",
    "train-saturated-weights_by_output-momentum",
    "evaluate-mlp",
    "evaluate-dict_outputs",
    "predict-two_inputs",
    "predict-saturated",
    "class_weight-mlp-weights-adam",
    "resume-convnet",
    "rescale-convnet",
    "save-convnet",
)

#: What ranks share: regularizers (or their refusal), the order of records, and what is gathered for
#: files; a norm over parts is tried in tests/training/test_shard_weights.py.
_OF_TWO_RANKS_SHORT = (
    "train-mlp-weights-adam",
    "resume-convnet",
)

#: What keeping slots in parts, or less on a device, could do otherwise.
_OF_LESS_MEMORY = (
    "train-mlp-tail_of_1-adam",
    "train-mlp-tail_of_1-global_clipnorm",
    "train-convnet-tail_of_1-adam",
    "train-two_inputs-weights-adagrad",
    "train-list_outputs-weights-adamw",
    "evaluate-mlp",
    "resume-convnet",
    "rescale-convnet",
    "save-convnet",
)

#: A norm over all parts, and slots and decay by the names of variables.
_OF_LESS_MEMORY_SHORT = (
    "train-mlp-tail_of_1-global_clipnorm",
    "train-list_outputs-weights-adamw",
)

#: What ranks that take unlike parts of a batch could count otherwise.
_OF_UNLIKE_SPEEDS = (
    "train-convnet-tail_of_1-adam",
    "train-two_inputs-weights-adagrad",
    "train-dict_outputs-weights_by_output-rmsprop",
    "evaluate-mlp",
    "predict-two_inputs",
    "class_weight-mlp-weights-adam",
    "resume-convnet",
    "rescale-convnet",
)

ROWS = (
    Row(strategy="single", num_replicas=1),
    Row(
        strategy="single",
        options={"offload": ["optimizer", "activations"]},
        num_replicas=1,
        only=_OF_LESS_MEMORY,
        short=_OF_LESS_MEMORY_SHORT,
    ),
    Row(
        strategy="mirrored",
        options={"devices": 2},
        num_replicas=2,
    ),
    Row(
        strategy="mirrored",
        options={"devices": 2, "shard": "optimizer"},
        num_replicas=2,
        only=_OF_LESS_MEMORY,
        short=_OF_LESS_MEMORY_SHORT,
    ),
    Row(
        strategy="horovod",
        options={"stall_timeout_s": 100, "shard": "optimizer"},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_LESS_MEMORY,
        short=(),
    ),
    Row(
        strategy="multi_worker",
        options={"shard": "optimizer"},
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_LESS_MEMORY,
        short=(),
    ),
    Row(
        strategy="horovod",
        options={"stall_timeout_s": 100},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        leaves_out=_OTHER_BATCHES,
    ),
    Row(
        strategy="horovod",
        options={"stall_timeout_s": 100, "shard": "weights"},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        refuses={"*-mlp*": "(shard='weights') must have neither regularizers nor constraints"},
        only=_OF_TWO_RANKS,
        short=_OF_TWO_RANKS_SHORT,
    ),
    Row(
        strategy="multi_worker",
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        leaves_out=_AS_ON_MIRRORED,
        short=(
            *(*cases.SHORT, "train-mlp-tail_of_1-momentum"),
            *("predict-mlp", "predict-dict_outputs"),
        ),
    ),
    Row(
        strategy="multi_worker",
        options={"shard": "weights"},
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        refuses={"*-mlp*": "(shard='weights') must have neither regularizers nor constraints"},
        only=_OF_TWO_RANKS,
        short=(),
    ),
    Row(
        strategy="horovod",
        options={"stall_timeout_s": 100, "device_speeds": [3, 1]},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_UNLIKE_SPEEDS,
        short=(),
    ),
    Row(
        strategy="multi_worker",
        options={"device_speeds": [3, 1]},
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_UNLIKE_SPEEDS,
        short=(),
    ),
    Row(
        strategy="mesh",
        options={"batch": 2, "model": 2},
        num_replicas=2,
        refuses=_own_step("mesh") | _own_loss("mesh"),
    ),
    Row(
        strategy="mesh",
        options={"batch": 1, "model": 2, "replicas": "horovod"},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_TWO_RANKS,
        short=(),
    ),
    Row(
        strategy="mesh",
        options={"batch": 1, "model": 2, "replicas": "multi_worker", "shard": "optimizer"},
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_LESS_MEMORY,
        short=(),
    ),
    # Steps of one worker follow one another; several are asynchronous (tests/strategies).
    Row(
        strategy="parameter_server",
        launcher=_launched("parameter_server", workers=1),
        num_replicas=1,
    ),
    # One replica, divided: tests/strategies/pipeline asserts that its stages are on two devices.
    Row(
        strategy="pipeline",
        options={"stages": 2, "microbatches": 4},
        num_replicas=1,
        refuses=_own_step("pipeline") | _own_loss("pipeline"),
    ),
    # The same on each of two ranks, which divide the slots: what differs is what ranks share.
    Row(
        strategy="pipeline",
        options={"stages": 2, "microbatches": 3, "replicas": "horovod", "shard": "optimizer"},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_TWO_RANKS,
        short=(),
    ),
    Row(
        strategy="pipeline",
        options={"stages": 2, "microbatches": 3, "replicas": "multi_worker", "shard": "optimizer"},
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        only=_OF_LESS_MEMORY,
        short=(),
    ),
    # A round is a step on all records. BatchNormalization on several clients is not one device's.
    Row(
        strategy="federated",
        options={"algorithm": "fedsgd", "clients_per_round": 3},
        num_replicas=3,
        batches="a_round",
        models=tuple(model for model in cases.MODELS if model != "convnet"),
        refuses=_own_step("federated"),
    ),
    Row(
        strategy="federated",
        options={"algorithm": "fedsgd", "clients_per_round": 1, "batch_norm": "average"},
        num_replicas=1,
        batches="a_round",
        models=("convnet",),
        leaves_out={"rescale-*": "a round has all records of its clients, and no global batch"},
    ),
)

#: What Keras 3 computes otherwise than Keras 2: losses, metrics and gradients of replicas,
#: BatchNormalization, its loops and its files. Data and optimizers it has in common.
_OF_KERAS_3 = (
    "train-mlp-tail_of_1-adam",
    "train-mlp-tail_of_1-global_clipnorm",
    "train-convnet-tail_of_1-adam",
    "train-two_inputs-weights-adam",
    "train-dict_outputs-tail_of_1-rmsprop",
    "train-dict_outputs-weights_by_output-rmsprop",
    "train-list_outputs-weights-adamw",
    "train-saturated-weights_by_output-momentum",
    "train-own_loss-tail_of_1-momentum",
    "train-super_loss-weights-adam",
    "evaluate-mlp",
    "evaluate-dict_outputs",
    "predict-two_inputs",
    "predict-list_outputs",
    "class_weight-mlp-weights-adam",
    "train_step-mlp",
    "resume-convnet",
    "save-convnet",
)
#: One of each: losses and metrics of outputs, a loss of its own, weights of classes, a broken fit.
_OF_KERAS_3_SHORT = (
    "train-dict_outputs-weights_by_output-rmsprop",
    "train-super_loss-weights-adam",
    "evaluate-mlp",
    "class_weight-mlp-weights-adam",
    "resume-convnet",
)
#: What of it processes do among themselves; a file is written by the chief as on one device.
_OF_KERAS_3_ON_RANKS_SHORT = ("train-dict_outputs-weights_by_output-rmsprop",)
#: Steps of its own: losses and metrics of outputs, BatchNormalization, a broken fit, and files.
_OF_KERAS_3_ON_STAGES_SHORT = (
    "train-dict_outputs-weights_by_output-rmsprop",
    "resume-convnet",
    "save-convnet",
)
#: One replica takes Keras' own steps: what is left is what surrounds them.
_OF_KERAS_3_ALONE = (
    "evaluate-dict_outputs",
    "predict-list_outputs",
    "class_weight-mlp-weights-adam",
    "train_step-mlp",
    "resume-convnet",
    "save-convnet",
)
_OF_OUTPUTS = {
    "evaluate-dict_outputs": "Keras 3 shows an output's mean loss of batches, which have other rows"
}
ROWS += (
    Row(
        strategy="single",
        num_replicas=1,
        keras=3,
        only=_OF_KERAS_3_ALONE,
        short=("predict-list_outputs", "train_step-mlp", "save-convnet"),
    ),
    Row(
        strategy="mirrored",
        options={"devices": 2},
        num_replicas=2,
        keras=3,
        only=_OF_KERAS_3,
        short=_OF_KERAS_3_SHORT,
    ),
    Row(
        strategy="parameter_server",
        launcher=_launched("parameter_server", workers=1),
        num_replicas=1,
        keras=3,
        only=_OF_KERAS_3,
        short=_OF_KERAS_3_ON_RANKS_SHORT,
    ),
    Row(
        strategy="horovod",
        options={"stall_timeout_s": 100},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        leaves_out=_OF_OUTPUTS,
        keras=3,
        only=_OF_KERAS_3,
        short=_OF_KERAS_3_ON_RANKS_SHORT,
    ),
    Row(
        strategy="multi_worker",
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        leaves_out=_OF_OUTPUTS | _AS_ON_MIRRORED,
        keras=3,
        only=_OF_KERAS_3,
        short=_OF_KERAS_3_ON_RANKS_SHORT,
    ),
    Row(
        strategy="mesh",
        options={"batch": 2, "model": 2},
        num_replicas=2,
        refuses=_own_step("mesh") | _own_loss("mesh"),
        keras=3,
        only=_OF_KERAS_3,
        short=_OF_KERAS_3_ON_STAGES_SHORT,
    ),
    Row(
        strategy="mesh",
        options={"batch": 1, "model": 2, "replicas": "horovod"},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        refuses=_own_step("mesh") | _own_loss("mesh"),
        leaves_out=_OF_OUTPUTS,
        keras=3,
        only=_OF_KERAS_3,
        short=(),
    ),
    Row(
        strategy="mesh",
        options={"batch": 1, "model": 2, "replicas": "multi_worker", "shard": "optimizer"},
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        refuses=_own_step("mesh") | _own_loss("mesh"),
        leaves_out=_OF_OUTPUTS | _AS_ON_MIRRORED,
        keras=3,
        only=_OF_KERAS_3,
        short=(),
    ),
    Row(
        strategy="pipeline",
        options={"stages": 2, "microbatches": 4},
        num_replicas=1,
        refuses=_own_step("pipeline") | _own_loss("pipeline"),
        keras=3,
        only=_OF_KERAS_3,
        short=_OF_KERAS_3_ON_STAGES_SHORT,
    ),
    Row(
        strategy="pipeline",
        options={"stages": 2, "microbatches": 3, "replicas": "horovod", "shard": "optimizer"},
        launcher=_launched("horovod", workers=2),
        num_replicas=2,
        batches="two_processes",
        refuses=_own_step("pipeline") | _own_loss("pipeline"),
        leaves_out=_OF_OUTPUTS,
        keras=3,
        only=_OF_KERAS_3,
        short=(),
    ),
    Row(
        strategy="pipeline",
        options={"stages": 2, "microbatches": 3, "replicas": "multi_worker"},
        launcher=_launched("multi_worker", workers=2),
        num_replicas=2,
        batches="two_processes",
        refuses=_own_step("pipeline") | _own_loss("pipeline"),
        leaves_out=_OF_OUTPUTS | _AS_ON_MIRRORED,
        keras=3,
        only=_OF_KERAS_3,
        short=(),
    ),
    Row(
        strategy="federated",
        options={"algorithm": "fedsgd", "clients_per_round": 3},
        num_replicas=3,
        batches="a_round",
        models=tuple(model for model in cases.MODELS if model != "convnet"),
        refuses=_own_step("federated"),
        keras=3,
        only=_OF_KERAS_3,
        short=_OF_KERAS_3_SHORT,
    ),
    Row(
        strategy="federated",
        options={"algorithm": "fedsgd", "clients_per_round": 1, "batch_norm": "average"},
        num_replicas=1,
        batches="a_round",
        models=("convnet",),
        keras=3,
        only=_OF_KERAS_3,
        short=("resume-convnet", "save-convnet"),
    ),
)


#: What tests of the reference alone look at.
_ALWAYS = (
    "predict-saturated",
    "train-mlp-tail_of_1-momentum",
    *(f"train-mlp-tail_of_1-{clipped}" for clipped in cases.CLIPPED),
)


@pytest.fixture(scope="module")
def asked_of(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """The cases that this run of pytest asks of each row, by -m or -k for instance."""
    here = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    asked: dict[str, set[str]] = {str(row): set() for row in ROWS}
    for of_test in params:
        if "case" in of_test:
            asked[str(of_test["row"])].add(of_test["case"])
    return asked


@pytest.fixture(scope="module")
def wanted(asked_of: dict[str, set[str]]) -> dict[int, dict[str, list[str]]]:
    """The cases that are asked of each Keras and batches, in the order of all."""
    asked: dict[int, dict[str, set[str]]] = {2: {}, 3: {}}
    asked[2] = {formed: set(_ALWAYS) for formed in observed.BATCHES}
    for row in ROWS:
        asked[row.keras].setdefault(row.batches, set()).update(asked_of[str(row)])
    return {
        keras: {formed: [case for case in cases.CASES if case in of] for formed, of in its.items()}
        for keras, its in asked.items()
    }


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, wanted: dict[int, dict[str, list[str]]]):
    """Runs plain Keras on one device, when a row of it is asked for; compared with every row.

    Once for all workers of pytest, whose folders stand side by side.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def of(keras: int) -> Path:
        reference = folder / f"reference-of-keras-{keras}.npz"
        with reference.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not reference.exists():
                what = [json.dumps(wanted[keras]), reference]
                _run(["run_reference.py", *what], reference, keras=keras)
        return reference

    return of


@pytest.fixture(scope="module")
def reference(references) -> Path:
    """What Keras 2 does on one device."""
    return references(2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, references, asked_of: dict[str, set[str]]):
    """Runs the cases of a row in one job, when the first of them is asked for."""
    done: dict[str, dict] = {}

    def of(row: Row) -> dict:
        if str(row) not in done:
            done[str(row)] = {}  # A job that failed is not run once more for each case.
            out = tmp_path_factory.mktemp(row.strategy) / "results.json"
            its_own = [case for case in row.cases if case in asked_of[str(row)]]
            what = [row.strategy, json.dumps(row.options), json.dumps(its_own)]
            how = [references(row.keras), row.batches, out]
            _run(["run_cases.py", *what, *how], out, row.launcher, keras=row.keras)
            done[str(row)] = json.loads(out.read_text())
        return done[str(row)]

    return of


def _run(
    script: list[str | Path], out: Path, launcher: tuple[str, ...] = (), *, keras: int
) -> None:
    """Runs a script of this folder, which must write ``out``."""
    name, *arguments = script
    finished = subprocess.run(
        [*launcher, sys.executable, *map(str, (Path(__file__).with_name(name), *arguments))],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | ({VARIABLE: "0"} if keras == 3 else {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert out.exists(), finished.stdout[-3000:] + finished.stderr[-3000:]


def _params(*, refused: bool) -> list[Any]:
    return [
        pytest.param(
            row,
            case,
            id=f"{row}-{case}",
            marks=() if case in row.short else pytest.mark.long,
        )
        for row in ROWS
        for case in row.cases
        if (row.refusal(case) is not None) == refused
    ]


def test_every_registered_strategy_has_a_row():
    assert {row.strategy for row in ROWS} == set(REGISTRY)


def test_the_rows_of_a_strategy_have_every_case():
    for name in REGISTRY:
        whole = [row for row in ROWS if row.strategy == name and row.keras == 2 and row.is_whole]
        told = [case for row in whole for case in (*row.cases, *row.left_out)]
        assert sorted(told) == sorted(cases.CASES)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_short_tier_of_a_strategy_meets_what_all_of_its_cases_meet(name):
    whole = [row for row in ROWS if row.strategy == name and row.keras == 2 and row.is_whole]
    run = [(row, case) for row in whole for case in row.cases if row.refusal(case) is None]
    short = [case for row, case in run if case in row.short]
    of_all = set().union(*(cases.met(case) for _, case in run))
    assert not of_all - set().union(*map(cases.met, short))


def test_the_short_tier_of_a_row_has_cases_that_the_row_has():
    for row in ROWS:
        assert set(row.short) <= set(cases.CASES if row.is_whole else row.only), row


def test_every_strategy_that_takes_keras_3_has_a_row_of_it():
    assert {row.strategy for row in ROWS if row.keras == 3} == {
        name for name, spec in REGISTRY.items() if spec.takes_keras_3
    }


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row.short else pytest.mark.long, id=str(row)) for row in ROWS],
)
def test_row_has_as_many_replicas_as_it_says(row, results):
    assert results(row)["num_replicas"] == row.num_replicas


@pytest.mark.parametrize("clipped", cases.CLIPPED)
@pytest.mark.parametrize("batches", observed.BATCHES)
def test_a_clipped_gradient_is_another_one(batches, clipped, reference):
    """Else a strategy that clips nothing would pass."""
    one_device = observed.read(reference, batches)
    weights = one_device[f"train-mlp-tail_of_1-{clipped}"]["weights"]
    unclipped = one_device["train-mlp-tail_of_1-momentum"]["weights"]
    assert np.max(np.abs(weights - unclipped)) > 100 * TOLERANCE


@pytest.mark.parametrize("batches", observed.BATCHES)
def test_saturated_outputs_are_beyond_where_keras_clips(batches, reference):
    """Else a strategy that lost the logits would pass."""
    found = observed.read(reference, batches)["predict-saturated"]
    _, y = cases.arrays("saturated", 49)
    kind, sort, flag = (found[f"dataset: output {name}"] for name in ("kind", "sort", "flag"))
    of_the_truth = {
        "kind": np.take_along_axis(kind, y["kind"][:, None], axis=1),
        "sort": np.sum(sort * y["sort"], axis=1),
        "flag": np.where(y["flag"] == 1, flag, 1 - flag),
    }
    for name, probabilities in of_the_truth.items():
        assert np.sum(probabilities < 1e-8) >= 3, name


@pytest.mark.parametrize(("row", "case"), _params(refused=False))
def test_equals_one_device(row, case, results):
    result = results(row)[case]
    assert "error" not in result, result["error"]
    wrong = {
        what: difference
        for what, difference in result["differences"].items()
        if math.isnan(difference) or difference > TOLERANCE
    }
    assert not wrong


@pytest.mark.parametrize(("row", "case"), _params(refused=True))
def test_refuses_what_would_not_equal_one_device(row, case, results):
    result = results(row)[case]
    assert "refusal" in result, result
    assert row.refusal(case) in result["refusal"]
