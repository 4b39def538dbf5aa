"""Tables of files, batches and tuning jobs, without a server: what keeps a file, and who may have which row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.server.conversations.database import MEMORY, Database
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds, Conflict, NotFound
from holdfast.server.jobs.tables import STEPS, BatchTable, FileTable, JobTable, TooMany, WrongPurpose, create_indexes
from holdfast.server.jobs.values import AnsweredLine, Batch, StoredFile, TuningJob, Usage


@pytest.fixture
def database() -> Iterator[Database]:
    store = Store.open(MEMORY, Bounds(seconds=1e6, threads=100, bytes=1 << 30), lambda: 0.0, STEPS)
    yield store.database
    store.close()


def stored(database: Database, id: str, tenant: str = "a", *, purpose: str = "batch", **fields: Any) -> StoredFile:
    given: dict[str, Any] = {"bytes": 10, "created": 1.0, "expires": 50.0} | fields
    file = StoredFile(id=id, tenant=tenant, purpose=purpose, name=f"{id}.jsonl", **given)
    FileTable(database).add(file)
    return file


def batch(database: Database, id: str, input: str, tenant: str = "a", **fields: Any) -> Batch:
    limits: dict[str, Any] = {"limit": 4, "tenant_limit": 3} | fields
    made = Batch(
        id=id, tenant=tenant, endpoint="/v1/chat/completions", input_file=input, model="m", created=2.0, expires=None,
        output_seconds=9.0, total=3,
    )  # fmt: skip
    BatchTable(database).add(made, "server", purpose="batch", **limits)
    return made


def job(database: Database, id: str, training: str, validation: str | None = None) -> None:
    made = TuningJob(
        id=id, tenant="a", model="m", name=f"ft:{id}", created=3.0, training_file=training, validation_file=validation,
        seed=0, asked={},
    )  # fmt: skip
    JobTable(database).add(made, "server", limit=9, tenant_limit=9, kept=9)


def test_an_expired_file_stays_while_a_batch_or_a_tuning_job_reads_it(database: Database) -> None:
    table = FileTable(database)
    stored(database, "batch")
    for name in ("training", "validation"):
        stored(database, name, purpose="fine-tune")
    for name, expires in (("old", 50.0), ("young", 50.1), ("lasting", None)):
        stored(database, name, expires=expires)
    batch(database, "b", "batch")
    job(database, "j", "training", "validation")
    assert table.drop_expired(50.0) == ["old"]
    JobTable(database).change("j", {"status": "queued"})
    assert sorted(table.drop_expired(50.0)) == ["training", "validation"], "it has its examples"
    BatchTable(database).change("b", {"status": "completed"})
    assert sorted(table.drop_expired(51.0)) == ["batch", "young"] and table.drop_expired(1e9) == []


def test_a_file_that_is_read_cannot_be_deleted_and_an_expired_one_is_not_found(database: Database) -> None:
    table = FileTable(database)
    stored(database, "f")
    batch(database, "b", "f")
    with pytest.raises(Conflict, match="a batch that has not ended reads this file"):
        table.delete("a", "f", 10.0)
    BatchTable(database).change("b", {"status": "failed"})
    with pytest.raises(NotFound):
        table.delete("b", "f", 10.0)
    assert table.get("a", "f", 49.0).id == "f"
    with pytest.raises(NotFound):
        table.get("a", "f", 50.0)
    table.delete("a", "f", 10.0)
    assert table.held("a") == (0, 0)


def test_bytes_are_counted_in_all_and_by_tenant(database: Database) -> None:
    for number, tenant in enumerate("aab"):
        stored(database, str(number), tenant, bytes=10**number)
    table = FileTable(database)
    assert [table.held(tenant) for tenant in "abc"] == [(111, 11), (111, 100), (111, 0)]


def test_open_batches_are_limited_in_all_and_by_tenant_and_ended_ones_do_not_count(database: Database) -> None:
    for tenant in "ab":
        stored(database, f"f{tenant}", tenant)
    for number in range(3):
        batch(database, f"a{number}", "fa")
    with pytest.raises(TooMany, match="this API key has 3 batches"):
        batch(database, "a3", "fa")
    batch(database, "b0", "fb", "b")
    with pytest.raises(TooMany, match="4 batches have not ended"):
        batch(database, "b1", "fb", "b")
    BatchTable(database).change("a0", {"status": "completed"})
    batch(database, "b1", "fb", "b")
    stored(database, "tuned", purpose="fine-tune")
    with pytest.raises(WrongPurpose, match="the file's purpose is fine-tune"):
        batch(database, "c", "tuned", limit=99)
    with pytest.raises(NotFound):
        batch(database, "c", "fb", limit=99)


def answer(number: int, completed: bool = True) -> AnsweredLine:
    usage = Usage(prompt=number, cached=1, completion=10)
    return AnsweredLine(batch="b", number=number, completed=completed, text=b"%d" % number, usage=usage)


def test_an_answer_counts_once_however_often_it_comes(database: Database) -> None:
    stored(database, "f")
    batch(database, "b", "f")
    table = BatchTable(database)
    now, new = table.answer("b", [answer(1), answer(2, completed=False), answer(1)])
    assert (now.completed, now.failed, [each.number for each in new]) == (1, 1, [1, 2])
    now, new = table.answer("b", [answer(2), answer(3)])
    assert (now.completed, now.failed, [each.number for each in new]) == (2, 1, [3])
    assert now.usage == Usage(prompt=6, cached=3, completion=30)
    assert table.answered("b") == {1, 2, 3}
    assert table.answers("b", completed=True, after=0, limit=9) == [(1, b"1"), (3, b"3")]
    assert table.answers("b", completed=True, after=1, limit=9) == [(3, b"3")]
    assert table.answers("b", completed=False, after=0, limit=9) == [(2, b"2")]
    assert not table.forget_answers(), "it has not ended"
    table.change("b", {"status": "completed"})
    while table.forget_answers():
        pass
    assert table.answered("b") == set()


def test_work_goes_to_one_server_only_and_with_what_was_asked_of_it(database: Database) -> None:
    stored(database, "f")
    for name in ("b1", "b2", "b3"):
        batch(database, name, "f")
    table = BatchTable(database)
    table.ask_cancel("a", "b2", 7.0)
    table.change("b3", {"status": "completed"})
    assert table.owners() == {"server"} and table.cancelled(["b1", "b2"]) == ["b2"]
    assert [(each.id, cancelled) for each, cancelled in table.orphans(["server"])] == [("b1", False), ("b2", True)]
    assert sorted(table.adopt("next", ["server"], ["b1", "b2"])) == ["b1", "b2"]
    assert table.adopt("late", ["server"], ["b1", "b2"]) == {} and table.owners() == {"next"}
    with pytest.raises(Conflict, match="the batch is completed"):
        table.ask_cancel("a", "b3", 7.0)
    with pytest.raises(NotFound):
        table.ask_cancel("b", "b1", 7.0)


def test_a_job_is_paused_resumed_and_cancelled_only_where_that_changes_it(database: Database) -> None:
    stored(database, "f", purpose="fine-tune")
    job(database, "j", "f")
    table = JobTable(database)
    table.change("j", {"status": "running"})

    def ask(verb: str) -> tuple[str, str, int]:
        asked, wanted, number = table.ask("a", "j", verb, 5.0)
        assert table.wanted(["j"]) == {"j": (wanted, number)} and table.get("a", "j") == asked
        return asked.status, wanted, number

    def refused(verb: str, status: str) -> None:
        before = table.wanted(["j"])
        with pytest.raises(Conflict, match=f"the job is {status}"):
            table.ask("a", "j", verb, 5.0)
        assert table.wanted(["j"]) == before

    refused("resume", "running")
    assert ask("pause") == ("paused", "pause", 1)
    refused("pause", "paused")
    assert ask("resume") == ("running", "run", 2)
    table.change("j", {"status": "paused"})
    assert table.get("a", "j").status == "queued", "its owner will find that it is to run"
    assert ask("cancel") == ("cancelled", "cancel", 3) and table.get("a", "j").finished == 5.0
    for verb in ("pause", "resume", "cancel"):
        refused(verb, "cancelled")
    with pytest.raises(NotFound):
        table.ask("b", "j", "pause", 5.0)
    assert [(each.id, wanted) for each, wanted in table.orphans(["server"])] == [("j", "cancel")]


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 20])
def test_files_created_at_the_same_time_are_listed_once_each_page_by_page(
    database: Database, limit: int, newest_first: bool
) -> None:
    wanted = [stored(database, f"{name}{at}", created=float(at)).id for at in range(3) for name in "abc"]
    stored(database, "theirs", "b")
    listed, after, more = list[str](), None, True
    while more:
        page, more = FileTable(database).page(
            "a", 10.0, limit=limit, newest_first=newest_first, after=after, purpose=None
        )
        listed += [each.id for each in page]
        after = listed[-1]
    assert listed == (wanted[::-1] if newest_first else wanted)


def test_a_deep_page_of_files_is_as_fast_as_the_first_also_in_an_older_store(database: Database) -> None:
    with database.write() as db:
        for table in ("files", "batches", "tuning_jobs"):
            db.exec_driver_sql(f"DROP INDEX {table}_by_creation")
        create_indexes(db)
    for number in range(500):
        stored(database, f"file{number:03}", created=float(number // 3))
    done = [0]
    connection = database.engine.raw_connection()
    connection.driver_connection.set_progress_handler(lambda: done.__setitem__(0, done[0] + 1), 10)

    def steps(after: str | None) -> int:
        """Return the tens of instructions of SQLite's machine for a page."""
        done[0] = 0
        page, _ = FileTable(database).page("a", 10.0, limit=10, newest_first=True, after=after, purpose=None)
        assert len(page) == 10
        return done[0]

    assert 0 < steps("file020") <= steps(None) + 40 and steps("file480") <= steps(None) + 40
    connection.close()
