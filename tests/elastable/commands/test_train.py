"""`elastable train` on two workers: what a run leaves behind, and what the other commands make of it."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from typer.testing import CliRunner

from elastable.command import app
from tests.elastable.click_job import HELD_OUT, RECORDS, data
from tests.elastable.conftest import JOB, Trained
from tests.elastable.processes import CLICK_JOB, counted_by_workers, succeeded


def output_of(*arguments: str | Path) -> list[dict[str, object]]:
    """Runs a command in this process; the JSON lines that it printed."""
    ran = CliRunner().invoke(app, [str(word) for word in arguments], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return [json.loads(line) for line in ran.stdout.splitlines()]


class TestRunDirectory:
    def test_result(self, trained: Trained) -> None:
        result = trained.result
        assert result["examples"] == 2 * RECORDS
        assert result["version"] == 40
        # A worker that loads slowly may find all of so short a job done.
        counted = counted_by_workers(trained.run)
        assert len(counted) == 2
        assert sum(counted) == 2 * 40 + 2 * HELD_OUT // 32
        assert 1 <= result["workers"] <= sum(1 for count in counted if count)
        assert (result["store"], result["store_servers"]) == ("memory", [])
        assert result["seconds"] > 0
        # The first version's seconds are the workers' way here.
        assert result["timed_examples"] == 2 * RECORDS - 2 * 32
        assert result["examples_per_second"] == pytest.approx(result["timed_examples"] / result["seconds"])
        assert result["auc"] == result["metrics"]["val_auc"] > 0.8
        assert result["stopped"] is None
        assert Path(result["checkpoint"]) == trained.checkpoint

    def test_files_are_their_owners(self, trained: Trained) -> None:
        found = [trained.checkpoint, trained.run, *trained.checkpoint.rglob("*"), *trained.run.rglob("*")]
        assert {"model.keras", "job.json", "metrics.jsonl", "manifest.json"} <= {path.name for path in found}
        open_to_others = {path.name: oct(path.stat().st_mode) for path in found if path.stat().st_mode & 0o077}
        assert not open_to_others

    def test_what_a_person_sees(self, trained: Trained) -> None:
        assert "users [50 x 8], words [any id x 8]" in trained.ran.out
        assert "epoch 2/2" in trained.ran.out
        for word in ("val_auc", "examples/s", "checkpoint", "model.keras"):
            assert word in trained.ran.out

    def test_metrics(self, trained: Trained) -> None:
        lines = [json.loads(line) for line in (trained.run / "metrics.jsonl").read_text().splitlines()]
        assert {line["kind"] for line in lines} == {"train", "epoch"}
        epochs = [line for line in lines if line["kind"] == "epoch"]
        assert [(line["epoch"], line["version"]) for line in epochs] == [(0, 20), (1, 40)]
        for line in epochs:
            assert {"loss", "auc", "val_loss", "val_auc", "seconds"} <= set(line)
        assert epochs[-1]["val_auc"] == trained.result["auc"]

    def test_learning_curve(self, trained: Trained) -> None:
        with Image.open(trained.run / "learning_curve.png") as picture:
            assert picture.format == "PNG"
            assert len(set(picture.convert("L").tobytes())) > 2

    def test_tensorboard(self, trained: Trained) -> None:
        events = EventAccumulator(str(trained.run / "tensorboard"), size_guidance={"tensors": 0})
        events.Reload()
        assert {"train/loss", "epoch/loss", "epoch/val_auc"} <= set(events.Tags()["tensors"])
        assert [event.step for event in events.Tensors("epoch/val_auc")] == [20, 40]
        last = tf.make_ndarray(events.Tensors("epoch/val_auc")[-1].tensor_proto)
        assert float(last) == pytest.approx(trained.result["auc"], rel=1e-6)

    def test_the_exported_model_needs_no_elastable(self, trained: Trained, tmp_path: Path) -> None:
        x, y = data("validation")
        np.savez(tmp_path / "x.npz", **x)
        program = f"""
import sys, keras, numpy as np
model = keras.saving.load_model({str(trained.run / "model.keras")!r})
with np.load({str(tmp_path / "x.npz")!r}) as x:
    predicted = model.predict(dict(x), verbose=0)
np.save({str(tmp_path / "predicted.npy")!r}, predicted)
ours = {{"elastable", "worker", "replicas", "master", "embedding_store"}} & set(sys.modules)
assert not ours, ours
"""
        # Away from the repository, where none of our packages would be found by accident.
        subprocess.run([sys.executable, "-c", program], check=True, timeout=250, cwd=tmp_path)
        predicted = np.load(tmp_path / "predicted.npy")
        written = output_of("predict", CLICK_JOB, "--checkpoint", trained.checkpoint, "--output", tmp_path / "ours.npy")
        origin = {"checkpoint": str(trained.checkpoint), "version": 40}
        assert written == [{"output": str(tmp_path / "ours.npy"), "shape": [HELD_OUT, 1], **origin}]
        np.testing.assert_allclose(predicted, np.load(tmp_path / "ours.npy"), rtol=1e-5, atol=1e-6)
        assert np.mean((predicted[:, 0] > 0.5) == y) > 0.8


def test_one_seed_is_one_result_in_new_interpreters_and_profiled(trained: Trained, tmp_path: Path) -> None:
    """To the bit, in one process. All other jobs of the tests are forks of one that has imported TensorFlow."""
    options = ("--run-dir", tmp_path, "--deadline", "60", "--profile", tmp_path / "profile")
    ran = succeeded("train", CLICK_JOB, "--workers", "1", *JOB, *options, new=True)
    assert ["takes the statistics of each micro-batch" in line for line in ran.err.splitlines()] == [True], ran.err
    run = (tmp_path / "latest").resolve()
    trained.require_same_numbers(run / "checkpoints")
    # And it was profiled: ten micro-batches, with the phases of each.
    (log,) = (tmp_path / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert not list(run.glob("worker-*.log"))
    counted = Counter[str]()
    for plane in xplane_pb2.XSpace.FromString(log.read_bytes()).planes:
        for line in plane.lines:
            counted.update(plane.event_metadata[event.metadata_id].name for event in line.events)
    assert [counted[label] for label in ("micro-batch", "lookup", "compute", "push")] == [10] * 4


class TestCheckpoint:
    def test_evaluate_says_what_the_job_said(self, trained: Trained) -> None:
        for place in (trained.checkpoint, trained.run):
            (line,) = output_of("evaluate", CLICK_JOB, "--checkpoint", place)
            assert (line["version"], line["split"]) == (40, "validation")
            assert line["loss"] == pytest.approx(trained.result["metrics"]["val_loss"], rel=1e-6)
            assert line["auc"] == pytest.approx(trained.result["auc"], rel=1e-6)

    def test_evaluate_on_the_training_split(self, trained: Trained) -> None:
        places = ("--checkpoint", trained.checkpoint, "--split", "train", "--batch-size", "4096")
        (line,) = output_of("evaluate", CLICK_JOB, *places)
        assert line["split"] == "train"
        assert float(str(line["auc"])) > 0.8

    def test_export_writes_what_the_job_wrote(self, trained: Trained, tmp_path: Path) -> None:
        file = tmp_path / "again.keras"
        (line,) = output_of("export", trained.run, "--format", "keras", "--version", "40", "--output", file)
        assert line == {"output": str(file), "source": str(trained.run), "version": 40}
        ours, theirs = (keras.saving.load_model(path) for path in (file, trained.run / "model.keras"))
        for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_lookup(self, trained: Trained) -> None:
        lines = output_of("lookup", "users", "3", "49", "--checkpoint", trained.checkpoint)
        assert [(line["table"], line["id"]) for line in lines] == [("users", 3), ("users", 49)]
        assert all(len(line["row"]) == 8 for line in lines)  # type: ignore[arg-type]
        (unseen,) = output_of("lookup", "words", "--checkpoint", trained.checkpoint, "--", "-123456789")
        assert np.ptp(np.array(unseen["row"])) > 0
