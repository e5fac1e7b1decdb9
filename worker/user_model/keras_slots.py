"""Slots of tables as Keras optimizers have them: taken over from variables, and in Keras files."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TypeAlias

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.row_blocks import fresh_rows
from elastable.master.backend.contract import backend
from elastable.worker.keras.keras_methods import built_with, wrap_method
from elastable.worker.rows.store_backed import StoreBacked

_BLOCK_ROWS = 1 << 16
_ACCUMULATOR = "gradient_accumulator"  # zeros between the updates that it is summed for


def keras_slots(optimizer: keras.optimizers.Optimizer, layer: StoreBacked, spec: TableSpec) -> Float32 | None:
    """float32 `[vocabulary, slot_width]`: the optimizer's slots of the layer's former variable.

    None if there are none: the layer never had a variable, or the optimizer was not built with it.

    Raises:
        Unsupported: the optimizer keeps other values.
    """
    variables = _variables(optimizer, layer, spec)
    if variables is None:
        return None
    no_slots = np.zeros((layer.input_dim or 0, 0), np.float32)
    return np.concatenate([no_slots, *map(np.asarray, variables)], axis=1)


def give_back_slots(optimizer: keras.optimizers.Optimizer, layer: StoreBacked, store: EmbeddingStore) -> None:
    """Copies the table's slots into the optimizer's variables, before they are written to a file."""
    spec = store.specs()[layer.table_name]
    variables = _variables(optimizer, layer, spec)
    if not variables:
        return
    slots = np.concatenate([np.asarray(variable) for variable in variables], axis=1)
    for block in store.scan(layer.table_name, _BLOCK_ROWS):
        slots[block.ids] = block.slots
    for variable, values in zip(variables, np.split(slots, len(variables), axis=1), strict=True):
        backend().assign(variable, values)


def _variables(
    optimizer: keras.optimizers.Optimizer, layer: StoreBacked, spec: TableSpec
) -> list[keras.Variable] | None:
    if not layer.has_variable_in(optimizer):
        return None
    path = str(getattr(layer, "variable_path", None))
    by_name = {variable.name: variable for variable in optimizer.variables}
    found = []
    for slot in row_optimizer(spec.optimizer).slots:
        variable = by_name.get(f"{path.replace('/', '_')}_{slot.name}")
        if variable is None or tuple(variable.shape) != (layer.input_dim, layer.output_dim):
            raise Unsupported(
                f"embedding layer {layer.name!r}: the optimizer {optimizer.name!r} has trained it, and what it keeps "
                f"({slot.name}) cannot be moved to a store; compile the model with a new optimizer"
            )
        found.append(variable)
    return found


def _table(weight: object) -> StoreBacked | None:
    """The layer whose rows the weight is; None: it is a variable."""
    return getattr(weight, "layer", None) if hasattr(weight, "table_name") else None


@dataclass(frozen=True, slots=True)
class _SlotOfTable:
    """A variable that the plain optimizer has for a table, and this one has not."""

    layer: StoreBacked
    slot: str


_Arrays: TypeAlias = "MutableMapping[str, npt.ArrayLike]"
_Place: TypeAlias = "keras.Variable | _SlotOfTable"


def wrap_optimizer_files() -> None:
    """Wraps how Keras' optimizers write and read their part of a file; a second call changes nothing.

    An optimizer that has only known a table in a store has no variables for it. Its part of a file is nevertheless that
    of the plain one where embeddings are offloaded. The slots of an `et.Embedding` are in the layer's part; those that
    a plain optimizer wrote are loaded.
    """
    wrap_method("save_own_variables", _save, keras.optimizers.Optimizer)
    wrap_method("load_own_variables", _load, keras.optimizers.Optimizer)


def _places(optimizer: keras.optimizers.Optimizer, offloaded_only: bool) -> list[_Place]:
    """What the variables of the plain optimizer are here, in its order; empty: it has the same.

    Args:
        optimizer: As it was built.
        offloaded_only: Whether plain Keras has variables for offloaded tables alone, or for all.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    weights = [
        weight
        for weight in built_with(optimizer)
        if (layer := _table(weight)) is None
        or hasattr(layer, "variable_path")  # it is offloaded
        or not (offloaded_only or layer.optimizer is not None)
    ]
    if not any(map(_table, weights)):
        return []
    plain = type(inner).from_config(inner.get_config())
    plain.build([keras.Variable(np.zeros((1, 1)), name=f"elastable{number}_") for number in range(len(weights))])
    mine = iter(inner.variables)  # the same, in the same order, but for those of tables
    found: list[_Place] = list(optimizer.variables[: -len(inner.variables)])
    for variable in plain.variables:
        number, of, slot = variable.name.removeprefix("elastable").partition("__")
        layer = _table(weights[int(number)]) if of else None
        found.append(next(mine) if layer is None else _SlotOfTable(layer, slot))
    return found if any(isinstance(place, _SlotOfTable) for place in found) else []


def _refuse_by_hand(method: str, optimizer: keras.optimizers.Optimizer, store: _Arrays, *places: list[_Place]) -> None:
    """Refuses what holds dense variables' state alone: in a file, that of tables is in the part of their layers.

    Args:
        method: Its name.
        optimizer: As it was built.
        store: A dict where a program calls the method; Keras passes a part of a file.
        places: Of offloaded tables, and of all.
    """
    offloaded, every = map(len, places)
    if isinstance(store, dict) and offloaded != every and len(store) != every:
        raise Unsupported(
            f"{method} of the optimizer {optimizer.name!r}: the slots of tables are in their store, and would be left "
            "out; use model.save, save_weights and load_weights, or tf.train.Checkpoint(model), or compile the model "
            "with a new optimizer to begin with new slots"
        )


def _save(plain: Callable[..., None], optimizer: keras.optimizers.Optimizer, store: _Arrays) -> None:
    places, every = (_places(optimizer, offloaded_only) for offloaded_only in (True, False))
    _refuse_by_hand("save_own_variables", optimizer, store, places, every)
    slots = {layer: _slots_of(layer) for layer in {place.layer for place in places if isinstance(place, _SlotOfTable)}}
    for number, place in enumerate(places):
        store[str(number)] = slots[place.layer][place.slot] if isinstance(place, _SlotOfTable) else np.asarray(place)
    if not places:
        plain(optimizer, store)


def _load(plain: Callable[..., None], optimizer: keras.optimizers.Optimizer, store: _Arrays) -> None:
    candidates = [_places(optimizer, offloaded_only) for offloaded_only in (True, False)]
    _refuse_by_hand("load_own_variables", optimizer, store, *candidates)
    places = next((each for each in candidates if each and len(each) == len(store.keys())), [])
    tables = {place.layer for place in places if isinstance(place, _SlotOfTable)}
    if not places or not all(isinstance(layer.source, EmbeddingStore) for layer in tables):
        plain(optimizer, store)  # Keras warns where it skips the optimizer
        return
    slots: dict[StoreBacked, dict[str, Float32]] = {}
    for number, place in enumerate(places):
        if isinstance(place, _SlotOfTable):
            slots.setdefault(place.layer, {})[place.slot] = np.asarray(store[str(number)], np.float32)
        else:
            backend().assign(place, np.asarray(store[str(number)]))
    for layer, found in slots.items():
        source, name = layer.source, layer.table_name
        assert isinstance(source, EmbeddingStore)
        wanted = row_optimizer(source.specs()[name].optimizer).slots
        if missing := [slot.name for slot in wanted if slot.name not in found]:
            raise Unsupported(
                f"embedding layer {layer.name!r}: a Keras file does not hold what its optimizer keeps of rows "
                f"({', '.join(missing)}), so they cannot be loaded; compile the model anew before"
            )
        no_slots = np.zeros((layer.input_dim or 0, 0), np.float32)
        whole = np.concatenate([no_slots, *(found[slot.name] for slot in wanted)], axis=1)
        for start in range(0, len(whole), _BLOCK_ROWS):
            ids = np.arange(start, min(start + _BLOCK_ROWS, len(whole)), dtype=np.int64)
            source.put(name, [RowBlock(ids, source.lookup({name: ids})[name], whole[ids])])
        layer.note_trained_by(optimizer)


def _slots_of(layer: StoreBacked) -> dict[str, Float32]:
    """Each slot of all rows, float32 `[vocabulary, dim]`, by Keras' name."""
    source, name, rows = layer.source, layer.table_name, layer.input_dim or 0
    if not isinstance(source, EmbeddingStore):
        raise Unsupported(
            f"embedding layer {layer.name!r} reads its rows from elsewhere: save the model where it is trained"
        )
    spec = source.specs()[name]
    whole = np.repeat(fresh_rows(spec, np.zeros(1, np.int64), np.zeros((1, spec.dim), np.float32)).slots, rows, axis=0)
    for block in source.scan(name, _BLOCK_ROWS):
        whole[block.ids] = block.slots
    optimizer_slots, found, at = row_optimizer(spec.optimizer).slots, {}, 0
    for slot in optimizer_slots:
        width = spec.dim if slot.columns is None else slot.columns
        found[slot.name], at = whole[:, at : at + width], at + width
    return {_ACCUMULATOR: np.zeros((rows, spec.dim), np.float32), **found}
