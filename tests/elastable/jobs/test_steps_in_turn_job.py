"""A job of a GAN with two workers: the numbers of plain Keras."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.elastable import gan_job
from tests.elastable.kept_jobs import kept, refusal, store_of, trained
from tests.elastable.processes import counted_by_workers

JOB = Path(gan_job.__file__)
EPOCHS, WAIT = 2, 2
VERSIONS = EPOCHS * gan_job.RECORDS // (gan_job.MICRO * WAIT)


OPTIONS = (
    *("--epochs", str(EPOCHS), "--micro-batch-size", str(gan_job.MICRO), "--grads-to-wait", str(WAIT)),
    *("--no-shuffle", "--no-lazy"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    trained(JOB, home, *OPTIONS, "--workers", "2")
    return home


def test_two_workers_train_a_gan_as_plain_keras(whole: Path) -> None:
    plain = gan_job.model(gan_job.in_keras, gan_job.at_once_plainly)
    history = plain.fit(*gan_job.DATA, epochs=EPOCHS, batch_size=gan_job.MICRO * WAIT, shuffle=False, verbose=0)
    result = json.loads((whole / "runs" / "latest" / "result.json").read_text())
    assert result["version"] == VERSIONS
    assert result["examples"] == EPOCHS * gan_job.RECORDS
    assert result["metrics"] == pytest.approx({name: values[-1] for name, values in history.history.items()}, rel=1e-4)
    assert sum(counted_by_workers(whole / "runs" / "latest")) == EPOCHS * gan_job.RECORDS // gan_job.MICRO
    saved, store = kept(whole).dense(), store_of(kept(whole))
    tables = {weight.path.split("/")[0]: weight for weight in plain.weights if "embeddings" in weight.path}
    for name, weight in tables.items():
        rows = store.lookup({name: np.arange(gan_job.LABELS)})[name]
        np.testing.assert_allclose(rows, weight, rtol=1e-4, atol=1e-5, err_msg=name)
    others = [weight for weight in plain.weights if "embeddings" not in weight.path]
    for place, weight in enumerate(others):
        np.testing.assert_allclose(saved[f"variables/{place:05d}"], weight, rtol=1e-4, atol=1e-5, err_msg=weight.path)


def test_a_step_that_needs_a_second_version_is_refused_with_what_to_write(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from tests.elastable import gan_job\n"
        "data = gan_job.data\n"
        "def model():\n"
        "    return gan_job.model(updates=gan_job.in_turn)\n"
    )
    message = refusal(job, tmp_path, *OPTIONS, "--workers", "1")
    assert "That needs a second version, and a step makes one" in message
    assert "as other:" in message
    assert "with et.step(model) as step:" in message
