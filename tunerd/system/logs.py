"""Logs as JSON, on stderr and in the run folder. Set up by the command line; others only log.

A record may say what it is about with `extra`: task, trial, slice, tuner. While a run is under way
its name is in every record, and what is logged goes to logs/tunerd.jsonl of its folder as well.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

LOG_NAME = "tunerd.jsonl"
MAX_BYTES = 8 << 20  # of the file that is written, and of the older one beside it
FIELDS = ("run", "task", "trial", "slice", "tuner")
_KEPT_BEFORE = 1000  # records of a run before its folder is open

_run: tuple[str, Path] | None = None  # of this process: the name, and where its logs are
log = logging.getLogger(__name__)


@contextmanager
def run_logged(name: str, folder: Path) -> Iterator[None]:
    """Say that a run is under way, whose folder for logs is there and this process's own."""
    global _run
    before, _run = _run, (name, folder)
    try:
        log.info("the run begins")
        yield
    except BaseException as error:
        log.info("the run ends with %s: %s", type(error).__name__, error)
        raise
    else:
        log.info("the run ends")
    finally:
        _run = before


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if _run is not None:
            line["run"] = _run[0]
        about = ((name, getattr(record, name, None)) for name in FIELDS)
        line |= {name: value for name, value in about if value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # escapes whatever a terminal would obey


class RunLogHandler(logging.Handler):
    """Writes to the folder of the run that is under way, what came shortly before it first.

    A folder that cannot be written loses its log, and nothing else.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._max_bytes = max_bytes
        self._before: deque[logging.LogRecord] = deque(maxlen=_KEPT_BEFORE)
        self._folder: Path | None = None
        self._file: RotatingFileHandler | None = None

    def emit(self, record: logging.LogRecord) -> None:
        folder = None if _run is None else _run[1]
        if folder != self._folder:
            self._open(folder)
        if folder is None:
            self._before.append(record)
        elif self._file is not None:
            self._file.emit(record)

    def _open(self, folder: Path | None) -> None:
        self._close()
        self._folder = folder
        if folder is None:
            return
        with suppress(OSError):
            self._file = _File(folder / LOG_NAME, self._max_bytes)
            self._file.setFormatter(self.formatter)
            while self._before:
                self._file.emit(self._before.popleft())

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        self._close()
        super().close()


class _File(RotatingFileHandler):
    """A log and the one before it, each bounded."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a line that a full disk refuses: the store says so, and ends the run."""


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]
    """What this process prints."""


def set_up(*, verbose: bool, as_json: bool) -> None:
    """Configure the logs of this process: errors on stderr, all that is done where asked for.

    JSON holds all: who asks for it has programs read it.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Shown | RunLogHandler)]:
        root.removeHandler(handler)  # of an earlier command in this process
        handler.close()
    shown = _Shown(sys.stderr)
    shown.setLevel(logging.INFO if verbose or as_json else logging.ERROR)
    text = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    shown.setFormatter(JsonFormatter() if as_json else text)
    root.addHandler(shown)
    root.addHandler(RunLogHandler())
    logging.captureWarnings(as_json)
    logging.getLogger("tunerd").setLevel(logging.INFO)  # others stay at the root's WARNING


def collect() -> list[tuple[str, int, str]]:
    """Configure the logs of a process whose parent logs what is collected in the returned list.

    Each entry is the logger's name, the level and the text, with any traceback.
    """
    handler = _Collected()
    logging.getLogger().addHandler(handler)
    logging.getLogger("tunerd").setLevel(logging.INFO)
    return handler.collected


class _Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.collected: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.collected.append((record.name, record.levelno, self.format(record)))


def is_json() -> bool:
    """Say whether what this process prints on stderr is to be JSON."""
    shown = (h for h in logging.getLogger().handlers if isinstance(h, _Shown))
    return any(isinstance(h.formatter, JsonFormatter) for h in shown)
