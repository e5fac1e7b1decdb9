"""What the exit codes of the `elastable` command mean."""

from enum import IntEnum
from typing import Self

from elastable.embedding_store.errors import (
    BadInput,
    CheckpointError,
    ElastableError,
    JobFailed,
    ModelError,
    NotInstalled,
    PermissionDenied,
    ShardAway,
    StoreFailed,
    Unauthenticated,
    Unavailable,
    VersionError,
)


class ExitCode(IntEnum):
    """Exit codes: number, one line of help, and the errors that end with it; 2 is typer's own for wrong arguments."""

    meaning: str
    errors: tuple[type[ElastableError], ...]

    def __new__(cls, code: int, meaning: str = "", *errors: type[ElastableError]) -> Self:
        made = int.__new__(cls, code)
        made._value_, made.meaning, made.errors = code, meaning, errors
        return made

    DONE = 0, "all is done"
    UNEXPECTED = 1, "an error nobody foresaw; please report it"
    USAGE = 2, "the command line is wrong: see `elastable COMMAND --help`"
    BAD_INPUT = 3, "data, ids, gradients or settings that cannot be used: correct what the message names", BadInput
    BAD_MODEL = 4, "the model or the model file cannot be used: correct it", ModelError
    UNAVAILABLE = (
        5,
        "a master or store cannot be reached within the deadline: start it, or correct its address",
        Unavailable,
        ShardAway,
    )
    STORE_FAILED = (
        6,
        "the store failed or lost a shard; nothing was made up: see it, then start with --resume",
        StoreFailed,
    )
    JOB_FAILED = 7, "the job ended before its last version: start it again with --resume", JobFailed, VersionError
    BAD_CHECKPOINT = (
        8,
        "a checkpoint is missing, damaged or of another model: take the one that is proposed",
        CheckpointError,
    )
    UNAUTHENTICATED = 9, "a token or certificate is missing, or not one that the other end accepts", Unauthenticated
    NOT_INSTALLED = 10, "a library that an extra brings is not installed: the error says which extra", NotInstalled
    PERMISSION_DENIED = (
        11,
        "the role of the token or certificate does not allow it: use another role's token",
        PermissionDenied,
    )
    INTERRUPTED = 130, "interrupted (Ctrl-C); stopped cleanly, with a checkpoint: start again with --resume"
    OUTPUT_CLOSED = (
        141, "the reader of standard output has gone, as head does; a job stops as when interrupted"
    )  # fmt: skip


_CODES = {kind: code for code in ExitCode for kind in code.errors}


def exit_code_of(error: ElastableError) -> ExitCode:
    """The exit code that tells of this error."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), ExitCode.UNEXPECTED)


def error_of(code: int) -> type[ElastableError]:
    """The kind of error that a process's exit code tells of; `JobFailed` for codes that are not ours."""
    return next((kind for kind, known in _CODES.items() if known == code), JobFailed)


def exit_code_table() -> str:
    """All codes and meanings, for `--help`."""
    return "\n\n".join(f"{code.value}: {code.meaning}" for code in ExitCode)
