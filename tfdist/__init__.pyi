"""What a type checker knows of ``tfdist``, whose names are imported when they are first used.

It stands apart from ``__init__.py``: an import written there, even for type checkers alone, would
let each room that asks for the version climb to all of them.
"""

from tfdist import errors as errors
from tfdist import export as export
from tfdist import records as records
from tfdist.export.smaller.decomposing import decompose as decompose
from tfdist.launch.notebook import notebook_launch as notebook_launch
from tfdist.records.reading.augmentation import augment as augment
from tfdist.records.reading.vocabulary import text_vectorizer as text_vectorizer
from tfdist.runs.evaluating import evaluate as evaluate
from tfdist.runs.predicting import predict as predict
from tfdist.runs.training import train as train
from tfdist.runs.verifying import verify as verify
from tfdist.strategies import strategy as strategy
from tfdist.training.checkpoints.checkpoint import Checkpoints as Checkpoints
from tfdist.training.loops.chief_only import on_chief as on_chief
from tfdist.training.steps.gathering import all_gather as all_gather
from tfdist.training.steps.gathering import reduce as reduce
from tfdist.tuning.tune import tune as tune

__version__: str
