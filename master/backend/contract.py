"""The contract of a backend: variables read and written, and functions of a model's code that are compiled."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, TypeAlias

import keras

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported

#: A tensor of the backend.
BackendTensor: TypeAlias = Any

#: Reads and assigns variables, and may return tensors.
Update: TypeAlias = Callable[..., Sequence[BackendTensor] | None]

#: (tensors to differentiate by, everything else) -> (loss, pytree of tensors).
Body: TypeAlias = Callable[[Sequence[BackendTensor], Any], tuple[BackendTensor, Any]]

#: (arrays to differentiate by, everything else, values of variables) -> (what `Body` returned, gradients of the
#: variables, gradients of the arrays); a gradient is None where the loss does not depend on it.
Gradients: TypeAlias = Callable[
    [Sequence[Array], Any, Sequence[tuple[keras.Variable, Array]]],
    tuple[Any, list[Array | None], list[Array | None]],
]


#: As of `ArrayBackend.ids_of`.
IdBody: TypeAlias = Callable[[Any, BackendTensor], Sequence[BackendTensor]]


class Backend(ABC):
    """A framework that Keras runs on.

    Attributes:
        name: As of `keras.config.backend()`.
        has_graphs: Whether a traced function is a graph that can be read: which ids a step needs, and by what its loss
            was divided. TensorFlow alone.
    """

    name: str
    has_graphs = False

    @abstractmethod
    def copied(self, variable: keras.Variable) -> Array:
        """A read-only copy of a variable's value."""

    @abstractmethod
    def assign(self, variable: keras.Variable, value: Array) -> None:
        """Sets a variable, also slots, which a program must not assign; the value is known to be of its shape."""

    def tensor(self, array: Array, ours: bool = False) -> BackendTensor:
        """The tensor of an array; `ours`: nobody changes it from now on, so that the tensor may be its memory."""
        return keras.ops.convert_to_tensor(array)

    @abstractmethod
    def update(
        self,
        body: Update,
        like: Sequence[Array],
        variables: Sequence[keras.Variable],
        eagerly: bool = False,
    ) -> Callable[..., list[Array]]:
        """A function that changes variables, compiled.

        Args:
            body: Of tensors; reads and assigns Keras variables, and may return tensors.
            like: An array of the shape and dtype of each argument; only these are read of it.
            variables: All that `body` reads or assigns.
            eagerly: Not compiled, where there is a choice.

        Returns:
            A function of arrays that runs it and returns its tensors as arrays.
        """

    def needs_exact_ids(self, batch: Any) -> bool:
        """Whether integers of a batch of arrays are what they are in `exact_ids` alone."""
        return False

    def exact_ids(self) -> AbstractContextManager[object]:
        """Within the block, integers of 64 bits stay what they are."""
        return nullcontext()

    def draws_kept(self) -> AbstractContextManager[object]:
        """Restores the framework's own random state after the block, where it has one besides Keras' generators."""
        return nullcontext()

    def seed_draws(self, seed: int) -> None:  # noqa: B027
        """Sets that state."""

    def set_threads(self, threads: int) -> None:  # noqa: B027
        """Sets the number of threads within an operation, which is a part of the job because it affects rounding.

        Raises:
            ElastableError: it has started with another number.
        """


class ArrayBackend(Backend):
    """A backend whose steps are functions of arrays.

    Attributes:
        runs: Held by whatever runs the model's code: ids are planned in another thread than steps run, and layers keep
            losses and values of the user's between two lines of it.
        compares_ids: Whether steps always run eagerly, so that their ids can be looked at.
        metrics_see_masks: Whether Keras' own train step gives metrics the predictions with their masks.
    """

    runs = threading.RLock()
    compares_ids = False
    metrics_see_masks = True

    def holds(self, ids: BackendTensor, planned: Array) -> bool:
        """Whether a tensor holds these integers, as it can; of a compiled step, which cannot be read: True."""
        return True

    @abstractmethod
    def gradients(
        self,
        body: Body,
        variables: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
        eagerly: bool = False,
    ) -> Gradients:
        """The gradient of a loss by variables and arrays, compiled.

        Args:
            body: Computes the loss; reads and assigns Keras variables.
            variables: All that `body` reads or assigns; after each call they have their new values.
            trained: Those of them by which the loss is differentiated.
            eagerly: Not compiled, where there is a choice.
        """

    def gradients_of(
        self, loss: BackendTensor, variables: Sequence[keras.Variable], rows: Sequence[BackendTensor]
    ) -> tuple[list[Array | None], list[Array | None]]:
        """Gradients of a loss that was computed, by variables and by rows of `watched`; None: it does not depend.

        Raises:
            Unsupported: the backend differentiates functions alone.
        """
        raise self._refused()

    def watched(self, rows: Array) -> BackendTensor:
        """Rows that `gradients_of` may be asked for; raises as of it."""
        raise self._refused()

    def _refused(self) -> Unsupported:
        return Unsupported(
            f"et.step on Keras' {self.name} backend, which differentiates functions, and no loss that was computed: "
            "override compute_loss and train with et.fit, or set KERAS_BACKEND to tensorflow or torch"
        )

    @abstractmethod
    def ids_of(
        self,
        body: IdBody,
        variables: Sequence[keras.Variable],
        as_keras: Callable[[], Sequence[bool]],
        eagerly: bool = False,
    ) -> IdFunction:
        """The part of a step that computes ids from a batch.

        Args:
            body: (a batch, a zero that stands for the values of rows) -> the ids of every embedding call, in order.
            variables: All that `body` reads or assigns; they do not change.
            as_keras: Of every embedding call, whether plain Keras has a table for it, so that its ids are those that it
                computes.
            eagerly: Not compiled, where there is a choice.

        Raises (from what is returned):
            Unsupported: ids that depend on more than the batch; or those of a table as Keras', which it computes
                otherwise.
        """

    @abstractmethod
    def rows_within(self, read: Callable[[Array], Array], ids: BackendTensor, dim: int) -> BackendTensor:
        """float32 ids' shape + `[dim]`: the rows of ids, which `read` finds, wherever the call is: traced or not."""

    @abstractmethod
    def constant(
        self, rows: BackendTensor, weights: Iterable[BackendTensor], refuse: Callable[[], object]
    ) -> BackendTensor:
        """Rows of a call that no step of ours trains; `refuse` raises, and is called where a gradient is asked for.

        Args:
            weights: Values that variables have in the `keras.StatelessScope` that is current, if one is.
        """


#: (a batch of arrays) -> ids of every embedding call, each an integer array of any shape.
IdFunction: TypeAlias = Callable[[Any], list[Array]]

_MODULES = {
    "tensorflow": "elastable.master.backend.tensorflow_backend",
    "jax": "elastable.master.backend.jax_backend",
    "torch": "elastable.master.backend.torch_backend",
}


@functools.cache
def backend() -> Backend:
    """The one that Keras runs on in this process.

    Raises:
        Unsupported: Keras runs on another one.
    """
    name = keras.config.backend()
    if name not in _MODULES:
        raise Unsupported(f"Keras runs on the backend {name!r}; Elastable's layers on {', '.join(_MODULES)}")
    made: Backend = import_module(_MODULES[name]).BACKEND
    return made


def array_backend() -> ArrayBackend:
    """The one that Keras runs on, where it is not TensorFlow."""
    made = backend()
    assert isinstance(made, ArrayBackend)
    return made


def take_statistics(layers: Iterable[keras.Layer]) -> None:
    """Has layers that compute with tensors made of their weights make them of what was assigned, as Keras does."""
    for layer in layers:
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()
