"""What every test may rely on."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.lib.bad_input import Place
    from tests.lib.postgres_server import PostgresServer
    from tunerd.runner.base import Runner

pytest.register_assert_rewrite("tunerd.testing")
_CORES = os.sched_getaffinity(0)

# No test is timed: cores are busy with others.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")


# Files of more than a minute, the longest first.
_LONGEST = (
    "test_readme",
    "test_session",
    "test_kills",
    "test_ray_jobs",
    "test_cluster",
    "test_actors",
    "test_matrix",
    "test_newcomer",
    "test_disk",
    "test_nightly",
    "test_store_runs",
    "test_recipe_execute",
    "test_places",
    "test_runner_contract",
    "test_api",
    "test_chaos",
    "test_pack",
    "test_lowering",
    "test_colocate_plan",
    "test_triton_tenants",
    "test_metrics",
    "test_status",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, then those of slow tests.

    Several run at once, and the last is waited for.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    nth = {name: n for n, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (nth.get(item.path.stem, len(nth)), item.path not in slow))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Give this process its cores back: TVM binds the thread that a model runs in to one.

    Before fixtures of any scope are made: processes that they start inherit the cores.
    """
    os.sched_setaffinity(0, _CORES)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what is no text in what a test printed: reports travel between processes as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return what compiles a good artifact, once and only where it is needed."""

    @functools.cache
    def make() -> Path:
        from tests.lib.artifact_fixtures import tiny_artifact

        folder = tmp_path_factory.mktemp("good") / "artifact"
        tiny_artifact(folder)
        return folder

    return make


@pytest.fixture
def place(tmp_path: Path, artifact_of: Callable[[], Path]) -> Iterator[Place]:
    """Yield an empty place to make a bad input in."""
    from tests.lib.bad_input import Place

    made = Place(tmp_path, artifact_of)
    with made.stack:
        yield made


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Yield a PostgreSQL server, started once and only where it is needed."""
    from tests.lib.postgres_server import start_postgres

    server = start_postgres()
    yield server
    server.close()


@pytest.fixture(scope="module")
def cores() -> Iterator[Runner]:
    """A runner in the least slice of this machine's cores."""
    from tunerd.slices import member, plan
    from tunerd.system import host
    from tunerd.vocabulary import SliceRequest

    planned = plan(SliceRequest("cpu", -(-100 // host.facts().usable_cores)))
    with member("cpu")(planned.slices[0]) as started:
        yield started.launch()


@pytest.fixture(scope="module")
def kept_cluster() -> Iterator[None]:
    """Start Ray once for the runs that a file makes in this process."""
    from tests.lib.kept_cluster import kept_cluster as kept

    with kept():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long each file took in all, the longest first, where durations are asked for."""
    shown = terminalreporter.config.getoption("durations")
    if not shown:
        return
    secs: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                secs[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for name, total in secs.most_common(shown):
        terminalreporter.write_line(f"{total:7.1f}  {name}")
    terminalreporter.write_line(f"{sum(secs.values()):7.1f}  all {len(secs)} files")
