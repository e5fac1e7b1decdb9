"""Callbacks of the process that drives a job, called between versions."""

from collections.abc import Mapping, Sequence

from elastable.master.api import BadEvent
from elastable.master.commits.accumulate import Accumulated


class Hooks:
    """Called by the thread in `Master.run`, without any lock; override what is wanted.

    While a hook runs nothing is committed and no worker has anything to train on, so a hook may read the model and the
    store, write a checkpoint, assign the optimizer's learning rate, or call `Master.stop`. A hook that raises fails the
    job.
    """

    def state(self) -> Mapping[str, object]:
        """The state of these hooks, as JSON: it is kept with the job, and a resumed job gets it (`Progress.hooks`)."""
        return {}

    def on_epoch_begin(self, epoch: int) -> None:
        """Training of an epoch (counted from 0) begins, or continues after a resume."""

    def on_rows(self, version: int, made: Accumulated) -> None:
        """Rows of a version have been committed, and logged where `waits_for_log` says so; `on_version` follows."""

    def on_bad_events(self, version: int, events: Sequence[BadEvent]) -> None:
        """These events of a stream could not be read; the version that passes over them is going to be committed.

        It may not be, where the job ends before: then the job that resumes this one tells of them again.
        """

    def waits_for_log(self, version: int) -> bool:
        """Asked before `on_version`: whether the store has to have logged the version by then.

        False only where `on_version` tells nobody of the version: it may turn out never to have been.
        """
        return True

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        """A version has been committed.

        Args:
            logs: Metrics of the epoch so far, computed when they are first read.
        """

    def may_assign(self) -> bool:
        """Asked after `on_version`: whether anything that the model's dense part has may have been assigned since.

        False saves the master from reading all of it again.
        """
        return True

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
            version: The version that was evaluated; later ones may be committed by now.
            logs: Loss and metrics of that version alone, as val_...
        """

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        """An epoch is trained and evaluated; `logs` holds its metrics and those of the evaluation as val_..."""
