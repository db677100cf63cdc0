from tfdist.export.exporting import tflite as tflite
from tfdist.export.kinds import QUANTIZATIONS as QUANTIZATIONS
from tfdist.export.reports import ParityError as ParityError
from tfdist.export.smaller.clustering import cluster as cluster
from tfdist.export.smaller.decomposing import decompose as decompose
from tfdist.export.smaller.distillation import distill as distill
from tfdist.export.smaller.pruning import prune as prune
from tfdist.export.smaller.rounding import quantize_aware as quantize_aware
