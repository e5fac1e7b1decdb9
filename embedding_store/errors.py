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
    """A value that cannot be used; also a `ValueError`. The message says which, where, and what would be right."""


class BadSpec(BadInput):
    """A table, initializer, optimizer or job that cannot be. Correct the definition that is named."""


class BadIds(BadInput):
    """Ids of a wrong dtype or shape, or a value that is no id. Give int64, or what the message lists."""


class IdOutOfRange(BadIds):
    """An id outside `0 <= id < vocabulary_size`. Correct the data, or take any id: `et.Embedding(None, dim)`."""


class BadGradient(BadInput):
    """A gradient of a wrong shape or dtype; an error of your own client. See the shape that is named."""


class NotFinite(BadGradient):
    """A gradient, or a row that is put, holds NaN or Inf.

    Lower the learning rate, look at the data; `--not-finite skip` leaves such micro-batches out.
    """


class TableNotFound(BadInput):
    """No table of that name. See the names that the message lists."""


class SpecConflict(BadInput):
    """A table of that name exists with another definition.

    Use the old one, another name or store; `--overwrite` drops the tables of an earlier job.
    """


class VersionError(ElastableError):
    """A version that is not the one needed."""


class StaleVersion(VersionError):
    """The version is past. Read the current one; to keep one readable, pin it."""


class FutureVersion(VersionError):
    """The version is not committed yet. Wait for it, or name the current one."""


class Unavailable(ElastableError, ConnectionError):
    """A server cannot be reached; also a `ConnectionError`.

    See whether it runs at the address in the message; clients try again until `--deadline`.
    """


class NotReady(Unavailable):
    """A server loads its data, or a failover is in progress. Try again; clients do so by themselves."""


class DeadlineExceeded(Unavailable):
    """No answer within the deadline. See what the server is doing (`elastable status`); raise `--deadline`."""


class Unauthenticated(ElastableError):
    """A client and a server do not accept each other. Set the token and certificates that the message names."""


class PermissionDenied(ElastableError):
    """The caller's role or session does not allow the call. Use the token of a role that may."""


class StoreFailed(ElastableError):
    """The store answered with a failure; nothing was made up in its place.

    The message holds the store's own: a full disk, a Redis that refuses writes.
    """


class StoreBroken(StoreFailed):
    """The store failed in the middle of a change, and fails ever since.

    Start again with `--resume`: it continues from the log or the newest checkpoint.
    """


class ShardAway(StoreFailed, Unavailable):
    """One of several stores cannot be reached. Start it again; the job waits until `--deadline`."""


class ShardLost(StoreBroken):
    """One of several stores has lost its rows or stayed unreachable.

    Start again with `--resume`; without a checkpoint, its rows are gone.
    """


class TakenOver(StoreFailed):
    """Another process has become the store's only writer. End one of the two; the message names the other."""


class NotJoined(ElastableError):
    """A worker without a session asked for work. Workers join again; your own client: open a session first."""


class ModelError(ElastableError):
    """The model or model file cannot be used as it is. The message names the layer or function, and what to write."""


class Unsupported(ModelError):
    """Something is not honoured, and would have changed numbers silently. Write what the message proposes."""


class NotInstalled(Unsupported, ImportError):
    """A library is missing; also an `ImportError`. Install the extra that the message names."""


class CheckpointError(ElastableError):
    """A checkpoint is missing, damaged or of another model.

    The message names the file, and an older intact checkpoint if there is one.
    """


class JobFailed(ElastableError):
    """The job ended before its last version. The message says why; start again with `--resume`."""
