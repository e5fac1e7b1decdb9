"""What the process that drives a job may do between versions, and how patient its master is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastable.embedding_store.contract.row_data import TableUpdate

__all__ = ["Hooks", "MasterOptions", "is_due"]


class Hooks:
    """Called by the thread in `Master.run`, without any lock; override what is wanted.

    While a hook runs nothing is committed and no worker has anything to train
    on, so a hook may read the model and the store, write a checkpoint, assign the
    optimizer's learning rate, or call `Master.stop`. A hook that raises fails
    the job.
    """

    def state(self) -> Mapping[str, Any]:
        """What these hooks remember, as JSON can hold it: who goes on with the job is told (`Progress.hooks`)."""
        return {}

    def on_epoch_begin(self, epoch: int) -> None:
        """Training of an epoch (counted from 0) begins, or goes on after a resume."""

    def on_rows(self, updates: Mapping[str, TableUpdate]) -> None:
        """Rows of a version have been committed; `on_version` follows.

        Args:
            updates: Table name -> the ids that had a gradient, with it.
        """

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        """A version has been committed.

        Args:
            version: The version that stands now.
            logs: Metrics of the epoch so far, computed when first looked at.
        """

    def stops_epoch(self) -> bool:
        """Asked after `on_version`: whether the epoch ends here, and with it, as in Keras, the job.

        The version is evaluated and `on_epoch_end` called, which stops the master.
        """
        return False

    def on_evaluation_begin(self, version: int) -> None:
        """The validation split is going to be evaluated on `version`."""

    def on_evaluation(self, version: int, logs: Mapping[str, float]) -> None:
        """The validation split was evaluated on `version` within an epoch (`MasterOptions.evaluate_every`).

        Args:
            version: That was evaluated; later ones may stand by now.
            logs: Loss and metrics of that version alone, as val_...
        """

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        """An epoch is trained and evaluated; `logs` holds its metrics and those of the evaluation as val_..."""


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """How patient a master is; but for `checkpoint_every` no option changes a bit of the result.

    Attributes:
        lease_seconds: A micro-batch not reported for so long is given to
            another worker too.
        backup_after_s: A micro-batch that one worker has been at for so long is
            given to an idle one too; whoever is first counts. None: not before
            the lease ends.
        look_ahead: Versions beyond the current one that workers may prepare.
        commit_deadline_s: How long a failing commit is tried again.
        push_deadline_s: How long an async push may wait for its commit.
        no_worker_timeout_s: The job fails after so long without any worker;
            None: it waits for ever, and says so in its status.
        evaluate_every: Versions between evaluations of the validation split; 0:
            it is evaluated at the end of epochs only.
        validation_freq: As in `model.fit`: it is evaluated at the end of every
            so many epochs, or of these epochs, counted from 1.
        evaluate_beside: Whether training goes on meanwhile. Not where a worker
            computes with the very model whose variables the master changes.
        checkpoint_every: Versions between the checkpoints that hooks write; 0: none within epochs. Each of them ends a
            chapter of tables with `lazy=False` (`Commit.ends_chapter`), and so does each epoch, whether or not a
            checkpoint can be written: who goes on from it has the bits of who never stopped.
        uneven: Whether micro-batches hold as many records as their pushes say, and not as the schedule does: where a
            stream makes them, for a worker in this process.
    """

    lease_seconds: float = 60.0
    backup_after_s: float | None = None
    look_ahead: int = 3
    commit_deadline_s: float = 30.0
    push_deadline_s: float = 60.0
    no_worker_timeout_s: float | None = None
    evaluate_every: int = 0
    validation_freq: int | tuple[int, ...] = 1
    evaluate_beside: bool = True
    checkpoint_every: int = 0
    uneven: bool = False

    def evaluates(self, epoch: int) -> bool:
        """Whether the validation split is evaluated at the end of an epoch, counted from 0."""
        often = self.validation_freq
        return epoch + 1 in often if isinstance(often, tuple) else (epoch + 1) % often == 0


def is_due(version: int, every: int) -> bool:
    """Whether a version is one of those that something happens at `every` so many versions; 0: it never does."""
    return every > 0 and version % every == 0
