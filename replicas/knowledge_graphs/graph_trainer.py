"""Trains a knowledge-graph model over a replica group, step by step; each worker's part of the model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Float32, Int32, Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import InitializerSpec, TableSpec
from elastable.embedding_store.errors import BadInput, NotFinite
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.grouping import coalesce
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph.batch import Side, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding, with_inverses
from elastable.replicas.knowledge_graphs.graph_settings import KVSALL, WHOLE_LOSSES, WHOLE_SOFTMAX, TrainSettings
from elastable.replicas.knowledge_graphs.losses import Loss, penalty_gradients
from elastable.replicas.knowledge_graphs.samplers import (
    AugmentedNegatives,
    RandomNegatives,
    RandomSampler,
    RigidSampler,
    ShardedSampler,
    TypedNegatives,
    frequency_weights,
)
from elastable.replicas.knowledge_graphs.schemes import (
    CandidateScheme,
    Dropout,
    EmbeddingMoving,
    KvsAll,
    Scheme,
    ScoreMoving,
    StepGradients,
    WholeSoftmax,
    distinct_queries,
)
from elastable.replicas.knowledge_graphs.scores.functions import ScoreFunction, Values, score_function

# A worker's part of a model: weights and optimizer state of its shard of the entities, and of all relations


_SLOTS = ".slots"


class ShardedModel:
    """Entities spread over the group; relations and further variables are the same on every worker.

    Initial values are functions of the seed and global ids, so they do not depend on the number of workers.

    Args:
        group: Worker and shard are a member's rank.
        settings: The model, its optimizer and its seed.
        relations: Number of relations, with inverse ones.

    Raises:
        BadInput: the numbers of shards and members differ.
    """

    def __init__(self, group: ReplicaGroup, settings: TrainSettings, sharding: Sharding, relations: int) -> None:
        if sharding.shards != group.size:
            raise BadInput(f"{sharding.shards} shards of entities need as many workers, not {group.size}")
        self.group, self.settings, self.sharding = group, settings, sharding
        self.score: ScoreFunction = score_function(settings.model, settings.dim, settings.norm, settings.seed)
        self._optimizer = row_optimizer(settings.optimizer_spec)
        self.held = int(sharding.counts[group.rank])
        score = self.score
        entities = np.zeros((sharding.rows, score.entity_width), np.float32)
        held = sharding.held_by(group.rank)
        entities[: self.held] = _initial("entities", score.entities, score.entity_width, settings, held)
        every = np.arange(relations)
        self._variables: dict[str, Float32] = {
            "entities": entities,
            "relations": _initial("relations", score.relations, score.relation_width, settings, every),
            # As rows of length 1, so that the row optimizers' kernels update them, too.
            **{f"dense.{name}": value.reshape(-1, 1).copy() for name, value in score.dense.items()},
        }
        score.bind({name: self._variables[f"dense.{name}"].reshape(old.shape) for name, old in score.dense.items()})
        self._slots = {name: self._initial_slots(value) for name, value in self._variables.items()}

    @property
    def entities(self) -> Float32:
        """float32 `[rows, entity_width]`: this worker's shard."""
        return self._variables["entities"]

    @property
    def relations(self) -> Float32:
        """float32 `[R, relation_width]`."""
        return self._variables["relations"]

    def update(self, gradients: StepGradients, step: int, rate: float) -> None:
        """One optimizer step.

        Args:
            gradients: Those of this worker's shard; of relations and further variables, summed over all workers.
            step: Number of steps taken before.
        """
        found = {"entities": gradients.entities, "relations": gradients.relations}
        found |= {f"dense.{name}": value.reshape(-1, 1) for name, value in gradients.dense.items()}
        for name, value in self._variables.items():
            rows = np.ascontiguousarray(gradients.rows, np.int64) if name == "entities" else np.arange(len(value))
            batch = UpdateBatch(rows, rows, np.ascontiguousarray(found[name]), step, rate)
            self._optimizer.apply(value, self._slots[name], batch)

    def asked(self, triples: Int32, side: Side) -> tuple[Int32, Side]:
        """The triples and side of its query for an end of triples: with reciprocal relations, tails of inverse ones."""
        if side == "head" and self.settings.reciprocal:
            return triples[:, ::-1] + np.array([0, len(self.relations) // 2, 0], np.int32), "tail"
        return triples, side

    def known(self, *triples: Int32) -> KnownTriples:
        """True triples, int32 `[N, 3]` each, for queries to it: with reciprocal relations, inverse ones, too."""
        every = np.concatenate(triples) if triples else np.empty((0, 3), np.int32)
        if self.settings.reciprocal:
            every = with_inverses(every, len(self.relations) // 2)
        return KnownTriples.create(self.sharding.entities, len(self.relations), every)

    def state(self) -> dict[str, Array]:
        """Weights and slots by name, entities by global id; every member calls it and gets the whole state."""
        return {
            name: self.sharding.whole_table(self.group.all_gather(value))
            if name.startswith("entities")
            else value.copy()
            for name, value in self._stored().items()
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restores a `state` of any number of workers.

        Raises:
            BadInput: values are missing or have other shapes; nothing has changed.
        """
        rank, wanted = self.group.rank, self._stored()
        for name, value in wanted.items():
            shape = (self.sharding.entities, *value.shape[1:]) if name.startswith("entities") else value.shape
            if name not in state or state[name].shape != shape:
                shape_found = list(state[name].shape) if name in state else "nothing"
                raise BadInput(f"state of a knowledge-graph model: {name} must be {list(shape)}, found {shape_found}")
        for name, value in wanted.items():
            whole = np.asarray(state[name], np.float32)
            value[:] = self.sharding.shard_table(whole, rank) if name.startswith("entities") else whole

    def _stored(self) -> dict[str, Float32]:
        return {**self._variables, **{name + _SLOTS: slots for name, slots in self._slots.items()}}

    def _initial_slots(self, value: Float32) -> Float32:
        first = self._optimizer.initial_slots(value.shape[1])
        return np.broadcast_to(np.asarray(first, np.float32), (len(value), len(first))).copy()


def _initial(name: str, initializer: InitializerSpec, width: int, settings: TrainSettings, ids: Int64) -> Float32:
    if settings.spread is not None and not (name == "relations" and settings.model == "RotatE"):
        kind = initializer.kind
        ends = (-settings.spread, settings.spread) if kind == "uniform" else (0.0, settings.spread)
        initializer = InitializerSpec(kind, *ends)
    spec = TableSpec(name, dim=width, initializer=initializer, seed=settings.seed)
    return initial_rows(spec, np.ascontiguousarray(ids, np.int64))


_STEP = "step"


class GraphTrainer:
    """One worker's part in training; every member of the group creates one and calls the same methods.

    Args:
        group: Worker and shard are a member's rank.
        relations: Number of relations, without inverse ones.
        triples: int32 `[N, 3]`: the training triples, by global id.
        pool: Threads of this worker; they do not affect results.
        entity_types: int32 `[entities]`, from 0; each type is spread evenly. None: no types.
        further_types: int32 `[K, 2]`: entity and type, for entities of several types.

    Attributes:
        step: Number of steps taken.
        wish: The largest `wish` of any member at the last step.

    Raises:
        BadInput: more workers than entities, no triples, or settings that do not fit.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        settings: TrainSettings,
        entities: int,
        relations: int,
        triples: Int32,
        pool: RangePool = SERIAL,
        entity_types: Int32 | None = None,
        further_types: Int32 | None = None,
    ) -> None:
        self.group, self.settings, self.pool = group, settings, pool
        self.sharding = Sharding.create(entities, group.size, seed=settings.seed, entity_types=entity_types)
        if settings.reciprocal:
            triples, relations = with_inverses(triples, relations), 2 * relations
        self.model = ShardedModel(group, settings, self.sharding, relations)
        self._sampler = _sampler(settings, self.sharding, triples, relations, further_types)
        self.steps_per_epoch = self._sampler.steps_per_epoch
        self.step, self.wish = 0, 0
        self._scheme = _scheme(self.model, triples, pool)

    def run_step(self, wish: int = 0) -> tuple[float, int]:
        """One step; returns its mean loss, without penalties, and its number of triples (each direction counts).

        Args:
            wish: What this member wants after the step, a number that all members learn (`wish`).

        Raises:
            NotFinite: the loss of a step is NaN or Inf; names the step.
            BadInput: workers read different numbers of rows of their shards.
        """
        batch = self._sampler.batch(self.step, self.group.rank)
        weight = (batch.weight / np.float32(max(1, batch.present))).astype(np.float32)
        loss, gradients = self._gradients(batch, weight)
        everyones = self.group.all_gather(np.array([loss, batch.gathered_rows, wish]))
        if (everyones[:, 1] != everyones[0, 1]).any():
            rows = everyones[:, 1].astype(int).tolist()
            raise BadInput(f"step {self.step}: workers read {rows} rows of their shards; balanced, they are equal")
        self.wish = int(everyones[:, 2].max())
        loss = float(everyones[:, 0].sum())
        if not np.isfinite(loss):
            raise NotFinite(f"the loss of step {self.step} is {loss}; a smaller learning rate may help")
        dense = {name: self.group.all_reduce(value) for name, value in gradients.dense.items()}
        gradients = replace(gradients, relations=self.group.all_reduce(gradients.relations), dense=dense)
        rate = self.settings.rate(self.step, self.settings.epochs * self.steps_per_epoch)
        self.model.update(gradients, self.step, rate)
        self.step += 1
        return loss, batch.present

    def state(self) -> dict[str, Array]:
        """The model and the step, in an order that does not depend on the workers; every member calls it."""
        return {**self.model.state(), _STEP: np.array([self.step], np.int64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restores a `state` of any number of workers; with the same number, training continues to the bit.

        Raises:
            BadInput: the state is of another model.
        """
        if _STEP not in state:
            raise BadInput("state of a knowledge-graph model: its step is missing")
        self.model.restore({name: value for name, value in state.items() if name != _STEP})
        self.step = int(state[_STEP][0])

    def _gradients(self, batch: StepBatch, weight: Float32) -> tuple[float, StepGradients]:
        """Those of the loss and of the penalties of this shard's heads and tails, and of its triples' relations."""
        model, settings = self.model, self.settings
        loss, found = self._scheme.step(
            batch, model.entities, model.relations, weight * np.float32(settings.loss_scale)
        )
        if settings.regularizer == "none" or settings.regularization <= 0:
            return loss, found
        everyones = self.group.all_gather(weight)
        places = np.concatenate([batch.head.reshape(-1), batch.tail.reshape(-1)]).astype(np.int64)
        weights = np.concatenate([weight.reshape(-1), everyones[:, self.group.rank].reshape(-1)])
        kinds = model.score.entity_values, model.score.relation_values
        rows, entities = self._add(found.rows, found.entities, places, weights, model.entities, kinds[0])
        relation, every = batch.relation.reshape(-1).astype(np.int64), np.arange(len(model.relations))
        _, relations = self._add(every, found.relations, relation, weight.reshape(-1), model.relations, kinds[1])
        return loss, StepGradients(rows, entities, relations, found.dense)

    def _add(
        self, rows: Array, gradients: Float32, places: Array, weights: Float32, values: Float32, kind: Values
    ) -> tuple[Array, Float32]:
        """Gradients with the penalties of `values[places]`, once per place."""
        scale = np.float32(self.settings.regularization)
        present, counts = np.unique(places, return_inverse=True)
        total = np.bincount(counts, weights, len(present)).astype(np.float32) * scale
        more = penalty_gradients(self.settings.regularizer, values[present], kind)
        more *= total[:, None]
        if np.array_equal(rows, np.arange(len(rows))):
            gradients[present] += more
            return rows, gradients
        update = coalesce(np.concatenate([rows, present]), np.concatenate([gradients, more]), self.pool)
        return update.ids, update.gradients


def _scheme(model: ShardedModel, triples: Int32, pool: RangePool) -> Scheme:
    """How a run's triples are scored and what its loss is."""
    group, score, settings, sharding = model.group, model.score, model.settings, model.sharding
    dropout = Dropout(settings.dropout, settings.seed) if settings.dropout else None
    smoothing = settings.label_smoothing
    if settings.loss == KVSALL:
        known = KnownTriples.create(sharding.entities, len(model.relations), triples)
        return KvsAll(group, score, sharding, ("tail",), smoothing, known=known, pool=pool, dropout=dropout)
    if settings.loss == WHOLE_SOFTMAX:
        sides: tuple[Side, ...] = ("tail",) if settings.reciprocal else ("head", "tail")
        return WholeSoftmax(group, score, sharding, sides, smoothing, pool=pool, dropout=dropout)
    kind: type[CandidateScheme] = EmbeddingMoving if settings.scheme == "embedding-moving" else ScoreMoving
    loss = Loss(settings.loss, settings.margin, settings.adversarial, sharding.entities)
    return kind(group, score, loss, pool=pool, dropout=dropout)


def _sampler(
    settings: TrainSettings, sharding: Sharding, triples: Int32, relations: int, types: Int32 | None
) -> ShardedSampler:
    """The batches of a run, with candidates if its loss needs them; triples and relations include inverses."""
    if settings.loss == KVSALL:
        triples = distinct_queries(triples)
    partition = PartitionedTriples.create(triples, sharding)
    negatives: RandomNegatives | None = None
    if settings.loss not in WHOLE_LOSSES:
        known = KnownTriples.create(sharding.entities, relations, triples) if settings.filtered else None
        drawn: dict[str, Any] = {"seed": settings.seed, "known": known, "total": settings.negatives}
        kind: type[RandomNegatives] = AugmentedNegatives
        if not settings.augment_negative:
            kind = TypedNegatives if settings.candidates == "typed" else RandomNegatives
            drawn |= {"corruption": settings.ends, "shared": settings.shared}
        drawn |= {"further_types": types} if kind is TypedNegatives else {}
        negatives = kind(sharding, -(-settings.negatives // sharding.shards), **drawn)
    weights = frequency_weights(partition.triples) if settings.weighting == "frequency" else None
    sampler: type[ShardedSampler] = RandomSampler if settings.sampling == "random" else RigidSampler
    batch = -(-settings.batch // sharding.shards)
    return sampler(partition, batch, seed=settings.seed, negatives=negatives, weights=weights)
