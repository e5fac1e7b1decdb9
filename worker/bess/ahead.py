"""The batches of the next steps, made in a thread while the one before them is trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from embedding_store.errors import BadInput, DeadlineExceeded
from worker.bess.batch import StepBatch
from worker.bess.sampler import ShardedSampler

__all__ = ["BatchesAhead"]


class BatchesAhead:
    """One worker's batches in order, from a step on, without end. They are those of `sampler.batch`.

    Args:
        sampler: Makes them.
        worker: Whose.
        start: The first step.
        ahead: How many are made before they are asked for.
        timeout: Seconds that a batch may take to make.

    Attributes:
        step: Of the batch that comes next: where a run that stops now goes on.

    Use it as a context, so that its thread ends with it. `next` raises what the
    sampler raises, and:
        DeadlineExceeded: the batch was not made in time.
    """

    def __init__(
        self, sampler: ShardedSampler, worker: int, *, start: int = 0, ahead: int = 2, timeout: float = 600.0
    ) -> None:
        if ahead < 1:
            raise BadInput(f"batches ahead: at least 1, got {ahead}")
        self.step = start
        self._sampler, self._worker, self._timeout = sampler, worker, timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"batches-{worker}")
        self._begun: deque[Future[StepBatch]] = deque()
        for step in range(start, start + ahead):
            self._begin(step)

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        try:
            made = self._begun[0].result(self._timeout)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the batch of step {self.step} was not made within {self._timeout} s") from error
        self._begun.popleft()
        self._begin(self.step + len(self._begun) + 1)
        self.step += 1
        return made

    def close(self) -> None:
        """Ends the thread; batches that were made and not asked for are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, step: int) -> None:
        self._begun.append(self._thread.submit(self._sampler.batch, step, self._worker))
