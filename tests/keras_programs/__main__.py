"""Runs many drawn programs: `python -m tests.keras_programs --programs 2000`.

Prints every program that came out differently, each kind of refusal with one program, and how many there were. Ends
with 1 where one is different, or more than one in ten are refused.
"""

import argparse
import multiprocessing
import os
import sys
from collections import defaultdict

from tests.keras_programs.run import kind_of_refusal, ran


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.keras_programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.programs)
    counts: dict[str, int] = defaultdict(int)
    kinds: dict[str, list[tuple[int, str]]] = defaultdict(list)
    # New processes now and then: TensorFlow keeps what it has traced.
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=60) as pool:
        for seed, what, said in pool.imap(ran, seeds):
            counts[what] += 1
            if what in ("different", "of no use"):
                print(f"{seed} {what}: {said}", flush=True)
            elif what == "refused":
                kinds[kind_of_refusal(said)].append((seed, said))
    for found in sorted(kinds.values(), key=len, reverse=True):
        print(f"refused {len(found)} times, as program {found[0][0]}: {found[0][1]}")
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    sys.exit(counts["different"] > 0 or counts["refused"] * 10 > options.programs)


if __name__ == "__main__":
    main()
