"""Strategy "mesh": batches divided on one axis of a mesh of devices, weights on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.errors import EngineMissingError, ModelError, OptionError
from tfdist.strategies.base import ModelOrFn, made_here
from tfdist.strategies.model_parallel import ModelParallel
from tfdist.strategies.rank_devices import own_devices
from tfdist.strategies.spec import check_shard
from tfdist.training.engine.options import StepOptions, check_count

if TYPE_CHECKING:
    from tfdist.strategies.mesh.description import Description


class Mesh(ModelParallel):
    """A mesh of ``batch`` x ``model`` devices of this machine, in one process, on Mesh-TensorFlow.

    With mixed precision the slices of weights and slots are float32, layers compute in their
    policy's precision, and a ``LossScaleOptimizer`` scales the loss.

    Args:
        batch: parts that each batch is divided into.
        model: parts that the weights are divided into.
        devices: names such as ["GPU:0", "GPU:1"] or "GPU:0,GPU:1", batch x model of them; None
            takes GPUs, or logical CPUs where there is none.
        layout: regular expression of a weight's path ("dense_1/kernel") -> the mesh axis of each
            dimension, as (None, "model"); weights that no rule matches are split automatically.
        keep_host_copy: False frees the whole weights of the host while they are not read.
        recompute: "blocks" computes activations once more on the way back instead of keeping them,
            block by block: nested models, or runs of layers; or names of layers and nested
            models to do so with. Dropout draws the same numbers again. "none" keeps them.
        replicas: "horovod" or "multi_worker": each rank of such a job holds a mesh on devices of
            its own, and the ranks share global batches; None: one mesh, in one process.
        shard: "optimizer": of the ranks of ``replicas``, each keeps the optimizer's slots of its
            part of each slice alone, and updates that part; "none": each keeps all.
        precision: "float32", "mixed_bfloat16" or "mixed_float16": what the layers that model_fn
            makes compute in; None leaves Keras' own policy.
        lr_scaling: "linear" or "sqrt" multiplies the learning rate by (the root of) ``batch``,
            times the ranks.
        warmup_epochs: epochs in which the learning rate climbs to its scaled value.
    """

    name = "mesh"
    takes_lengths = False

    def __init__(
        self,
        *,
        batch: int = 1,
        model: int = 2,
        devices: Sequence[str] | str | None = None,
        layout: Mapping[str, Sequence[str | None]] | None = None,
        keep_host_copy: bool = True,
        recompute: str | Sequence[str] | None = "none",
        replicas: str | None = None,
        shard: str = "none",
        precision: str | None = None,
        lr_scaling: str | None = None,
        warmup_epochs: float = 0,
    ):
        for axis, size in (("batch", batch), ("model", model)):
            check_count(f"mesh axis '{axis}'", size)
        if devices is not None:
            devices = _names(devices)
            check_devices(batch, model, devices)
        super().__init__(
            lr_scaling,
            warmup_epochs,
            shares_of_each=batch,
            replicas=replicas,
            precision=precision,
        )
        self._batch = batch
        self._model = model
        self._device_names = devices
        self._layout = layout
        self._keep_host_copy = keep_host_copy
        or_else = ": a larger model axis divides slots as well"
        check_shard(shard, replicas, self.name, or_else=or_else)
        self._options = StepOptions(recompute=recompute, shard=shard)
        self._devices: list[str] | None = None

    def start(self) -> None:
        import tensorflow as tf

        from tfdist.compat import import_mesh_tensorflow

        try:
            import_mesh_tensorflow()
        except ImportError as error:
            raise EngineMissingError(
                "strategy 'mesh' must have mesh-tensorflow installed",
                received=f"an error: {error}",
                mend="Run tfdist install mesh",
            ) from error
        from tfdist.strategies.mesh.layout import Layout

        Layout(self._layout, self._model)  # A rule that is not one is refused here.
        count = self._batch * self._model
        self._start_ranks(count)
        gpus = [f"GPU:{i}" for i, _ in enumerate(tf.config.get_visible_devices("GPU"))]
        if self._device_names is not None:
            names = self._device_names
        elif gpus:
            check_devices(self._batch, self._model, gpus, exactly=False)
            names = gpus[:count]
        else:
            names = [f"CPU:{i}" for i in range(count)]
        parts = [name.upper().rpartition(":") for name in names]  # Others are refused below.
        cpus = [int(number) for kind, _, number in parts if "CPU" in kind and number.isdecimal()]
        if cpus:
            from tfdist.strategies.mirrored import make_logical_cpus

            make_logical_cpus(max(cpus) + 1)
        self._join_ranks(tuple(name.upper() for name in names))
        known = own_devices()
        unknown = [name for name in names if name.upper() not in known]
        if unknown:
            raise OptionError(
                "the devices of a mesh must exist",
                received=", ".join(unknown),
                mend=f"Choose from {', '.join(sorted(known))}",
            )
        self._devices = [known[name.upper()] for name in names]

    def close(self) -> None:
        self._devices = None

    def build(self, model_fn: ModelOrFn) -> Any:
        """See ``Strategy.build``.

        Raises:
            UnsupportedLayerError: a layer that has no conversion to Mesh-TensorFlow.
            OptionError: the layout does not fit the model.
        """
        import tensorflow as tf

        from tfdist.keras.graph import has_graph
        from tfdist.strategies.mesh.layout import Layout
        from tfdist.strategies.mesh.model import MeshModel
        from tfdist.strategies.mesh.operations import MeshDevices
        from tfdist.training.engine.binding import Binding
        from tfdist.training.model.precision import check_follows, policy
        from tfdist.training.model.refusals import refuse_own_metrics

        self._entered(self._devices)
        # The whole of a large model fits on the host only.
        with tf.device("CPU:0"), policy(self.precision):
            model = made_here(model_fn)
        check_follows(model, self.precision)
        if not has_graph(model):
            raise ModelError(
                "strategy 'mesh' must have a Functional or Sequential model, since it reads its "
                "graph",
                received=f"{type(model).__name__} '{model.name}'",
                mend="Build it with keras.Input and keras.Model(inputs, outputs)",
            )
        ranks = self.connect()
        if ranks.shares_batches:
            refuse_own_metrics(model, self.name)
        on_mesh = MeshModel(
            model,
            MeshDevices(self._batch, self._model, self._devices),
            Layout(self._layout, self._model),
            ranks,
            keep_host_copy=self._keep_host_copy,
            options=self._options,
        )
        binding = Binding(model, ranks)
        on_mesh.host.heard_by(binding)
        return self._assembled(
            binding,
            engine=on_mesh.engine(),
            by_hand=ModelError(
                "a model on a mesh must be trained by its fit or train_on_batch, since its "
                "optimizer knows the slices of the weights only",
                received="model.optimizer.apply_gradients outside of them",
                mend="Call one of these, or use strategy 'single'",
            ),
        )

    def describe(self, model: Any, *, global_batch_size: int = 32) -> Description:
        """Prints and returns where each weight of a built model lies, and what a step sends.

        Raises:
            ModelError: the model was not built by this strategy.
        """
        from tfdist.strategies.mesh.description import describe
        from tfdist.strategies.mesh.model import MeshModel
        from tfdist.training.engine.binding import known_of

        on_mesh = known_of(model, MeshModel, "describe")
        description = describe(on_mesh, global_batch_size, self._places)
        description.print()
        return description


def _names(devices: Any) -> list[str]:
    names = devices.split(",") if isinstance(devices, str) else devices
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise OptionError(
            "the devices of a mesh must be names",
            received=repr(devices),
            mend='Give ["GPU:0", "GPU:1"], or -o devices=GPU:0,GPU:1; batch x model says how many',
        )
    return list(names)


def check_devices(batch: int, model: int, names: list[str], *, exactly: bool = True) -> None:
    """Raises OptionError unless ``names`` are enough devices for the mesh."""
    need = batch * model
    if len(names) < need or (exactly and len(names) != need) or len(set(names)) < len(names):
        raise OptionError(
            f"mesh batch={batch} x model={model} must have {need} different devices",
            received=f"{len(names)}: {', '.join(names)}",
            mend=f"Choose batch and model whose product is {len(set(names))}",
        )
