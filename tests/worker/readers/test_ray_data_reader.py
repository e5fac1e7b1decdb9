"""What a Ray Dataset has that files have not: tensors, blocks of any size, and an order that Ray does not keep."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import ray
import ray.data

import elastable as et
from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.master.api import JobSpec, TaskKind
from elastable.worker.readers.batch.ragged import RaggedArray
from elastable.worker.readers.batch.reader import ModelInputs
from elastable.worker.runtime.compute import require_same_records
from tests.contracts.readers import listed, start_ray

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def a_ray() -> Iterator[None]:
    start_ray()
    yield
    ray.shutdown()


def test_tensors_are_arrays_where_the_model_says_so_and_never_padded() -> None:
    for shape in ((4,), (2, 3)):
        values = np.arange(7 * np.prod(shape), dtype=np.float64).reshape(7, *shape)
        reader = et.RayDataReader(ray.data.from_numpy(values)).for_inputs(
            ModelInputs({"data": "float32"}, {"data": shape[0]})
        )
        (x,) = reader.take(np.array([6, 0]))
        assert x["data"].dtype == np.float32
        assert x["data"].tolist() == values[[6, 0]].tolist()
    lists = [list(range(number % 3)) for number in range(7)]
    (x,) = et.RayDataReader(ray.data.from_items([{"v": np.array(each, np.int64)} for each in lists])).take(np.arange(7))
    assert isinstance(x["v"], RaggedArray)
    assert listed(x["v"]) == lists
    for wrong in ([{"v": np.zeros((1, 2, 2))}], [{"v": object()}]):
        with pytest.raises(
            BadInput, match=r"Ray Dataset, block 0: column 'v': type .* is no number, boolean or string"
        ):
            et.RayDataReader(ray.data.from_items(wrong)).take(np.array([0]))


def test_the_order_of_a_job_is_that_of_any_cut_and_other_records_are_refused() -> None:
    table = pa.table({"a": np.arange(23)})
    cuts = [[table], [table[:5], table[:0], table[5:6], table[6:]], [table[:16], table[16:]]]
    one, *others = [et.RayDataReader(ray.data.from_arrow(cut), block_records=8) for cut in cuts]
    for other in others:
        assert other.shuffle_block == one.shuffle_block == 8
        assert other.take(np.arange(23))[0]["a"].tolist() == list(range(23))
        assert other.digest() == one.digest()
    readers = {TaskKind.TRAIN: et.RayDataReader(ray.data.from_arrow(table.take(np.arange(23)[::-1].copy())))}
    with pytest.raises(BadInput, match="holds other records here than at the master, or in another order"):
        require_same_records(JobSpec(train_records=23, records_digest=one.digest()), readers)
    require_same_records(
        JobSpec(train_records=23, records_digest=et.PartsReader([one]).digest()), {TaskKind.TRAIN: one}
    )


def test_a_dataset_is_computed_in_its_order() -> None:
    def slowly_at_first(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        import time

        time.sleep(0.3 if batch["id"][0] == 0 else 0.0)
        return {"id": batch["id"]}

    dataset = ray.data.range(8, override_num_blocks=8).map_batches(slowly_at_first)
    assert et.RayDataReader(dataset).take(np.arange(8))[0]["id"].tolist() == list(range(8))
    assert not dataset.context.execution_options.preserve_order  # it is the user's


def test_what_cannot_be_read_is_named() -> None:
    for wrong, said in (
        (ray.data.range(3).map_batches(lambda batch: 1 / 0), "cannot be computed"),
        (ray.data.range(0), "empty"),
    ):
        with pytest.raises(BadInput, match=f"Ray Dataset: .*{said}"):
            et.RayDataReader(wrong)
    with pytest.raises(BadInput, match=r"takes a ray\.data\.Dataset, and not a list"):
        et.RayDataReader([1])
    reader = et.RayDataReader(ray.data.range(3))
    ray.shutdown()
    start_ray()
    with pytest.raises(Unavailable, match="Ray does not give a block"):
        reader.take(np.array([0]))
