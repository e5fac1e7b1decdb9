"""What the exit codes of the `elastable` command mean."""

from enum import IntEnum

from elastable.embedding_store.errors import (
    BadInput,
    CheckpointError,
    ElastableError,
    JobFailed,
    ModelError,
    NotInstalled,
    PermissionDenied,
    StoreFailed,
    Unauthenticated,
    Unavailable,
    VersionError,
)


class ExitCode(IntEnum):
    """Exit codes; 2 is typer's own for arguments that cannot be parsed."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    BAD_INPUT = 3
    BAD_MODEL = 4
    UNAVAILABLE = 5
    STORE_FAILED = 6
    JOB_FAILED = 7
    BAD_CHECKPOINT = 8
    UNAUTHENTICATED = 9
    NOT_INSTALLED = 10
    PERMISSION_DENIED = 11
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141

    @property
    def meaning(self) -> str:
        """One line of help."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.DONE: "all is done",
    ExitCode.UNEXPECTED: "an error nobody foresaw; please report it",
    ExitCode.USAGE: "the command line is wrong: see `elastable COMMAND --help`",
    ExitCode.BAD_INPUT: "data, ids, gradients or settings that cannot be used: correct what the message names",
    ExitCode.BAD_MODEL: "the model or the model file cannot be used: correct it",
    ExitCode.UNAVAILABLE: "a master or store cannot be reached within the deadline: start it, or correct its address",
    ExitCode.STORE_FAILED: "the store failed or lost a shard; nothing was made up: see it, then start with --resume",
    ExitCode.JOB_FAILED: "the job ended before its last version: start it again with --resume",
    ExitCode.BAD_CHECKPOINT: "a checkpoint is missing, damaged or of another model: take the one that is proposed",
    ExitCode.UNAUTHENTICATED: "a token or certificate is missing, or not one that the other end accepts",
    ExitCode.NOT_INSTALLED: "a library that an extra brings is not installed: the error says which extra",
    ExitCode.PERMISSION_DENIED: "the role of the token or certificate does not allow it: use another role's token",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); stopped cleanly, with a checkpoint: start again with --resume",
    ExitCode.OUTPUT_CLOSED: "the reader of standard output has gone, as head does; a job stops as when interrupted",
}

_CODES: tuple[tuple[type[ElastableError], ExitCode], ...] = (
    (CheckpointError, ExitCode.BAD_CHECKPOINT),
    (NotInstalled, ExitCode.NOT_INSTALLED),
    (ModelError, ExitCode.BAD_MODEL),
    (Unavailable, ExitCode.UNAVAILABLE),
    (StoreFailed, ExitCode.STORE_FAILED),
    (JobFailed, ExitCode.JOB_FAILED),
    (VersionError, ExitCode.JOB_FAILED),
    (BadInput, ExitCode.BAD_INPUT),
    (Unauthenticated, ExitCode.UNAUTHENTICATED),
    (PermissionDenied, ExitCode.PERMISSION_DENIED),
)


def exit_code_of(error: ElastableError) -> ExitCode:
    """The exit code that tells of this error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.UNEXPECTED)


def error_of(code: int) -> type[ElastableError]:
    """The kind of error that a process's exit code tells of; `JobFailed` for codes that are not ours."""
    return next((kind for kind, known in _CODES if known == code), JobFailed)


def exit_code_table() -> str:
    """All codes and meanings, for `--help`."""
    return "\n\n".join(f"{code.value}: {code.meaning}" for code in ExitCode)
