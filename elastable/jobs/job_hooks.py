"""What the master's process does between versions: callbacks, records, checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import keras

from elastable.callbacks.callback_list import JobCallbacks
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.errors import Unsupported
from elastable.master.commits.accumulate import Accumulated
from elastable.master.jobs.hooks import Hooks
from elastable.master.keras.discovery import store_backed_layers
from elastable.master.master_options import is_due
from elastable.master.tasks.schedule import Schedule
from elastable.output.run_directory import RunDirectory
from elastable.process.logs import describe_process

__all__ = ["JobHooks", "UntrainedTables"]

_VERSIONS = 10


class UntrainedTables:
    """Finds the embedding layers whose tables had no gradient in the first versions, and names them once.

    Frozen layers (`trainable=False`) are not warned of.

    Args:
        model: The model that is trained.
        versions: Versions after which a table should have had a gradient.
    """

    def __init__(self, model: keras.Model, versions: int = _VERSIONS) -> None:
        self._model = model
        self._left, self._versions = versions, versions
        self._updated: set[str] = set()

    def saw(self, updated: Iterable[str], overflowed: bool = False) -> None:
        """A version has been committed that changed these tables; warns with the last of the first versions.

        One whose gradient overflowed changes no table, whatever it looked up: it says nothing.
        """
        if not self._left or overflowed:
            return
        self._updated.update(updated)
        self._left -= 1
        if not self._left:
            self._warn()

    def end(self) -> None:
        """An epoch is over: one of fewer versions is judged by what there was, unless each of them overflowed."""
        if 0 < self._left < self._versions:
            self._left = 0
            self._warn()

    def _warn(self) -> None:
        for layer in store_backed_layers(self._model):
            if layer.table_name not in self._updated and getattr(layer, "trainable", True):
                _log.warning(
                    "embedding layer %r: its table %r has had no gradient so far: either nothing that the loss is "
                    "computed from looks its rows up, or all bags and lists of ids that it was given were empty. Set "
                    "trainable=False on the layer if that is meant",
                    layer.name,
                    layer.table_name,
                )


_log = logging.getLogger(__name__)

_RECORD_EVERY_S = 0.5


class JobHooks(Hooks):
    """Joins a job to Keras callbacks, a run directory and checkpoints.

    Args:
        callbacks: Keras callbacks of the job.
        schedule: Of the job.
        stop: Ends the job, with a reason.
        run: Where metrics are noted; None: nowhere.
        save: Begins to write a checkpoint; None: none are written.
        checkpoint_every: Versions between checkpoints; 0: none but the last.
        on_epoch: Called with (epoch, logs) after each epoch.
        evaluated: Called with (version, logs) after each evaluation during training.
        committed: Called with the updates, version and frozen tables of each commit.
        version: That the job begins with: 0, or where an earlier run of it ended.
        written: How many rows of all tables were written besides commits; None: such rows are seen by every worker.
        shares_model: Whether a worker computes with the model that the master trains.
    """

    def __init__(
        self,
        callbacks: JobCallbacks,
        schedule: Schedule,
        stop: Callable[[str], None],
        run: RunDirectory | None = None,
        save: Callable[[], None] | None = None,
        checkpoint_every: int = 0,
        on_epoch: Callable[[int, Mapping[str, float]], None] = lambda epoch, logs: None,
        evaluated: Callable[[int, Mapping[str, float]], None] = lambda version, logs: None,
        committed: Callable[[Mapping[str, TableUpdate], int, Collection[str]], None] = lambda *commit: None,
        version: int = 0,
        shares_model: bool = False,
        written: Callable[[], int] | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._shares_model = shares_model
        self._schedule = schedule
        self._stop = stop
        self._run = run
        self._save = save
        self._every = checkpoint_every
        self._on_epoch = on_epoch
        self._evaluated = evaluated
        self._committed = committed
        self._untrained = UntrainedTables(callbacks.model)
        self._recorded = 0.0
        self._asked: float | None = None  # when it was decided whether the next version is noted
        self._version, self._written = version, written
        self._made_one = False
        self._stopped = False
        self.seconds = 0.0
        """Between versions, without evaluations."""
        self.untimed_records = 0
        """Records of the first version: its seconds were the workers' way here, and are not counted."""
        self._timed_since: float | None = None
        self.logs: Mapping[str, float] = {}

    def state(self) -> Mapping[str, object]:
        return self._callbacks.states()

    def on_epoch_begin(self, epoch: int) -> None:
        self._callbacks.begin_epoch(epoch)
        self._begin_step()
        if self._made_one:
            # Not in the first one: the workers are still on their way.
            self._timed_since = time.monotonic()

    def go_on(self, logs: Mapping[str, float]) -> None:
        """The job goes on at a version that was kept before callbacks heard of it: they hear of it now."""
        version = self._version
        step, last = self._schedule.step(version - 1), self._schedule.ends_epoch(version)
        self._stopped = self._callbacks.version(step, logs, last)

    def on_rows(self, version: int, made: Accumulated) -> None:
        self._committed(made.updates, version, made.frozen)
        self._untrained.saw(made.changed, made.overflowed)

    def waits_for_log(self, version: int) -> bool:
        """True for versions that callbacks hear of, that are noted in the run directory, or saved."""
        self._asked = time.monotonic()
        saved = self._save is not None and is_due(version, self._every)
        return self._callbacks.sees_versions or saved or self._is_noted(self._asked)

    def _is_noted(self, now: float) -> bool:
        return self._run is not None and now - self._recorded >= _RECORD_EVERY_S

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if not self._made_one:
            before = self._schedule.records_before
            self.untimed_records = before(version) - before(version - 1)
        self._version, self._made_one = version, True
        describe_process(version=version)
        now = time.monotonic()
        if self._timed_since is not None:
            self.seconds += now - self._timed_since
        self._timed_since = now
        rows = self._rows_written()
        last = self._schedule.ends_epoch(version)
        self._stopped = self._callbacks.version(self._schedule.step(version - 1), logs, last)
        now, self._asked = time.monotonic() if self._asked is None else self._asked, None
        if self._run is not None and self._is_noted(now):
            self._recorded = now
            self._run.record("train", version, self._schedule.epoch(version - 1), logs)
        if self._save is not None and is_due(version, self._every):
            self._save()
        if not self._stopped and not self._schedule.ends_epoch(version):
            self._begin_step()
            if self._rows_written() != rows:
                raise Unsupported(
                    f"a callback has written rows of a table between two batches, at version {version}: workers look "
                    "rows up ahead, and may have read them before; write rows in on_epoch_begin or on_epoch_end"
                )

    def _rows_written(self) -> int:
        return self._written() if self._written is not None and self._callbacks.sees_versions else 0

    def _begin_step(self) -> None:
        # After a checkpoint is begun: a job that is resumed from it begins the step itself.
        self._callbacks.begin_step(self._schedule.step(self._version))

    def may_assign(self) -> bool:
        return self._shares_model or self._callbacks.sees_versions

    def stops_epoch(self) -> bool:
        return self._stopped

    def on_evaluation_begin(self, version: int) -> None:
        self._timed_since = None

    def on_evaluation(self, version: int, logs: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.record("evaluation", version, self._schedule.epoch(version - 1), logs)
        self._evaluated(version, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        self._timed_since = None
        self._untrained.end()
        self.logs = dict(logs)
        if self._run is not None:
            self._run.record("epoch", self._version, epoch, logs)
        listed = ", ".join(f"{name} {value:.6g}" for name, value in logs.items()) or "no metrics"
        _log.info("epoch %d ended at version %d: %s", epoch + 1, self._version, listed)
        self._on_epoch(epoch, logs)
        if self._callbacks.end_epoch(epoch, logs):
            self._stop("a callback stopped training")
