"""Requests that wait for the model are answered together: those that wait while it computes are its next batch."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.wire.channels.status_codes import CallRefused
from elastable.master.backend.contract import backend
from elastable.models.predictor import Predictor

MOST_WAITING = 32
"""Requests that wait for their predictions; one more is refused."""

_log = logging.getLogger(__name__)

Prediction = tuple[dict[str, Array], int]
"""Outputs by name, and the version that all of them are of."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    x: Mapping[str, Array]
    answer: Future[Prediction] = field(default_factory=Future)

    @property
    def records(self) -> int:
        return len(next(iter(self.x.values())))

    @property
    def form(self) -> list[tuple[str, tuple[int, ...]]]:
        """Requests of one form can be joined, and no number changes: NumPy would make a float of int64 and uint64."""
        return [(array.dtype.str, array.shape[1:]) for array in self.x.values()]


class Batches(Closing):
    """Computes predictions in a thread of its own. Nothing waits for requests that have not come yet.

    Args:
        most_records: Of several requests that are answered together. Models of which an output depends on the other
            records of a batch are recognised as far as a trial shows it, and answer each request by itself.
    """

    def __init__(self, predictor: Predictor, most_records: int) -> None:
        self._predictor = predictor
        self._most_records = most_records if predictor.warm() else 1
        if self._most_records < most_records:
            _log.warning("model %s: records of different requests are not predicted together", predictor.name)
        # JAX compiles the step for each number of records: for powers of two, these are few.
        self._powers = self._most_records > 1 and backend().name == "jax"
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="elastable-predictions", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait, those of the batch under way apart."""
        return len(self._waiting)

    def predict(self, x: Mapping[str, npt.ArrayLike]) -> Future[Prediction]:
        """The prediction for one request, which raises as `Predictor.predict`.

        Raises:
            BadInput: as `Predictor.checked`.
            CallRefused: too many wait.
        """
        request = _Request(self._predictor.checked(x))
        with self._changed:
            if len(self._waiting) >= MOST_WAITING or self._closed:
                raise CallRefused(f"{MOST_WAITING} requests wait already")
            self._waiting.append(request)
            self._changed.notify()
        return request.answer

    def close(self) -> None:
        """Answers those who wait, and ends the thread. Closing twice is harmless."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                batch = list(self._next())
            wanted = [request for request in batch if request.answer.set_running_or_notify_cancel()]
            if wanted:
                self._answer(wanted)

    def _next(self) -> Iterator[_Request]:
        """The request that waits longest, and others that go with it."""
        first = self._waiting.popleft()
        yield first
        left = self._most_records - first.records
        for request in list(self._waiting):
            if request.records <= left and request.form == first.form:
                self._waiting.remove(request)
                left -= request.records
                yield request

    def _joined(self, requests: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
        x = requests[0]
        if len(requests) > 1:
            x = {name: np.concatenate([each[name] for each in requests]) for name in x}
        if not self._powers:
            return x
        records = len(next(iter(x.values())))
        more = (1 << (records - 1).bit_length()) - records
        return {name: np.concatenate((array, array[-1:].repeat(more, axis=0))) for name, array in x.items()}

    def _answer(self, batch: Sequence[_Request]) -> None:
        try:
            found, version = self._predictor.predict(self._joined([request.x for request in batch]))
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            if len(batch) > 1:  # whose fault it is, each finds by itself
                for request in batch:
                    self._answer([request])
            else:
                batch[0].answer.set_exception(error)
            return
        begin = 0
        for request in batch:
            end = begin + request.records
            request.answer.set_result(({name: array[begin:end] for name, array in found.items()}, version))
            begin = end
