"""Keras on PyTorch: the model runs eagerly, on tensors that share memory with arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

from elastable.embedding_store.contract.arrays import Array
from elastable.master.backend.contract import ArrayBackend, BackendTensor, Body, Gradients, IdBody, IdFunction, Update


class TorchBackend(ArrayBackend):
    """Functions run as they are."""

    name = "torch"
    compares_ids = True

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
        eagerly: bool = False,
    ) -> Callable[..., list[Array]]:
        def run(*arrays: Array) -> list[Array]:
            with self.runs, torch.no_grad():
                return [_array(each).copy() for each in body(*map(_tensor, arrays)) or ()]

        return run

    def gradients(
        self,
        body: Body,
        variables: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
        eagerly: bool = False,
    ) -> Gradients:
        def run(
            arrays: Sequence[Array], given: Any, preset: Sequence[tuple[keras.Variable, Array]]
        ) -> tuple[Any, list[Array | None], list[Array | None]]:
            for variable, value in preset:
                self.assign(variable, value)
            rows = [_tensor(each).requires_grad_() for each in arrays]
            weights = [each.value for each in trained]
            with self.runs:
                loss, found = body(rows, keras.tree.map_structure(_given, given))
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, [*weights, *rows], allow_unused=True)
            else:
                gradients = (None,) * len([*weights, *rows])
            arrays_of = [None if each is None else _array(each) for each in gradients]
            return keras.tree.map_structure(_array, found), arrays_of[: len(weights)], arrays_of[len(weights) :]

        return run

    def gradients_of(
        self, loss: BackendTensor, variables: Sequence[keras.Variable], rows: Sequence[BackendTensor]
    ) -> tuple[list[Array | None], list[Array | None]]:
        weights = [each.value for each in variables]
        found = torch.autograd.grad(loss, [*weights, *rows], allow_unused=True, retain_graph=True)
        arrays = [None if each is None else _array(each) for each in found]
        return arrays[: len(weights)], arrays[len(weights) :]

    def watched(self, rows: Array) -> BackendTensor:
        return _tensor(rows).requires_grad_()

    def ids_of(
        self,
        body: IdBody,
        variables: Sequence[keras.Variable],
        as_keras: Callable[[], Sequence[bool]],
        eagerly: bool = False,
    ) -> IdFunction:
        views: list[_View | None] | None = None

        def run(batch: Any) -> list[Array]:
            nonlocal views
            leaves = [_given(leaf) for leaf in keras.tree.flatten(batch)]
            if views is not None and all(view is not None for view in views):
                return [_array(view.of(leaves)) for view in views if view is not None]
            values = [(each, each.value) for each in variables]
            with self.runs, self.draws_kept(), torch.no_grad(), keras.StatelessScope(values, collect_losses=True):
                found = list(body(keras.tree.pack_sequence_as(batch, leaves), 0.0))
            if views is None:
                views = [_view_of(ids, leaves) for ids in found]
            return list(map(_array, found))

        return run

    def rows_within(self, read: Callable[[Array], Array], ids: BackendTensor, dim: int) -> BackendTensor:
        return _given(read(_array(ids)))

    def constant(
        self, rows: BackendTensor, weights: Iterable[BackendTensor], refuse: Callable[[], object]
    ) -> BackendTensor:
        if torch.is_grad_enabled():
            rows.requires_grad_().register_hook(lambda gradient: refuse())
        return rows

    def draws_kept(self) -> AbstractContextManager[object]:
        """Of PyTorch's global generators, from which layers without a seed draw."""
        context: AbstractContextManager[object] = torch.random.fork_rng(range(torch.cuda.device_count()))
        return context

    def seed_draws(self, seed: int) -> None:
        torch.manual_seed(seed)

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
    """Where Keras computes; on the CPU, of the same memory where PyTorch can."""
    array = np.asarray(array)
    made: torch.Tensor = keras.ops.convert_to_tensor(
        torch.from_numpy(array if array.flags.writeable else array.copy()), dtype=str(array.dtype)
    )
    return made


def _given(leaf: Any) -> Any:
    return None if leaf is None else keras.ops.convert_to_tensor(leaf)


BACKEND = TorchBackend()
