"""A process that dies after any command it sends: what it left is found, and written again, as from a log."""

from itertools import count

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.schema import partition_of
from tests.embedding_store.dying_writer import Died, dying_after
from tests.embedding_store.tiers.redis.tier_samples import IDS, TABLE, begin, changed, read_back, rows_of

pytestmark = pytest.mark.process

PARTITIONS = 4
GONE = IDS[::7]
LEFT = np.setdiff1d(IDS, GONE)


def write_two(tier: RedisTier) -> None:
    tier.write(changed(2, IDS[::3]), {"t": (np.append(GONE, 10**9), np.append(GONE, 10**9))}, 2)


def expected() -> np.ndarray:
    rows = rows_of(1)
    rows[::7] = 0
    rows[::3] = rows_of(2)[::3]
    return rows


def found(tier: RedisTier) -> tuple[np.ndarray, Int64]:
    rows = np.zeros((len(IDS), 16), np.uint8)
    (missing,) = tier.read([Records("t", IDS, IDS, rows)])
    return rows, missing


def prepared(url: str) -> None:
    with RedisTier(url) as tier:
        tier.drop("t")
        begin(tier)
        tier.put_state(b"one")


def test_every_command_of_a_write(node_or_cluster_url: str) -> None:
    url = f"{node_or_cluster_url}?partitions={PARTITIONS}"
    partitions = partition_of(IDS, PARTITIONS)
    points = 0
    for commands in count(1):
        prepared(url)
        with RedisTier(url) as tier, pytest.MonkeyPatch.context() as patch:
            tier.take_over()
            with dying_after(patch, commands) as writes:
                try:
                    write_two(tier)
                except Died:
                    points += 1
                else:
                    assert writes.count < commands
                    break
        with RedisTier(url) as successor:
            assert set(successor.tables()) == {"t"}  # nothing is lost
            assert successor.state() == b"one"
            rows, _ = found(successor)
            changed_partitions = set()
            for partition in range(PARTITIONS):
                mine = partitions == partition
                before, after = rows_of(1)[mine], expected()[mine]
                assert (rows[mine] == before).all() or (rows[mine] == after).all()  # at once or not at all
                if not (rows[mine] == before).all():
                    changed_partitions.add(partition)
            assert successor.sequence == (2 if changed_partitions else 1)
            write_two(successor)
            successor.put_state(b"two")
            np.testing.assert_array_equal(found(successor)[0], expected())
            assert successor.sequence == 2
    assert points >= PARTITIONS


@pytest.mark.parametrize("act", ["create", "drop", "state"])
def test_every_command_of_a_change_of_the_registry(redis_url: str, act: str) -> None:
    url = f"{redis_url}?partitions={PARTITIONS}"
    points = 0
    for commands in count(1):
        prepared(url)
        with RedisTier(url) as tier, pytest.MonkeyPatch.context() as patch:
            if act == "create":
                tier.drop("t")
            tier.take_over()
            acts = {"create": lambda: tier.create(TABLE), "drop": lambda: tier.drop("t")}
            with dying_after(patch, commands):
                try:
                    acts.get(act, lambda: tier.put_state(b"two"))()
                except Died:
                    points += 1
                else:
                    break
        with RedisTier(url) as successor:
            tables = successor.tables()
            if act == "state":
                assert successor.state() in (b"one", b"two")
                np.testing.assert_array_equal(read_back(successor), rows_of(1))
                continue
            assert successor.sequence >= (1 if act == "drop" else 0)
            if "t" in tables:
                (missing,) = [found(successor)[1]]
                assert len(missing) in ((0,) if act == "drop" else (len(IDS),))
                successor.drop("t")
            successor.create(TABLE)
            assert len(found(successor)[1]) == len(IDS)
    assert points >= 1
