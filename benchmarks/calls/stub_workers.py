"""Workers that compute nothing: sessions, leases, versions and gradients are real, and every worker has a connection.

Thousands fit into a few processes, because they are coroutines:

    python -m benchmarks.calls.stub_workers HOST:PORT COUNT
"""

import asyncio
import secrets
import sys
from contextlib import suppress

import grpc
import grpc.aio
import numpy as np

from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof
from elastable.master.api import Push, SyncPushId
from elastable.master.rpc.messages import MASTER_SERVICE, push_frames
from elastable.master.v1 import master_pb2

TABLE, DIM, IDS = "t", 16, 512
ROWS = 100_000
_WAIT_MS = 20_000
_TIMEOUT_S = 120.0
_PAUSE_S = 0.05
_ATTEMPTS = 600


class StubWorker:
    """One worker.

    Args:
        address: Of the master.
        seed: Of its ids and gradients.
        record: Records in a micro-batch.
    """

    def __init__(self, address: str, seed: int, records: int = 1) -> None:
        random = np.random.default_rng(seed)
        self._slices = Slices(random.integers(0, ROWS, IDS), random.standard_normal((IDS, DIM)).astype(np.float32))
        self._records = records
        self.name = f"stub-{seed}-{secrets.token_hex(4)}"
        self._metadata = ((PROOF_KEYS[Proof.SESSION], secrets.token_bytes(16)),)
        # Channels share connections otherwise.
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.joined = asyncio.Event()

    async def run(self) -> None:
        """Takes part until it is cancelled, or the job ends."""
        async with self._channel:
            join = self._channel.unary_stream(f"/{MASTER_SERVICE}/Join", master_pb2.JoinRequest.SerializeToString, None)
            request = master_pb2.JoinRequest(incarnation=self.name, host="stub", pid=1)
            session = join(request, metadata=self._metadata)
            await session.read()
            self.joined.set()
            hearing = asyncio.create_task(_hear(session))
            try:
                while not (lease := await self._lease()).finished:
                    for task in sorted(lease.tasks, key=lambda task: task.version):
                        await self._work(task)
            finally:
                hearing.cancel()

    async def _lease(self) -> master_pb2.LeaseTasksReply:
        request = master_pb2.LeaseTasksRequest(
            incarnation=self.name, want=1, wait_ms=_WAIT_MS, holding=master_pb2.Holding()
        )
        return master_pb2.LeaseTasksReply.FromString(await self._call("LeaseTasks", request.SerializeToString()))

    async def _work(self, task: master_pb2.Task) -> None:
        """Waits for the task's version, and pushes for it."""
        wanted = master_pb2.PullDenseRequest(incarnation=self.name, version=task.version, wait_ms=_WAIT_MS)
        reply = await self._call("PullDense", wanted.SerializeToString())
        if not master_pb2.DenseFrame.FromString(reply).header.ready:
            return
        push = Push(
            id=SyncPushId(task.version, task.micro_batch),
            records=self._records,
            dense=(),
            slices={TABLE: self._slices},
            incarnation=self.name,
        )
        (frame,) = push_frames(push)
        await self._call("ReportGradient", frame)

    async def _call(self, method: str, message: bytes) -> bytes:
        """The reply; a server that is full is asked again, for a while."""
        call = self._channel.unary_unary(f"/{MASTER_SERVICE}/{method}", None, None)
        for _ in range(_ATTEMPTS - 1):
            try:
                reply: bytes = await call(message, metadata=self._metadata, timeout=_TIMEOUT_S)
                return reply
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
                    raise
                await asyncio.sleep(_PAUSE_S)
        last: bytes = await call(message, metadata=self._metadata, timeout=_TIMEOUT_S)
        return last


async def run_workers(address: str, count: int, first: int = 0) -> None:
    """Runs so many until the job ends; prints a line once they have joined."""
    workers = [StubWorker(address, first + number) for number in range(count)]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    for worker in workers:
        await worker.joined.wait()
    print("joined", flush=True)
    await asyncio.gather(*tasks)


async def _hear(session: grpc.aio.UnaryStreamCall[master_pb2.JoinRequest, bytes]) -> None:
    with suppress(grpc.RpcError):
        while await session.read():  # what gRPC returns at the end is false
            pass


if __name__ == "__main__":
    asyncio.run(run_workers(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
