"""Training's tables on SQLite and on PostgreSQL, and servers that share them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import zstandard
from msgspec.structs import replace
from tinker_server import forward_body, training_server

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import Database
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import NotFound
from holdfast.server.run import open_store
from holdfast.server.tinker import runner, training
from holdfast.server.tinker.futures import new_future
from holdfast.server.tinker.sample_table import Sampler, SamplerTable
from holdfast.server.tinker.tables import (
    CheckpointTable,
    FutureTable,
    LimitReached,
    ModelEnded,
    ModelTable,
    Reused,
    SessionTable,
    create_tables,
    unfinished,
)
from holdfast.server.tinker.values import Checkpoint, Future, Model, Session


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The place of an empty store."""
    return str(tmp_path / "s.sqlite" if request.param == "sqlite" else request.getfixturevalue("postgresql_schema"))


@pytest.fixture
def database(where: str, tmp_path: Path) -> Iterator[Database]:
    store: Store = open_store(ServerConfig(store=where, files=str(tmp_path / "files")))
    yield store.database
    store.close()


def session(id: str = "s", tenant: str = "a", created: float = 1.0) -> Session:
    return Session(id=id, tenant=tenant, created=created, seen=created, tags=["one"], metadata={"k": "v"})


def model(id: str = "s:train:0", tenant: str = "a", created: float = 1.0) -> Model:
    return Model(
        id=id, tenant=tenant, session="s", base="tiny", created=created, rank=4, seed=(1 << 62) + 1, modules=["q"]
    )


def future(seq: int, kind: str = "forward", item: str = "s:train:0", tenant: str = "a", **more: Any) -> Future:
    return new_future(tenant, item, seq, kind, f"digest {seq}", 2.0 + seq, **more)


def checkpoint(name: str, id: str = "", tenant: str = "a", **more: Any) -> Checkpoint:
    kind = more.pop("kind", "training")
    return Checkpoint(
        id=id or name, tenant=tenant, model="s:train:0", kind=kind, name=name, created=3.0, directory="/d", **more
    )  # fmt: skip


def begun(database: Database, made: Future, saves: tuple[Checkpoint, ...] = (), **limits: int) -> tuple[Future, bool]:
    return FutureTable(database).begin(made, **{"limit": 9, "tenant_limit": 9} | limits, saves=saves)


def opened(database: Database, made: Model | None = None, owner: str = "x", **limits: int) -> Model:
    made = made or model()
    creation = future(0, "create_model", made.id, made.tenant)
    ModelTable(database).add(made, creation, owner, **{"limit": 9, "tenant_limit": 9} | limits)
    return made


def done(made: Future, ended: float = 5.0) -> tuple[str, dict[str, Any], bytes]:
    return made.id, {"state": "done", "ended": ended, "media": "text/plain"}, b"\0result"


def test_a_session_is_read_back_with_its_heartbeat_and_its_end(database: Database) -> None:
    table = SessionTable(database)
    table.add(session())
    table.add(session("t", created=2.0))
    assert table.get("a", "s") == session()
    assert table.beat("a", "s", 7.5).seen == 7.5 == table.seen(["s", "none"])["s"]
    assert [each.id for each in table.page("a", offset=0, limit=1)] == ["t"]
    opened(database)
    assert table.finish("a", "s", "success") == ["s:train:0"] and table.finish("a", "s", "errored")
    assert table.get("a", "s").finished == "success"
    assert ModelTable(database).unloading("x") == ["s:train:0"] and ModelTable(database).unloading("y") == []
    with pytest.raises(NotFound):
        table.get("b", "s")
    assert table.drop_old(9.0) == ["t"], "a session with a model stays"


def test_models_have_limits_and_a_number_creates_one_model(database: Database) -> None:
    table, creation = ModelTable(database), future(0, "create_model")
    assert table.add(model(), creation, "x", limit=2, tenant_limit=1) == (creation, True)
    again = replace(creation, id="another")
    assert table.add(model(), again, "x", limit=2, tenant_limit=1) == (creation, False)
    with pytest.raises(Reused):
        table.add(model(), replace(again, digest="other"), "x", limit=2, tenant_limit=1)
    for tenant, reason in (("a", "at most 1"), ("c", "2 models")):
        with pytest.raises(LimitReached, match=reason):
            opened(database, model(f"{tenant}:train:9", tenant), limit=2, tenant_limit=1)
        if tenant == "a":
            opened(database, model("b:train:0", "b"), limit=2, tenant_limit=1)
    assert table.get("a", "s:train:0") == model()
    assert table.page("a", offset=0, limit=5) == ([(model(), 1.0)], 1)


def test_models_of_an_ended_server_are_adopted_once(database: Database) -> None:
    table = ModelTable(database)
    opened(database, owner="gone")
    opened(database, model("s:train:1"), owner="here")
    assert table.owners() == {"gone", "here"}
    assert [each.id for each in table.orphans(["gone"])] == ["s:train:0"]
    ids = ["s:train:0", "s:train:1"]
    assert table.adopt("next", ["gone"], ids) == {"s:train:0": {}}
    assert table.adopt("late", ["gone"], ids) == {}
    assert table.change("s:train:0", {"status": "failed", "reason": "ruined"}).reason == "ruined"
    assert table.owners() == {"here"}


def test_a_request_keeps_its_id_number_and_result(database: Database) -> None:
    opened(database)
    table, first = FutureTable(database), future(1, call=0, detail={"path": "p"})
    assert begun(database, first) == (first, True)
    assert begun(database, replace(first, id="again")) == (first, False)
    with pytest.raises(Reused, match="seq_id 1"):
        begun(database, replace(first, id="again", digest="other"))
    held = future(3)
    begun(database, held)
    assert table.last("s:train:0") == (1, 0, -1) and table.with_held(["s:train:0", "t"]) == {"s:train:0"}
    assert table.number(held.id, 1).call == 1 and table.with_held(["s:train:0"]) == set()
    ended, _ = table.finish([done(first)])
    assert ended[0].state == "done" and table.body("a", first.id) == b"\0result"
    table.finish([(first.id, {"state": "failed", "error": "late"}, None)])
    assert table.get("a", first.id).state == "done", "an end stays as it is"
    assert [each.seq for each in table.of_item("s:train:0", pending=True)] == [0, 3]
    assert table.last("s:train:0") == (3, 1, 0) and ModelTable(database).used("s:train:0") == held.created
    with pytest.raises(NotFound):
        table.get("b", first.id)


def test_pending_requests_are_bounded_and_an_ended_model_takes_none(database: Database) -> None:
    opened(database)
    begun(database, future(1))
    with pytest.raises(LimitReached, match="s:train:0"):
        begun(database, future(2), limit=2)
    with pytest.raises(LimitReached, match="API key"):
        begun(database, future(2), tenant_limit=2)
    assert begun(database, future(1, item="other", tenant="b"), limit=2, tenant_limit=2)[1]
    ModelTable(database).change("s:train:0", {"status": "closed"})
    with pytest.raises(ModelEnded):
        begun(database, future(2))
    assert FutureTable(database).get("a", future_of(database, 1).id).state == "expired"


def future_of(database: Database, seq: int) -> Future:
    found = FutureTable(database).known("s:train:0", seq)
    assert found is not None
    return found


def test_old_results_go_and_their_numbers_stay_taken_while_the_model_is_open(database: Database) -> None:
    opened(database)
    made = [future(seq, call=seq) for seq in (1, 2)]
    for each in made:
        begun(database, each)
    table = FutureTable(database)
    table.finish([done(made[0], 5.0), done(made[1], 8.0)])
    assert [each.seq for each in table.drop_old(6.0)] == [1] and table.drop_old(6.0) == []
    assert table.get("a", made[0].id).state == "expired" and table.get("a", made[1].id).state == "done"
    assert begun(database, replace(made[0], id="again"))[1] is False
    ModelTable(database).change("s:train:0", {"status": "closed"})
    assert [each.id for each in ModelTable(database).drop_old(99.0)] == ["s:train:0"]
    assert table.known("s:train:0", 1) is None


def test_a_finished_checkpoint_replaces_the_one_of_its_name(database: Database) -> None:
    opened(database)
    table, save = CheckpointTable(database), future(1, "save", call=0)
    old = checkpoint("best", "one", bytes=1 << 40, ready=True, metadata={"a": "b"})
    begun(database, save, (checkpoint("best", "one"),))
    assert table.taken("s:train:0", "training", "best") and table.page("a", 4.0, model=None, offset=0, limit=9)[1] == 0
    _, replaced_ones = FutureTable(database).finish([done(save)], [old])
    assert replaced_ones == [] and table.find("a", "s:train:0", "training", "best", 4.0) == old
    again = future(2, "save", call=1)
    begun(database, again, (checkpoint("best", "two"),))
    assert FutureTable(database).finish([done(again)], [replace(old, id="two")])[1] == [old]
    assert table.get("one") is None
    table.change("two", {"public": True, "expires": 9.0})
    assert table.find("b", "s:train:0", "training", "best", 8.0).id == "two"
    with pytest.raises(NotFound):
        table.find("a", "s:train:0", "training", "best", 9.0)
    assert [each.id for each in table.expired(9.0)] == ["two"] and table.unfinished("s:train:0") == []
    table.delete(["two"])
    assert not table.taken("s:train:0", "training", "best")


def test_a_sampling_session_is_opened_once_and_counts_its_copies(database: Database) -> None:
    table = SamplerTable(database)
    made = Sampler("s:sample:1", "a", "s", 1, "tiny", None, None, 1.0, 1.0)
    later = Sampler("s:sample:0", "a", "s", 0, "tiny", "tinker://m/sampler_weights/x", "c", 2.0, 2.0)
    assert table.open(made) == made == table.open(made._replace(created=5.0))
    table.open(later)
    assert [table.join("a", made.id) for _ in range(2)] == [1, 2]
    table.use(made.id, 9.5)
    assert table.get("a", made.id) == made._replace(clients=2, used=9.5)
    assert table.sessions() == ["s"] and [each.seq for each in table.of_session("s")] == [1, 0]
    with pytest.raises(NotFound):
        table.open(made._replace(tenant="b"))
    table.delete([made.id, later.id])
    assert table.sessions() == []


def test_an_older_store_gets_the_index_that_it_lacks(database: Database) -> None:
    with database.write() as db:
        unfinished.drop(db)
        create_tables(db)
        assert unfinished.name in {each["name"] for each in sqlalchemy.inspect(db).get_indexes("training_futures")}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
async def test_servers_with_one_store_carry_out_what_the_other_takes(tmp_path: Path, where: str) -> None:
    async with (
        training_server(tmp_path, store=where) as first,
        training_server(tmp_path, store=where) as second,
    ):
        model = await first.model()
        made = [await (first, second)[seq % 2].forward(model, seq, data=[[seq]]) for seq in range(1, 9)]
        ended = [await (second, first)[future.seq % 2].ended(future) for future in made]
        assert [each.call for each in ended] == [*range(8)]
        assert [number for _, number in first.driver.computed] == [*range(8)]
        results = [await asyncio.gather(*(each.training.result(one) for one in ended)) for each in (first, second)]
        assert results[0] == results[1]
        await second.sessions.beat("", first.runner(model).model.session)
        await first.kill()
        update = await second.update(model, 9)
        assert (await second.ended(update)).state == "done"
        assert second.job(model).updates == 1 and model in second.training.runners
        await second.training.unload("", model)
        await second.until_ended(model)


async def test_a_client_that_waits_at_another_server_learns_that_its_samples_server_has_ended(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        future, _ = await server.futures.begin("", "sampler", 1, "sample", "digest")
        ended: set[str] = set()
        waiting = asyncio.create_task(server.futures.wait("", future.id, 3600, lambda each: each.id in ended))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        ended.add(future.id)
        assert (await asyncio.wait_for(waiting, 30)).state == "pending"


async def test_a_large_body_is_decompressed_and_decoded_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            threads[name] = threading.get_ident()
            return work(*given)

        return run

    for name in ("decompress", "read_forward"):
        monkeypatch.setattr(training, name, noted(name, getattr(training, name)))
    async with training_server(tmp_path) as server:
        model = await server.model()
        body = zstandard.ZstdCompressor().compress(forward_body(model, 1, data=[[1] * 100] * 1000))
        future = await server.training.forward(body, "", encoding="zstd")
        assert (await server.ended(future)).state == "done"
    assert {*threads} == {"decompress", "read_forward"} and threading.get_ident() not in threads.values()
