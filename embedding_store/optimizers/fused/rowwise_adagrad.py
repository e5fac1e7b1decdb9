"""Row-wise Adagrad: one accumulator a row, of the mean of its squared gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import SlotSpec
from elastable.embedding_store.optimizers.fused.kernel_optimizer import KernelOptimizer, hyperparameters

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.types import Type
    from numba.core.typing import Signature
    from numba.core.typing.context import BaseContext as TypingContext

__all__ = ["RowwiseAdagrad", "row_squares"]

_LANES = 16
_NO_SQUARES = np.empty(0, np.float32)


class RowwiseAdagrad(KernelOptimizer):
    """`a += mean(g²); w -= lr / (sqrt(a) + epsilon) g`, a being one value a row."""

    cross_column = True
    # Those of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen(optimizer=EXACT_ROWWISE_ADAGRAD), which TorchRec's
    # fused row-wise Adagrad runs; Keras has none.
    defaults = hyperparameters(learning_rate=0.01, initial_accumulator_value=0.0, epsilon=1e-8, weight_decay=0.0)

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots = (
            SlotSpec("accumulator", self.hyperparameters["initial_accumulator_value"], columns=1, squares=True),
        )

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        means = _NO_SQUARES if batch.squares is None else batch.squares
        scalars = np.float32(batch.rate), *self.single("weight_decay", "epsilon")
        _rowwise_adagrad(*batch.arrays(weights, slots), means, *scalars)


def row_squares(gradients: Float32) -> Float32:
    """The mean of each row's squares, float32 `[u]`, to the bit as `RowwiseAdagrad` takes it.

    For `TableUpdate.row_squares`, where the columns of a row lie in several places.

    Args:
        gradients: float32 `[u, dim]`, C-contiguous, of whole rows.
    """
    squares = np.empty(len(gradients), np.float32)
    _row_squares(gradients, squares)
    return squares


@intrinsic  # type: ignore[untyped-decorator]
def _lane_squares(
    typing_context: TypingContext, array: Type, row: Type, blocks: Type
) -> tuple[Signature, Callable[..., Value]]:
    """float32: the squares of the first 16 * blocks values of `array[row]`, added as `_mean_of_squares` says.

    Written in LLVM's own words: without fast-math LLVM may not reorder a sum,
    and a loop over an array of 16 sums goes through memory (measured: 2 to 3
    times the time of the whole kernel).
    """

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: Sequence[Value]) -> Value:
        source = context.make_array(signature.args[0])(context, builder, arguments[0])
        lanes, word = ir.VectorType(ir.FloatType(), _LANES), ir.IntType(32)
        at = [context.cast(builder, value, kind, types.intp)
              for value, kind in zip(arguments[1:], signature.args[1:], strict=True)]  # fmt: skip
        row_bytes = cgutils.unpack_tuple(builder, source.strides)[0]
        start = builder.gep(builder.bitcast(source.data, ir.IntType(8).as_pointer()), [builder.mul(at[0], row_bytes)])
        sums = cgutils.alloca_once_value(builder, ir.Constant(lanes, [0.0] * _LANES))
        with cgutils.for_range(builder, at[1]) as loop:
            values = builder.load(builder.gep(builder.bitcast(start, lanes.as_pointer()), [loop.index]))
            values.align = 4
            builder.store(builder.fadd(builder.load(sums), builder.fmul(values, values)), sums)
        total = builder.load(sums)
        for width in (8, 4, 2, 1):
            low, high = (
                ir.Constant(ir.VectorType(word, width), list(range(first, first + width))) for first in (0, width)
            )
            total = builder.fadd(builder.shuffle_vector(total, total, low), builder.shuffle_vector(total, total, high))
        return builder.extract_element(total, word(0))

    return types.float32(array, row, blocks), generate


@kernel
def _mean_of_squares(gradients: Float32, row: int) -> np.float32:
    """Of one row: in 16 sums, joined pairwise, then what is left over of 16 values, one by one.

    An order of its own, so that the processor may add 16 numbers at once.
    """
    dim = gradients.shape[1]
    total = _lane_squares(gradients, row, dim // _LANES)
    for j in range(dim - dim % _LANES, dim):
        total += gradients[row, j] * gradients[row, j]
    mean: np.float32 = total / np.float32(dim)
    return mean


@kernel
def _row_squares(gradients: Float32, squares: Float32) -> None:
    for i in range(len(gradients)):
        squares[i] = _mean_of_squares(gradients, i)


@kernel
def _rowwise_adagrad(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    squares: Float32,
    rate: np.float32,
    decay: np.float32,
    epsilon: np.float32,
) -> None:
    count, dim = gradients.shape
    far = prefetch_distance(dim)
    for i in range(count):
        ahead = min(i + far, count - 1)
        prefetch(weights, places[ahead])
        prefetch(slots, positions[ahead])
        g = gradients[i]
        square = squares[i] if len(squares) else _mean_of_squares(gradients, i)
        a = slots[positions[i], 0] + square
        slots[positions[i], 0] = a
        scale = rate / (np.sqrt(a) + epsilon)
        w = weights[places[i]]
        for j in range(dim):
            x = w[j] - w[j] * decay * rate
            w[j] = x - scale * g[j]
