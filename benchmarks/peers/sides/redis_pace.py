"""The server ceiling of Redis, with Elastable's requests."""

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from benchmarks.peers.sides.elastable_redis import filled_tier
from benchmarks.storage.redis_pace import read_pace, write_pace


def prepare(race: str, settings: workloads.Settings) -> Turn:
    """`redis lookup`, `redis write` or `redis flush`: their traffic."""
    tier, url, table = filled_tier(race, settings)
    tier.close()
    batches = workloads.redis_ids(settings["rows"], settings["batch"])
    work = (read_pace if race == "redis lookup" else write_pace)(url, table, batches)
    return Turn("redis-server", work, settings["batch"])
