"""The disk tier's files: what a kill, a flipped bit, another engine and another model find there."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from holdfast.lm.execution.disk_store import ENTRY_BYTES, DiskStore
from holdfast.lm.tiers import TierBlock

SIZE = 10_000
IDENTITY = {"weights": "1"}


def open_store(directory, size=1_000_000, identity=IDENTITY):
    store = DiskStore(directory, size, SIZE, identity)
    return store, store.stored()


def contents(number):
    return random.Random(number).randbytes(SIZE)


def block(number, slot):
    return TierBlock(bytes([number]) * 32, number, slot=slot)


def write(store, number, slot, age=0.0):
    (outcome,) = store.write([block(number, slot)], [(memoryview(contents(number)),)], [time.time() - age])
    return outcome


def read(store, number, slot):
    target = bytearray(SIZE)
    (outcome,) = store.read([block(number, slot)], [(memoryview(target),)])
    return outcome, bytes(target) == contents(number)


def in_parts(data, count):
    """A block as so many ranks keep it."""
    share = -(-len(data) // count)
    return tuple(data[at : at + share] for at in range(0, len(data), share))


def files_of(directory):
    (own,) = directory.glob("kv-*")
    return own


def test_blocks_survive_the_engine_with_their_place_and_age(tmp_path):
    store, _ = open_store(tmp_path)
    assert write(store, 7, 3, age=50.0) == write(store, 8, 1) == "done"
    store.close()
    store, stored = open_store(tmp_path)
    assert [(each.slot, each.digest[0], each.place) for each in stored] == [(3, 7, 7), (1, 8, 8)], "the oldest first"
    assert 50 <= stored[0].age < 60 and stored[1].age < 10
    assert read(store, 7, 3) == read(store, 8, 1) == ("done", True)
    store.close()


def test_a_flipped_bit_is_found_and_its_block_is_forgotten(tmp_path):
    store, _ = open_store(tmp_path)
    for number in range(3):
        write(store, number, number)
    store.close()
    with (files_of(tmp_path) / "blocks").open("r+b") as file:
        at = 1 * 12288 + 5000  # in the second block
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    store, stored = open_store(tmp_path)
    assert len(stored) == 3
    assert read(store, 1, 1)[0] == "corrupt"
    assert read(store, 0, 0) == read(store, 2, 2) == ("done", True)
    store.close()
    store, stored = open_store(tmp_path)
    assert [each.slot for each in stored] == [0, 2]
    store.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_written_and_read_together_each_have_their_own_outcome(tmp_path, monkeypatch, parts):
    calls, (store, _) = [], open_store(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda *args, inner=os.preadv: calls.append(len(args[1])) or inner(*args))
    places = {5: 9, 3: 4, 4: 7, 20: 1}  # by place on the disk, the number of the block
    blocks = [block(number, slot) for slot, number in places.items()]
    data = [in_parts(memoryview(contents(each)), parts) for each in places.values()]
    assert store.write(blocks, data, [0.0] * 4) == ["done"] * 4
    wanted = [*blocks, block(2, 6)]
    targets = [memoryview(bytearray(SIZE)) for _ in wanted]
    assert store.read(wanted, [in_parts(data, parts) for data in targets]) == ["done"] * 4 + ["corrupt"], (
        "nothing was written to the last"
    )
    assert [bytes(data) for data in targets[:4]] == [contents(each) for each in places.values()]
    assert calls == [4 * parts + 3, parts], "neighbours, with what lies between them, come by one call"
    store.close()
    store, stored = open_store(tmp_path)
    assert {each.slot: each.digest[0] for each in stored} == places
    store.close()


def test_neighbours_of_many_ranks_come_in_no_more_pieces_than_the_system_takes(tmp_path):
    store, _ = open_store(tmp_path, size=2_000_000)
    blocks = [block(number, number) for number in range(80)]
    assert store.write(blocks, [in_parts(memoryview(contents(n)), 16) for n in range(80)], [0.0] * 80) == ["done"] * 80
    targets = [memoryview(bytearray(SIZE)) for _ in blocks]
    assert store.read(blocks, [in_parts(data, 64) for data in targets]) == ["done"] * 80
    assert [bytes(data) for data in targets] == [contents(number) for number in range(80)]
    store.close()


def test_where_a_read_fails_the_blocks_beside_it_still_come(tmp_path, monkeypatch):
    store, _ = open_store(tmp_path)
    blocks = [block(number, number) for number in range(3)]
    store.write(blocks, [(memoryview(contents(number)),) for number in range(3)], [0.0] * 3)
    stride = 12288

    def bad(file, pieces, at, inner=os.preadv):
        if at <= stride < at + sum(map(len, pieces)):
            raise OSError(5, "a bad sector")
        return inner(file, pieces, at)

    monkeypatch.setattr(os, "preadv", bad)
    assert store.read(blocks, [(memoryview(bytearray(SIZE)),) for _ in blocks]) == ["done", "failed", "done"]
    store.close()


def test_a_damaged_index_entry_is_an_empty_place(tmp_path):
    store, _ = open_store(tmp_path)
    for number in range(3):
        write(store, number, number)
    store.close()
    with (files_of(tmp_path) / "index").open("r+b") as file:
        file.seek(1 * ENTRY_BYTES + 20)
        file.write(b"???")
    store, stored = open_store(tmp_path)
    assert [each.slot for each in stored] == [0, 2]
    store.close()


def test_a_block_is_not_taken_for_another_whose_place_it_has(tmp_path):
    store, _ = open_store(tmp_path)
    write(store, 1, 0)
    assert read(store, 2, 0)[0] == "corrupt"
    store.close()


def test_blocks_of_another_model_or_version_are_never_read_and_make_room(tmp_path):
    store, _ = open_store(tmp_path)
    write(store, 1, 0)
    store.close()
    (tmp_path / "mine").mkdir()
    store, stored = open_store(tmp_path, identity={"weights": "2"})
    assert not stored
    store.close()
    assert len([*tmp_path.glob("kv-*")]) == 1 and (tmp_path / "mine").is_dir()
    store, stored = open_store(tmp_path)
    assert not stored
    store.close()


def test_a_second_engine_is_refused_by_name(tmp_path):
    store, _ = open_store(tmp_path)
    with pytest.raises(ValueError, match="another engine uses"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path)[0].close()


def test_a_smaller_size_keeps_what_fits(tmp_path):
    store, _ = open_store(tmp_path)
    write(store, 1, 0)
    write(store, 2, store.num_blocks - 1)
    store.close()
    store, stored = open_store(tmp_path, size=200_000)
    assert [each.slot for each in stored] == [0] and read(store, 1, 0) == ("done", True)
    used = sum(file.stat().st_size for file in files_of(tmp_path).iterdir() if file.name != "about")
    assert used <= 200_000
    store.close()


@pytest.mark.parametrize(("size", "match"), [(1000, "room for one"), (1 << 60, "are free")])
def test_a_size_that_cannot_be_is_refused(tmp_path, size, match):
    with pytest.raises(ValueError, match=match):
        open_store(tmp_path, size)
    open_store(tmp_path)[0].close()


WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from tests.lm.execution.test_disk_store import open_store, write
    store, stored = open_store(Path(sys.argv[1]))
    print("ready", flush=True)
    for turn in range(10**9):
        write(store, turn % 200, turn * 7 % store.num_blocks)
""")


def test_a_kill_in_mid_write_leaves_no_corrupt_block(tmp_path):
    draw, whole = random.Random(5), 0
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        try:
            writer.wait(draw.uniform(0.01, 0.06))
        except subprocess.TimeoutExpired:
            os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        store, stored = open_store(tmp_path)
        for each in stored:
            assert read(store, each.digest[0], each.slot) == ("done", True)
        whole += len(stored)
        store.close()
    assert whole > 0
