"""`--evaluate-every`, and that of `et.fit`: each result is of exactly its version, whatever is trained meanwhile."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import BadInput
from tests.elastable.conftest import JOB
from tests.elastable.processes import CLICK_JOB, succeeded
from tests.elastable.small_models import clicks, store_model

BATCH, EVERY = 16, 5


class EvaluateAt(keras.callbacks.Callback):
    """Evaluates the model on the spot at some versions, while nothing is trained."""

    def __init__(self, records: tuple[object, object], every: int) -> None:
        super().__init__()
        self.records, self.every, self.version = records, every, 0
        self.found: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.version += 1
        if self.version % self.every == 0:
            x, y = self.records
            metrics = self.model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
            self.found[self.version] = {f"val_{name}": value for name, value in metrics.items()}


def compiled() -> keras.Model:
    model = store_model()
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["AUC"])
    return model


def test_in_a_program_each_result_is_that_of_the_model_at_its_version() -> None:
    records, held_out = clicks(BATCH * 11), clicks(BATCH * 4, seed=3)
    beside = et.fit(
        compiled(), records, epochs=2, batch_size=BATCH, validation_data=held_out, evaluate_every=EVERY, verbose=False
    )
    on_the_spot = EvaluateAt(held_out, EVERY)
    alone = et.fit(
        compiled(), records, epochs=2, batch_size=BATCH, validation_data=held_out, callbacks=[on_the_spot],
        verbose=False,
    )  # fmt: skip
    # 22 versions; the one that ends an epoch is evaluated as such.
    assert [entry["version"] for entry in beside.evaluations] == [5, 10, 15, 20]
    for entry in beside.evaluations:
        for name, value in on_the_spot.found[entry["version"]].items():
            assert entry[name] == pytest.approx(value, rel=1e-5), (entry["version"], name)
    assert beside.history == alone.history
    assert alone.evaluations == []


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(BadInput, match="evaluate_every=3"):
        et.fit(compiled(), clicks(BATCH), evaluate_every=3, verbose=False)


@pytest.mark.timeout(600)
def test_a_jobs_results_are_those_of_its_checkpoints(tmp_path: Path) -> None:
    """To the bit, with two workers that evaluate and train at the same time."""
    every = 8
    home = ["--run-dir", tmp_path / "runs", "--checkpoint-dir", tmp_path / "checkpoints", "--keep", 0]
    arguments = [*JOB, "--evaluate-every", every, "--checkpoint-every", every, "--no-export"]
    succeeded("train", CLICK_JOB, "--workers", "2", *map(str, [*arguments, *home]))
    lines = [json.loads(line) for line in (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    beside = {line["version"]: line for line in lines if line["kind"] == "evaluation"}
    assert sorted(beside) == [version for version in range(every, 40, every) if version % 20]
    for version in (every, max(beside)):
        line = beside[version]
        checkpoint = tmp_path / "checkpoints" / f"ckpt-{version:010d}"
        output = succeeded("evaluate", CLICK_JOB, "--checkpoint", checkpoint)
        result = json.loads(output.out.splitlines()[-1])
        assert result["version"] == version
        found = {name: value for name, value in line.items() if name.startswith("val_")}
        assert found == {f"val_{name}": result[name] for name in result if f"val_{name}" in found}
        assert {"val_loss", "val_auc"} <= found.keys()
    assert np.isfinite([line["val_loss"] for line in beside.values()]).all()
