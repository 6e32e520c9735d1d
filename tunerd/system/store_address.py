"""Where a team's store is, and the password for it, which is kept apart from all that is written.

    postgresql+psycopg://USER@HOST/DATABASE    a PostgreSQL server
    sqlite:////srv/tunerd/team.sqlite          a file on a disk of this machine

The password comes with the address, or from the environment: libpq reads PGPASSWORD and ~/.pgpass.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

PASSWORD_VARIABLE = "TUNERD_STORE_PASSWORD"
_POSTGRESQL = ("postgresql", "postgresql+psycopg")
_IN_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # which Ray's job supervisor sets for an entry point
_SECRET_OPTIONS = {"password", "sslpassword"}
_EXAMPLES = "postgresql+psycopg://user@host/database or sqlite:////folder/team.sqlite"


@dataclass(frozen=True)
class StoreAddress:
    """A team's store. `shown` is the whole address but for the password."""

    shown: str
    password: SecretStr | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str, password: SecretStr | None = None) -> StoreAddress:
        """Read an address; ValueError, without a part of it, where it cannot be one."""
        try:
            url = make_url(text)
        except (ArgumentError, ValueError):
            raise ValueError(f"it is no address of a store; write {_EXAMPLES}") from None
        if url.drivername == "sqlite":
            return cls(_sqlite(url))
        if url.drivername not in _POSTGRESQL:
            raise ValueError(f"it is an address of no store that tunerd knows; write {_EXAMPLES}")
        if _SECRET_OPTIONS & url.query.keys():
            raise ValueError(
                "its options hold a password; write it before the host, as user:password@host, or "
                "leave it to PGPASSWORD or ~/.pgpass"
            )
        if "@" in (url.host or ""):
            raise ValueError("its password holds an '@'; write %40 for it, and %25 for a '%'")
        if url.password is not None:
            password = SecretStr(str(url.password))
        bare = url.set(drivername="postgresql+psycopg", password=None)
        # A password that was left out can be told from an empty one.
        return cls(bare._replace(password=None).render_as_string(), password or None)

    @property
    def url(self) -> URL:
        """The address with its password, for the driver alone."""
        url = make_url(self.shown)
        return url if self.password is None else url.set(password=self.password.get_secret_value())

    @property
    def file(self) -> Path | None:
        """The file of an SQLite store."""
        url = make_url(self.shown)
        return Path(url.database or "") if url.drivername == "sqlite" else None


def _sqlite(url: URL) -> str:
    if url.host or url.password or url.query or not url.database or url.database == ":memory:":
        raise ValueError("an SQLite store is one file: write sqlite:////folder/team.sqlite")
    return f"sqlite:///{Path(url.database).absolute()}"


def out_of_sight(argv: Sequence[str], environment: MutableMapping[str, str]) -> list[str] | None:
    """Move a password from a command line to the environment; None where there is none to move.

    Command lines are seen by everybody on the machine, and Ray notes that of a driver as its
    entry point. Raises ValueError for one that Ray's job server has noted already.
    """
    moved = None
    for number, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag == "--store" and equals:
            text, prefix = value, "--store="
        elif number and argv[number - 1] == "--store":
            text, prefix = word, ""
        else:
            continue
        address = StoreAddress.parse(text)
        if address.password is not None:
            if _IN_A_RAY_JOB in environment:
                raise ValueError(
                    "it holds a password, and the entry point of a Ray job is shown on its "
                    "dashboard; leave it out and set PGPASSWORD or ~/.pgpass where the job runs, "
                    "and change that password"
                )
            environment[PASSWORD_VARIABLE] = address.password.get_secret_value()
            moved = list(argv) if moved is None else moved
            moved[number] = prefix + address.shown
    return moved


def hide_password() -> None:
    """Run this very program again without the password in its command line, if it has one."""
    words = sys.orig_argv
    moved = out_of_sight(words, os.environ)
    if moved is not None:
        os.execv(sys.executable, moved)


def password_from(environment: MutableMapping[str, str]) -> SecretStr | None:
    """Take the password that `out_of_sight` left, so that no process started later has it."""
    found = environment.pop(PASSWORD_VARIABLE, None)
    return SecretStr(found) if found else None
