"""Keras on JAX: pure functions of the variables' values, compiled by `jax.jit`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported
from elastable.master.backend.contract import ArrayBackend, BackendTensor, Body, Gradients, IdFunction, Update

# Ids are kept in NumPy, and rows come by their exact values; what else a model does with the ids it does with 32 bits,
# as in plain Keras.
warnings.filterwarnings("ignore", "Explicitly requested dtype u?int64", UserWarning)


class JaxBackend(ArrayBackend):
    """Functions take the values of variables, and return their new ones, by Keras' `StatelessScope`."""

    name = "jax"
    metrics_see_masks = False  # it updates them outside of what it differentiates

    def __init__(self) -> None:
        self._copied: dict[int, tuple[weakref.ref[Array], BackendTensor]] = {}

    def copied(self, variable: keras.Variable) -> Array:
        value = variable.value
        copy: Array = np.asarray(value)  # JAX never changes an array: the next value is another one
        key = id(copy)
        self._copied[key] = weakref.ref(copy, lambda gone: self._copied.pop(key, None)), value
        return copy

    def assign(self, variable: keras.Variable, value: Array) -> None:
        # Where master and worker share a process, most values were copied from a variable just before.
        known = self._copied.get(id(value))
        if known is not None and known[0]() is value and known[1].dtype == variable.dtype:
            variable._value = known[1]
            return
        # Copied: JAX would alias the memory of an array, which its owner may change.
        variable._value = jax.numpy.array(value, variable.dtype)

    def update(
        self,
        body: Update,
        like: Sequence[Array],
        variables: Sequence[keras.Variable],
    ) -> Callable[..., list[Array]]:
        known = _once(variables)

        def pure(values: Sequence[BackendTensor], arrays: Sequence[BackendTensor]) -> tuple[Any, list[BackendTensor]]:
            with _stateless(known, values) as scope:
                found = body(*arrays) or ()
                return list(found), _after(scope, known)

        compiled = jax.jit(pure)

        def run(*arrays: Array) -> list[Array]:
            found, after = compiled([each.value for each in known], arrays)
            _keep(known, after)
            return list(map(np.asarray, found))

        return run

    def gradients(
        self, body: Body, variables: Sequence[keras.Variable], trained: Sequence[keras.Variable]
    ) -> Gradients:
        wanted = {id(each) for each in trained}
        others = [each for each in _once(variables) if id(each) not in wanted]

        def pure(
            values: Sequence[BackendTensor], arrays: Sequence[BackendTensor], rest: Sequence[BackendTensor], given: Any
        ) -> tuple[BackendTensor, Any]:
            with _stateless((*trained, *others), (*values, *rest)) as scope:
                loss, found = body(arrays, given)
                return loss, (found, _after(scope, others))

        compiled = jax.jit(jax.grad(pure, argnums=(0, 1), has_aux=True))

        def run(
            arrays: Sequence[Array], given: Any, preset: Sequence[tuple[keras.Variable, Array]]
        ) -> tuple[Any, list[Array | None], list[Array | None]]:
            set_to = {id(variable): value for variable, value in preset}
            rest = [set_to.get(id(each), each.value) for each in others]
            (dense, rows), (found, after) = compiled([each.value for each in trained], list(arrays), rest, given)
            _keep(others, after)
            # All of it is read here: JAX may still read the arrays that it was given until then.
            return jax.tree.map(np.asarray, found), list(map(np.asarray, dense)), list(map(np.asarray, rows))

        return run

    def ids_of(self, body: Callable[[Any], Sequence[BackendTensor]], variables: Sequence[keras.Variable]) -> IdFunction:
        known = _once(variables)

        def pure(values: Sequence[BackendTensor], batch: Any) -> list[BackendTensor]:
            with _stateless(known, values):
                return list(body(batch))

        # What ids do not need is not computed: JAX drops what leads to no result.
        compiled, seen = jax.jit(pure), set[object]()

        def run(batch: Any) -> list[Array]:
            values = [each.value for each in known]
            with self.exact_ids():
                form = str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch))
                if form not in seen:
                    _require_from_batch(partial(pure), values, batch)
                    seen.add(form)
                return list(map(np.asarray, compiled(values, batch)))

        return run

    def exact_ids(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = jax.enable_x64(True)
        return context

    def rows_within(self, read: Callable[[Array], Array], ids: BackendTensor, dim: int) -> BackendTensor:
        if not isinstance(ids, jax.core.Tracer):
            return jax.numpy.asarray(read(np.asarray(ids)))
        like = jax.ShapeDtypeStruct((*ids.shape, dim), np.float32)
        return jax.pure_callback(lambda asked: read(np.asarray(asked)), like, ids)


def _once(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    return list({id(each): each for each in variables}.values())


def _stateless(variables: Sequence[keras.Variable], values: Sequence[BackendTensor]) -> keras.StatelessScope:
    pairs: Iterator[tuple[keras.Variable, BackendTensor]] = zip(variables, values, strict=True)
    return keras.StatelessScope(state_mapping=list(pairs), collect_losses=True)


def _after(scope: keras.StatelessScope, variables: Sequence[keras.Variable]) -> list[BackendTensor]:
    return [scope.get_current_value(each) for each in variables]


def _keep(variables: Sequence[keras.Variable], values: Sequence[BackendTensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def _require_from_batch(pure: Callable[..., Any], values: Sequence[BackendTensor], batch: Any) -> None:
    """Raises `Unsupported` where ids are computed from variables: rows, weights, random numbers."""
    traced = jax.make_jaxpr(pure)(values, batch).jaxpr
    of_variables = {id(each) for each in traced.invars[: len(values)]}
    needed = {id(each) for each in traced.outvars}
    for equation in reversed(traced.eqns):
        if any(id(each) in needed for each in equation.outvars):
            needed |= {id(each) for each in equation.invars}
    if needed & of_variables:
        raise Unsupported(
            "the ids of an embedding call depend on weights, on rows of another embedding or on random numbers, so "
            "they are not known before the step: compute them from the batch alone, or use Keras' TensorFlow backend, "
            "which looks such rows up within the step"
        )


BACKEND = JaxBackend()
