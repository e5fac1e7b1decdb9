"""Which records make which version: a pure function of the job, never of its workers."""

from elastable.embedding_store.errors import BadInput
from elastable.master.api import JobSpec, Task, TaskKind


class Schedule:
    """The whole plan of a job: version -> training tasks, and what is evaluated when.

    A pass over the records has M = ceil(train_records / micro_batch_size) micro-batches and ceil(M / grads_to_wait)
    steps; its last micro-batch and its last step may be smaller, and no step spans two passes. In async mode every
    micro-batch is a separate step.

    A step makes one version.

    An epoch is a pass. With `steps_per_epoch` an epoch has that many steps, the next one continues where it ended, and
    the last epoch of a pass has what is left of it, as in `model.fit` of arrays. The pass at which `initial_epoch`
    begins has its number.

    Micro-batches are numbered within the job in the order of their versions. They are leased in groups, which are
    numbered from 0 and trained one after the other: in sync mode a group is a version, in async mode an epoch.

    Attributes:
        by_epoch: Whether groups are epochs; if not, workers may fetch the micro-batches of one before it is open.
        group_count: How many groups the job has.

    Raises:
        BadInput: the job has no training records.
    """

    def __init__(self, job: JobSpec) -> None:
        if job.train_records < 1:
            raise BadInput("the job has no training records: data('train') must hold at least one")
        self.job = job
        self.group = job.micro_batches_per_version
        self.by_epoch = job.mode == "async"
        self.micro_batches_per_pass = -(-job.train_records // job.micro_batch_size)
        self.versions_per_pass = -(-self.micro_batches_per_pass // self.group)
        self.steps_per_epoch = min(job.steps_per_epoch or self.versions_per_pass, self.versions_per_pass)
        self._epochs_per_pass = -(-self.versions_per_pass // self.steps_per_epoch)
        self.versions_total = self.first_version(job.epochs)
        self.group_count = job.epochs if self.by_epoch else self.versions_total
        self._evaluated_together = job.evaluation_batch_size or job.micro_batch_size
        self.evaluation_tasks = -(-job.validation_records // self._evaluated_together)

    def epoch(self, version: int) -> int:
        """The epoch, counted from 0, that trains on `version`."""
        number, place = divmod(version, self.versions_per_pass)
        first = self.job.initial_epoch
        return first + (number - first) * self._epochs_per_pass + place // self.steps_per_epoch

    def first_version(self, epoch: int) -> int:
        """The version that the first step of an epoch trains on."""
        first = self.job.initial_epoch
        passes, part = divmod(epoch - first, self._epochs_per_pass)
        return (first + passes) * self.versions_per_pass + part * self.steps_per_epoch

    def step(self, version: int) -> int:
        """The position within its epoch, counted from 0, of the step that trains on `version`."""
        return version - self.first_version(self.epoch(version))

    def micro_batches(self, version: int) -> range:
        """Numbers within the job of the micro-batches trained on `version`."""
        number, step = divmod(version, self.versions_per_pass)
        start = step * self.group
        first = number * self.micro_batches_per_pass + start
        return range(first, first + min(self.group, self.micro_batches_per_pass - start))

    def of_group(self, group: int) -> range:
        """Numbers within the job of the micro-batches of a group."""
        if not self.by_epoch:
            return self.micro_batches(group)
        first = group * self.micro_batches_per_pass
        return range(first, first + self.micro_batches_per_pass)

    def epoch_stop(self, group: int) -> int:
        """The first group behind the epoch that `group` belongs to."""
        return group + 1 if self.by_epoch else self.first_version(self.epoch(group) + 1)

    def task(self, version: int, micro_batch: int) -> Task:
        """The training task of micro-batch `micro_batch` (its number within the job) on `version`."""
        number, place = divmod(micro_batch, self.micro_batches_per_pass)
        start = place * self.job.micro_batch_size
        stop = min(start + self.job.micro_batch_size, self.job.train_records)
        return Task(version, TaskKind.TRAIN, micro_batch, number, start, stop)

    def tasks(self, version: int) -> tuple[Task, ...]:
        """The training tasks of `version`, in micro-batch order."""
        return tuple(self.task(version, number) for number in self.micro_batches(version))

    def evaluation(self, version: int, micro_batch: int) -> Task:
        """The task that evaluates micro-batch `micro_batch` of the validation split on `version`."""
        start = micro_batch * self._evaluated_together
        stop = min(start + self._evaluated_together, self.job.validation_records)
        return Task(version, TaskKind.EVALUATE, micro_batch, self.epoch(version - 1), start, stop)

    def ends_epoch(self, version: int) -> bool:
        """Whether `version` is what an epoch leaves behind."""
        return version > 0 and version == self.first_version(self.epoch(version))

    def records_before(self, version: int) -> int:
        """Records of the steps that are done once `version` is committed, in a job that skipped none."""
        number, place = divmod(version, self.versions_per_pass)
        within = min(place * self.group * self.job.micro_batch_size, self.job.train_records)
        return number * self.job.train_records + within
