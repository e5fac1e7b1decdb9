"""Chaos: seeded schedules of faults on real processes, each compared to the bit with a job that met none.

`make chaos` runs hundreds of schedules and prints a tally; `test_chaos.py` runs
a few in CI. docs/testing.md says how to use it, and what a schedule is.

| module | |
| --- | --- |
| `stores`, `schedules` | A kind of store and a seed -> one job and its faults; a pure function. |
| `gates` | Places in a process at which a fault may strike. |
| `child` | One process of a cluster: the `elastable` command, forked from a process that has imported everything. |
| `links` | The proxy of one link: passes bytes, cuts, delays, falls silent, counts transactions. |
| `cluster` | The processes and links of one schedule, in one loop of one thread. |
| `redis_servers` | Its Redis servers: single ones, a Cluster, a primary and a replica with Sentinels. |
| `strikes` | What each fault does. |
| `conductor` | One schedule from its start to its verdict. |
| `verdict` | Rows, slots, dense weights, metrics, evaluations and counts against the undisturbed job's. |
| `run`, `__main__` | Many schedules, and what is said of them. |
| `records`, `job`, `light_job` | The data, the Keras model, and the same in NumPy. |
| `sabotage` | Errors put in on purpose, and schedules in which they must show. |
"""
