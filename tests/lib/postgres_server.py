"""A PostgreSQL server of the tests' own, in a private folder, without a network."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest

PASSWORD = "S3cret@of/the team"
START_SECS = 60.0
_PROGRAMS = Path("/usr/lib/postgresql")  # Debian's, which are on no PATH


class PostgresServer:
    """A server that is started, stopped and asked by one test at a time."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        # Not pytest's folder, which other users may not enter: the server refuses to be root.
        self._root = Path(tempfile.mkdtemp(prefix="tunerd-postgres-"))
        self._user = _unprivileged()
        self._numbers = count(1)
        self.process: subprocess.Popen[bytes] | None = None
        password = self._root / "password"
        password.write_text(PASSWORD + "\n")
        for path in (self._root, password):
            if self._user is not None:
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        options = ["--username=team", "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"]
        options += ["--encoding=UTF8", "--locale=C", f"--pgdata={self._root / 'data'}"]
        done = self._start("initdb", options).communicate(timeout=START_SECS)
        assert (self._root / "data" / "PG_VERSION").exists(), done

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = ["-D", str(self._root / "data"), "-k", str(self._root), "-h", ""]
        self.process = self._start("postgres", [*options, "-F", "-c", "max_connections=20"])
        deadline = time.monotonic() + START_SECS
        while not self._answers():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self) -> None:
        """End the server and all its connections at once, as a crash does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.communicate(timeout=START_SECS)
            self.process = None

    def new_database(self) -> str:
        """Create a database and return its address, with the password."""
        name = f"team{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.address(name)

    def address(self, database: str, password: str | None = PASSWORD) -> str:
        user = "team" if password is None else f"team:{quote(password, safe='')}"
        return f"postgresql+psycopg://{user}@/{database}?host={self._root}"

    def execute(self, statement: str, database: str = "postgres") -> None:
        import psycopg

        with psycopg.connect(**self._login(database), autocommit=True) as connection:
            connection.execute(statement)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._root, ignore_errors=True)

    def _login(self, database: str) -> dict[str, str]:
        return {
            "host": str(self._root),
            "user": "team",
            "password": PASSWORD,
            "dbname": database,
        }

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(**self._login("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True

    def _start(self, program: str, options: list[str]) -> subprocess.Popen[bytes]:
        as_whom = {}
        if self._user is not None:
            as_whom = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return subprocess.Popen(
            [str(self._programs / program), *options],
            cwd=self._root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **as_whom,  # type: ignore[call-overload]
        )


def start_postgres() -> PostgresServer:
    """Start a server; skip the test where PostgreSQL is missing, but never in CI."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        _missing("the package psycopg is not installed")
    found = sorted(_PROGRAMS.glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        _missing("there is no PostgreSQL server here; Debian's package is postgresql")
    server = PostgresServer(found[-1].parent if found else Path(on_path or "").resolve().parent)
    server.start()
    return server


def _missing(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _unprivileged() -> pwd.struct_passwd | None:
    """Return whom the server runs as: nobody else unless this is root."""
    if os.geteuid() != 0:
        return None
    names = {user.pw_name for user in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")
