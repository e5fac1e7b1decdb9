"""A worker's part of a model: weights and optimizer state of its shard of the entities, and of all relations."""

from collections.abc import Mapping

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Float32, Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import InitializerSpec, TableSpec
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph.sharding import Sharding
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.schemes.candidate_losses import StepGradients
from elastable.replicas.knowledge_graphs.scores.catalogue import score_function
from elastable.replicas.knowledge_graphs.scores.functions import ScoreFunction

_SLOTS = ".slots"


class ShardedModel:
    """Entities spread over the group; relations and further variables are the same on every worker.

    Initial values are functions of the seed and global ids, so they do not depend on the number of workers.

    Args:
        group: Worker and shard are a member's rank.
        settings: The model, its optimizer and its seed.
        relations: Number of relations, with inverse ones.

    Attributes:
        entities: float32 `[rows, entity_width]`: this worker's shard.
        relations: float32 `[R, relation_width]`.

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
        self.entities = np.zeros((sharding.rows, self.score.entity_width), np.float32)
        self.entities[: self.held] = _initial(
            "entities", self.score.entities, self.score.entity_width, settings, sharding.held_by(group.rank)
        )
        self.relations = _initial(
            "relations", self.score.relations, self.score.relation_width, settings, np.arange(relations)
        )
        # As rows of length 1, so that the row optimizers' kernels update them, too.
        self._dense = {name: value.reshape(-1, 1).copy() for name, value in self.score.dense.items()}
        self._shapes = {name: value.shape for name, value in self.score.dense.items()}
        self._bind()
        self._slots = {name: self._initial_slots(value) for name, value in self._variables().items()}

    def update(self, gradients: StepGradients, step: int, rate: float) -> None:
        """One optimizer step.

        Args:
            gradients: Those of this worker's shard; of relations and further variables, summed over all workers.
            step: Number of steps taken before.
        """
        places = np.ascontiguousarray(gradients.rows, np.int64)
        self._apply("entities", self.entities, places, gradients.entities, step, rate)
        self._apply("relations", self.relations, np.arange(len(self.relations)), gradients.relations, step, rate)
        for name, value in self._dense.items():
            flat = gradients.dense[name].reshape(-1, 1)
            self._apply(f"dense.{name}", value, np.arange(len(value)), flat, step, rate)

    def state(self) -> dict[str, Array]:
        """Weights and slots by name, entities by global id; every member calls it and gets the whole state."""
        found: dict[str, Array] = {}
        for name, value in self._variables().items():
            whole = self._whole if name == "entities" else np.copy
            found[name], found[name + _SLOTS] = whole(value), whole(self._slots[name])
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restores a `state` of any number of workers.

        Raises:
            BadInput: values are missing or have other shapes; nothing has changed.
        """
        rank = self.group.rank
        wanted = {**self._variables(), **{name + _SLOTS: slots for name, slots in self._slots.items()}}
        for name, value in wanted.items():
            shape = (self.sharding.entities, *value.shape[1:]) if name.startswith("entities") else value.shape
            if name not in state or state[name].shape != shape:
                shape_found = list(state[name].shape) if name in state else "nothing"
                raise BadInput(f"state of a knowledge-graph model: {name} must be {list(shape)}, found {shape_found}")
        for name, value in wanted.items():
            whole = np.asarray(state[name], np.float32)
            value[:] = self.sharding.shard_table(whole, rank) if name.startswith("entities") else whole

    def _variables(self) -> dict[str, Float32]:
        dense = {f"dense.{name}": value for name, value in self._dense.items()}
        return {"entities": self.entities, "relations": self.relations, **dense}

    def _whole(self, shard: Float32) -> Array:
        return self.sharding.whole_table(self.group.all_gather(shard))

    def _initial_slots(self, value: Float32) -> Float32:
        first = self._optimizer.initial_slots(value.shape[1])
        return np.tile(first, (len(value), 1)).astype(np.float32).reshape(len(value), len(first))

    def _apply(self, name: str, value: Float32, places: Int64, gradients: Float32, step: int, rate: float) -> None:
        batch = UpdateBatch(places, places, np.ascontiguousarray(gradients), step, rate)
        self._optimizer.apply(value, self._slots[name], batch)

    def _bind(self) -> None:
        if self._dense:
            self.score.bind({name: value.reshape(self._shapes[name]) for name, value in self._dense.items()})


def _initial(name: str, initializer: InitializerSpec, width: int, settings: TrainSettings, ids: Int64) -> Float32:
    if settings.spread is not None and not (name == "relations" and settings.model == "RotatE"):
        kind = initializer.kind
        ends = (-settings.spread, settings.spread) if kind == "uniform" else (0.0, settings.spread)
        initializer = InitializerSpec(kind, *ends)
    spec = TableSpec(name, dim=width, initializer=initializer, seed=settings.seed)
    return initial_rows(spec, np.ascontiguousarray(ids, np.int64))
