"""Time limits and intervals of a job's master, and where a stream ends for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from elastable.embedding_store.errors import BadInput


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """Time limits and intervals; no option but `checkpoint_every` changes a bit of the result.

    Attributes:
        lease_seconds: Seconds before an unfinished micro-batch is reassigned.
        backup_after_s: Seconds before a micro-batch in progress is also given to an idle worker; the first result
            counts. None: not before the lease ends.
        look_ahead: Versions beyond the current one that workers may prepare.
        commit_deadline_s: How long a failing commit is retried.
        evaluate_every: Evaluate the validation split every N versions; 0: at the end of epochs only.
        validation_freq: Evaluate at the end of every N-th epoch, or of these epochs, counted from 1.
        concurrent_evaluation: Whether training continues during an evaluation. Must be False where a worker computes
            with the very model whose variables the master changes.
        checkpoint_every: Versions between the checkpoints that hooks write; 0: none within epochs. Each of them ends a
            replay epoch of tables with `lazy=False` (`Commit.ends_replay_epoch`), and so does each epoch, whether or
            not a checkpoint can be written: a resumed job gets the same bits as an uninterrupted one.
        uneven: Whether a micro-batch holds as many records as its push says, rather than as the schedule says: for
            streams that are read by a worker in this process.
        linger_s: Of a stream of events: for so long events that are too few for a version wait for others.
        until: Of a stream: "end" (of the stream as the job begins), a time in ISO 8601 (events that come later are left
            out), or "PARTITION=POSITION,..." (of the last events); None: it has no end.
        max_bad_events: Of a stream: the job stops if more events cannot be read.
    """

    lease_seconds: float = 60.0
    backup_after_s: float | None = None
    look_ahead: int = 3
    commit_deadline_s: float = 30.0
    evaluate_every: int = 0
    validation_freq: int | tuple[int, ...] = 1
    concurrent_evaluation: bool = True
    checkpoint_every: int = 0
    uneven: bool = False
    linger_s: float = 5.0
    until: str | None = None
    max_bad_events: int = 100

    def evaluates(self, epoch: int) -> bool:
        """Whether the validation split is evaluated at the end of an epoch, counted from 0."""
        often = self.validation_freq
        return epoch + 1 in often if isinstance(often, tuple) else (epoch + 1) % often == 0


def is_due(version: int, every: int) -> bool:
    """Whether `version` is a multiple of `every`; always False where `every` is 0."""
    return every > 0 and version % every == 0


@dataclass(frozen=True, slots=True)
class Until:
    """Where a job on a stream ends: `MasterOptions.until`.

    Attributes:
        positions: Partition -> position of the last event.
        time: Unix time: events that come later are not trained.
        end: Whether it ends where the stream does as the job begins.

    With none of the three it has no end.
    """

    positions: Mapping[str, str] | None = None
    time: float | None = None
    end: bool = False

    @classmethod
    def parse(cls, text: str | None) -> "Until":
        """Raises `BadInput` for a text that is none of the forms."""
        if text is None:
            return cls()
        if text == "end":
            return cls(end=True)
        pairs = [part.rpartition("=") for part in text.split(",")]
        if all(name and position for name, _, position in pairs):
            return cls(positions={name: position for name, _, position in pairs})
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise BadInput(
                f"--until {text}: write end, a time such as 2026-11-28T06:00Z, or PARTITION=POSITION,..."
            ) from error
        return cls(time=(moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
