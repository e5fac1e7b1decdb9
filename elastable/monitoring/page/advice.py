"""What to do about an error, by its class."""

from __future__ import annotations

from elastable.embedding_store import errors

__all__ = ["advice_on"]

_ADVICE: tuple[tuple[type[errors.ElastableError], str], ...] = (
    (
        errors.NotFinite,
        "Drop or fill values that are not finite, lower the learning rate, or train with --not-finite skip.",
    ),
    (errors.BadGradient, "Start master and workers from the same model file and the same release."),
    (errors.NotInstalled, "Install the extra that the message names where the worker runs."),
    (errors.ModelError, "Give the worker the master's model file and the same data, then start it again."),
    (errors.Unauthenticated, "Give the process a token or certificate that the server accepts: docs/security.md."),
    (errors.PermissionDenied, "Give the process the token of a higher role: docs/security.md."),
    (errors.ShardLost, "Start the shard again with its rows, or restore a checkpoint."),
    (errors.TakenOver, "Another job has taken the store; stop one of the two."),
    (errors.StoreBroken, "Restore a checkpoint: --resume with --checkpoint-dir."),
    (errors.StoreFailed, "Look at the store's own log and at its disk; commits are tried again until --deadline."),
    (
        errors.Unavailable,
        "Check that the address is right and that a network policy or firewall lets the port through.",
    ),
    (errors.CheckpointError, "Make room where checkpoints are written; the next one is tried in any case."),
    (errors.BadInput, "Correct what the message names, and start again."),
)


def advice_on(error: str) -> str:
    """One sentence; "" where there is nothing to say that the message does not.

    Args:
        error: Name of the error's class.
    """
    kind = getattr(errors, error, None) if error in errors.__all__ else None
    if not isinstance(kind, type):
        return "Look at the worker's log."
    return next((told for known, told in _ADVICE if issubclass(kind, known)), "")
