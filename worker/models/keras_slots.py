"""Slots of offloaded embeddings as Keras optimizers have them: taken over from variables, and in Keras files.

A plain Keras optimizer has variables for each embedding. One that has only known a table in a store has none for it.
Its part of a Keras file is nevertheless that of the plain one, slots included, so that what loads the file goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
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
from elastable.worker.rows.store_backed import StoreBacked

__all__ = ["give_back_slots", "keras_slots", "knows_variable", "note_weights", "wrap_optimizer_files"]

_BLOCK_ROWS = 1 << 16
_WEIGHTS = "_elastable_weights"
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


def knows_variable(optimizer: keras.optimizers.Optimizer, layer: StoreBacked) -> bool:
    """Whether the optimizer was built with the layer's former variable, and has slots for it."""
    path = getattr(layer, "variable_path", None)
    return path is not None and path in [each.path for each in getattr(optimizer, "_trainable_variables", ())]


def give_back_slots(optimizer: keras.optimizers.Optimizer, layer: StoreBacked, store: EmbeddingStore) -> None:
    """Copies the table's slots into the optimizer's variables, before they are written to a file."""
    spec = store.specs()[layer.table_name]
    variables = _variables(optimizer, layer, spec) or []
    slots = np.concatenate([np.asarray(variable) for variable in variables], axis=1) if variables else None
    if slots is None:
        return
    for block in store.scan(layer.table_name, _BLOCK_ROWS):
        slots[block.ids] = block.slots
    for variable, values in zip(variables, np.split(slots, len(variables), axis=1), strict=True):
        variable.assign(values)


def _variables(
    optimizer: keras.optimizers.Optimizer, layer: StoreBacked, spec: TableSpec
) -> list[keras.Variable] | None:
    if not knows_variable(optimizer, layer):
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


def note_weights(optimizer: keras.optimizers.Optimizer, weights: Sequence[object]) -> None:
    """Records a model's trainable weights, its offloaded tables among them, which this optimizer trains from now on.

    Nothing where it has been recorded before, or where the optimizer was built with variables of the tables.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    tables = [layer for weight in weights if (layer := _offloaded(weight)) is not None]
    if tables and not hasattr(inner, _WEIGHTS) and not any(knows_variable(inner, layer) for layer in tables):
        kept = [weight for weight in weights if not hasattr(weight, "table_name") or _offloaded(weight) is not None]
        object.__setattr__(inner, _WEIGHTS, tuple(kept))  # past Keras' tracking


def _offloaded(weight: object) -> StoreBacked | None:
    layer: StoreBacked | None = getattr(weight, "layer", None)
    return layer if hasattr(layer, "variable_path") else None


@dataclass(frozen=True, slots=True)
class _SlotOfTable:
    """A variable that the plain optimizer has for an offloaded table, and this one has not."""

    layer: StoreBacked
    slot: str


_Arrays: TypeAlias = "MutableMapping[str, npt.ArrayLike]"
_Place: TypeAlias = "keras.Variable | _SlotOfTable"


def wrap_optimizer_files() -> None:
    """Wraps how Keras' optimizers write and read their part of a file; a second call changes nothing."""
    kind = keras.optimizers.Optimizer
    if "save_own_variables" not in vars(kind):
        kind.save_own_variables = _with_tables(kind.save_own_variables, _save)
        kind.load_own_variables = _with_tables(kind.load_own_variables, _load)


def _with_tables(
    plain: Callable[..., None], ours: Callable[[keras.optimizers.Optimizer, _Arrays, list[_Place]], bool]
) -> Callable[[keras.optimizers.Optimizer, _Arrays], None]:
    @functools.wraps(plain)
    def method(self: keras.optimizers.Optimizer, store: _Arrays) -> None:
        places = _places(self)
        if not any(isinstance(place, _SlotOfTable) for place in places) or not ours(self, store, places):
            plain(self, store)

    return method


def _places(optimizer: keras.optimizers.Optimizer) -> list[_Place]:
    """What the variables of the plain optimizer are here, in its order; empty: the same."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    weights = getattr(inner, _WEIGHTS, ())
    if not weights or not inner.built:
        return []
    plain = type(inner).from_config(inner.get_config())
    plain.build([keras.Variable(np.zeros((1, 1)), name=f"elastable{number}_") for number in range(len(weights))])
    mine = iter(inner.variables)  # the same, in the same order, but for those of tables
    found: list[_Place] = list(optimizer.variables[: -len(inner.variables)])
    for variable in plain.variables:
        number, of, slot = variable.name.removeprefix("elastable").partition("__")
        layer = _offloaded(weights[int(number)]) if of else None
        found.append(next(mine) if layer is None else _SlotOfTable(layer, slot))
    return found


def _save(optimizer: keras.optimizers.Optimizer, store: _Arrays, places: list[_Place]) -> bool:
    slots: dict[str, dict[str, Float32]] = {}
    for place in places:
        if isinstance(place, _SlotOfTable) and place.layer.name not in slots:
            slots[place.layer.name] = _slots_of(place.layer)
    for number, place in enumerate(places):
        if isinstance(place, _SlotOfTable):
            store[str(number)] = slots[place.layer.name][place.slot]
        else:
            store[str(number)] = np.asarray(place)
    return True


def _load(optimizer: keras.optimizers.Optimizer, store: _Arrays, places: list[_Place]) -> bool:
    if len(store.keys()) != len(places):
        return False
    slots: dict[StoreBacked, dict[str, Float32]] = {}
    for number, place in enumerate(places):
        if isinstance(place, _SlotOfTable):
            slots.setdefault(place.layer, {})[place.slot] = np.asarray(store[str(number)], np.float32)
        else:
            place.assign(store[str(number)])
    for layer, found in slots.items():
        source, name = layer.source, layer.table_name
        if not isinstance(source, EmbeddingStore):
            continue
        wanted = row_optimizer(source.specs()[name].optimizer).slots
        if missing := [slot.name for slot in wanted if slot.name not in found]:
            raise Unsupported(
                f"embedding layer {layer.name!r}: a Keras file does not hold what its optimizer keeps of rows "
                f"({', '.join(missing)}), so they cannot be loaded; compile the model anew before"
            )
        whole = np.concatenate(
            [np.zeros((layer.input_dim or 0, 0), np.float32), *(found[slot.name] for slot in wanted)], 1
        )
        for start in range(0, len(whole), _BLOCK_ROWS):
            ids = np.arange(start, min(start + _BLOCK_ROWS, len(whole)), dtype=np.int64)
            source.put(name, [RowBlock(ids, source.lookup({name: ids})[name], whole[ids])])
        layer.note_trained_by(optimizer)
    return True


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
