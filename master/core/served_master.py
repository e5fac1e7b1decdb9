"""What a server needs of a master: calls that wait give back their threads."""

from collections.abc import Collection
from concurrent.futures import Future

from elastable.embedding_store.support.futures import at_once
from elastable.master.api import DenseSnapshot, JobStatus, Lease, MasterApi, Push, PushReply, Task


class ServedMaster(MasterApi):
    """A master whose calls may be answered later, by futures.

    Each `..._later` is its call: what is wrong at once is raised, what becomes wrong is the error of the future.
    Whoever cancels a future gets no answer. Results are set without any lock of the master, by the thread that they
    came of: what is called with one must not wait. A master whose calls do not wait need not define them.

    Attributes:
        pushes_wait: Whether the future of `report_gradient_later` may be not done: such calls cost a server more.
    """

    pushes_wait: bool = False

    def lease_tasks_later(
        self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None
    ) -> Future[Lease]:
        """As `lease_tasks`."""
        return at_once(self.lease_tasks(incarnation, want, wait_s, holding))

    def pull_dense_later(self, incarnation: str, version: int | None, wait_s: float) -> Future[DenseSnapshot | None]:
        """As `pull_dense`."""
        return at_once(self.pull_dense(incarnation, version, wait_s))

    def report_gradient_later(self, push: Push) -> Future[PushReply]:
        """As `report_gradient`."""
        return at_once(self.report_gradient(push))

    def ended(self) -> Future[JobStatus]:
        """The last status of the job, once it has ended: the same future for everybody, not to be cancelled."""
        return Future()

    def not_ready(self) -> str | None:
        """Why workers cannot take part now, for health checks; None: they can."""
        return None
