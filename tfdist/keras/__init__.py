"""What Keras has no public name for, or names otherwise from one version to the next.

Nothing else in tfdist touches a private name of Keras, which ruff holds (SLF001). Each function
says what it hides. Where Keras 2 and Keras 3 differ, it does what the one that is here needs.
"""

from tfdist.keras import (  # noqa: F401
    graph,
    layers,
    loss_scale,
    losses,
    optimizers,
    rates,
    seeds,
    settings,
    steps,
    tensors,
    trackables,
)
