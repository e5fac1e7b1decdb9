"""Keras on PyTorch: the model runs eagerly, on tensors that share memory with arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

from elastable.embedding_store.contract.arrays import Array
from elastable.master.backend.contract import ArrayBackend, BackendTensor, Body, Gradients, IdFunction, Update


class TorchBackend(ArrayBackend):
    """Functions run as they are."""

    name = "torch"
    compares_ids = True

    def __init__(self) -> None:
        self._in_update = threading.local()
        self._drawing = threading.RLock()  # PyTorch's generator is one for all threads, and ids are planned ahead

    @contextmanager
    def seeded(self, words: Sequence[int] | None) -> Iterator[None]:
        # Dropout without a seed draws from PyTorch's generator.
        with self._drawing:
            if words is None:
                yield
                return
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]))
                yield

    def holds(self, ids: BackendTensor, planned: Array) -> bool:
        return np.array_equal(_array(ids), planned)

    def copied(self, variable: keras.Variable) -> Array:
        copy: Array = _array(variable.value).copy()  # PyTorch changes a variable in place
        copy.setflags(write=False)
        return copy

    def assign(self, variable: keras.Variable, value: Array) -> None:
        with torch.no_grad():
            variable.value.copy_(_tensor(value))

    def update(
        self,
        body: Update,
        like: Sequence[Array],
        variables: Sequence[keras.Variable],
    ) -> Callable[..., list[Array]]:
        def run(*arrays: Array) -> list[Array]:
            self._in_update.so = True
            try:
                with torch.no_grad():
                    return [_array(each).copy() for each in body(*map(_tensor, arrays)) or ()]
            finally:
                self._in_update.so = False

        return run

    def gradients(
        self, body: Body, variables: Sequence[keras.Variable], trained: Sequence[keras.Variable]
    ) -> Gradients:
        def run(
            arrays: Sequence[Array], given: Any, preset: Sequence[tuple[keras.Variable, Array]]
        ) -> tuple[Any, list[Array | None], list[Array | None]]:
            for variable, value in preset:
                self.assign(variable, value)
            rows = [_tensor(each).requires_grad_() for each in arrays]
            weights = [each.value for each in trained]
            loss, found = body(rows, keras.tree.map_structure(_given, given))
            gradients = torch.autograd.grad(loss, [*weights, *rows], allow_unused=True)
            arrays_of = [None if each is None else _array(each) for each in gradients]
            return keras.tree.map_structure(_array, found), arrays_of[: len(weights)], arrays_of[len(weights) :]

        return run

    def ids_of(self, body: Callable[[Any], Sequence[BackendTensor]], variables: Sequence[keras.Variable]) -> IdFunction:
        views: list[_View | None] | None = None

        def run(batch: Any) -> list[Array]:
            nonlocal views
            leaves = [_given(leaf) for leaf in keras.tree.flatten(batch)]
            if views is not None and all(view is not None for view in views):
                return [_array(view.of(leaves)) for view in views if view is not None]
            values = [(each, each.value) for each in variables]
            with self.seeded((0,)), torch.no_grad(), keras.StatelessScope(values, collect_losses=True):
                found = list(body(keras.tree.pack_sequence_as(batch, leaves)))
            if views is None:
                views = [_view_of(ids, leaves) for ids in found]
            return list(map(_array, found))

        return run

    def in_function(self) -> bool:
        return getattr(self._in_update, "so", False) or super().in_function()

    def rows_within(self, read: Callable[[Array], Array], ids: BackendTensor, dim: int) -> BackendTensor:
        return _given(read(_array(ids)))

    def set_threads(self, threads: int) -> None:
        """Sets PyTorch's threads within an operation."""
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class _View:
    """Ids that are a column of the batch, or a slice of one: they are known without running the model.

    A step compares them with what its layers are called with.

    Attributes:
        leaf: Number of the column.
        size, stride, offset: As of `torch.as_strided`; `size` without the records.
    """

    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        column = leaves[self.leaf]
        return torch.as_strided(column, (len(column), *self.size), self.stride, self.offset)


def _view_of(ids: torch.Tensor, leaves: Sequence[torch.Tensor]) -> _View | None:
    for number, leaf in enumerate(leaves):
        same = ids.dtype == leaf.dtype and ids.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
        by_record = same and leaf.ndim and ids.ndim and len(ids) == len(leaf) and ids.stride(0) == leaf.stride(0)
        if by_record and leaf.is_contiguous() and leaf.storage_offset() == 0:
            return _View(number, tuple(ids.shape[1:]), tuple(ids.stride()), ids.storage_offset())
    return None


def _array(tensor: Any) -> Array:
    return np.asarray(tensor.detach().cpu()) if isinstance(tensor, torch.Tensor) else np.asarray(tensor)


def _tensor(array: Array) -> torch.Tensor:
    """On the CPU, of the same memory where PyTorch can."""
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _given(leaf: Any) -> Any:
    return None if leaf is None else keras.ops.convert_to_tensor(leaf)


BACKEND = TorchBackend()
