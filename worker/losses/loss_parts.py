"""The parts of a micro-batch's loss that a version combines differently, and metrics that are means of such parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import keras
import numpy as np

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DivisorKind
from elastable.master.backend.lazy import tf
from elastable.worker.losses.loss_terms import LossTerm, LossTerms
from elastable.worker.losses.origin_rules import Holds
from elastable.worker.losses.origins import Origins, changes_of, operation_named
from elastable.worker.losses.recording import MetricUpdate, Recording, keras_metric


@dataclass(frozen=True, slots=True)
class MetricMean:
    """A `keras.metrics.Mean` of numbers of whole batches.

    Attributes:
        place: Of its total among the metric variables.
        terms: What the number is the sum of.
        once: Whether its count is of a batch, however many records it has.
    """

    place: int
    terms: Sequence[LossTerm]
    once: bool


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Every metric of a model by itself, those of `compile()` included."""
    return [part for metric in model.metrics for part in getattr(metric, "metrics", None) or [metric]]


def metric_means(
    model: keras.Model, recorded: Recording, terms: LossTerms, origins: Origins, states: Mapping[int, tf.Tensor]
) -> list[MetricMean]:
    """The metrics of a traced step that are means of numbers of whole batches.

    The states of micro-batches are added up, so all others must be sums over records.

    Args:
        states: id of a metric variable -> its value at the end of the step.

    Raises:
        Unsupported: a metric that is neither such a mean nor a sum over records; names it, and the operation.
    """
    for update in recorded.updates:
        if not _is_of_whole_batch(update):
            _require_records(update, terms, origins)
    for metric in all_metrics(model):
        if keras_metric(metric) is None:
            _require_sums(metric, terms, origins, states)
    places = {id(variable): place for place, variable in enumerate(model.metrics_variables)}
    means = [_mean(updates, places, terms, origins) for updates in _of_whole_batches(recorded, places).values()]
    return [mean for mean in means if mean is not None]


def eager_means(
    model: keras.Model, recorded: Recording, records: int, kind: DivisorKind, penalty: tf.Tensor | None
) -> list[MetricMean]:
    """As `metric_means`, of a step that runs eagerly, whose graph has shown that all numbers are divided alike.

    Args:
        records: In the micro-batch.
        kind: What the numbers are divided by.
        penalty: On rows, which Keras' loss metric counts in; None: there is none.
    """
    means = []
    places = {id(variable): place for place, variable in enumerate(model.metrics_variables)}
    for updates in _of_whole_batches(recorded, places).values():
        metric, weight = updates[0].metric, updates[0].weight
        number = tf.add_n([update.given[0] for update in updates]) / len(updates)
        terms = [LossTerm(number, kind, None, True)]
        if penalty is not None and metric is getattr(model, "_loss_tracker", None):
            terms = [LossTerm(number - penalty, kind, None, True), LossTerm(penalty, DivisorKind.ROWS, None, False)]
        once = weight is None or float(weight) != records
        if once or len(terms) > 1 or kind is not DivisorKind.RECORDS:
            means.append(MetricMean(places[id(metric.total)], terms, once))
    return means


def _of_whole_batches(recorded: Recording, places: Mapping[int, int]) -> dict[int, list[MetricUpdate]]:
    """id of a `Mean` -> its updates by numbers of whole batches."""
    found: dict[int, list[MetricUpdate]] = {}
    for update in recorded.updates:
        if _is_of_whole_batch(update) and id(update.metric.total) in places:
            found.setdefault(id(update.metric), []).append(update)
    return found


def _is_of_whole_batch(update: MetricUpdate) -> bool:
    return update.by is keras.metrics.Mean and update.given[0].shape.rank == 0


def _require_records(update: MetricUpdate, terms: LossTerms, origins: Origins) -> None:
    if update.by not in (keras.metrics.Mean, keras.metrics.Sum):
        cause = origins.first_mixed(update.given)
        if cause is not None:
            _refuse(update.metric, operation_named(cause))
        return
    values = update.given[0]
    if update.by is keras.metrics.Sum and values.shape.rank == 0:
        if update.weight is not None or not terms.is_sum(values):
            _refuse(update.metric, operation_named(values.op))
        return
    function = getattr(update.metric, "_fn", None)
    if getattr(function, "__module__", type(function).__module__).startswith("keras."):
        # Keras' own functions have a value for each record, or mix them and have none.
        if values.shape.rank == 0 or values.shape[0] is not None:
            _refuse(update.metric, operation_named(values.op))
        return
    weight = update.weight
    if weight is not None and weight.shape.rank == 0:  # the mean of the values counts as many times
        if _counts_batches(update, origins) or not origins.counts_records(values):
            _refuse(update.metric, operation_named(values.op))
        weight = None
    cause = values.op if origins.of(values).kind is Holds.CONSTANT else None
    cause = cause or origins.first_mixed([values] if weight is None else [values, weight])
    if cause is not None:
        _refuse(update.metric, operation_named(cause))


def _require_sums(
    metric: keras.metrics.Metric, terms: LossTerms, origins: Origins, states: Mapping[int, tf.Tensor]
) -> None:
    """A metric with a separate update: what it adds to its state are sums over records."""
    for variable in metric.variables:
        state = states.get(id(variable))
        if state is not None and not terms.is_sum(state):
            _refuse(
                metric, operation_named(state.op if not (assigned := origins.assigned_to(state)) else assigned[0][0].op)
            )


def _mean(
    updates: Sequence[MetricUpdate], places: Mapping[int, int], terms: LossTerms, origins: Origins
) -> MetricMean | None:
    """None: its states are sums over records, as of a mean over records that is weighted by their number."""
    metric = updates[0].metric
    once = {_counts_batches(update, origins) for update in updates}
    weights = {update.weight is None for update in updates}
    if len(once) != 1 or len(weights) != 1 or (len(updates) > 1 and weights != {True}):
        _refuse(metric, operation_named(updates[-1].given[0].op))
    found = [term.scaled(1.0 / len(updates)) for update in updates for term in terms.of(update.given[0])]
    for term in found:
        if term.kind is None:
            _refuse(metric, term.where)
    if once == {False} and all(term.kind is DivisorKind.RECORDS for term in found):
        return None
    return MetricMean(places[id(metric.total)], found, once == {True})


def _counts_batches(update: MetricUpdate, origins: Origins) -> bool:
    if update.weight is None:
        return True
    weight = origins.of(update.weight)
    if weight.kind is not Holds.CONSTANT and not (weight.kind is Holds.COUNT and weight.counted):
        _refuse(update.metric, operation_named(update.weight.op))
    return weight.kind is Holds.CONSTANT


def _refuse(metric: keras.metrics.Metric, where: str) -> None:
    raise Unsupported(
        f"metric {metric.name!r} ({type(metric).__name__}): with grads_to_wait above 1 the states of micro-batches are "
        f"merged, and operation {where}, which is in its update, gives neither a sum over records nor a mean with a "
        "known divisor, or is not known to. Let a metric function return one value per record; keep sums over records "
        "in the state of a metric of your own; or compute it in a callback; or use grads_to_wait=1 (--grads-to-wait "
        "1), or average='records' (--average records), which merges it as it is"
    )


# The parts of a loss


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


def loss_parts(
    model: keras.Model, loss: tf.Tensor, terms: Sequence[LossTerm], average: str, updates: Sequence[MetricUpdate]
) -> list[LossPart]:
    """The parts of a loss, those that depend on the batch first.

    Args:
        model: For messages.
        average: How the job combines micro-batches; see `JobSpec`.
        updates: Of metrics, before.

    Raises:
        Unsupported: with "mean", a term with an unknown divisor, or a variable of the program's own that changes.
    """
    if average == "records":
        return [LossPart(DivisorKind.RECORDS, None, loss)]
    if average == "mean":
        _refuse_unknown(model, terms)
        _refuse_assigned(model, updates)
    groups: dict[tuple[DivisorKind | None, Hashable], list[LossTerm]] = {}
    for term in sorted(terms, key=lambda term: not term.of_batch):
        groups.setdefault(_group(term, average), []).append(term)
    if len(groups) == 1:
        # The loss itself: adding its terms again could change the order of additions.
        (((kind, _), (first, *_)),) = groups.items()
        return [LossPart(kind, first.amount, loss, where=first.where)]
    parts = []
    for (kind, _), alike in groups.items():
        first, values = alike[0], [term.value for term in alike]
        loss = values[0] if len(values) == 1 else tf.add_n(values)
        parts.append(LossPart(kind, first.amount, loss, where=first.where))
    return parts


def _group(term: LossTerm, average: str) -> tuple[DivisorKind | None, Hashable]:
    if average == "sum":
        return (DivisorKind.NOTHING if term.of_batch else DivisorKind.RECORDS), None
    return term.kind, None if term.amount is None else term.amount.ref()


def _refuse_unknown(model: keras.Model, terms: Sequence[LossTerm]) -> None:
    for term in terms:
        if term.kind is None:
            mixes = ", as it joins the records of a batch, or is not known to keep them apart" if term.mixes else ""
            raise Unsupported(
                f"model {model.name!r}: with grads_to_wait above 1 every term of the loss needs a known divisor, and "
                f"that of operation {term.where} is unknown{mixes}. Return one value per record from a loss function, "
                "so that Keras reduces them; or end a term of add_loss or compute_loss in keras.ops.mean or "
                "keras.ops.sum over the records, or in tf.math.divide_no_nan by a sum of weights; or mark it "
                "with et.averaged(term) or et.summed(term); or use "
                "grads_to_wait=1 (--grads-to-wait 1), which trains it as it is; or weight micro-batches by their "
                "records: average='records' (--average records)"
            )


def _refuse_assigned(model: keras.Model, updates: Sequence[MetricUpdate]) -> None:
    """Refuses a change of a variable that is neither of the model nor of a metric: it counts micro-batches."""
    metrics = [variable for update in updates for variable in update.metric.variables]
    known = {id(each.value.handle) for each in (*variables_of(model.variables), *model.metrics_variables, *metrics)}
    for operation, handle in changes_of(tf.compat.v1.get_default_graph()):
        # Keras' generators of random numbers may go on from each micro-batch.
        if id(handle) not in known and "seed_generator_state" not in str(handle):
            raise Unsupported(
                f"model {model.name!r}: operation {operation_named(operation)} changes a variable that is neither a "
                "weight of the model nor a state of a metric. With grads_to_wait above 1 a loss or metric function "
                "runs once for each micro-batch, and so does the change, once for a batch with Keras: use "
                "grads_to_wait=1 (--grads-to-wait 1), or change it in a callback"
            )


def parts_with_metrics(parts: Sequence[LossPart], means: Sequence[MetricMean]) -> list[LossPart]:
    """The parts with what their terms add to metrics; further ones for terms of metrics that are divided otherwise."""
    found = list(parts)
    added: list[dict[int, tf.Tensor]] = [{} for _ in parts]
    for mean in means:
        for term in mean.terms:
            same = (at for at, part in enumerate(found) if part.kind is term.kind and part.amount is term.amount)
            if (at := next(same, None)) is None:
                at = len(found)
                found.append(LossPart(term.kind, term.amount, None))
                added.append({})
            before = added[at].get(mean.place)
            added[at][mean.place] = term.value if before is None else before + term.value
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
