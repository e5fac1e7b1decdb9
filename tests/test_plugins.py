"""The suite's own habits: heap, seeds, order, skips, quick run, samples and delays, each tried on a small suite."""

import gc
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_plugins as pytest_plugins_of_the_suite
from tests.plugins import delays, quick
from tests.plugins.order import DEAREST, ROOT
from tests.plugins.skips import MAY_BE_SKIPPED

pytestmark = pytest.mark.process

pytest_plugins = ["pytester"]

CONFTEST = f"pytest_plugins = {pytest_plugins_of_the_suite}"
DRAWS = """
import random
import numpy as np
import pytest

@pytest.fixture(scope="module")
def shared():
    return random.random()

def test_one(shared):
    print("drawn one", shared, random.random(), np.random.normal())

def test_other(shared):
    print("drawn other", shared, random.random(), np.random.normal())
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with this suite's plugins and without its own settings."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the suite that runs in a separate process
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n  process\n  slow\n  sampled(n)\n")
    return pytester


def draws_and_seed(ran: pytest.RunResult) -> tuple[list[str], str]:
    """What the tests of `DRAWS` say they drew, sorted; and the seed that the run tells, if it does."""
    seeds = [line.removeprefix("seed: ") for line in ran.outlines if line.startswith("seed: ")]
    return sorted(line.split("drawn ")[1] for line in ran.outlines if "drawn " in line), "".join(seeds)


def drawn(suite: pytest.Pytester, *options: str) -> list[str]:
    ran = suite.runpytest_inprocess("-s", *options)
    ran.assert_outcomes(passed=2 if "-k" not in options else 1)
    return draws_and_seed(ran)[0]


def test_what_was_there_before_the_first_test_is_left_out_of_collections() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 50_000


class TestSeeds:
    def test_a_test_draws_the_same_whatever_ran_before(self, suite: pytest.Pytester) -> None:
        suite.makepyfile(DRAWS)
        both = drawn(suite)
        assert both[0].split()[1:] != both[1].split()[1:]
        assert drawn(suite, "-k", "other") == both[1:]
        assert drawn(suite, "--random-order", "--seed", "0") == both

    def test_another_seed_draws_otherwise(self, suite: pytest.Pytester) -> None:
        suite.makepyfile(DRAWS)
        assert drawn(suite, "--seed", "1") != drawn(suite)
        assert drawn(suite, "--seed", "random") != drawn(suite, "--seed", "random")

    def test_a_random_seed_is_printed_and_can_be_given_again(self, suite: pytest.Pytester) -> None:
        suite.makepyfile(DRAWS)
        draws, seed = draws_and_seed(suite.runpytest_inprocess("-s", "-q", "--seed", "random"))
        assert drawn(suite, "--seed", seed) == draws

    @pytest.mark.process
    def test_all_processes_of_a_run_have_one_random_seed(self, suite: pytest.Pytester) -> None:
        suite.makepyfile(DRAWS)
        ran = suite.runpytest_subprocess("-n", "2", "--dist", "load", "-rP", "--random-order", "--seed", "random")
        draws, seed = draws_and_seed(ran)
        assert len(draws) == 2
        assert drawn(suite, "--seed", seed) == draws


class TestOrder:
    def test_random_order_keeps_modules_and_classes_together(self, suite: pytest.Pytester) -> None:
        tests = "class Test{}:\n    def test_1(self): pass\n    def test_2(self): pass\n"
        for name in "abc":
            suite.makepyfile(**{f"test_{name}": tests.format("One") + tests.format("Other")})
        orders = set()
        for seed in range(6):
            ran = suite.runpytest_inprocess("--collect-only", "-q", "--random-order", "--seed", str(seed))
            names = [line for line in ran.outlines if "::" in line]
            assert len(set(names)) == 12
            for depth, groups in ((1, 3), (2, 6)):
                prefixes = ["::".join(name.split("::")[:depth]) for name in names]
                assert sum(one != other for one, other in itertools.pairwise(prefixes)) == groups - 1
            orders.add(tuple(names))
        assert len(orders) == 6

    def test_the_dearest_modules_exist(self) -> None:
        assert [name for name in DEAREST if not (ROOT / name).is_file()] == []
        assert len(set(DEAREST)) == len(DEAREST)


class TestSkips:
    @pytest.mark.parametrize(
        ("skipped", "in_ci"),
        [
            ("def test_it():\n    pytest.skip('no engine here')\n", "failed"),
            ("pytest.importorskip('no_such_module')\n", "errors"),
            ("def test_it():\n    pytest.skip('kubectl is not here')\n", "skipped"),
        ],
    )
    def test_a_skip_is_a_failure_in_ci_alone_unless_its_reason_is_of_the_list(
        self, suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, skipped: str, in_ci: str
    ) -> None:
        suite.makepyfile("import pytest\n\n" + skipped)
        suite.runpytest_inprocess().assert_outcomes(skipped=1)
        monkeypatch.setenv("CI", "true")
        ran = suite.runpytest_inprocess()
        ran.assert_outcomes(**{in_ci: 1})
        if in_ci == "failed":
            ran.stdout.fnmatch_lines(["*::test_it is skipped in CI: Skipped: no engine here"])

    def test_every_reason_of_the_list_is_that_of_a_test(self) -> None:
        sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if "plugins" not in str(path))
        assert [reason for reason in MAY_BE_SKIPPED if reason not in sources] == []


class TestQuick:
    def test_what_is_marked_or_needs_a_server_is_left_out(self, suite: pytest.Pytester) -> None:
        suite.makepyfile(
            "import pytest\n\n"
            "@pytest.fixture\ndef server_binary(): return 1\n\n"
            "@pytest.mark.process\ndef test_process(): pass\n\n"
            "@pytest.mark.slow\ndef test_slow(): pass\n\n"
            "def test_server(server_binary): pass\n\n"
            "def test_quick(): pass\n"
        )
        suite.runpytest_inprocess("--quick").assert_outcomes(passed=1, deselected=3)

    @pytest.mark.parametrize(
        ("folder", "options", "outcome"),
        [(".", ("--quick",), "failed"), ("tests/master", (), "failed"), ("tests/worker", (), "passed")],
    )
    def test_a_process_that_nobody_announced_fails_its_test_in_quick_runs_and_where_quick_tests_lie(
        self, suite: pytest.Pytester, folder: str, options: tuple[str, ...], outcome: str
    ) -> None:
        (suite.path / folder).mkdir(parents=True, exist_ok=True)
        place = suite.path / folder / "test_process.py"
        place.write_text("import subprocess\n\ndef test_it():\n    subprocess.run(['true'])\n")
        ran = suite.runpytest_subprocess(folder, *options)
        ran.assert_outcomes(**{outcome: 1})
        if outcome == "failed":
            ran.stdout.fnmatch_lines(["*mark it with pytest.mark.process*"])


def test_make_runs_the_quick_tests_where_they_lie() -> None:
    places = " ".join([f"$(wildcard {place}*.py)" if place[-1] != "/" else place[:-1] for place in quick.FAST])
    assert f"\nFAST_TESTS := {places}\n" in (ROOT / "Makefile").read_text()


HASTY = """
import threading

def begun(event):
    event.set()

def test_hasty():
    event = threading.Event()
    threading.Thread(target=begun, args=(event,)).start()
    for _ in range(10_000):  # no wait, but more time than a thread takes that nobody holds up
        pass
    assert event.is_set()

def test_patient():
    event = threading.Event()
    threading.Thread(target=begun, args=(event,)).start()
    assert event.wait(60)
"""


class TestDelays:
    def test_what_counts_on_a_quick_thread_fails_for_some_number(
        self, suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(delays, "ROOT", str(suite.path))
        monkeypatch.setattr(delays, "SHARE", 0.3)
        suite.makepyfile(HASTY)
        ran = [suite.runpytest_inprocess("--delays", str(number)).parseoutcomes() for number in range(12)]
        assert any(outcomes == {"passed": 1, "failed": 1} for outcomes in ran)
        suite.runpytest_inprocess("--delays", "0", "-k", "patient").assert_outcomes(passed=1, deselected=1)

    def test_a_number_decides_which_places_are_slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slept: list[float] = []
        monkeypatch.setattr(delays, "ROOT", __file__)
        monkeypatch.setattr(delays, "SHARE", 0.5)
        monkeypatch.setattr(delays.time, "sleep", slept.append)

        def run(seed: str) -> list[float]:
            slept.clear()
            profile = delays.Delays(seed, left_s=1_000.0)
            frame = sys._getframe()
            for line in range(40):
                for _ in range(5):
                    profile(SimpleNamespace(f_code=frame.f_code, f_lineno=line), "call", None)  # type: ignore[arg-type]
            return list(slept)

        first, again, other = run("1"), run("1"), run("2")
        assert first == again
        assert first != other
        assert len(first) % 3 == 0, "each slow place the first three times"
        assert 0 < len(first) < 3 * 40


def test_of_sampled_cases_some_run_and_all_at_night(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.sampled(3)
        @pytest.mark.parametrize("case", range(8))
        def test_many(case):
            print("ran", case)

        @pytest.mark.parametrize("case", "ab")
        def test_few(case):
            print("ran", case)
        """
    )

    def ran(*options: str) -> list[str]:
        lines = suite.runpytest("-s", "-q", "-p", "no:randomly", *options).stdout.lines
        return [line.rsplit("ran ", 1)[1] for line in lines if "ran " in line and " in " not in line]

    assert ran("-m", "not slow") == ["0", "3", "6", "a", "b"]
    assert ran() == [*"01234567", "a", "b"]


@pytest.mark.parametrize(("server", "kept"), [(None, 3), (Path("/usr/bin/redis-server"), 4)])
def test_cases_on_valkey_repeat_those_on_redis_where_redis_is_valkey(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, server: Path | None, kept: int
) -> None:
    monkeypatch.setattr("tests.plugins.sampled.redis_binary", lambda: server)
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("server", ["redis_url", "valkey_url", "redis_cluster_url"])
        def test_each(server): pass

        def test_none(): pass
        """
    )
    suite.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=kept, deselected=4 - kept)


def test_what_threads_of_earlier_modules_log_is_not_shown(suite: pytest.Pytester) -> None:
    earlier = """
    import logging, threading
    asked, done = threading.Event(), threading.Event()

    def work():
        assert asked.wait(60)
        logging.getLogger("elastable.x").warning("of a thread")
        done.set()

    def test_it(caplog):
        threading.Thread(target=work).start()
        {}
    """
    seen = "asked.set()\n        assert done.wait(60)\n        assert caplog.messages == [{}]"
    suite.makepyfile(test_a=earlier.format("pass"), test_c=earlier.format(seen.format("'of a thread'")))
    suite.makepyfile(test_b=f"from test_a import asked, done\n\ndef test_it(caplog):\n        {seen.format('')}")
    suite.runpytest_inprocess().assert_outcomes(passed=3)
