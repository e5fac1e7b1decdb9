"""The parts of a micro-batch's loss that a version combines differently, and what each adds to the loss metrics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DivisorKind
from elastable.worker.losses.loss_terms import LossTerm
from elastable.worker.losses.metric_means import MetricMean

__all__ = ["LossPart", "loss_parts", "parts_with_metrics", "require_rowwise"]


@dataclass(frozen=True, slots=True)
class LossPart:
    """Terms of a loss that are divided by the same number.

    Attributes:
        kind: What they are divided by; None: decided by the job's `average`.
        amount: With `DivisorKind.AMOUNT` the divisor, a float64 scalar; else None.
        loss: Their sum; None: they are of metrics alone.
        losses: Place of a metric's total -> the mean that they add to it.
        penalties: With `DivisorKind.ROWS`: table -> what each of its rows adds to the loss.
        where: The operation that divides them, for messages.
    """

    kind: DivisorKind | None
    amount: tf.Tensor | None
    loss: tf.Tensor | None
    losses: Mapping[int, tf.Tensor] = field(default_factory=dict)
    penalties: Mapping[str, tf.Tensor] = field(default_factory=dict)
    where: str = ""


def loss_parts(model: keras.Model, loss: tf.Tensor, terms: Sequence[LossTerm], average: str) -> list[LossPart]:
    """The parts of a loss, those that depend on the batch first.

    Args:
        model: For messages.
        loss: The whole loss.
        terms: Its terms (`elastable.worker.losses.loss_terms`).
        average: How the job combines micro-batches; see `JobSpec`.

    Raises:
        Unsupported: with "mean", a term with an unknown divisor.
    """
    if average == "records":
        return [LossPart(DivisorKind.RECORDS, None, loss)]
    if average == "mean":
        _refuse_unknown(model, terms)
    groups: dict[tuple[DivisorKind | None, Hashable], list[LossTerm]] = {}
    for term in sorted(terms, key=lambda term: not term.of_batch):
        groups.setdefault(_group(term, average), []).append(term)
    if len(groups) == 1:
        # The loss itself: adding its terms again could change the order of additions.
        (((kind, _), (first, *_)),) = groups.items()
        return [LossPart(kind, first.amount, loss, where=first.where)]
    return [LossPart(kind, alike[0].amount, _sum(alike), where=alike[0].where) for (kind, _), alike in groups.items()]


def _group(term: LossTerm, average: str) -> tuple[DivisorKind | None, Hashable]:
    if average == "sum":
        return (DivisorKind.NOTHING if term.of_batch else DivisorKind.RECORDS), None
    return term.kind, None if term.amount is None else term.amount.ref()


def _sum(terms: Sequence[LossTerm]) -> tf.Tensor:
    values = [term.value for term in terms]
    return values[0] if len(values) == 1 else tf.add_n(values)


def _refuse_unknown(model: keras.Model, terms: Sequence[LossTerm]) -> None:
    for term in terms:
        if term.kind is None:
            mixes = ", as it joins the records of a batch, or is not known to keep them apart" if term.mixes else ""
            raise Unsupported(
                f"model {model.name!r}: with grads_to_wait above 1 every term of the loss needs a known divisor, and "
                f"that of operation {term.where} is unknown{mixes}. Return one value per record from a loss function, "
                "so that Keras reduces them; or end a term of add_loss or compute_loss in keras.ops.mean or "
                "keras.ops.sum over the records; or mark it with et.averaged(term) or et.summed(term); or use "
                "grads_to_wait=1 (--grads-to-wait 1), which trains it as it is; or weight micro-batches by their "
                "records: average='records' (--average records)"
            )


def parts_with_metrics(parts: Sequence[LossPart], means: Sequence[MetricMean]) -> list[LossPart]:
    """The parts with what their terms add to metrics; further ones for terms of metrics that are divided otherwise."""
    found = list(parts)
    added: list[dict[int, tf.Tensor]] = [{} for _ in parts]
    for mean in means:
        for term in mean.terms:
            places = [
                place for place, part in enumerate(found) if part.kind is term.kind and part.amount is term.amount
            ]
            if not places:
                found.append(LossPart(term.kind, term.amount, None))
                added.append({})
            losses = added[places[0] if places else -1]
            losses[mean.place] = losses[mean.place] + term.value if mean.place in losses else term.value
    return [replace(part, losses=losses) for part, losses in zip(found, added, strict=True)]


def require_rowwise(layer: keras.Layer) -> None:
    """Refuses a table's regularizer that does not treat rows separately, so micro-batches cannot be combined.

    Raises:
        Unsupported: names layer and regularizer.
    """
    rows = tf.constant(np.random.default_rng(0).normal(size=(4, layer.output_dim)).astype(np.float32))
    penalty = layer.embeddings_regularizer
    if not np.isclose(penalty(rows), sum(float(penalty(half)) for half in tf.split(rows, 2)), rtol=1e-4):
        raise Unsupported(
            f"embedding layer {layer.name!r}: its regularizer {type(penalty).__name__} combines the rows of a batch, "
            "so micro-batches cannot compute it separately (grads_to_wait above 1); use grads_to_wait=1"
        )
