"""Keras on JAX: pure functions of the variables' values, compiled by `jax.jit`."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported
from elastable.master.backend.contract import ArrayBackend, BackendTensor, Body, Gradients, IdBody, IdFunction, Update

# Ids are kept in NumPy, and rows come by their exact values; what else a model does with the ids it does with 32 bits,
# as in plain Keras.
warnings.filterwarnings("ignore", "Explicitly requested dtype u?int64", UserWarning)


class JaxBackend(ArrayBackend):
    """Functions take the values of variables, and return their new ones, by Keras' `StatelessScope`."""

    name = "jax"
    metrics_see_masks = False  # it updates them outside of what it differentiates

    def __init__(self) -> None:
        self._copied: dict[int, tuple[weakref.ref[Array], BackendTensor]] = {}

    def holds(self, ids: BackendTensor, planned: Array) -> bool:
        if isinstance(ids, jax.core.Tracer):
            return True
        found = np.asarray(ids)
        return np.array_equal(found, planned.astype(found.dtype))  # of ids beyond 32 bits a step has the lower ones

    def copied(self, variable: keras.Variable) -> Array:
        value = variable.value
        copy: Array = np.asarray(value)  # JAX never changes an array: the next value is another one
        key = id(copy)
        self._copied[key] = weakref.ref(copy, lambda gone: self._copied.pop(key, None)), value
        return copy

    def assign(self, variable: keras.Variable, value: Array) -> None:
        # Where master and worker share a process, most values were copied from a variable just before.
        known = self._copied.get(id(value))
        if known is not None and known[0]() is value and not known[1].is_deleted():
            variable._value = known[1]
            return
        # Copied: JAX would alias the memory of an array, which its owner may change.
        variable._value = jax.numpy.array(value, variable.dtype)

    def update(
        self,
        body: Update,
        like: Sequence[Array],
        variables: Sequence[keras.Variable],
        eagerly: bool = False,
    ) -> Callable[..., list[Array]]:
        known = _once(variables)

        def pure(values: Sequence[BackendTensor], arrays: Sequence[BackendTensor]) -> tuple[Any, _Changed]:
            with self.runs, _stateless(known, values) as scope:
                found = body(*arrays) or ()
                return list(found), _changed(scope, known, values)

        compiled = pure if eagerly else jax.jit(pure)

        def run(*arrays: Array) -> list[Array]:
            if eagerly:
                arrays = tuple(map(jax.numpy.asarray, arrays))
            # JAX may read the arrays that it was given until it is done.
            found, changed = jax.block_until_ready(compiled([each.value for each in known], arrays))
            _keep(known, changed)
            return list(map(np.asarray, found))

        return run

    def gradients(
        self,
        body: Body,
        variables: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
        eagerly: bool = False,
    ) -> Gradients:
        wanted = {id(each) for each in trained}
        others = [each for each in _once(variables) if id(each) not in wanted]

        def pure(
            values: Sequence[BackendTensor], arrays: Sequence[BackendTensor], rest: Sequence[BackendTensor], given: Any
        ) -> tuple[BackendTensor, Any]:
            with self.runs, _stateless((*trained, *others), (*values, *rest)) as scope:
                loss, found = body(arrays, given)
                return loss, (found, _changed(scope, others, rest))

        gradient = jax.grad(pure, argnums=(0, 1), has_aux=True)
        compiled = gradient if eagerly else jax.jit(gradient)

        def run(
            arrays: Sequence[Array], given: Any, preset: Sequence[tuple[keras.Variable, Array]]
        ) -> tuple[Any, list[Array | None], list[Array | None]]:
            if eagerly:
                arrays, given = jax.tree.map(jax.numpy.array, (list(arrays), given))
            set_to = {id(variable): value for variable, value in preset}
            rest = [set_to.get(id(each), each.value) for each in others]
            (dense, rows), (found, changed) = compiled([each.value for each in trained], list(arrays), rest, given)
            _keep(others, changed)
            drawn_from = {id(others[place]) for place in changed}
            for variable, value in preset:
                if id(variable) not in drawn_from:
                    self.assign(variable, value)
            # All of it is read here: JAX may still read the arrays that it was given until then.
            return jax.tree.map(np.asarray, found), list(map(np.asarray, dense)), list(map(np.asarray, rows))

        return run

    def ids_of(
        self,
        body: IdBody,
        variables: Sequence[keras.Variable],
        as_keras: Callable[[], Sequence[bool]],
        eagerly: bool = False,
    ) -> IdFunction:
        known = _once(variables)

        def pure(values: Sequence[BackendTensor], zero: BackendTensor, batch: Any) -> list[BackendTensor]:
            with self.runs, _stateless(known, values):
                return list(body(batch, zero))

        # What ids do not need is not computed: JAX drops what leads to no result.
        compiled, found = pure if eagerly else jax.jit(pure), dict[object, _Ids]()
        zero = np.zeros((), np.float32)

        def run(batch: Any) -> list[Array]:
            leaves = jax.tree.leaves(batch)
            form = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            values = [each.value for each in known]
            with self.exact_ids(), _inner_calls_refused():
                if form not in found:
                    found[form] = _ids_in(pure, values, zero, batch)
                columns, computed = found[form]
                if columns is not None and not eagerly:
                    return [column(leaves) for column in columns]
                exact = list(map(np.asarray, compiled(values, zero, jax.tree.map(jax.numpy.asarray, batch))))
            if computed and not self.needs_exact_ids(batch):
                plain = partial(compiled, values, zero, jax.tree.map(jax.numpy.asarray, batch))
                _require_same(exact, plain, as_keras())
            return exact

        return run

    def needs_exact_ids(self, batch: Any) -> bool:
        wide = [leaf for leaf in jax.tree.leaves(batch) if getattr(leaf, "dtype", None) in _LIMITS and leaf.size]
        return any(leaf.min() < _LIMITS[leaf.dtype].min or leaf.max() > _LIMITS[leaf.dtype].max for leaf in wide)

    def set_threads(self, threads: int) -> None:
        """Sets XLA's threads, of which it has those of one operation alone; only before its first operation."""
        os.environ["NPROC"] = str(threads)
        flag = f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

    def exact_ids(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = jax.enable_x64(True)
        return context

    def rows_within(self, read: Callable[[Array], Array], ids: BackendTensor, dim: int) -> BackendTensor:
        if not isinstance(ids, jax.core.Tracer):
            return jax.numpy.asarray(read(np.asarray(ids)))
        like = jax.ShapeDtypeStruct((*ids.shape, dim), np.float32)
        return jax.pure_callback(lambda asked: read(np.asarray(asked)), like, ids)

    def constant(
        self, rows: BackendTensor, weights: Iterable[BackendTensor], refuse: Callable[[], object]
    ) -> BackendTensor:
        # A function of the weights too, so that JAX asks for its derivative, also where it is compiled before.
        kept = jax.custom_vjp(lambda rows, weights: rows)
        kept.defvjp(lambda rows, weights: refuse(), lambda *given: refuse())
        return kept(rows, list(weights))


def _once(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    return list({id(each): each for each in variables}.values())


def _stateless(variables: Sequence[keras.Variable], values: Sequence[BackendTensor]) -> keras.StatelessScope:
    pairs: Iterator[tuple[keras.Variable, BackendTensor]] = zip(variables, values, strict=True)
    return keras.StatelessScope(state_mapping=list(pairs), collect_losses=True)


_Changed = dict[int, BackendTensor]
"""Place of a variable -> its new value; the others keep theirs, and what was read of it."""


def _changed(
    scope: keras.StatelessScope, variables: Sequence[keras.Variable], before: Sequence[BackendTensor]
) -> _Changed:
    after = map(scope.get_current_value, variables)
    return {place: now for place, (now, was) in enumerate(zip(after, before, strict=True)) if now is not was}


def _keep(variables: Sequence[keras.Variable], changed: _Changed) -> None:
    for place, value in changed.items():
        variables[place]._value = value


#: What JAX leaves as it is where it has no 64 bits.
_LIMITS = {np.dtype(np.int64): np.iinfo(np.int32), np.dtype(np.uint64): np.iinfo(np.uint32)}

#: Operations that move integers, and leave them what they are.
_MOVES = (
    *("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "slice", "dynamic_slice", "gather", "copy"),
    *("concatenate", "rev", "convert_element_type", "stop_gradient"),
)


#: (columns of a batch) -> ids of a call, which are a part of one.
_Column = Callable[[Sequence[Array]], Array]

#: Those of them that choose some of one array, as views of NumPy's.
_VIEWS: dict[str, Callable[..., Array]] = {
    "reshape": lambda array, new_sizes, **_: array.reshape(new_sizes),
    "slice": lambda array, start_indices, limit_indices, strides: array[
        tuple(map(slice, start_indices, limit_indices, strides or [None] * array.ndim))
    ],
    "squeeze": lambda array, dimensions: array.squeeze(dimensions),
}


class _Ids(NamedTuple):
    """How ids come from a batch: as `columns` alone, else None; else whether any are computed, and not only moved."""

    columns: list[_Column] | None
    computed: bool


@contextmanager
def _inner_calls_refused() -> Iterator[None]:
    """Raises `Unsupported` where ids are known within a function alone that the model has JAX transform."""
    try:
        yield
    except (jax.errors.UnexpectedTracerError, jax.errors.TracerArrayConversionError) as error:
        raise Unsupported(
            "an embedding is called inside of a function that is mapped, repeated or computed again (keras.ops.map, "
            "scan, vectorized_map, keras.remat): call it outside, and pass its output in "
            f"({str(error).splitlines()[0]})"
        ) from error


def _ids_in(pure: Callable[..., Any], values: Sequence[BackendTensor], zero: BackendTensor, batch: Any) -> _Ids:
    """How ids come from a batch of this form.

    Raises:
        Unsupported: they are computed from more than the batch: rows, weights, random numbers.
    """
    traced = jax.make_jaxpr(pure)(values, zero, batch).jaxpr
    of_variables = {id(each) for each in traced.invars[: len(values) + 1]}
    needed, computed = {id(each) for each in traced.outvars}, False
    for equation in reversed(traced.eqns):
        if any(id(each) in needed for each in equation.outvars):
            needed |= {id(each) for each in equation.invars}
            computed = computed or equation.primitive.name not in _MOVES
    if needed & of_variables:
        raise Unsupported(
            "the ids of an embedding call depend on weights, on rows of another embedding or on random numbers, so "
            "they are not known before the step: compute them from the batch alone, or use Keras' TensorFlow backend, "
            "which looks such rows up within the step"
        )
    places = {id(each): place for place, each in enumerate(traced.invars[len(values) + 1 :])}
    columns = [_column(traced, ids, places) for ids in traced.outvars]
    return _Ids(None if None in columns else [each for each in columns if each is not None], computed)


def _column(traced: Any, ids: Any, places: Mapping[int, int]) -> _Column | None:
    """Of the part of a column that these ids are, the function that takes it; None: they are none."""
    made = {id(each): equation for equation in traced.eqns for each in equation.outvars}
    views: list[Callable[[Array], Array]] = []
    while (equation := made.get(id(ids))) is not None:
        turned = equation.params.get("dimensions") is not None and equation.primitive.name == "reshape"
        if equation.primitive.name not in _VIEWS or turned or len(equation.invars) != 1:
            return None
        views.insert(0, partial(_VIEWS[equation.primitive.name], **equation.params))
        ids = equation.invars[0]
    if id(ids) not in places:
        return None
    place = places[id(ids)]
    return lambda leaves: reduce(lambda array, view: view(array), views, np.asarray(leaves[place]))


def _require_same(
    exact: Sequence[Array], compute: Callable[[], Sequence[BackendTensor]], as_keras: Sequence[bool]
) -> None:
    """Raises `Unsupported` where plain Keras, which has 32 bits on JAX, computes other ids."""
    try:
        plain = list(map(np.asarray, compute()))
    except OverflowError:  # of a number that the program says: plain Keras cannot run it
        return
    for one, other, compared in zip(exact, plain, as_keras, strict=True):
        if compared and not np.array_equal(one, other):
            place = int(np.flatnonzero((one != other).ravel())[0])
            raise Unsupported(
                f"the model computes the id {one.ravel()[place]} from its batch, and Keras, which has 32 bits on JAX, "
                f"{other.ravel()[place]}: compute ids so that no number on the way is above 2**31 - 1, as by % before "
                "a product, or in the reader"
            )


BACKEND = JaxBackend()
