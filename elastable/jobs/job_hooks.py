"""What the master's process does between versions: callbacks, records, checkpoints."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import keras

from elastable.callbacks.callback_list import JobCallbacks
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.support.printable import printable
from elastable.master.api import BadEvent
from elastable.master.commits.accumulate import Accumulated
from elastable.master.core.hooks import Hooks
from elastable.master.master_options import is_due
from elastable.output.run_directory import RunDirectory
from elastable.process.logs import describe_process
from elastable.worker.layers.model_tables import store_layers

_VERSIONS = 10


class UntrainedTables:
    """Finds the embedding layers whose tables had no gradient in the first versions, and names them once.

    Frozen layers (`trainable=False`) are not warned of.

    Args:
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
        for layer in store_layers(self._model):
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


@dataclass(eq=False)
class JobHooks(Hooks):
    """Joins a job to Keras callbacks, a run directory and checkpoints.

    Attributes:
        stop: Ends the job, with a reason.
        run: Where metrics are noted; None: nowhere.
        save: Begins to write a checkpoint; None: none are written.
        checkpoint_every: Versions between checkpoints; 0: none but the last.
        on_epoch: Called with (epoch, logs) after each epoch.
        evaluated: Called with (version, logs) after each evaluation during training.
        committed: Called with the updates and frozen tables of each commit; None: nobody is.
        version: That was committed last; the job begins with 0, or where an earlier run of it ended.
        written: How many rows of all tables were written besides commits; None: such rows are seen by every worker.
        seconds: Between versions, without evaluations.
        untimed_records: Of the first version: its seconds were the workers' way here, and are not counted.
        logs: Of the last epoch.
    """

    callbacks: JobCallbacks
    stop: Callable[[str], None]
    run: RunDirectory | None = None
    save: Callable[[], None] | None = None
    checkpoint_every: int = 0
    on_epoch: Callable[[int, Mapping[str, float]], None] = lambda epoch, logs: None
    evaluated: Callable[[int, Mapping[str, float]], None] = lambda version, logs: None
    committed: Callable[[Mapping[str, TableUpdate], Collection[str]], None] | None = None
    version: int = 0
    written: Callable[[], int] | None = None
    seconds: float = 0.0
    untimed_records: int = 0
    logs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.schedule = self.callbacks.schedule
        self._untrained = UntrainedTables(self.callbacks.model)
        self._timed_since: float | None = None
        self._recorded = 0.0
        self._notes_next = self._made_one = self._stopped = False

    def state(self) -> Mapping[str, object]:
        return self.callbacks.states()

    def on_epoch_begin(self, epoch: int) -> None:
        self.callbacks.begin_epoch(epoch)
        self.callbacks.begin_step(self.version)
        if self._made_one:
            # Not in the first one: the workers are still on their way.
            self._timed_since = time.monotonic()

    def go_on(self, logs: Mapping[str, float]) -> None:
        """The job goes on at a version that was kept before callbacks heard of it: they hear of it now."""
        self._stopped = self.callbacks.version(self.version, logs, self.schedule.ends_epoch(self.version))

    def on_rows(self, version: int, made: Accumulated) -> None:
        if self.committed is not None:
            self.committed(made.updates, made.frozen)
        self._untrained.saw(made.changed, made.overflowed)

    def on_bad_events(self, version: int, events: Sequence[BadEvent]) -> None:
        if self.run is not None:
            self.run.note_bad_events(version, events)
        first = events[0]
        where = f"{first.partition} {first.position}: {first.reason}"
        _log.warning(
            "%d events of version %d cannot be read and are passed over, such as %s",
            len(events), version, printable(where, 512, lines=False),
        )  # fmt: skip

    def waits_for_log(self, version: int) -> bool:
        """True for versions that callbacks hear of, that are noted in the run directory, or saved."""
        self._notes_next = self.run is not None and time.monotonic() - self._recorded >= _RECORD_EVERY_S
        saved = self.save is not None and is_due(version, self.checkpoint_every)
        return self.callbacks.sees_versions or saved or self._notes_next

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if not self._made_one:
            before = self.schedule.records_before
            self.untimed_records = before(version) - before(version - 1)
        self.version, self._made_one = version, True
        describe_process(version=version)
        now = time.monotonic()
        if self._timed_since is not None:
            self.seconds += now - self._timed_since
        self._timed_since = now
        written = self.written if self.callbacks.sees_versions else None
        rows, last = written() if written else 0, self.schedule.ends_epoch(version)
        self._stopped = self.callbacks.version(version, logs, last)
        if self.run is not None and self._notes_next:
            self._recorded = now
            self.run.record("train", version, self.schedule.epoch(version - 1), logs)
        if self.save is not None and is_due(version, self.checkpoint_every):
            self.save()
        if not self._stopped and not last:
            # After a checkpoint is begun: a job that is resumed from it begins the step itself.
            self.callbacks.begin_step(version)
            if written and written() != rows:
                raise Unsupported(
                    f"a callback has written rows of a table between two batches, at version {version}: workers look "
                    "rows up ahead, and may have read them before; write rows in on_epoch_begin or on_epoch_end"
                )

    def may_assign(self) -> bool:
        return self.callbacks.sees_versions

    def stops_epoch(self) -> bool:
        return self._stopped

    def on_evaluation_begin(self, version: int) -> None:
        self._timed_since = None

    def on_evaluation(self, version: int, logs: Mapping[str, float]) -> None:
        if self.run is not None:
            self.run.record("evaluation", version, self.schedule.epoch(version - 1), logs)
        self.evaluated(version, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        self._timed_since = None
        self._untrained.end()
        self.logs = dict(logs)
        if self.run is not None:
            self.run.record("epoch", self.version, epoch, logs)
        listed = ", ".join(f"{name} {value:.6g}" for name, value in logs.items()) or "no metrics"
        _log.info("epoch %d ended at version %d: %s", epoch + 1, self.version, listed)
        self.on_epoch(epoch, logs)
        if self.callbacks.end_epoch(epoch, logs):
            self.stop("a callback stopped training")
