"""Which layers a job trains, where callbacks may freeze them and unfreeze them."""

import logging

import keras

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.master.backend.contract import backend
from elastable.master.model.dense import DenseModel
from elastable.worker.keras.same_optimizer import Hyperparameters, require_same_values, runs_eagerly
from elastable.worker.keras.seeds import layers_of
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.step.trainable import frozen_tables, imposed, put_trainable, read_trainable

_LOG = logging.getLogger(__name__)
_KEPT = "elastable_trainable"


class Freezing:
    """Reads `trainable` of a model's layers when Keras' `fit` does, and has the master hold to it.

    Keras reads it with the first batch of a new train function, which `compile` and `make_train_function(force=True)`
    make; eager models are read with every batch. A flag that was set since is without effect until then, here as there.
    But Keras traces `fit` and `train_on_batch` apart, and batches of other shapes anew: where a flag that was set since
    would count for some of them alone, it is refused.

    Args:
        model: A built model, compiled; callbacks know it.
        of: Names what Keras traces once: the method that trains, the size of its batches, and their structure.
    """

    def __init__(self, model: keras.Model, dense: DenseModel, of: str = "fit") -> None:
        self._model, self._dense, self._of = model, dense, of
        self._layers = store_layers(model)
        self._compiled = (model.optimizer, model._compile_loss)
        self._sources, self._tables = [], set()
        for layer in self._layers:
            self._sources.append((layer, layer.source))
            self._tables.add(layer.table_name)
        self._hyperparameters = list(map(Hyperparameters, dense.optimizers))
        self._held: object = None
        self._function: object = None
        self._warned = b""

    def begin(self, state: str = "") -> None:
        """Training begins, or goes on with what `state()` said.

        Raises:
            ModelError: the state is of another model.
        """
        if state:
            try:
                put_trainable(self._model, bytes.fromhex(state))
            except ValueError as error:
                raise ModelError(f"{state[:40]!r} does not say which layers of a model are trained") from error
            self._model.make_train_function(force=True)
            # As if it were traced: also where no epoch is left, and where a callback changes it before the next one.
            setattr(self._model.train_function, _KEPT, {self._of: bytes.fromhex(state)})
        self._model.make_train_function()

    def state(self) -> str:
        """What is trained now, for a job that goes on."""
        kept: dict[str, bytes] = getattr(self._model.train_function, _KEPT, {})
        return kept.get(self._of, b"").hex()

    def look(self, of: str | None = None) -> None:
        """To be called before each epoch and, where callbacks see batches, after each version.

        Args:
            of: As of the class, of this batch.

        Raises:
            Unsupported: a callback compiled the model anew, unfroze what the optimizer was not built for, put a table
                into another store, or assigned a hyperparameter of an optimizer; or see the class and
                `require_same_values`.
            ModelError: layers that share a table differ in whether it is trained.
        """
        if (self._model.optimizer, self._model._compile_loss) != self._compiled or not self._model.train_function:
            raise Unsupported(
                f"a callback compiled model {self._model.name!r} while it is trained: to freeze layers or to unfreeze "
                "them call model.make_train_function(force=True), and compile between two fits"
            )
        for layer, source in self._sources:
            if layer.source is not source:
                raise Unsupported(
                    f"embedding layer {layer.name!r}: a callback put its table into another store while model "
                    f"{self._model.name!r} is trained: load weights and attach stores between two fits"
                )
        for each in self._hyperparameters:
            each.require(f"model {self._model.name!r}", "compile it anew between two fits")
        function = self._model.train_function
        if runs_eagerly(self._model):
            setattr(function, _KEPT, {self._of: read_trainable(self._model)})
        if runs_eagerly(self._model) or function is not self._function:  # it is traced now, or read
            require_same_values(self._model)
            self._function = function
        flags = self._kept(function, of or self._of)
        if self._held == (function, flags):
            self._warn(flags)
            return
        self._held = (function, flags)
        self._hold(flags)

    def _kept(self, function: object, of: str) -> bytes:
        """The flags in force in this trace of Keras' train function."""
        kept: dict[str, bytes] = getattr(function, _KEPT, {})
        if of not in kept:
            now = read_trainable(self._model)
            if other := next((flags for flags in kept.values() if flags != now), b""):
                raise Unsupported(
                    f"model {self._model.name!r}: trainable of {self._differing(now, other)} was changed after "
                    "training began. In Keras the new value counts for batches of a size or structure, and for a "
                    "method, that it has not trained with since it was compiled, and the old one for all others; call "
                    "model.compile(...) first, with this optimizer or a new one"
                )
            setattr(function, _KEPT, {**kept, of: now})
        found: bytes = getattr(function, _KEPT)[of]
        return found

    def _hold(self, trainable: bytes) -> None:
        with imposed(self._model, trainable):
            frozen = frozen_tables(self._model, self._layers)
            any_table = len(frozen) < len(self._tables)
            variables = variables_of(self._model.trainable_weights)
            self._dense.hold(variables, frozen, trainable, any_table)
            if not any_table and not variables:
                _LOG.warning("model %r has nothing that can be trained: all its layers are frozen", self._model.name)
        self._warn(trainable)

    def _warn(self, held: bytes) -> None:
        now = read_trainable(self._model)
        if now in (held, self._warned):
            return
        self._warned = now
        if backend().name == "jax":
            raise Unsupported(
                f"model {self._model.name!r}: trainable of {self._differing(now, held)} was changed after training "
                "began, which Keras' JAX backend cannot go on with: call model.compile(...) first"
            )
        _LOG.warning(
            "trainable of %s was changed and is without effect, as in Keras: call model.compile(...), or in a callback "
            "model.make_train_function(force=True)",
            self._differing(now, held),
        )

    def _differing(self, now: bytes, held: bytes) -> str:
        """Names of the layers whose flags differ, but for the model itself."""
        names = [
            layer.name
            for layer, flag, other in zip(layers_of(self._model), now, held, strict=False)
            if flag != other and layer is not self._model and layer.weights
        ]
        return ", ".join(map(repr, names)) or "weights"
