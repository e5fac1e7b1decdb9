"""Table specs travel as messages and come back as they were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.contract.spec import (
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
    spec_from_json,
    spec_to_json,
)
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.store_messages import spec_from_message, spec_to_message

finite = st.floats(allow_nan=False, allow_infinity=False)
specs = st.builds(
    TableSpec,
    name=st.text("abcXYZ019._-/\u00e9", min_size=1, max_size=100),
    dim=st.integers(1, 65_536),
    vocabulary_size=st.none() | st.integers(1, 2**63 - 1),
    initializer=st.builds(InitializerSpec, st.sampled_from(["zeros", "constant", "normal"]), finite, st.just(0.5)),
    seed=st.integers(-(2**63), 2**63 - 1),
    optimizer=st.builds(
        OptimizerSpec,
        st.sampled_from(["sgd", "adam", "keras"]),
        st.dictionaries(st.text(min_size=1, max_size=9), finite, max_size=5).map(
            lambda pairs: tuple(sorted(pairs.items()))
        ),
        st.text(max_size=40),
    ),
)


@given(specs)
def test_a_spec_comes_back_as_it_was(spec: TableSpec) -> None:
    assert spec_from_json(spec_to_json(spec)) == spec
    parsed = store_pb2.TableSpec.FromString(spec_to_message(spec).SerializeToString())
    assert spec_from_message(parsed) == spec


def test_what_a_foreign_client_leaves_out_takes_the_defaults() -> None:
    assert spec_from_message(store_pb2.TableSpec(name="t", dim=4)) == TableSpec("t", 4)


@pytest.mark.parametrize(
    ("message", "expected_message"),
    [
        (store_pb2.TableSpec(), "table name ''"),
        (store_pb2.TableSpec(name="t", dim=0), "dim"),
        (store_pb2.TableSpec(name="t", dim=4, vocabulary_size=-1), "vocabulary_size"),
        (store_pb2.TableSpec(name="t", dim=4, optimizer=store_pb2.Optimizer()), "optimizer has no name"),
        (store_pb2.TableSpec(name="t", dim=4, initializer=store_pb2.Initializer(kind="magic")), "'magic'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(message: store_pb2.TableSpec, expected_message: str) -> None:
    with pytest.raises(BadSpec, match=expected_message):
        spec_from_message(message)
