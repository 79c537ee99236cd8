"""Options of the whole test suite."""

import pytest

LEFT_OUT = "left out:"  # how the reason of a skip begins that `make test-interop` lets pass: an apt package is missing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=300, help="random programs to compare clocks and checker on")
    parser.addoption("--round-trips", type=int, default=20, help="random plans to send through each exporter and back")
    parser.addoption(
        "--interop", action="store_true", help="run the tests that need the parsers of other frameworks; a skip fails"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--interop"):
        return
    for item in items:
        if item.get_closest_marker("interop"):
            item.add_marker(pytest.mark.skip(reason="needs the parsers of other frameworks: make test-interop"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `--interop`, a test that was skipped is a test that did not say whether an export is right."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--interop") or reporter is None:
        return
    skipped = [report for report in reporter.stats.get("skipped", []) if LEFT_OUT not in str(report.longrepr)]
    if skipped and session.exitstatus == 0:
        reporter.write_line(f"\n{len(skipped)} interop tests were skipped, and none may be", red=True)
        session.exitstatus = 1
