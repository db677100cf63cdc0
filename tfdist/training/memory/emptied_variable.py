"""A variable whose value lies elsewhere.

``Elsewhere``: in parts of which each process holds one. The variable keeps its name, shape and
type, and holds nothing. A step reads what its block has gathered; a file that is written reads what
has come together on the host; anything else is refused.

``listen``: whoever has the value is told of what reads and writes the variable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.keras.optimizers import inner_of, squares_look_ups
from tfdist.training.engine.binding import Binding
from tfdist.training.layers.clipping import clips_by_norm, limit_of_values, not_added_up
from tfdist.training.memory.flat_parts import Division
from tfdist.training.memory.slots import set_value

_numbers = itertools.count()
_READS = ("_read_variable_op", "sparse_read", "gather_nd")
_WRITES = (
    *("assign", "assign_add", "assign_sub", "_restore_from_tensors", "_strided_slice_assign"),
    *("scatter_add", "scatter_sub", "scatter_max", "scatter_min", "scatter_mul", "scatter_div"),
    *("scatter_update", "batch_scatter_update", "scatter_nd_add", "scatter_nd_sub"),
    *("scatter_nd_max", "scatter_nd_min", "scatter_nd_update"),
)


def listen(
    binding: Binding,
    variable: tf.Variable,
    *,
    before_read: Callable[[], None],
    after_write: Callable[[], None],
) -> None:
    """Tells of all that reads or writes a variable; in a function, once when it is traced.

    Args:
        before_read: called before a write, too: TensorFlow compares its shape with what is held.
    """

    def told(method: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            before_read()
            result = method(*args, **options)
            if writes:
                after_write()
            return result

        return run

    names = (*_READS, *_WRITES)
    binding.put(variable, {n: told(getattr(variable, n), n in _WRITES) for n in names})


class Elsewhere:
    """A whole variable, emptied, and this process's part of its value.

    Attributes:
        variable: the whole one.
        part: a variable [part_size].
        division: of the whole.
        given: a whole value that came here, from a file or its owner, and that others may not have.
        host: the whole value, while this process needs it.
    """

    def __init__(self, binding: Binding, variable: tf.Variable, part: tf.Variable, own: Division):
        self.variable, self.part, self.division = variable, part, own
        self.given: np.ndarray | None = None
        self.host: np.ndarray | None = None
        self._model = binding.model
        self._process = binding.collective.process
        self._read_whole = variable._read_variable_op  # noqa: SLF001
        self._present: tf.Variable | None = None
        set_value(variable, tf.zeros([0], variable.dtype))
        # TensorFlow reads handles, too: where nothing was ever made that is an error.
        number = next(_numbers)
        self._nothing = tf.raw_ops.VarHandleOp(
            dtype=variable.dtype, shape=variable.shape, shared_name=f"tfdist_divided_{number}"
        )
        self._nothing._handle_data = variable.handle._handle_data  # noqa: SLF001
        ways = dict.fromkeys(_WRITES, self._refuse_change) | {
            "_handle": self._nothing,
            "is_initialized": lambda name=None: tf.constant(True),
            "_read_variable_op": self._read,
            "sparse_read": self._look_up,
            "gather_nd": self._look_up_each,
            "assign": self._assign,
            "_restore_from_tensors": self._restore,
        }
        binding.put(variable, ways)

    def take(self, value: Any) -> None:
        """Keeps the part of this process of a whole value."""
        self.part.assign(self.division.part(value, self._process))

    def dense(self, gradient: Any) -> tf.Tensor:
        """Returns a gradient of the whole variable as a tensor.

        Raises:
            ModelError: the variable is a table, and the optimizer takes its look-ups one by one.
        """
        optimizer = inner_of(self._model.optimizer)
        if isinstance(gradient, tf.IndexedSlices) and squares_look_ups(optimizer):
            raise not_added_up("shard='weights'", self.variable.name, optimizer)
        return tf.convert_to_tensor(gradient)

    def hold(self, value: tf.Tensor) -> None:
        """Has the variable be whole outside of a graph, where TensorFlow reads its handle."""
        self._present = tf.Variable(value, trainable=False)
        self.variable._handle = self._present.handle  # noqa: SLF001

    def drop(self) -> None:
        """Ends what ``hold`` has begun."""
        self.variable._handle = self._nothing  # noqa: SLF001
        self._present = None

    # What stands in the place of the variable's methods -----------------------------------------

    def _read(self, no_copy: bool = False) -> tf.Tensor:
        gathered = step_context.current().gathered
        value = None if gathered is None else gathered.read(self.variable)
        if value is not None:
            return value
        if self._present is not None:
            return self._read_whole(no_copy)
        if self.host is None:
            raise ModelError(
                "a weight that replicas divide (shard='weights') must be read by the layer that "
                "has it, in a call of the model, or by model.get_weights() on all ranks",
                received=f"another use of '{self.variable.name}'",
                mend="Use one of these, or shard='optimizer'; another model on its layers is built "
                "on what keras.models.load_model returns of a file that strategy.save wrote",
            )
        if not tf.executing_eagerly():  # A function that is written to a file.
            return self._read_whole(no_copy)
        with tf.device("CPU:0"):
            return tf.constant(self.host)

    def _look_up(self, indices: Any, name: str | None = None) -> tf.Tensor:
        value, optimizer = self._read(), inner_of(self._model.optimizer)
        clips = clips_by_norm(optimizer) or limit_of_values(optimizer) is not None
        if step_context.current().repeatable is not None and clips:
            raise ModelError(
                "a table that replicas divide (shard='weights') must have gradients that are not "
                "clipped, since Keras clips each row that was looked up",
                received=f"'{self.variable.name}' and an optimizer with clipnorm, clipvalue or "
                "global_clipnorm",
                mend="Leave its layer out of the blocks (recompute=names of the others), or use "
                "shard='optimizer'",
            )
        return tf.gather(value, indices, name=name)

    def _look_up_each(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self._read(), indices, name=name)

    def _assign(self, value: Any, *_: Any, read_value: bool = True, **__: Any) -> Any:
        if not tf.executing_eagerly():
            self._refuse_change()
        value = np.asarray(value, self.variable.dtype.as_numpy_dtype)
        if value.shape != self.division.shape:
            raise ValueError(
                f"Cannot assign value to variable '{self.variable.name}': Shape mismatch. The "
                f"variable shape {self.division.shape}, and the assigned value shape "
                f"{value.shape} are incompatible."
            )
        self.given = value
        self.take(value)
        if self.host is not None:
            self.host = value
        return self.variable if read_value else None

    def _restore(self, restored_tensors: dict[str, Any]) -> None:
        (value,) = restored_tensors.values()
        self._assign(value)

    def _refuse_change(self, *_: Any, **__: Any) -> None:
        raise ModelError(
            "a weight that replicas divide (shard='weights') must be changed by model.fit, or "
            "given a whole value, outside of tf.function",
            received=f"another change of '{self.variable.name}'",
            mend="Use model.set_weights on all ranks, or shard='optimizer'",
        )
