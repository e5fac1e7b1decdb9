"""In CI a skipped test is a failure, unless its reason is listed here."""

import os
from collections.abc import Generator

import pytest

#: Reason -> why it is no gap. A new one is a decision, not a way to pass.
MAY_BE_SKIPPED = {
    "the shared test data are not beside this checkout": "reference data of another repository, too large for this one",
    "the graphs of ../shared/data are not here": "data sets of other people, which may not be copied",
    "grpcio-tools is part of the dev extra": "`make proto-check`, a step of its own in .ci/run, compares the stubs",
    "chromium and playwright are not here": "tests/elastable/monitoring/test_live_page.py checks the page without them",
    "network namespaces cannot be made here": "slow tests alone, which CI leaves out; they need root and iproute2",
    "kubectl is not here": "it only joins files, each of which tests/deploy/test_kubernetes.py validates without it",
    "no Docker engine answers": "the manifests are validated without it, in tests/deploy/test_kubernetes.py",
    "Node.js, npm and its packages are not here": "tests/master/rpc/test_wire_doc.py has the same client in Python",
    "another C library keeps or gives back as it likes": "CI has glibc, and the promise is made for it alone",
}


def _is_gap(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return (
        report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true" and not _allowed(report)
    )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    # A skip tells of file, line and reason.
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _allowed(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return any(reason in _reason(report) for reason in MAY_BE_SKIPPED)


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    report.longrepr = f"{report.nodeid} is skipped in CI: {_reason(report)}\nMake it run, or see {__name__}"
    report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _is_gap(report):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _is_gap(report):
        _fail(report)
    return report
