"""The Mesh-TensorFlow operations that everything on a mesh is made of.

``mtf.slicewise`` is not used: its gradient leaves out the sum over the mesh axes on which an
operand is whole while another is split, and weights then come out wrong.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import import_mesh_tensorflow
from tfdist.keras.tensors import with_mask
from tfdist.training.model.logits import Logits, logits_of

mtf = import_mesh_tensorflow()

from mesh_tensorflow import placement_mesh_impl  # noqa: E402 - only after the mend above
from mesh_tensorflow.ops import LazyAllreduceSum  # noqa: E402

BATCH, MODEL = "batch", "model"


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Encloses what TensorFlow's log says nothing useful about."""
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class SuffixRules(mtf.LayoutRules):
    """Dimension "batch" lies on mesh axis "batch", dimension "anything@model" on axis "model"."""

    def __init__(self) -> None:
        super().__init__([])

    def tensor_dimension_to_mesh_axis(self, dimension: Any, mesh_shape: Any) -> int | None:
        axis = dimension.name.rpartition("@")[2]
        names = [mesh_dimension.name for mesh_dimension in mesh_shape]
        if axis not in names:
            return None
        index = names.index(axis)
        assert dimension.size % mesh_shape[index].size == 0, (dimension, mesh_shape[index])
        return index


class MeshDevices(placement_mesh_impl.PlacementMeshImpl):
    """The devices of a mesh; it keeps a record of the collectives that a program was lowered to.

    Attributes:
        collectives: (kind, mesh axes, bytes that each device holds before it), in order.
        share_memory: logical CPUs do: what one has computed, the others need not.
    """

    def __init__(self, batch: int, model: int, devices: Sequence[str]):
        shape = mtf.Shape([mtf.Dimension(BATCH, batch), mtf.Dimension(MODEL, model)])
        super().__init__(shape, SuffixRules(), list(devices))
        self.collectives: list[tuple[str, str, int]] = []
        self.share_memory = all("CPU" in device.upper() for device in devices)

    def first_places(self, inputs: Sequence[Sequence[Any]], output: Any = None) -> list[int]:
        """Returns for each device the first one that is given the same: it computes for both.

        Where memory is not shared, each device computes by itself.

        Args:
            inputs: of each one slice, or number, for each device.
            output: mtf.Shape of what is computed, where devices may make other slices of it.
        """
        if not self.share_memory:
            return list(range(self.size))
        keys = [
            (
                *(id(part) if tf.is_tensor(part) else part for part in parts),
                *(() if output is None else self.slice_begin(output, place)),
            )
            for place, parts in enumerate(zip(*inputs, strict=True))
        ]
        return [keys.index(key) for key in keys] if inputs else [0] * self.size

    def slicewise(self, fn: Callable, *inputs: Any) -> Any:
        inputs = [
            x.to_laid_out_tensor().tensor_list
            if hasattr(x, "to_laid_out_tensor")
            else [x] * self.size
            for x in inputs
        ]
        results = self.run(fn, inputs, self.first_places(inputs))
        if isinstance(results[0], tuple):
            return tuple(self.LaidOutTensor(list(each)) for each in zip(*results, strict=True))
        return self.LaidOutTensor(results)

    def run(self, fn: Callable, inputs: Sequence[Sequence[Any]], places: Sequence[int]) -> list:
        """Returns for each device what ``fn`` makes of its inputs on the one of its ``places``."""
        results = {}
        for place in dict.fromkeys(places):
            with tf.device(self.devices[place]):
                results[place] = fn(*(parts[place] for parts in inputs))
        return [results[place] for place in places]

    def laid_out_pcoord(self, mesh_axis: int) -> Any:
        divisor = math.prod(dimension.size for dimension in self.shape.dims[mesh_axis + 1 :])
        of_axis = self.shape[mesh_axis].size
        return self.LaidOutTensor([place // divisor % of_axis for place in range(self.size)])

    def axis_size(self, name: str) -> int:
        return self.shape[self.axis_index(name)].size

    def axis_index(self, name: str) -> int:
        return [dimension.name for dimension in self.shape].index(name)

    def allreduce(self, x: Any, mesh_axes: list[int], reduction_fn_string: str) -> Any:
        self._record("all-reduce", x, mesh_axes)
        if self.share_memory and reduction_fn_string == "SUM":
            return self._collective_with_groups(x, mesh_axes, _once(tf.add_n))
        return super().allreduce(x, mesh_axes, reduction_fn_string)

    def allconcat(self, x: Any, mesh_axis: int, concat_axis: int) -> Any:
        self._record("all-gather", x, [mesh_axis])
        if self.share_memory:
            join = _once(lambda parts: tf.concat(parts, concat_axis))
            return self._collective_with_groups(x, [mesh_axis], join)
        return super().allconcat(x, mesh_axis, concat_axis)

    def alltoall(self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int) -> Any:
        self._record("all-to-all", x, [mesh_axis])
        return super().alltoall(x, mesh_axis, split_axis, concat_axis)

    def record_gather(self, output: Any, x: Any) -> None:
        """An output is brought to the first device, where the loss is evaluated."""
        self._record("gather for the loss", x, sorted(_axes_of(self, output)))

    def _record(self, kind: str, x: Any, mesh_axes: list[int]) -> None:
        axes = [self.shape[axis] for axis in mesh_axes]
        if all(axis.size == 1 for axis in axes):
            return
        part = x.to_laid_out_tensor().tensor_list[0]
        num_bytes = part.shape.num_elements() * part.dtype.size
        self.collectives.append((kind, " x ".join(a.name for a in axes), num_bytes))


def _once(function: Callable[[list[tf.Tensor]], tf.Tensor]) -> Callable:
    """Returns a collective of which the first device makes the result, for all."""

    def collective(parts: list[tf.Tensor], devices: list[str]) -> list[tf.Tensor]:
        if len(parts) == 1:
            return parts
        with tf.device(devices[0]):
            result = function(parts)
        return [result] * len(parts)

    return collective


class LocalOperation(mtf.Operation):
    """``fn`` on the slices of each device, with gradients that are right for every layout.

    Args:
        fn: slices of ``inputs``, then what ``coordinates`` ask for -> a slice of the output.
        output_shape: mtf.Shape of the whole output.
        partial_over: mesh axes over which the outputs of the devices add up to the output.
        slice_number_of: a shape; fn also gets the number of the device's slice of such a tensor.
        model_coordinate: whether fn also gets the device's place on the model axis.
        with_back: whether fn also returns its gradient: a function from that of the output to those
            of the float inputs, None for those that no trained weight lies behind. Else TensorFlow
            finds it.
        beside: (mtf.Shape, dtype) of further outputs, of which fn returns a tuple with the first;
            no gradient goes back through them.
    """

    def __init__(
        self,
        fn: Callable,
        inputs: Sequence[Any],
        output_shape: Any,
        dtype: tf.DType,
        *,
        name: str,
        partial_over: Sequence[str] = (),
        slice_number_of: Any = None,
        model_coordinate: bool = False,
        with_back: bool = False,
        beside: Sequence[tuple[Any, tf.DType]] = (),
    ):
        super().__init__(list(inputs), name=name)
        self._fn = fn
        self._given_name = name
        self.partial_over = tuple(partial_over)
        self._slice_number_of = slice_number_of
        self._model_coordinate = model_coordinate
        self._with_back = with_back
        self._outputs = [
            mtf.Tensor(self, shape, of_dtype, index=i)
            for i, (shape, of_dtype) in enumerate([(output_shape, dtype), *beside])
        ]
        self.float_inputs = [i for i, tensor in enumerate(inputs) if tensor.dtype.is_floating]
        # Filled by lower(): for each device the one that computes for it; by place its tape and the
        # slices of the float inputs, or its written gradient; for each device the output, and where
        # the loss starts at the logits behind it, their gradient.
        self.places: list[int] = []
        self.tapes: dict[int, tf.GradientTape] = {}
        self.backs: dict[int, Callable] = {}
        self.input_slices: dict[int, list[tf.Tensor]] = {}
        self.output_slices: list[tf.Tensor] = []
        self.gradients_of_logits: list[tf.Tensor] = []

    def on(self, inputs: Sequence[Any]) -> LocalOperation:
        """Returns the same on other inputs, which lie as its own do."""
        first, *others = self.outputs
        made = LocalOperation(
            self._fn,
            inputs,
            first.shape,
            first.dtype,
            name=self._given_name,
            partial_over=self.partial_over,
            slice_number_of=self._slice_number_of,
            model_coordinate=self._model_coordinate,
            with_back=self._with_back,
            beside=[(other.shape, other.dtype) for other in others],
        )
        # One list: the loss gives them to the operation that it has met.
        made.gradients_of_logits = self.gradients_of_logits
        return made

    @property
    def logits(self) -> list[Logits] | None:
        """What Keras finds behind the output, on each device."""
        found = [logits_of(output) for output in self.output_slices]
        return None if self.partial_over or any(f is None for f in found) else found

    def gradient(self, grad_ys: list[Any]) -> list[Any]:
        gradients = iter(LocalGradient(self, grad_ys[0]).outputs)
        is_float = [tensor.dtype.is_floating for tensor in self.inputs]
        return [next(gradients) if floating else None for floating in is_float]

    def lower(self, lowering: Any) -> None:
        devices = lowering.mesh_impl(self)
        given = [lowering.tensors[tensor].to_laid_out_tensor() for tensor in self.inputs]
        if self._slice_number_of is not None:
            given.append(devices.laid_out_slice_num(self._slice_number_of))
        if self._model_coordinate:
            given.append(devices.laid_out_pcoord(devices.axis_index(MODEL)))
        inputs = [laid_out.tensor_list for laid_out in given]

        def run_with_back(place: int, *slices: Any) -> tf.Tensor:
            output, self.backs[place] = self._fn(*slices)
            return output

        def run(place: int, *slices: Any) -> tf.Tensor:
            # One tape for each device: tf.gradients would walk the whole graph for every operation.
            own = [tf.convert_to_tensor(slices[i]) for i in self.float_inputs]
            slices = list(slices)
            with tf.GradientTape() as tape:
                for index, tensor in zip(self.float_inputs, own, strict=True):
                    tape.watch(tensor)
                    slices[index] = tensor
                output = self._fn(*slices)
            self.tapes[place] = tape
            self.input_slices[place] = own
            return output

        self.places = devices.first_places(inputs, self.outputs[0].shape)
        numbered = [list(range(devices.size)), *inputs]
        made = devices.run(run_with_back if self._with_back else run, numbered, self.places)
        if len(self.outputs) > 1:
            made, *others = (list(slices) for slices in zip(*made, strict=True))
            for tensor, slices in zip(self.outputs[1:], others, strict=True):
                lowering.set_tensor_lowering(tensor, devices.LaidOutTensor(slices))
        self.output_slices = made
        output = devices.LaidOutTensor(made)
        axes = [devices.axis_index(axis) for axis in self.partial_over]
        if axes:
            output = LazyAllreduceSum(devices, output, axes)
        lowering.set_tensor_lowering(self.outputs[0], output)


class LocalGradient(mtf.Operation):
    """The gradients of a ``LocalOperation`` with respect to its float inputs."""

    def __init__(self, forward: LocalOperation, grad_y: Any):
        super().__init__([*forward.inputs, grad_y], name="local_gradient")
        self._forward = forward
        self._grad_y = grad_y
        tensors = [forward.inputs[i] for i in forward.float_inputs]
        self._outputs = [
            mtf.Tensor(self, tensor.shape, tensor.dtype, index=i)
            for i, tensor in enumerate(tensors)
        ]

    def lower(self, lowering: Any) -> None:
        devices, forward = lowering.mesh_impl(self), self._forward
        grad_ys = lowering.tensors[self._grad_y].to_laid_out_tensor().tensor_list
        # Equal on devices for which one computes: they have made the same slice of the output.
        numbered = [list(range(devices.size)), grad_ys]
        by_device = devices.run(self._on_device, numbered, forward.places)
        split_over = {devices.axis_index(axis) for axis in forward.partial_over}
        for tensor in [*forward.inputs, *forward.outputs]:
            split_over |= _axes_of(devices, tensor)
        for index, output in enumerate(self.outputs):
            if by_device[0][index] is None:  # Written so: nothing that is trained lies behind it.
                continue
            slices = [tf.convert_to_tensor(gradients[index]) for gradients in by_device]
            gradient = devices.LaidOutTensor(slices)
            # An input that is whole on an axis was used by every device on it: their parts add up.
            axes = sorted(split_over - _axes_of(devices, output))
            if axes:
                gradient = LazyAllreduceSum(devices, gradient, axes)
            lowering.set_tensor_lowering(output, gradient)

    def _on_device(self, place: int, grad_y: tf.Tensor) -> list[tf.Tensor | None]:
        forward = self._forward
        if forward.backs:
            return forward.backs[place](grad_y)
        targets, seeds = [forward.output_slices[place]], [grad_y]
        if forward.gradients_of_logits:
            targets.append(forward.logits[place].tensor)
            seeds.append(forward.gradients_of_logits[place])
        return forward.tapes[place].gradient(
            targets,
            forward.input_slices[place],
            output_gradients=seeds,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )


def _axes_of(devices: MeshDevices, tensor: Any) -> set[int]:
    layout = devices.tensor_layout(tensor).tensor_axis_to_mesh_axis
    return {axis for axis in layout if axis is not None}


class LossBridge(mtf.Operation):
    """Takes outputs off the mesh, evaluates any Keras loss, and brings its gradients back.

    Args:
        outputs: the outputs of the model, and scalars that belong to its loss.
        loss_fn: whole tf.Tensors of ``outputs`` -> the scalar to differentiate.
        masks: place of an output -> the mask that Keras' losses and metrics are to find on it.
    """

    def __init__(self, outputs: Sequence[Any], loss_fn: Callable, masks: dict[int, Any]):
        super().__init__([*outputs, *masks.values()], name="loss")
        self._loss_fn = loss_fn
        self._masks = masks
        self._outputs = [
            mtf.Tensor(self, output.shape, output.dtype, index=i)
            for i, output in enumerate(outputs)
        ]

    @property
    def has_gradient(self) -> bool:
        return False

    def lower(self, lowering: Any) -> None:
        devices = lowering.mesh_impl(self)
        given = self.inputs[: len(self.outputs)]
        masks = {n: lowering.export_to_tf_tensor(mask) for n, mask in self._masks.items()}
        behind = [getattr(output.operation, "logits", None) for output in given]
        whole = []
        for output, logits in zip(given, behind, strict=True):
            devices.record_gather(output, lowering.tensors[output])
            if logits is None:
                whole.append(lowering.export_to_tf_tensor(output))
            else:  # The loss starts there, and so does its gradient.
                slices = devices.LaidOutTensor([found.tensor for found in logits])
                whole.append(devices.export_to_tf_tensor(output, slices))
        with tf.GradientTape() as tape:
            tape.watch(whole)
            loss = self._loss_fn(
                [
                    with_mask(
                        tensor if logits is None else logits[0].activated(tensor), masks.get(n)
                    )
                    for n, (tensor, logits) in enumerate(zip(whole, behind, strict=True))
                ]
            )
        gradients = tape.gradient(loss, whole, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for place, (gradient, logits) in enumerate(zip(gradients, behind, strict=True)):
            laid_out = devices.import_tf_tensor(self.outputs[place], tf.convert_to_tensor(gradient))
            if logits is not None:
                held = self.inputs[place].operation.gradients_of_logits
                own = laid_out.tensor_list  # Two outputs may be one tensor.
                held[:] = [a + b for a, b in zip(held, own, strict=True)] if held else own
                zeros = [tf.zeros_like(part) for part in laid_out.tensor_list]
                laid_out = devices.LaidOutTensor(zeros)
            lowering.set_tensor_lowering(self.outputs[place], laid_out)
