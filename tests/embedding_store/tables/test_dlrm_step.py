"""One whole training step of DLRM, against the numbers that PyTorch made of it.

Source: github.com/darchr/DLRM.jl, `ref/`: seven tables of 1000 x 16, one id a
bag, batch 128, SGD with learning rate 10. The dense part is written plainly in
NumPy here; lookup, interaction buffer and update are ours.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import IndexedSlices, MemoryStore, RowBlock, lookup_many, update_many
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec

REFERENCE = Path(__file__).parents[4] / "shared" / "data" / "dlrm_reference_single.npz"
TABLES, RATE = 7, 10.0
BELOW = np.tril_indices(TABLES + 1, -1)

Arrays = dict[str, np.ndarray]
Layer = tuple[str, np.ndarray, np.ndarray]
"""A dense layer's name, what went in `[batch, in]`, and what came out `[batch, out]`."""


@pytest.fixture(scope="module")
def reference() -> Arrays:
    with np.load(REFERENCE) as arrays:
        return dict(arrays)


def forward(arrays: Mapping[str, np.ndarray], part: str, inputs: np.ndarray, last: int) -> list[Layer]:
    """Dense layers with ReLU, but for the last layer of the upper part."""
    layers = []
    for number in range(last + 1):
        name = f"{part}_l.{number}"
        outputs = inputs @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]
        if part == "bot" or number < last:
            outputs = np.maximum(outputs, 0)
        layers.append((name, inputs, outputs))
        inputs = outputs
    return layers


def backward(arrays: Arrays, layers: list[Layer], gradient: np.ndarray, stepped: Arrays) -> np.ndarray:
    """Steps the layers, whose ReLU the gradient `[batch, out]` has passed already; returns that of their input."""
    for number, (name, inputs, _) in reversed(list(enumerate(layers))):
        stepped[f"{name}.weight"] = arrays[f"{name}.weight"] - np.float32(RATE) * (gradient.T @ inputs)
        stepped[f"{name}.bias"] = arrays[f"{name}.bias"] - np.float32(RATE) * gradient.sum(axis=0)
        gradient = gradient @ arrays[f"{name}.weight"]
        if number:
            gradient = gradient * (inputs > 0)
    return gradient


@pytest.mark.skipif(not REFERENCE.exists(), reason="the shared test data are not beside this checkout")
def test_one_step(reference: Arrays) -> None:
    with MemoryStore() as store:
        tables = []
        for number in range(TABLES):
            spec = TableSpec(f"emb_{number}", 16, 1000, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))
            tables.append(store.table(spec))
            tables[-1].put([RowBlock(np.arange(1000), reference[spec.name], np.empty((1000, 0), np.float32))])
        ids = [reference[f"input_emb_{number}"] for number in range(TABLES)]

        # 1. Bottom MLP into the first 16 columns, the lookups behind it, bit for bit.
        bottom = forward(reference, "bot", reference["input_bot"], 3)
        buffer = lookup_many(tables, ids, "preallocated", prepend_columns=16)
        buffer[:, :16] = bottom[-1][2]
        features = buffer.reshape(128, TABLES + 1, 16)
        np.testing.assert_array_equal(features[:, 1:], reference["concatenated_result"][:, 1:])

        # 2. Interaction: dot products of every pair, below the diagonal; then the top MLP and the loss.
        dots = (features @ features.transpose(0, 2, 1))[:, BELOW[0], BELOW[1]]
        top = forward(reference, "top", np.concatenate([bottom[-1][2], dots], axis=1), 2)
        predicted = 1 / (1 + np.exp(-top[-1][2]))
        labels = reference["labels"]
        loss = -np.mean(labels * np.log(predicted) + (1 - labels) * np.log(1 - predicted))
        np.testing.assert_allclose(loss, reference["loss"], rtol=1e-6)

        # 3. Back through all of it.
        stepped: Arrays = {}
        gradient = backward(reference, top, (predicted - labels) / np.float32(len(labels)), stepped)
        of_pairs = np.zeros((128, TABLES + 1, TABLES + 1), np.float32)
        of_pairs[:, BELOW[0], BELOW[1]] = gradient[:, 16:]
        of_features = (of_pairs + of_pairs.transpose(0, 2, 1)) @ features
        of_bottom = (of_features[:, 0] + gradient[:, :16]) * (bottom[-1][2] > 0)
        backward(reference, bottom, of_bottom, stepped)

        # 4. The tables' step.
        slices = [IndexedSlices(np.ascontiguousarray(of_features[:, 1 + n]), ids[n]) for n in range(TABLES)]
        assert update_many(tables, OptimizerSpec.of("sgd", learning_rate=RATE), slices) == [1] * TABLES
        for number, table in enumerate(tables):
            stepped[table.name] = table.lookup(np.arange(1000))
            touched = np.isin(np.arange(1000), ids[number])
            np.testing.assert_array_equal(stepped[table.name][~touched], reference[table.name][~touched])

    check_updates(reference, stepped)


def check_updates(reference: Arrays, stepped: Arrays) -> None:
    """Every `update_*` of the reference, whose dense layers are counted with the ReLUs between them."""
    names = {f"update_emb_{number}": f"emb_{number}" for number in range(TABLES)}
    for part, count in (("bot", 4), ("top", 3)):
        for number in range(count):
            for kind in ("weight", "bias"):
                names[f"update_{part}_{2 * number}.{kind}"] = f"{part}_l.{number}.{kind}"
    assert set(names) == {name for name in reference if name.startswith("update_")}
    for theirs, ours in names.items():
        # Where the two change by some 1e-2, sums over the batch in another order differ by some 1e-8.
        np.testing.assert_allclose(stepped[ours], reference[theirs], rtol=1e-6, atol=5e-7, err_msg=theirs)
        assert np.abs(stepped[ours] - reference[ours]).max() > 0, f"{ours} did not change"
