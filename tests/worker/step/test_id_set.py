"""Id sets of a micro-batch."""

import numpy as np
import pytest

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import TableNotFound
from elastable.worker.step.id_set import make_id_sets


def test_a_table_that_the_store_has_lost_is_named() -> None:
    specs = {"b": TableSpec("b", 2, None)}
    with pytest.raises(TableNotFound, match=r"no table 'a' in the job's store \(tables: b\)"):
        make_id_sets(["b", "a"], [np.array([1]), np.array([2])], specs)
