"""The MPS server's log, with lines that driver 580 wrote on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerd.slices.mps.log import ServerLog

QUIET = """\
[2026-11-21 21:15:20.732 Server  1340] Client {PID: 1376, Context ID: 1} connected
[2026-11-21 21:15:20.732 Server  1340] Creating worker thread for client {PID: 1376, Context ID: 1}
[2026-11-21 21:15:20.732 Server  1340] Status of client {PID: 1376, Context ID: 1} is ACTIVE
[2026-11-21 21:16:00.033 Server  1597] Client {PID: 1580, Context ID: 1} exiting. \
Number of active client contexts is 2.
[2026-11-21 21:16:00.092 Server  1597] MPS server requesting client {PID: 1608, Context ID: 1} to \
exit
"""
MISALIGNED = """\
[2026-11-21 21:14:42.292 Server  1076] Client {PID: 1059, Context: 1} encountered a fatal GPU error.
[2026-11-21 21:14:42.292 Server  1076] Server is handling a fatal GPU error.
[2026-11-21 21:14:42.292 Server  1076] Client {PID: 1059, Context ID: 1} on device 0 to be torn down
[2026-11-21 21:14:42.292 Server  1076] Client {PID: 1116, Context ID: 1} on device 0 to be torn down
"""
TRAP = """\
[2026-11-21 21:15:22.932 Server  1340] Server is handling a fatal GPU error.
[2026-11-21 21:15:22.932 Server  1340] Client {PID: 1319, Context ID: 1} on device 0 to be torn down
[2026-11-21 21:15:22.932 Server  1340] Client {PID: 1376, Context ID: 1} on device 0 to be torn down
"""


@pytest.mark.parametrize("written", [MISALIGNED, TRAP])
def test_a_fault_is_told(tmp_path: Path, written: str) -> None:
    log = ServerLog(tmp_path / "server.log")
    assert log.fault() == ()
    (tmp_path / "server.log").write_text(QUIET)
    assert log.fault() == ()
    (tmp_path / "server.log").write_text(QUIET + written)
    for _ in range(2):
        assert "to be torn down" in log.fault()[-1]


def test_a_fault_that_is_over_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(MISALIGNED)
    log = ServerLog(path)
    assert log.fault() == ()
    path.write_text(MISALIGNED + TRAP)
    assert log.fault()
    assert log.fault(frozenset({1319, 1376})) == ()  # of clients that have ended
    log.forget()
    assert log.fault() == ()


def test_a_log_that_was_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(QUIET + MISALIGNED)
    log = ServerLog(path)
    path.write_text(TRAP)
    assert log.fault()
