"""Which records make which version: a pure function of the job, never of its workers."""

from bisect import bisect_right

from elastable.embedding_store.errors import BadInput
from elastable.master.api import JobSpec, Task, TaskKind
from elastable.master.tasks.progress import Progress


class Schedule:
    """The whole plan of a job: version -> training tasks, and what is evaluated when.

    A pass over the records goes through their parts, one after the other; usually there is one. A part of R records
    has M = ceil(R / micro_batch_size) micro-batches and ceil(M / grads_to_wait) steps; its last micro-batch and its
    last step may be smaller, and no step spans two parts. In async mode every micro-batch is a separate step.

    A step makes one version.

    An epoch is a pass. With `steps_per_epoch` an epoch has that many steps, the next one continues where it ended, and
    the last epoch of a pass has what is left of it, as in `model.fit` of arrays. The pass at which `initial_epoch`
    begins has its number.

    Micro-batches are numbered in the order of their versions, from `JobSpec.micro_batches_before` on. They are leased
    in groups, which are trained one after the other and numbered: in sync mode a group is a version, in async mode an
    epoch.

    Attributes:
        by_epoch: Whether groups are epochs; if not, workers may fetch the micro-batches of one before it is open.
        versions_total: The version that the job ends with; 0: that is not known.
        group_count: The first group that the job does not have, as far as it is planned.
        complete: Whether all of it is planned.

    Raises:
        BadInput: the job has no training records.
    """

    def __init__(self, job: JobSpec) -> None:
        if job.train_records < 1:
            raise BadInput("the job has no training records: data('train') must hold at least one")
        self.job = job
        self.group = job.micro_batches_per_version
        self.by_epoch = job.mode == "async"
        self._parts = job.parts_of_pass
        # Where each part begins within a pass, and where the last one ends.
        self._records, self._micro_batches, self._versions = [0], [0], [0]
        for records in self._parts:
            count = -(-records // job.micro_batch_size)
            self._records.append(self._records[-1] + records)
            self._micro_batches.append(self._micro_batches[-1] + count)
            self._versions.append(self._versions[-1] - (-count // self.group))
        self.micro_batches_per_pass, self.versions_per_pass = self._micro_batches[-1], self._versions[-1]
        self.steps_per_epoch = min(job.steps_per_epoch or self.versions_per_pass, self.versions_per_pass)
        self._epochs_per_pass = -(-self.versions_per_pass // self.steps_per_epoch)
        self.versions_total = self.first_version(job.epochs) if job.epochs else 0
        self.group_count, self.complete = job.epochs if self.by_epoch else self.versions_total, True
        self._evaluated_together = job.evaluation_batch_size or job.micro_batch_size
        self.evaluation_tasks = -(-job.validation_records // self._evaluated_together)

    def finished(self, version: int) -> bool:
        """Whether no version comes after this one."""
        return 0 < self.versions_total <= version

    def epoch(self, version: int) -> int:
        """The epoch, counted from 0, that trains on `version`."""
        number, place = divmod(version - self.job.versions_before, self.versions_per_pass)
        first = self.job.initial_epoch
        return first + (number - first) * self._epochs_per_pass + place // self.steps_per_epoch

    def first_version(self, epoch: int) -> int:
        """The version that the first step of an epoch trains on."""
        first = self.job.initial_epoch
        passes, part = divmod(epoch - first, self._epochs_per_pass)
        within = (first + passes) * self.versions_per_pass + part * self.steps_per_epoch
        return self.job.versions_before + within

    def step(self, version: int) -> int:
        """The position within its epoch, counted from 0, of the step that trains on `version`."""
        return version - self.first_version(self.epoch(version))

    def _place(self, version: int) -> tuple[int, int, int]:
        """The pass that trains on `version`, the part of it, and the first micro-batch of the version in that part."""
        number, place = divmod(version - self.job.versions_before, self.versions_per_pass)
        part = bisect_right(self._versions, place) - 1
        return number, part, (place - self._versions[part]) * self.group

    def micro_batches(self, version: int) -> range:
        """Numbers of the micro-batches trained on `version`."""
        number, part, start = self._place(version)
        first = self.job.micro_batches_before + number * self.micro_batches_per_pass + self._micro_batches[part]
        of_part = self._micro_batches[part + 1] - self._micro_batches[part]
        return range(first + start, first + min(start + self.group, of_part))

    def of_group(self, group: int) -> range:
        """Numbers of the micro-batches of a group."""
        if not self.by_epoch:
            return self.micro_batches(group)
        first = self.job.micro_batches_before + group * self.micro_batches_per_pass
        return range(first, first + self.micro_batches_per_pass)

    def epoch_stop(self, group: int) -> int:
        """The first group behind the epoch that `group` belongs to."""
        return group + 1 if self.by_epoch else self.first_version(self.epoch(group) + 1)

    def task(self, version: int, micro_batch: int) -> Task:
        """The training task of a micro-batch, by its number, on `version`."""
        number, place = divmod(micro_batch - self.job.micro_batches_before, self.micro_batches_per_pass)
        part = bisect_right(self._micro_batches, place) - 1
        start = (place - self._micro_batches[part]) * self.job.micro_batch_size
        stop = min(start + self.job.micro_batch_size, self._parts[part])
        of_job = self.job.parts_before + number * len(self._parts) + part
        return Task(version, TaskKind.TRAIN, micro_batch, of_job, start, stop)

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
        return version > self.job.versions_before and version == self.first_version(self.epoch(version))

    def ends_part(self, version: int) -> bool:
        """Whether `version` is what a part of the records leaves behind."""
        within = version - self.job.versions_before
        return within > 0 and within % self.versions_per_pass in self._versions

    def records_before(self, version: int) -> int:
        """Records of the job's steps that are done once `version` is committed, if none was skipped."""
        number, part, start = self._place(version)
        within = min(start * self.job.micro_batch_size, self._parts[part])
        return number * self.job.train_records + self._records[part] + within

    def before_next(self, progress: Progress) -> dict[str, int]:
        """What a job that continues this one from there has before it: fields of its `JobSpec`.

        A part that was begun counts as one: its record order is not used again.
        """
        version = progress.version
        if self.by_epoch:
            group = self.of_group(progress.epoch)
            stop = group.stop if progress.done else group.start
        else:
            stop = self.micro_batches(version - 1).stop if version > self.job.versions_before else 0
        stop = max(stop, self.job.micro_batches_before)
        parts = self.job.parts_before
        if stop > self.job.micro_batches_before:
            parts = self.task(version, stop - 1).epoch + 1
        return {"versions_before": version, "parts_before": parts, "micro_batches_before": stop}
