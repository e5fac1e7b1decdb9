"""The one error tree of Elastable; `elastable.embedding_store.wire.channels.status_codes` maps it to gRPC."""

__all__ = [
    "BadGradient",
    "BadIds",
    "BadInput",
    "BadSpec",
    "CheckpointError",
    "DeadlineExceeded",
    "ElastableError",
    "FutureVersion",
    "IdOutOfRange",
    "JobFailed",
    "ModelError",
    "NotFinite",
    "NotInstalled",
    "NotJoined",
    "NotReady",
    "PermissionDenied",
    "ShardAway",
    "ShardLost",
    "SpecConflict",
    "StaleVersion",
    "StoreBroken",
    "StoreFailed",
    "TableNotFound",
    "TakenOver",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "VersionError",
]


class ElastableError(Exception):
    """Root of every error that Elastable raises on purpose; names what was given, where, and what would be right."""


class BadInput(ElastableError, ValueError):
    """A value that was handed in is not one that can be used."""


class BadSpec(BadInput):
    """A table, initializer, optimizer or job description that cannot be."""


class BadIds(BadInput):
    """Ids of a wrong dtype or shape."""


class IdOutOfRange(BadIds):
    """An id outside `0 <= id < vocabulary_size` of a fixed table."""


class BadGradient(BadInput):
    """A gradient of a wrong shape or dtype."""


class NotFinite(BadGradient):
    """A gradient, or a row that is put, holds NaN or Inf."""


class TableNotFound(BadInput):
    """No table of that name."""


class SpecConflict(BadInput):
    """A table of that name exists with another specification."""


class VersionError(ElastableError):
    """A version that is not the one needed."""


class StaleVersion(VersionError):
    """The version named is past."""


class FutureVersion(VersionError):
    """The version named has not been committed yet."""


class Unavailable(ElastableError, ConnectionError):
    """A server cannot be reached; the message names its address."""


class NotReady(Unavailable):
    """A server answers that it cannot serve yet: it is loading its data, or a failover is under way. Try again."""


class DeadlineExceeded(Unavailable):
    """No answer within the stated deadline."""


class Unauthenticated(ElastableError):
    """A client and a server do not accept each other: a token or certificate that is missing, or not the right one."""


class PermissionDenied(ElastableError):
    """A server knows the caller, and its role or session does not allow the call."""


class StoreFailed(ElastableError):
    """The store answered with a failure; no value was substituted for it."""


class StoreBroken(StoreFailed):
    """The store failed in the middle of a change and fails ever since: no repetition mends it, a checkpoint does."""


class ShardAway(StoreFailed, Unavailable):
    """A shard of a store cannot be reached now; the message names the shard. Try again."""


class ShardLost(StoreBroken):
    """A shard of a store has lost its rows, or has stayed away until the deadline; the message names the shard."""


class TakenOver(StoreFailed):
    """Another process has become the store's only writer; this one may not write to it any more."""


class NotJoined(ElastableError):
    """A worker without a session asked for work; it has to join (again)."""


class ModelError(ElastableError):
    """The user's model or model file cannot be used as it is."""


class Unsupported(ModelError):
    """Something that was asked for, by name, and that is not honoured."""


class NotInstalled(Unsupported, ImportError):
    """Something that needs a library which is not installed here; the message says which extra brings it."""


class CheckpointError(ElastableError):
    """A checkpoint that is missing, torn, or of another model."""


class JobFailed(ElastableError):
    """The job ended without reaching its last version."""
