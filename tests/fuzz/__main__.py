"""`python -m tests.fuzz`: a campaign, with what to say to see a finding again."""

import argparse
import importlib
import logging
import pkgutil
import sys
from collections.abc import Sequence

import tests.fuzz
from tests.fuzz.sabotage import SABOTAGES, noticed
from tests.fuzz.target import Campaign, Target

for _module in pkgutil.iter_modules(tests.fuzz.__path__, "tests.fuzz."):
    if ".test_" not in _module.name and not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)
TARGETS = tuple(Target.known)

_GROWTH = 0.05
_ROUNDS = 40  # fewer say nothing about memory


def main(arguments: Sequence[str]) -> int:
    """0 where nothing was found, and memory stayed as it was over the second half."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    names = [target.name for target in TARGETS]
    parser.add_argument("--cases", type=int, help="how many; a million where --seconds is not said, either")
    parser.add_argument("--seconds", type=float, help="for how long, in the place of --cases")
    parser.add_argument("--seed", type=int, default=0, help="of all choices: a seed's cases are always the same")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--only", action="append", choices=names, help="a target; may be said several times")
    parser.add_argument("--noticed", action="store_true", help="take checks out, one at a time: each must be noticed")
    given = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # servers log what they refuse
    if given.noticed:
        return _all_noticed(given.seed)
    chosen = [target for target in TARGETS if given.only is None or target.name in given.only]
    cases = given.cases if given.cases is not None or given.seconds is not None else 1_000_000
    campaign = Campaign(
        chosen, cases, given.seconds, given.seed, given.first, tell=lambda line: print(line, flush=True)
    )
    report = campaign.run()
    print(
        f"{report.cases} cases in {report.seconds:.0f} s with seed {given.seed}: {len(report.findings)} found, "
        f"memory {100 * report.growth:+.1f} % over the second half"
    )
    flat = len(report.memory) < _ROUNDS or report.growth <= _GROWTH
    if not flat:
        print(f"memory grew by more than {100 * _GROWTH:g} % over the second half")
    return 0 if flat and not report.findings else 1


def _all_noticed(seed: int) -> int:
    """0 where the fuzzers notice every check that is taken out."""
    missed = 0
    for name, sabotage in SABOTAGES.items():
        found = any(f"accepted, with {sabotage.flaw}" in one for one in noticed(sabotage, 2_000, seed).findings)
        missed += not found
        print(f"{name}: {'noticed' if found else 'NOT NOTICED'} by {sabotage.target.name}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
