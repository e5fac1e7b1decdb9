"""What a table is: frozen descriptions, validated when they are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Real

from elastable.embedding_store.contract.malformed import MALFORMED, Document
from elastable.embedding_store.errors import BadSpec, SpecConflict

_MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127

ID_KINDS = ("int64", "farmhash64")

WEIGHT_DTYPES = ("float32", "float16", "bfloat16", "int8")

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer by name, with hyperparameters under Keras' own names.

    Attributes:
        name: A fused optimizer ("sgd", "adagrad", "adam", ...), or "keras" for
            any other Keras optimizer, run on the gathered block of rows.
        hyperparameters: Sorted pairs (name, value); booleans are 0.0 or 1.0.
            `learning_rate` is the default where a commit names none.
        keras_config: JSON of `keras.optimizers.serialize`, for "keras" only.
        lazy: Whether a step moves the rows alone that have a gradient. False:
            all of them, as Keras' dense optimizers do, at the cost of those alone.
    """

    name: str = "sgd"
    hyperparameters: tuple[tuple[str, float], ...] = (("learning_rate", 0.01),)
    keras_config: str = ""
    lazy: bool = True

    @classmethod
    def of(cls, name: str, *, lazy: bool = True, **hyperparameters: float) -> OptimizerSpec:
        """The spec of a fused optimizer, `OptimizerSpec.of("adagrad", learning_rate=0.1)`.

        Raises:
            BadSpec: a hyperparameter that is no number.
        """
        for key, value in hyperparameters.items():
            if not isinstance(value, Real):
                raise BadSpec(f"optimizer {name!r}: {key} must be a number, got {value!r}")
        pairs = tuple(sorted((key, float(value)) for key, value in hyperparameters.items()))
        return cls(name, pairs, lazy=lazy)

    def same_but_rate(self, other: OptimizerSpec) -> bool:
        """Whether both train alike but for the learning rate, which every commit of a job names anew."""
        return self._without_rate() == other._without_rate()

    def _without_rate(self) -> tuple[object, ...]:
        pairs = tuple(pair for pair in self.hyperparameters if pair[0] != "learning_rate")
        return self.name, pairs, _rateless(json.loads(self.keras_config or "null")), self.lazy

    def get(self, name: str, default: float) -> float:
        """The hyperparameter `name`, or `default` where the spec has none."""
        return dict(self.hyperparameters).get(name, default)


def _rateless(config: object) -> object:
    """A config without its learning rates, however deep they lie; a config within another may be text."""
    if isinstance(config, dict):
        return {key: _rateless(value) for key, value in config.items() if key != "learning_rate"}
    if isinstance(config, list):
        # The pairs of an optimizer within another, as `elastable.master.model.wrapping_optimizers` writes them.
        return [
            _rateless(value) for value in config if not (isinstance(value, list) and value[:1] == ["learning_rate"])
        ]
    if isinstance(config, str) and config.startswith("{"):
        return _rateless(json.loads(config))
    return config


@dataclass(frozen=True, slots=True)
class AdmissionSpec:
    """When an id of a dynamic table gets its row.

    An id is sighted once by each commit that has a gradient for it. Sightings are counted in a sketch of fixed size, so
    an id may be admitted a little early where others fell on its counters, never late. Until then its gradients are
    dropped, and it reads its initial value.

    Attributes:
        sightings: Which sighting admits it; 1 admits at once.
        counters: Counters of the sketch, rounded up to a power of two; one
            byte each, so at most 255 sightings can be asked for.
    """

    sightings: int
    counters: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.sightings <= 255:
            raise BadSpec(f"admission: sightings must lie from 1 to 255, got {self.sightings}")
        if not 16 <= self.counters <= 1 << 30:
            raise BadSpec(f"admission: counters must lie from 16 to 2**30, got {self.counters}")


@dataclass(frozen=True, slots=True)
class EvictionSpec:
    """Which rows of a dynamic table are given up, and when.

    Looked at at the end of every commit whose version is a multiple of `every`. A row is touched by a commit that has a
    gradient for it. An evicted row loses weights and slots, and reads its initial value.

    With `ttl`, what a table holds depends on when versions were committed (`Commit.time`), and on nothing else of the
    clock: a commit that is replayed or repeated keeps its time.

    Attributes:
        max_age: Rows not touched for more than so many versions go; None: none go for age.
        min_frequency: Rows touched less often than this since they were last looked at go; None: none go for frequency.
        max_rows: At most so many rows stay, those touched last (of equal
            ones those with the smaller id); None: no budget.
        every: Versions from one look to the next.
        ttl: Rows not touched for more than so many seconds go, at most a 1024th of that later; None: none go for time.
    """

    max_age: int | None = None
    min_frequency: int | None = None
    max_rows: int | None = None
    every: int = 1
    ttl: float | None = None

    def __post_init__(self) -> None:
        if self.max_age is None and self.min_frequency is None and self.max_rows is None and self.ttl is None:
            raise BadSpec("eviction: give max_age, min_frequency, max_rows or ttl")
        if self.ttl is not None and not (isinstance(self.ttl, (int, float)) and 0.001 <= self.ttl < 2**31):
            raise BadSpec(f"eviction: ttl must lie from 0.001 to 2**31 seconds, got {self.ttl}")
        object.__setattr__(self, "ttl", None if self.ttl is None else float(self.ttl))
        for name in ("max_age", "min_frequency", "max_rows", "every"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise BadSpec(f"eviction: {name} must lie from 1 to 2**31 - 1, got {value}")


@dataclass(frozen=True, slots=True)
class ShardOrigin:
    """Where a shard's ids and columns lie in the whole table, whose initial values it shares.

    Attributes:
        id_stride: The shard's id i is id `i * id_stride + id_offset` of the table.
        id_offset: See there.
        first_column: The shard's column c is column `first_column + c` of the table.
        table: What was split into shards (itself a shard, where shards are split again); None: nothing was.
        shards: Into how many.
    """

    id_stride: int = 1
    id_offset: int = 0
    first_column: int = 0
    table: TableSpec | None = None
    shards: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.id_stride < 2**31 and 0 <= self.id_offset < self.id_stride and self.first_column >= 0):
            raise BadSpec(
                f"shard origin: need id_stride >= 1, 0 <= id_offset < id_stride and first_column >= 0, got {self}"
            )
        if self.shards < 1:
            raise BadSpec(f"shard origin: shards must be at least 1, got {self.shards}")


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table: its name, shape, initial values and optimizer.

    Attributes:
        name: Unique in a store; letters, digits and `._-/`, at most 200 of them.
        dim: Values in a row, at least 1.
        vocabulary_size: Ids are `0 <= id < vocabulary_size`; None: any int64.
        dtype: How weights are kept, one of `WEIGHT_DTYPES`; they are read as float32. Slots are always float32.
            int8 tables are written (`put`) and read, never trained.
        initializer: Distribution of the rows that were never updated; a scaled kind becomes what it means here.
        seed: Of the initial values.
        optimizer: How gradients become rows.
        admission: When ids get rows; None: at their first gradient. Dynamic tables only.
        eviction: Which rows are given up; None: none. Dynamic tables only.
        origin: The position of this table in a larger one of the same name and seed.
        ids: What ids are: "int64", or "farmhash64", the hashes of strings (`string_ids.hash_ids`). Rows
            are kept alike; who looks up by a string has to know.
    """

    name: str
    dim: int
    vocabulary_size: int | None = None
    dtype: str = "float32"
    initializer: InitializerSpec = field(default_factory=lambda: InitializerSpec("uniform", -0.05, 0.05))
    seed: int = 0
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    admission: AdmissionSpec | None = None
    eviction: EvictionSpec | None = None
    origin: ShardOrigin = ShardOrigin()
    ids: str = "int64"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise BadSpec(f"table name {self.name!r} is no string")
        if not self.name or len(self.name) > 200 or not all(c.isalnum() or c in "._-/" for c in self.name):
            raise BadSpec(f"table name {self.name!r}: use 1 to 200 letters, digits, '.', '_', '-' or '/'")
        if len(self.name.encode()) > 256:
            raise BadSpec(f"table name {self.name!r}: {len(self.name.encode())} bytes; the most are 256")
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or not 1 <= self.dim <= 65_536:
            raise BadSpec(f"table {self.name!r}: dim must be an integer from 1 to 65536, got {self.dim!r}")
        size = self.vocabulary_size
        if size is not None and not (isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= _INT64_MAX):
            raise BadSpec(f"table {self.name!r}: vocabulary_size must be None or a positive integer, got {size!r}")
        if self.dtype not in WEIGHT_DTYPES:
            raise BadSpec(f"table {self.name!r}: dtype {self.dtype!r}; known dtypes are {', '.join(WEIGHT_DTYPES)}")
        if self.ids not in ID_KINDS or (self.ids != "int64" and size is not None):
            raise BadSpec(
                f"table {self.name!r}: ids {self.ids!r}; known are {', '.join(ID_KINDS)}, hashes only where "
                f"vocabulary_size is None (it is {size})"
            )
        object.__setattr__(self, "initializer", self.initializer.for_table(self.name, size, self.dim))
        if not -(2**63) <= self.seed <= _INT64_MAX:
            raise BadSpec(f"table {self.name!r}: seed {self.seed} does not fit in int64")
        if size is not None and (self.admission is not None or self.eviction is not None):
            raise BadSpec(
                f"table {self.name!r}: admission and eviction are for dynamic tables (vocabulary_size=None); "
                f"its vocabulary_size is {size}"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights of one row take, with an int8 row's scale."""
        return {"float32": 4 * self.dim, "int8": self.dim + 4}.get(self.dtype, 2 * self.dim)

    @property
    def timed(self) -> bool:
        """Whether rows go with time (`EvictionSpec.ttl`)."""
        return self.eviction is not None and self.eviction.ttl is not None

    @property
    def shares_rows(self) -> bool:
        """Whether it is a shard that holds only some ids of a whole table."""
        return self.origin.id_stride > 1

    def shares_budget(self, version: int) -> bool:
        """Whether at this version rows go for a `max_rows` that the table, as a shard, cannot look after by itself."""
        rule = self.eviction
        return rule is not None and rule.max_rows is not None and self.shares_rows and version % rule.every == 0

    @property
    def whole(self) -> TableSpec:
        """The table that this one is a shard of, as it was declared before any split; itself, if it is none."""
        return self if self.origin.table is None else self.origin.table.whole

    def differences(self, other: TableSpec) -> Mapping[str, tuple[object, object]]:
        """The fields in which two specs differ: name -> (ours, theirs)."""
        names = [part.name for part in fields(self)]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def refuse_conflict(ours: TableSpec, theirs: TableSpec) -> None:
    """Raises `SpecConflict` where a table is declared again with another spec."""
    if ours != theirs:
        differences = ours.differences(theirs)
        found = "; ".join(f"{name} is {mine!r}, not {other!r}" for name, (mine, other) in differences.items())
        raise SpecConflict(f"table {ours.name!r} already exists with another spec: {found}")


# Initializers of tables: kinds, and those whose spread depends on the table's shape (Glorot, He, LeCun)


INITIALIZER_KINDS = ("zeros", "ones", "constant", "uniform", "normal", "truncated_normal")
_ALIASES = {"random_uniform": ("uniform", -0.05, 0.05), "random_normal": ("normal", 0.0, 0.05)}

#: Keras draws a truncated normal from a wider one, so that its standard
#: deviation after the cut at two sigma is the one asked for.
TRUNCATION = 0.87962566103423978

_SCALED = {
    "glorot_uniform": (1.0, "fan_avg", "uniform"),
    "glorot_normal": (1.0, "fan_avg", "truncated_normal"),
    "he_uniform": (2.0, "fan_in", "uniform"),
    "he_normal": (2.0, "fan_in", "truncated_normal"),
    "lecun_uniform": (1.0, "fan_in", "uniform"),
    "lecun_normal": (1.0, "fan_in", "truncated_normal"),
}

SCALED_INITIALIZERS = tuple(_SCALED)
"""Kinds whose distribution is known once the table's shape is."""


def variance_scaling(scale: float, mode: str, distribution: str, rows: float, dim: int) -> tuple[str, float, float]:
    """What Keras' `VarianceScaling` draws a table from, as kind, a and b of an `InitializerSpec`.

    Args:
        scale: The scale of `VarianceScaling`.
        mode: "fan_in", "fan_out" or "fan_avg". The fans of a table are, as Keras
            reckons them for any matrix, its rows (in) and its columns (out).
        distribution: "uniform", "truncated_normal" or "untruncated_normal".
        rows: Size of the vocabulary.
        dim: Columns.
    """
    fan = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}[mode]
    variance = scale / max(1.0, fan)
    if distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return "uniform", -limit, limit
    if distribution == "truncated_normal":
        return "truncated_normal", 0.0, math.sqrt(variance) / TRUNCATION
    return "normal", 0.0, math.sqrt(variance)


@dataclass(frozen=True, slots=True)
class InitializerSpec:
    """A distribution of initial values.

    Attributes:
        kind: One of `INITIALIZER_KINDS`, or of `SCALED_INITIALIZERS` (Glorot, He, LeCun), which the
            `TableSpec` replaces by the distribution that its shape makes of it. "random_uniform" and
            "random_normal" are Keras' names of "uniform" and "normal", and without a and b its defaults.
        a: `constant`: the value; `uniform`: low; normal kinds: mean; scaled kinds: rows to reckon with
            where the table has no vocabulary, 0 for the vocabulary's size.
        b: `uniform`: high; normal kinds: standard deviation (of the
            untruncated normal, which is cut at two of them, as in Keras).
    """

    kind: str = "uniform"
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind in _ALIASES:
            kind, *spread = _ALIASES[self.kind]
            a, b = spread if (self.a, self.b) == (0.0, 0.0) else (self.a, self.b)
            for name, value in (("kind", kind), ("a", a), ("b", b)):
                object.__setattr__(self, name, value)
        if self.kind not in (*INITIALIZER_KINDS, *SCALED_INITIALIZERS):
            known = ", ".join((*INITIALIZER_KINDS, *_ALIASES, *SCALED_INITIALIZERS))
            raise BadSpec(f"initializer kind {self.kind!r}: known kinds are {known}")
        if not all(abs(value) <= _MAX_FLOAT32 for value in (self.a, self.b, self.b - self.a)):  # NaN is not, either
            raise BadSpec(
                f"initializer {self.kind}: parameters, and the width of a range, must be finite in float32, got "
                f"a={self.a}, b={self.b}"
            )
        if self.kind == "uniform" and self.a > self.b:
            raise BadSpec(f"initializer uniform: low {self.a} is above high {self.b}")
        if self.kind in ("normal", "truncated_normal") and self.b < 0:
            raise BadSpec(f"initializer {self.kind}: standard deviation {self.b} is negative")
        if self.kind in SCALED_INITIALIZERS and (self.b != 0 or not (self.a == 0 or self.a >= 1)):
            raise BadSpec(f"initializer {self.kind}: a is a number of rows, b is not used; got a={self.a}, b={self.b}")

    def for_table(self, table: str, vocabulary_size: int | None, dim: int) -> InitializerSpec:
        """The distribution itself, also of a scaled kind.

        Raises:
            BadSpec: it scales with the size of a vocabulary that the table has not.
        """
        if self.kind not in SCALED_INITIALIZERS:
            return self
        if self.a == 0 and vocabulary_size is None:
            raise BadSpec(
                f"table {table!r}: initializer {self.kind} scales with the size of the vocabulary, and "
                "vocabulary_size=None has none; say how many rows to reckon with, "
                f"InitializerSpec({self.kind!r}, a=ROWS), "
                'or give a spread of your own, InitializerSpec("uniform", low, high)'
            )
        return InitializerSpec(*variance_scaling(*_SCALED[self.kind], self.a or float(vocabulary_size or 1), dim))


# Table specs as JSON, and back without loss


_PLAIN = TableSpec("plain", 1)
_PARTS = {"admission": AdmissionSpec, "eviction": EvictionSpec}


def spec_to_json(spec: TableSpec) -> str:
    """The spec as one JSON object; equal specs give equal text.

    What a table does not have (admission, eviction, ids of strings, an origin, rows that follow every step) is
    left out.
    """
    return json.dumps(_fields(spec), sort_keys=True)


def spec_from_json(text: str | bytes) -> TableSpec:
    """The spec that `spec_to_json` wrote.

    Raises:
        BadSpec: the text is no table spec.
    """
    try:
        spec = _spec(json.loads(text))
        hash(spec)  # a TypeError for a list or an object in place of a value
        return spec
    except MALFORMED as error:
        raise BadSpec(f"{text[:200]!r} is no table spec: {error}") from error


def _fields(spec: TableSpec) -> Document:
    fields = asdict(spec)
    for name in ("admission", "eviction", "ids", "origin"):
        if getattr(spec, name) == getattr(_PLAIN, name):
            del fields[name]
    if spec.eviction is not None and spec.eviction.ttl is None:
        del fields["eviction"]["ttl"]  # as releases without it wrote it
    if spec.optimizer.lazy:
        del fields["optimizer"]["lazy"]
    if "origin" in fields:
        table, origin = spec.origin.table, fields["origin"]
        if table is None:
            del origin["table"], origin["shards"]
        else:
            origin["table"] = _fields(table)
    return fields


def _spec(fields: Document) -> TableSpec:
    optimizer = fields["optimizer"]
    pairs = tuple((str(name), float(value)) for name, value in optimizer["hyperparameters"])
    return TableSpec(
        **{
            **fields,
            "initializer": InitializerSpec(**fields["initializer"]),
            "optimizer": OptimizerSpec(
                optimizer["name"], pairs, optimizer["keras_config"], bool(optimizer.get("lazy", True))
            ),
            **{name: kind(**fields[name]) for name, kind in _PARTS.items() if name in fields},
            **({"origin": _origin(fields["origin"])} if "origin" in fields else {}),
        }
    )


def _origin(fields: Document) -> ShardOrigin:
    table = fields.get("table")
    return ShardOrigin(**{**fields, "table": None if table is None else _spec(table)})
