"""Tables in memory and in files, and a client of `elastable serve`, on what `pip install elastable` brings."""

import sys
from collections.abc import Callable

import numpy as np

import elastable as et
import master
import proto
import worker
from elastable.embedding_store import IndexedSlices, InitializerSpec, MemoryStore, OptimizerSpec, RemoteStore, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import NotInstalled, PermissionDenied
from elastable.embedding_store.open_store import open_store

address, folder = sys.argv[1:]
assert {module.WHOSE for module in (master, proto, worker)} == {"mine"}

SPEC = TableSpec(
    "cities", dim=2, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5)
)
IDS, GRADIENTS = np.array([3, 2**60, 3]), np.ones((3, 2), np.float32)


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Why a call is refused: for want of a library, or for it would need one."""
    try:
        call(*arguments)
    except (NotInstalled, PermissionDenied) as error:
        return str(error)
    raise AssertionError(f"{call}{arguments} was not refused")


def trained(store: EmbeddingStore) -> list[float]:
    """Two rows after one step, of which the first has twice the other's gradient."""
    table = store.table(SPEC)
    assert not table.lookup(IDS).any()
    table.update(None, IndexedSlices(GRADIENTS, IDS))
    return [float(value) for value in table.lookup(IDS[:2])[:, 0]]


with MemoryStore() as memory, open_store(f"file://{folder}") as files:
    expected = trained(memory)
    assert trained(files) == expected
    assert expected[0] < expected[1] < 0

with RemoteStore(address, deadline_s=120.0) as store:
    assert trained(store) == expected
    block = TableSpec("block", dim=2, optimizer=OptimizerSpec("keras", (("learning_rate", 0.5),), "{}"))
    assert "this caller shows no token" in refusal(store.create_table, block)
with RemoteStore(address) as reader:
    assert reader.version() == 1

here = ("AdmissionSpec", "ElastableError", "MemoryStore", "TableSpec", "hash_ids", "open_store")
assert all(getattr(et, name) is not None for name in here)
assert et.replica_group().size == 1
EXTRAS = {
    "keras": ("DistributedEmbedding", "Embedding", "ParquetReader", "averaged", "export_keras", "fit", "save", "step"),
    "replicas": ("HostEmbedding", "ReplicaTrainer", "create_host_embedding"),
}
for extra, names in EXTRAS.items():
    for name in names:
        message = refusal(getattr, et, name)
        assert message.startswith(f"elastable.{name} needs "), message
        assert message.endswith(f'not installed: pip install "elastable[{extra}]"'), message

heavy = {"tensorflow", "keras", "pyarrow", "mpi4py", "matplotlib", "tensorboard"}
assert not heavy & {name.partition(".")[0] for name in sys.modules}
assert {module for name, module in sys.modules.items() if name == "worker"} == {worker}
print("all of it runs, version", et.__version__)
