"""OwnDirectory: nobody else can write to it, and no file is opened through links in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.files.own_directory import OwnDirectory, check_own

NEW = os.O_RDWR | os.O_CREAT


@pytest.fixture
def held(tmp_path: Path) -> Path:
    with OwnDirectory(tmp_path / "a" / "b"):
        return tmp_path / "a" / "b"


def test_a_new_directory_and_its_files_are_for_this_user_alone(held: Path) -> None:
    before = os.umask(0)
    try:
        with OwnDirectory(held) as own, own.below("c") as below:
            os.close(below.open("file", NEW))
            below.write_text("text", "longer\n")
            below.write_text("text", "new\n")
            assert own.names() == ["c"] and below.names() == ["file", "text"]
    finally:
        os.umask(before)
    assert [(held / name).stat().st_mode & 0o777 for name in ("", "c", "c/file", "c/text")] == [0o700] * 2 + [0o600] * 2
    assert (held / "c/text").read_text() == "new\n"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused_with_its_mode(held: Path, mode: int) -> None:
    held.chmod(mode)
    with pytest.raises(PermissionError, match=rf"others may write to it \(mode {mode:o}\)"):
        OwnDirectory(held)
    held.chmod(0o755)
    with OwnDirectory(held):
        pass


def test_a_directory_of_another_user_is_refused(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, other = os.geteuid(), os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match=f"it belongs to user {owner}, and this process runs as {other}"):
        OwnDirectory(held)


def test_a_link_or_a_file_in_the_place_of_a_directory_is_refused(held: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(held)
    (held / "below").symlink_to(tmp_path)
    (held / "file").touch()
    with pytest.raises(NotADirectoryError, match="it is a symbolic link, not a directory"):
        OwnDirectory(tmp_path / "link")
    with OwnDirectory(held) as own:
        with pytest.raises(NotADirectoryError, match="it is a symbolic link, not a directory"):
            own.below("below")
        with pytest.raises(NotADirectoryError, match="it is a regular file, not a directory"):
            own.below("file")


@pytest.mark.parametrize("target", ["victim", "nothing"])
def test_no_file_is_opened_or_made_through_a_link(held: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (held / "file").symlink_to(tmp_path / target)
    with OwnDirectory(held) as own:
        with pytest.raises(OSError, match="it is a symbolic link, not a regular file"):
            own.open("file", NEW)
        with pytest.raises(OSError, match="it is a symbolic link, not a regular file"):
            own.write_text("file", "theirs")
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "nothing").exists()


def test_a_file_with_a_second_name_elsewhere_is_left_as_it_is(held: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (held / "file").hardlink_to(tmp_path / "victim")
    with OwnDirectory(held) as own, pytest.raises(PermissionError, match="it has another name elsewhere"):
        own.write_text("file", "theirs")
    assert (tmp_path / "victim").read_text() == "mine"


def test_files_below_stay_the_same_when_the_path_leads_elsewhere_later(held: Path, tmp_path: Path) -> None:
    with OwnDirectory(held) as own:
        moved = held.rename(tmp_path / "moved")
        (tmp_path / "elsewhere").mkdir()
        held.symlink_to(tmp_path / "elsewhere")
        own.write_text("file", "here")
        with own.below("c"):
            pass
    assert (moved / "file").read_text() == "here" and (moved / "c").is_dir()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_removing_a_tree_keeps_the_targets_of_its_links(held: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (held / "tree").mkdir()
    (held / "tree" / "link").symlink_to(tmp_path / "kept")
    (held / "link").symlink_to(tmp_path / "kept")
    with OwnDirectory(held) as own:
        own.remove_tree("tree")
        own.remove_tree("link")
        assert own.names() == ["link"]
    assert (tmp_path / "kept" / "file").exists()


def test_no_descriptor_stays_open(held: Path, tmp_path: Path) -> None:
    (held / "file").touch()
    (tmp_path / "second").hardlink_to(held / "file")
    before = len([*Path("/dev/fd").iterdir()])
    with OwnDirectory(held) as own:
        with pytest.raises(PermissionError):
            own.open("file", NEW)
        held.chmod(0o777)
        with pytest.raises(PermissionError):
            OwnDirectory(held)
    assert len([*Path("/dev/fd").iterdir()]) == before


def test_check_own_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        check_own((tmp_path / "file").stat(), tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")


def test_the_bytes_of_a_directory_are_those_of_all_files_below_it(held: Path) -> None:
    with OwnDirectory(held) as own, own.below("c") as below:
        before = own.bytes_on_disk()
        below.write_text("text", "x" * 100_000)
        assert own.bytes_on_disk() - before >= 100_000
        assert below.bytes_on_disk() >= 100_000
