"""The disk tier's files after a kill or a flipped bit, and as another engine or another model finds them."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from holdfast.lm.execution.disk_store import ENTRY_BYTES, LEAST_LEFT, DiskStore
from holdfast.lm.tiers import StateAbout, TierBlock

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
    """A block as several ranks keep it."""
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


def test_a_new_last_use_survives_the_engine_and_the_block_stays_whole(tmp_path):
    store, _ = open_store(tmp_path)
    for number in range(2):
        write(store, number, number, age=50.0 - number)
    now = time.time()
    outcomes = store.renew([block(0, 0), block(5, 3)], [now - 7.0, now])
    assert outcomes == ["done", "missing"]
    store.close()
    store, stored = open_store(tmp_path)
    assert [each.slot for each in stored] == [1, 0] and 7 <= stored[1].age < 20
    assert read(store, 0, 0) == ("done", True)
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


def test_a_failed_read_does_not_affect_neighbouring_blocks(tmp_path, monkeypatch):
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


def test_a_smaller_size_keeps_the_blocks_that_fit(tmp_path):
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


@pytest.mark.parametrize("name", ["lock", "kv/about", "kv/index", "kv/blocks", "kv"])
def test_a_link_in_the_place_of_a_file_is_refused_and_its_target_stays_as_it_is(tmp_path, name):
    directory, victim = tmp_path / "tier", tmp_path / "victim"
    store, _ = open_store(directory)
    own = files_of(directory)
    write(store, 1, 1)
    store.close()
    victim.mkdir() if name == "kv" else victim.write_bytes(b"mine")
    place = directory / name.replace("kv", own.name)
    place.rename(tmp_path / "moved")
    place.symlink_to(victim)
    kind = "not a directory" if name == "kv" else "not a regular file"
    with pytest.raises(ValueError, match=rf"disk_cache_dir is .*{place.name} in it: it is a symbolic link, {kind}"):
        open_store(directory)
    assert not any(victim.iterdir()) if name == "kv" else victim.read_bytes() == b"mine"
    place.unlink()
    (tmp_path / "moved").rename(place)
    store, stored = open_store(directory)
    assert [each.slot for each in stored] == [1], "nothing was let go but the link"
    store.close()


@pytest.mark.parametrize("name", ["lock", "kv/about", "kv/index", "kv/blocks"])
def test_a_pipe_in_the_place_of_a_file_does_not_hold_the_start(tmp_path, name):
    store, _ = open_store(tmp_path)
    own = files_of(tmp_path)
    store.close()
    place = tmp_path / name.replace("kv", own.name)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(ValueError, match=rf"{place.name} in it: it is a named pipe, not a regular file"):
        open_store(tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, inside):
    store, _ = open_store(tmp_path)
    own = files_of(tmp_path)
    store.close()
    (own if inside else tmp_path).chmod(0o777)
    with pytest.raises(ValueError, match=r"disk_cache_dir is .* others may write to it \(mode 777\)"):
        open_store(tmp_path)


def test_a_start_that_fails_leaves_no_file_open_and_no_lock(tmp_path):
    store, _ = open_store(tmp_path)
    own = files_of(tmp_path)
    store.close()
    (own / "blocks").rename(own / "moved")
    (own / "blocks").mkdir()
    before = {*Path("/dev/fd").iterdir()}
    with pytest.raises(ValueError, match="blocks in it: Is a directory"):
        open_store(tmp_path)
    assert {*Path("/dev/fd").iterdir()} == before
    (own / "blocks").rmdir()
    store, _ = open_store(tmp_path)
    store.close()


def test_the_tier_s_own_blocks_do_not_count_as_used_by_others(tmp_path, monkeypatch):
    size = 2_000_000
    store, _ = open_store(tmp_path, size)
    for number in range(100):
        write(store, number, number)
    store.close()
    taken = sum(path.stat().st_blocks * 512 for path in files_of(tmp_path).iterdir())
    assert taken > 1_000_000
    usage = shutil.disk_usage(tmp_path)
    free = LEAST_LEFT + size - taken
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    store, stored = open_store(tmp_path, size)
    assert len(stored) == 100, "the tier's own bytes are room for it"
    store.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free - 1))
    with pytest.raises(ValueError, match=r"disk_cache_gb is 0.002, and of the file system of .* are free"):
        open_store(tmp_path, size)


def test_a_store_below_another_counts_in_the_size_of_both(tmp_path, monkeypatch):
    size, besides = 1_000_000, 3_000_000
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((LEAST_LEFT + size + besides, True), (LEAST_LEFT + size + besides - 100_000, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            store = DiskStore(tmp_path / "a", size, 1000, IDENTITY, besides=besides)
            DiskStore(store.directory / "states", size, 1000, IDENTITY).close()
            store.close()
        else:
            with pytest.raises(ValueError, match=r"disk_cache_gb is 0\.004, and of the file system"):
                DiskStore(tmp_path / "b", size, 1000, IDENTITY, besides=besides)


def test_a_store_of_another_model_takes_the_one_below_it_along(tmp_path):
    store, _ = open_store(tmp_path)
    DiskStore(store.directory / "states", 1_000_000, 1000, IDENTITY).close()
    store.close()
    open_store(tmp_path, identity={**IDENTITY, "weights": "others"})[0].close()
    assert not store.directory.exists()


@pytest.mark.parametrize("fails", ["raises", "falls short"])
def test_a_run_whose_write_fails_leaves_all_its_places_empty(tmp_path, monkeypatch, fails):
    store, _ = open_store(tmp_path)
    for number in range(5):
        write(store, number, number)

    def fail(descriptor, pieces, at):
        if fails == "raises":
            raise OSError(errno.ENOSPC, "no space left")
        return os.pwrite(descriptor, bytes(sum(map(len, pieces)) // 2), at)

    monkeypatch.setattr(os, "pwritev", fail)
    run = [block(10 + slot, slot) for slot in (1, 2, 3)]
    data = [(memoryview(contents(10 + slot)),) for slot in (1, 2, 3)]
    assert store.write(run, data, [time.time()] * 3) == ["failed"] * 3
    monkeypatch.undo()
    assert [read(store, number, number)[0] for number in range(5)] == ["done", *["corrupt"] * 3, "done"]
    store.close()
    store, stored = open_store(tmp_path)
    assert sorted(each.slot for each in stored) == [0, 4], "no entry is left of what was there before"
    store.close()


def write_state(store, digest, slots, *, positions=9, pieces=None, age=0.0):
    """Write a state of pieces in these places. Its description says how many it has."""
    about = StateAbout(positions, bytes([digest]) * 20, len(slots) if pieces is None else pieces)
    whole = about.packed().ljust(len(slots) * SIZE, bytes([digest]))
    blocks = [TierBlock(bytes([digest]) * 32, place, slot=slot) for place, slot in enumerate(slots)]
    data = [(memoryview(whole[at * SIZE : (at + 1) * SIZE]),) for at in range(len(slots))]
    assert store.write(blocks, data, [time.time() - age] * len(slots)) == ["done"] * len(slots)
    return about


def states_in(directory):
    store, _ = open_store(directory)
    found = store.states()
    store.close()
    return found


def test_states_survive_the_engine_with_their_places_and_what_is_kept_with_them(tmp_path):
    store, _ = open_store(tmp_path)
    about = write_state(store, 1, [5, 2, 9], age=70.0)
    other = write_state(store, 2, [3])
    store.close()
    (first, second), damaged = states_in(tmp_path)
    assert (first.slots, first.about, first.digest) == ((5, 2, 9), about, b"\1" * 32) and 70 <= first.age < 80
    assert (second.slots, second.about, damaged) == ((3,), other, 0)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_state_without_all_its_pieces_is_dropped_and_counted(tmp_path, lost):
    store, _ = open_store(tmp_path)
    places = [5, 2, 9]
    write_state(store, 1, places)
    write_state(store, 2, [3])
    write(store, 77, places[lost])
    store.close()
    states, damaged = states_in(tmp_path)
    assert [state.slots for state in states] == [(3,)]
    assert damaged == 2, "the one that lacks a piece, and the block that is no state"
    assert states_in(tmp_path)[1] == 0, "their pieces were cleared"


def test_a_state_whose_last_piece_was_never_written_is_dropped(tmp_path):
    store, _ = open_store(tmp_path)
    write_state(store, 1, [4, 5], pieces=3)
    store.close()
    assert states_in(tmp_path) == ([], 1)


def test_a_state_whose_description_is_damaged_is_dropped(tmp_path):
    store, _ = open_store(tmp_path)
    write_state(store, 1, [4, 5])
    store.close()
    with (files_of(tmp_path) / "blocks").open("r+b") as file:
        file.seek(4 * 12288 + 40)
        file.write(b"\x7f")
    assert states_in(tmp_path) == ([], 1)


def test_a_description_longer_than_a_piece_is_read_whole(tmp_path):
    store, _ = open_store(tmp_path)
    about = StateAbout(9, random.Random(1).randbytes(2 * SIZE), 4)
    whole = about.packed().ljust(4 * SIZE, b"x")
    blocks = [TierBlock(b"l" * 32, place, slot=slot) for place, slot in enumerate((7, 1, 4, 3))]
    data = [(memoryview(whole[at * SIZE : (at + 1) * SIZE]),) for at in range(4)]
    assert store.write(blocks, data, [time.time()] * 4) == ["done"] * 4
    store.close()
    ((state,), damaged) = states_in(tmp_path)
    assert (state.about, state.slots, damaged) == (about, (7, 1, 4, 3), 0)


def test_a_file_that_was_cut_loses_the_states_beyond_its_end(tmp_path):
    store, _ = open_store(tmp_path)
    write_state(store, 1, [0, 1])
    write_state(store, 2, [60, 61])
    store.close()
    index = files_of(tmp_path) / "index"
    os.truncate(index, 61 * ENTRY_BYTES)
    states, damaged = states_in(tmp_path)
    assert [state.slots for state in states] == [(0, 1)] and damaged == 1
