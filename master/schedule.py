"""Which records make which version: a pure function of the job, never of its workers."""

from __future__ import annotations

from elastable.embedding_store.errors import BadInput
from elastable.master.api import JobSpec, Task, TaskKind

__all__ = ["Schedule"]


class Schedule:
    """The whole plan of a job: version -> training tasks, and what is evaluated when.

    An epoch has M = ceil(train_records / micro_batch_size) micro-batches and
    V = ceil(M / grads_to_wait) versions; its last micro-batch and its last
    version may be smaller, and no version spans two epochs. In async mode
    every micro-batch is a version of its own.

    Micro-batch i of epoch e has the number e * M + i within the job.

    Raises:
        BadInput: the job has no training records.
    """

    def __init__(self, job: JobSpec) -> None:
        if job.train_records < 1:
            raise BadInput("the job has no training records: data('train') must hold at least one")
        self.job = job
        self.group = job.grads_to_wait if job.mode == "sync" else 1
        self.micro_batches_per_epoch = _ceil(job.train_records, job.micro_batch_size)
        self.versions_per_epoch = _ceil(self.micro_batches_per_epoch, self.group)
        self.versions_total = job.epochs * self.versions_per_epoch
        self.evaluation_tasks = _ceil(job.validation_records, job.micro_batch_size)

    def epoch(self, version: int) -> int:
        """The epoch, counted from 0, that trains on `version`."""
        return version // self.versions_per_epoch

    def micro_batches(self, version: int) -> range:
        """Numbers within the job of the micro-batches trained on `version`."""
        epoch, place = divmod(version, self.versions_per_epoch)
        first = epoch * self.micro_batches_per_epoch
        start = place * self.group
        return range(first + start, first + min(start + self.group, self.micro_batches_per_epoch))

    def micro_batches_of_epoch(self, epoch: int) -> range:
        """Numbers within the job of an epoch's micro-batches."""
        first = epoch * self.micro_batches_per_epoch
        return range(first, first + self.micro_batches_per_epoch)

    def task(self, version: int, micro_batch: int) -> Task:
        """The training task of micro-batch `micro_batch` (its number within the job) on `version`."""
        epoch, place = divmod(micro_batch, self.micro_batches_per_epoch)
        start, stop = self._slice(place, self.job.train_records)
        return Task(version, TaskKind.TRAIN, micro_batch, epoch, start, stop)

    def tasks(self, version: int) -> tuple[Task, ...]:
        """The training tasks of `version`, in micro-batch order."""
        return tuple(self.task(version, number) for number in self.micro_batches(version))

    def evaluation(self, version: int, micro_batch: int) -> Task:
        """The task that evaluates micro-batch `micro_batch` of the validation split on `version`."""
        start, stop = self._slice(micro_batch, self.job.validation_records)
        return Task(version, TaskKind.EVALUATE, micro_batch, self.epoch(version - 1), start, stop)

    def ends_epoch(self, version: int) -> bool:
        """Whether `version` is what an epoch leaves behind."""
        return version > 0 and version % self.versions_per_epoch == 0

    def records_before(self, version: int) -> int:
        """Records trained once `version` is committed, in a job that skipped none."""
        epoch, place = divmod(version, self.versions_per_epoch)
        within = min(place * self.group * self.job.micro_batch_size, self.job.train_records)
        return epoch * self.job.train_records + within

    def _slice(self, place: int, records: int) -> tuple[int, int]:
        start = place * self.job.micro_batch_size
        return start, min(start + self.job.micro_batch_size, records)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
