"""What differs between the TensorFlows that tfdist runs on, and what old engines need on new ones.

Every such difference stands here and nowhere else, with its reason and, where there is one, the
issue of the project that it comes from.
"""

from __future__ import annotations

from tfdist.compat.engines import (
    import_horovod,
    import_mesh_tensorflow,
    import_tensorflow_federated,
)
from tfdist.compat.keras import (
    follow_file,
    follow_program,
    is_keras,
    keras_source,
    package_of,
    prefer_keras_2,
)
from tfdist.compat.tensorflow import import_tensorflow
from tfdist.compat.versions import check_versions, refuse_keras_3, uses_keras_3

__all__ = [
    "check_versions",
    "follow_file",
    "follow_program",
    "import_horovod",
    "import_mesh_tensorflow",
    "import_tensorflow",
    "import_tensorflow_federated",
    "is_keras",
    "keras_source",
    "package_of",
    "prefer_keras_2",
    "refuse_keras_3",
    "uses_keras_3",
]
