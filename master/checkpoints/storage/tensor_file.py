"""Tensors in the safetensors format: written without a copy, read as views of the bytes that were checked."""

import hashlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self, TypeVar

import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.native.range_pool import available_cores
from elastable.embedding_store.shards.server_contract import SavedFile
from elastable.master.api import Tensor
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles, Part

_NOTE = "__metadata__"
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
_MOST_RANK = 64  # of NumPy's arrays


def parts_of(tensors: Mapping[str, Sequence[Tensor]], note: Mapping[str, str]) -> list[Part]:
    """The bytes of a file, for `CheckpointFiles.write`.

    The length of a JSON header in eight bytes, the header, and the tensors' bytes, as
    https://github.com/huggingface/safetensors describes it: the safetensors library reads it, too.

    Args:
        tensors: Name -> blocks of one tensor, at least one of them, in the order of
            their first axis; of one dtype and of equal shapes but for that axis.
        note: Is kept in the header.

    Raises:
        TypeError: a dtype that the format does not have.
    """
    header: dict[str, object] = {_NOTE: dict(note)}
    blocks: list[Tensor] = []
    end = 0
    # The widest first, so that each lies at a multiple of its item's size.
    for name in sorted(tensors, key=lambda key: (-tensors[key][0].dtype.itemsize, key)):
        pieces = [np.ascontiguousarray(piece).reshape(piece.shape) for piece in tensors[name]]
        code = _CODES.get(pieces[0].dtype.name)
        if code is None:
            raise TypeError(f"{name}: a checkpoint cannot hold {pieces[0].dtype}; it can hold {', '.join(_CODES)}")
        shape: list[int] = list(pieces[0].shape)
        if shape:
            shape[0] = sum(len(piece) for piece in pieces)
        begin, end = end, end + sum(piece.nbytes for piece in pieces)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        blocks += pieces
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    return [head, *(block.reshape(-1).view(np.uint8).data for block in blocks if block.nbytes)]


def tensors_in(content: UInt8) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, views of `content` uint8 `[bytes]`, and its note.

    Raises:
        ValueError: the bytes are no such file.
    """
    if len(content) < 8:
        raise ValueError(f"{len(content)} bytes are no safetensors file")
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    if begin > len(content):
        raise ValueError(f"its header of {begin - 8} bytes is longer than the file")
    try:
        header = json.loads(content[8:begin].tobytes())
        note = {str(name): str(said) for name, said in header.pop(_NOTE, {}).items()}
        return {name: _tensor(entry, content[begin:]) for name, entry in header.items()}, note
    except MALFORMED as error:
        raise ValueError(f"its header is none of safetensors: {error!r}") from error


def _tensor(entry: DocumentFields, content: UInt8) -> Tensor:
    if len(entry["shape"]) > _MOST_RANK:  # first: the product of a million lengths takes hours
        raise ValueError(f"a tensor of {len(entry['shape'])} dimensions")
    dtype, shape = _dtype(_NAMES[entry["dtype"]]), tuple(int(length) for length in entry["shape"])
    first, last = entry["data_offsets"]
    if not 0 <= first <= last <= len(content) or last - first != dtype.itemsize * math.prod(shape):
        raise ValueError(f"a tensor of {dtype} {list(shape)} cannot lie at {first}..{last} of {len(content)} bytes")
    return content[first:last].view(dtype).reshape(shape)


def _dtype(name: str) -> np.dtype[np.generic]:
    if name == "bfloat16":
        import ml_dtypes  # of TensorFlow; needed for models of this dtype only

        name = ml_dtypes.bfloat16
    dtype: np.dtype[np.generic] = np.dtype(name)
    return dtype


T = TypeVar("T")
R = TypeVar("R")

_THREADS = 2
_NICE = 10


def _give_way() -> None:
    """Lets other threads go first. Only Linux has priorities of threads; elsewhere it would be the whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def in_order(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`work(item)` of every item, in their order, done by threads that are one item each ahead.

    Raises:
        Exception: what `work` raised, in its place.
    """
    with ThreadPoolExecutor(_THREADS, "elastable-checkpoint") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > _THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class FileWriter:
    """Writes files of a draft in threads. Used as a context, after which nothing is written any more.

    At most one file more than there are threads is pending.

    Args:
        note: Goes into every file.
        background: Whether training continues meanwhile: then it is one thread of low
            priority. Its work must not hold a lock that training needs.
        superseded: Whether another attempt has taken the place of this one: then no more files are begun.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        draft: str,
        note: Mapping[str, str],
        background: bool = False,
        superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._files = files
        self._superseded = superseded
        self._draft = draft
        self.note = note
        self._throttle = Throttle() if background else None
        self._threads = 1 if background else _THREADS
        self._pool = ThreadPoolExecutor(
            self._threads, "elastable-checkpoint", initializer=_give_way if background else None
        )
        self._waiting: deque[Future[tuple[str, SavedFile]]] = deque()
        self._written: list[tuple[str, SavedFile]] = []

    def put(self, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Submits a file, once there is room: `tensors` as for `parts_of`; they must not change afterwards.

        Raises:
            OSError: of a file submitted earlier.
            CheckpointError: the attempt is superseded.
        """
        if self._superseded():
            raise CheckpointError("another attempt has taken the place of this one")
        if len(self._waiting) > self._threads:
            self._written.append(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(self._write, name, tensors))

    def entries(self) -> dict[str, SavedFile]:
        """Every file by name, once all are written. Raises `OSError`."""
        while self._waiting:
            self._written.append(self._waiting.popleft().result())
        return dict(self._written)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> tuple[str, SavedFile]:
        parts = parts_of(tensors, self.note)
        digest = hashlib.sha256()
        for part in parts:
            with self._working():
                digest.update(part)
        with self._working():
            self._files.write(f"{self._draft}/{name}", parts)
        return name, SavedFile(digest.hexdigest(), sum(len(part) for part in parts))

    def _working(self) -> AbstractContextManager[None]:
        return nullcontext() if self._throttle is None else self._throttle.working()


_SHARE = 0.12  # of a core
_BUSY = 0.7  # of the cores


def cores_are_short() -> bool:
    """Whether, in the last minute, most cores were asked for."""
    return os.getloadavg()[0] > _BUSY * available_cores()


class Throttle:
    """Pauses behind pieces of work, for as long as it takes to have had an eighth of a core.

    Training keeps all cores of a small machine busy. Low priority alone left it 0.55 of its speed there while
    checkpoints were written, as caches and memory are shared, too; a quarter of a core 0.73, a tenth 0.87. Where cores
    are idle nothing is waited for.

    Args:
        short: Whether cores are short now.
        sleep: Waits that many seconds.
    """

    def __init__(
        self, short: Callable[[], bool] = cores_are_short, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._short = short
        self._sleep = sleep

    @contextmanager
    def working(self) -> Iterator[None]:
        """A piece of work of the thread."""
        busy = time.thread_time()
        yield
        busy = time.thread_time() - busy
        if self._short():
            self._sleep(busy * (1 / _SHARE - 1))
