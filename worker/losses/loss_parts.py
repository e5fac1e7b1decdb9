"""The parts of a micro-batch's loss that a version combines differently, and what each adds to the loss metrics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DivisorKind
from elastable.worker.losses.loss_terms import LossTerm
from elastable.worker.losses.recording import RecordedLoss

__all__ = ["LossPart", "loss_parts", "require_rowwise", "shown_losses"]


@dataclass(frozen=True, slots=True)
class LossPart:
    """Terms of a loss that are divided by the same number.

    Attributes:
        kind: What they are divided by; None: decided by the job's `average`.
        amount: With `DivisorKind.AMOUNT` the divisor, a float64 scalar; else None.
        loss: Their sum.
        losses: Place of a metric's total -> the mean that they add to it.
    """

    kind: DivisorKind | None
    amount: tf.Tensor | None
    loss: tf.Tensor
    losses: Mapping[int, tf.Tensor] = field(default_factory=dict)


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
    if len(groups) == 1 and not any(term.may_be_empty for term in terms):
        # The loss itself: adding its terms again could change the order of additions.
        ((kind, _),) = groups
        return [LossPart(kind, next(iter(groups.values()))[0].amount, loss)]
    return [LossPart(kind, alike[0].amount, _sum(alike)) for (kind, _), alike in groups.items()]


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


def shown_losses(
    model: keras.Model, parts: Sequence[LossPart], settled: Sequence[RecordedLoss], penalty: tf.Tensor | None
) -> tuple[list[LossPart], Mapping[int, tf.Tensor]]:
    """The parts with what they add to Keras' loss metrics, and what a penalty on rows adds to them.

    Not needed for a mean over records: metric states of micro-batches are summed directly.
    """
    if [part.kind for part in parts] == [DivisorKind.RECORDS] or parts[0].loss.shape.rank != 0:
        return list(parts), {}
    places = {id(variable): place for place, variable in enumerate(model.metrics_variables)}
    own = getattr(model, "_loss_tracker", None)
    whole = None if own is None else places.get(id(own.total))
    trackers = list(getattr(getattr(model, "_compile_loss", None), "metrics", ()))
    outputs = zip(trackers, settled, strict=True) if len(trackers) == len(settled) else ()
    found = [{} if whole is None else {whole: part.loss} for part in parts]
    for tracker, loss in outputs:
        for part, losses in zip(parts, found, strict=True):
            if (part.kind, part.amount is loss.amount) == (loss.kind, True) and loss.result.shape.rank == 0:
                losses[places[id(tracker.total)]] = loss.result
    shown = [LossPart(part.kind, part.amount, part.loss, losses) for part, losses in zip(parts, found, strict=True)]
    return shown, {} if whole is None or penalty is None else {whole: penalty}


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
