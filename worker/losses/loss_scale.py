"""Loss scaling: the gradient of the scaled loss, divided by the scale, so that float16 does not lose small gradients.

The scale of `keras.optimizers.LossScaleOptimizer` is part of the version. Workers receive it as one more state of the
model; the master updates it with each version (`elastable.master.keras.dense`).
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from elastable.worker.keras.structures import Gradient

__all__ = ["scale_variables", "scaled_gradient"]

_KEPT = "_elastable_loss_scale"


def scale_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variable of a dynamic loss scale as a list; empty if the optimizer has none."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return []
    if optimizer.built:
        return [optimizer.dynamic_scale]
    if not hasattr(optimizer, _KEPT):
        # A worker's optimizer makes no steps: it is not built, so it allocates no moments.
        scale = keras.Variable(optimizer.initial_scale, dtype="float32", trainable=False, name="dynamic_scale")
        object.__setattr__(optimizer, _KEPT, scale)
    return [getattr(optimizer, _KEPT)]


def scaled_gradient(
    tape: tf.GradientTape,
    loss: tf.Tensor,
    sources: Sequence[Sequence[tf.Tensor]],
    optimizer: keras.optimizers.Optimizer,
) -> Sequence[Sequence[Gradient]]:
    """`tape.gradient(loss, sources)`, computed at the optimizer's loss scale."""
    dynamic = scale_variables(optimizer)
    static = getattr(optimizer, "loss_scale_factor", None)
    found: Sequence[Sequence[Gradient]]
    if not dynamic and static is None:
        found = tape.gradient(loss, sources)
        return found
    scale = tf.convert_to_tensor(dynamic[0].value if dynamic else static, tf.float32)
    found = tape.gradient(loss, sources, output_gradients=tf.ones_like(loss) * tf.cast(scale, loss.dtype))
    found = tf.nest.map_structure(lambda gradient: _divided(gradient, scale), found)
    return found


def _divided(gradient: Gradient, scale: tf.Tensor) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values, scale), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(scale, gradient.dtype)
