"""Checks taken out on purpose, one at a time: fuzzers that do not notice would notice nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

from tests.fuzz.target import Campaign, Report, Target
from tests.fuzz.wrong_inputs import LayerInputs, LibraryInputs, OptionInputs, PushInputs, RecordInputs, ServedInputs


@dataclass(frozen=True, slots=True)
class Sabotage:
    target: type[Target]  # which fuzzer has to notice
    place: str  # `module:name` of the check, without `elastable.`; `module:Class.name` of a method
    check: Callable[..., Any]  # what stands there meanwhile
    flaw: str  # what is accepted then, among others; as the oracle calls it

    @contextmanager
    def put_in(self) -> Iterator[None]:
        module, _, name = self.place.partition(":")
        owner: Any = import_module(f"elastable.{module}")
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        with mock.patch.object(owner, last, self.check):
            yield


def noticed(sabotage: Sabotage, cases: int = 400, seed: int = 1) -> Report:
    with sabotage.put_in():
        return Campaign([sabotage.target], cases=cases, seed=seed).run()


def _nothing(*given: Any, **named: Any) -> None:
    """Passes whatever it is given."""


def _same(*given: Any) -> Any:
    return given[-1]


_TABLES, _READERS = "embedding_store.tables", "worker.readers"

SABOTAGES: dict[str, Sabotage] = {
    "floats-are-cut": Sabotage(LibraryInputs, f"{_TABLES}.checks:first_inexact", _nothing, "a fraction"),
    "masks-are-dropped": Sabotage(LibraryInputs, f"{_TABLES}.checks:refuse_masked", _nothing, "a masked value"),
    "gradients-may-be-nan": Sabotage(
        LibraryInputs, f"{_TABLES}.table_update:require_finite_of", _nothing, "a gradient that is not finite"
    ),
    "any-optimizer": Sabotage(LibraryInputs, f"{_TABLES}.table_update:_identity", _nothing, "another optimizer"),
    "touches-may-be-negative": Sabotage(
        LibraryInputs, f"{_TABLES}.checks:_require_touches", _nothing, "touches below 0"
    ),
    "an-id-counts-twice": Sabotage(
        ServedInputs, f"{_TABLES}.checks:_repeated", lambda ids, seed: (0, 0), "an id that appears twice"
    ),
    "commits-may-be-nan": Sabotage(
        ServedInputs, f"{_TABLES}.checks:require_finite_of", _nothing, "a gradient that is not finite"
    ),
    "pushes-may-be-nan": Sabotage(
        PushInputs, "master.push_check:require_finite_of", _nothing, "a gradient that is not finite"
    ),
    "states-may-be-nan": Sabotage(
        PushInputs, "master.push_check:_refuse_not_finite", _nothing, "a tensor that is not finite"
    ),
    "pushes-of-any-id": Sabotage(PushInputs, "master.push_check:require_ids", _same, "an id outside"),
    "pushes-of-any-shape": Sabotage(
        PushInputs, "master.push_check:require_gradients", _same, "a gradient with a row too many"
    ),
    "inputs-are-cut": Sabotage(RecordInputs, "worker.rows.model_inputs:first_inexact", _nothing, "a fraction"),
    "inputs-of-32-bits-cut": Sabotage(
        RecordInputs, "worker.rows.model_inputs:np.can_cast", lambda *dtypes: True, "an id beyond int32"
    ),
    "any-lengths": Sabotage(
        RecordInputs, f"{_READERS}.numpy_reader:records_of", lambda named, source: len(named[0][1]), "a target too many"
    ),
    "any-record": Sabotage(
        RecordInputs, f"{_READERS}.numpy_reader:checked_indices", lambda rows, *rest: rows, "a record that there is not"
    ),
    "layers-cut-floats": Sabotage(
        LayerInputs, "worker.rows.id_values:_inexact", lambda values: values != values, "a fraction"
    ),
    "any-value-of-an-option": Sabotage(
        OptionInputs, "embedding_store.option:OptionField.accepts", lambda self, value: True, "a wrong value"
    ),
    "contradictions": Sabotage(OptionInputs, "jobs.options:JobOptions._check_stores", _nothing, "a contradiction"),
}
"""By name."""
