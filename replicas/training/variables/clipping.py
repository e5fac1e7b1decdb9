"""Gradient clipping where no replica holds all gradients: by norms that do not depend on the sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.variables.exchange import Layout
from elastable.replicas.training.variables.split import VariableSplit

__all__ = ["GradientClipping", "clip_parts", "squared_norms"]

_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class GradientClipping:
    """At most one of Keras' three clipping options; None: not set.

    Attributes:
        clipnorm: Largest norm of one variable's gradient.
        global_clipnorm: Largest norm of all gradients together.
        clipvalue: Largest magnitude of an element.
    """

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> GradientClipping:
        """The clipping options of a Keras optimizer, for gradients of the scaled loss, which Keras unscales first."""
        scale = float(getattr(optimizer, "loss_scale_factor", None) or 1.0)
        names = ("clipnorm", "global_clipnorm", "clipvalue")
        asked = {name: getattr(optimizer, name, None) for name in names}
        return cls(**{name: float(value) * scale for name, value in asked.items() if value and value > 0})


def squared_norms(group: ReplicaGroup, gradients: Sequence[Array], layouts: Sequence[Layout]) -> list[float]:
    """The squared L2 norm of every whole gradient, the same on every replica.

    Every replica sums its part in float64 (of a whole gradient, the part it would own), and the parts are added in rank
    order. So sharding over all replicas does not change a bit.

    Args:
        group: All replicas; each calls this.
        gradients: Summed over the replicas: whole, or this replica's buffer.
        layouts: One for each.
    """
    mine = np.array(
        [_sum_of_squares(_own(group, array, layout)) for array, layout in zip(gradients, layouts, strict=True)]
    )
    everyones = group.all_gather(mine)
    norms = []
    for place, layout in enumerate(layouts):
        ranks: Sequence[int] = range(group.size)
        if layout.domain is not None:
            ranks = layout.domain.members(layout.domain.group_of(group.rank))
        total = 0.0
        for rank in ranks:
            total += float(everyones[rank, place])
        norms.append(total)
    return norms


def clip_parts(
    group: ReplicaGroup, clipping: GradientClipping, gradients: Sequence[Array], layouts: Sequence[Layout]
) -> list[Array]:
    """The gradients as a Keras optimizer would clip them; arguments as of `squared_norms`."""
    if clipping.clipvalue is not None:
        return [np.clip(array, -clipping.clipvalue, clipping.clipvalue).astype(array.dtype) for array in gradients]
    if clipping.clipnorm is not None:
        norms = np.sqrt(squared_norms(group, gradients, layouts))
        # np.maximum, as it keeps NaN.
        scales = list(clipping.clipnorm / np.maximum(norms, clipping.clipnorm))
    elif clipping.global_clipnorm is not None:
        norm = np.sqrt(np.float64(sum(squared_norms(group, gradients, layouts))))
        scales = [clipping.global_clipnorm / np.maximum(norm, clipping.global_clipnorm)] * len(gradients)
    else:
        return list(gradients)
    return [array * array.dtype.type(scale) for array, scale in zip(gradients, scales, strict=True)]


def _own(group: ReplicaGroup, array: Array, layout: Layout) -> Array:
    """This replica's elements of a gradient, flat and without padding."""
    if layout.domain is None or layout.split is None:
        first, last = VariableSplit(array.size, group.size).bounds(group.rank)
        return array.reshape(-1)[first:last]
    members = layout.domain.members(layout.domain.group_of(group.rank))
    first, last = layout.split.bounds(members.index(group.rank))
    return array[: last - first]


def _sum_of_squares(flat: Array) -> float:
    total = 0.0
    for first in range(0, flat.size, _AT_ONCE):
        total += float(np.square(flat[first : first + _AT_ONCE], dtype=np.float64).sum())
    return total
