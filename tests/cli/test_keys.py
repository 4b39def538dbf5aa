"""`holdfast keys`: what it stores, prints and refuses."""

from __future__ import annotations

import io
import time
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.cli.command import main
from holdfast.server.conversations.database import Database
from holdfast.server.keys.tables import KeyTable, Snapshot
from holdfast.server.keys.values import Limits, digest_of, tenant_of_secret


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store.sqlite")


def read(store: str) -> Snapshot:
    with closing(Database(store)) as database:
        found = KeyTable(database).snapshot()
    assert found is not None
    return found


def test_add_prints_the_secret_alone_and_stores_only_its_digest(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scope", "use", "--scope", "operator", "--expires", "90d", "--streams", "3", "--tenant", "acme"]
    assert main(["keys", "add", "first", "--store", store, *words]) == 0
    secret = capsys.readouterr().out.removesuffix("\n")
    assert secret.startswith("sk-holdfast-") and "\n" not in secret
    key = read(store).secrets[digest_of(secret.encode())].key
    assert (key.name, key.tenant, key.scopes, key.limits) == ("first", "acme", ("use", "operator"), Limits(streams=3))
    assert key.expires is not None and abs(key.expires - time.time() - 90 * 86400) < 60
    assert not any(secret.encode() in file.read_bytes() for file in Path(store).parent.iterdir())


def test_a_key_of_standard_input_keeps_its_tenant_and_is_not_shown(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("old-key\n"))
    assert main(["keys", "add", "legacy", "--store", store, "--from-key-file", "-"]) == 0
    shown = capsys.readouterr()
    assert "old-key" not in shown.out + shown.err
    assert read(store).secrets[digest_of(b"old-key")].key.tenant == tenant_of_secret("old-key")


def test_rotate_keeps_the_tenant_and_ends_the_earlier_key_after_the_overlap(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("old\n")
    main(["keys", "add", "acme", "--store", store, "--from-key-file", str(tmp_path / "key")])
    capsys.readouterr()
    assert main(["keys", "rotate", "acme", "--store", store, "--overlap", "1h"]) == 0
    secret = capsys.readouterr().out.strip()
    secrets = read(store).secrets
    assert secrets[digest_of(secret.encode())].key.tenant == tenant_of_secret("old")
    until = secrets[digest_of(b"old")].until
    assert until is not None and abs(until - time.time() - 3600) < 60


def test_limit_changes_and_removes_limits(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "add", "acme", "--store", store, "--requests-per-minute", "60", "--budget-tokens", "1000"])
    assert main(["keys", "limit", "acme", "--store", store, "--budget-tokens", "none", "--streams", "2"]) == 0
    assert "60 requests/min, 2 streams" in capsys.readouterr().err
    (found,) = read(store).secrets.values()
    assert found.key.limits == Limits(requests_per_minute=60, streams=2)


def test_list_shows_the_state_and_no_secret(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "add", "one", "--store", store])
    main(["keys", "add", "two", "--store", store, "--expires", "0s"])
    main(["keys", "add", "three", "--store", store])
    main(["keys", "revoke", "three", "--store", store])
    capsys.readouterr()
    assert main(["keys", "list", "--store", store]) == 0
    out = capsys.readouterr().out
    header, *rows = out.splitlines()
    assert header.split() == ["NAME", "STATE", "SCOPES", "CREATED", "LIMITS", "TENANT"]
    assert [row.split()[:2] for row in rows] == [["one", "never"], ["three", "revoked"], ["two", "expired"]]
    assert "sk-holdfast" not in out and not any(digest in out for digest in read(store).secrets)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["keys"], "ACTION is missing"),
        (["keys", "drop", "a"], "ACTION is drop"),
        (["keys", "add"], "add needs the NAME"),
        (["keys", "list", "a"], "list takes no NAME"),
        (["keys", "add", "a", "b"], "there is b besides"),
        (["keys", "add", "a", "--scope", "root"], "'root'"),
        (["keys", "add", "a", "--expires", "3y"], "expires is '3y'"),
        (["keys", "add", "a", "--overlap", "1h"], "--overlap has no meaning for add"),
        (["keys", "revoke", "a", "--streams", "1"], "--streams has no meaning for revoke"),
        (["keys", "add", "a", "--streams", "0"], "streams is 0"),
        (["keys", "limit", "a"], "limit needs one of"),
        (["keys", "rotate", "a"], "no key named a"),
    ],
)
def test_bad_usage_is_explained_in_one_line(
    store: str, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main([*words, "--store", store]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_a_store_in_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list", "--store", "memory"]) == 2
    assert "memory" in capsys.readouterr().err


def test_a_file_that_is_no_store_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    assert main(["keys", "list", "--store", str(tmp_path / "text")]) == 1
    assert "cannot be used" in capsys.readouterr().err
