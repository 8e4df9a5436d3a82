"""Files through the agent: whole or not at all, and nothing that could hang it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework.agent_client import AgentProcess, Client, attached, wait_for

Pair = tuple[AgentProcess, Client]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with attached(tmp_path) as both:
        yield both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "files"
    path.mkdir()
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("size", [0, 1, 48 * 1024, 3_000_000])
def test_what_is_written_is_read_back(pair: Pair, folder: Path, size: int) -> None:
    client = pair[1]
    content = os.urandom(size)
    path = folder / "a"
    assert client.write_file(path, content, mode=0o640)["size"] == size
    assert path.read_bytes() == content
    end, data = client.read_file(path)
    assert data == content
    assert (end["size"], end["mode"], end["file_size"]) == (size, 0o640, size)
    assert [p.name for p in folder.iterdir()] == ["a"]


def test_a_part_of_a_file(pair: Pair, folder: Path) -> None:
    (folder / "a").write_bytes(b"0123456789")
    for fields, expected in [
        ({"offset": 3}, b"3456789"),
        ({"offset": 3, "limit": 4}, b"3456"),
        ({"limit": 0}, b""),
        ({"offset": 99}, b""),
    ]:
        assert pair[1].read_file(folder / "a", **fields)[1] == expected


def test_files_without_a_size_are_read_to_their_end(pair: Pair) -> None:
    end, data = pair[1].read_file("/proc/self/status")
    assert data.startswith(b"Name:")
    assert end["size"] == len(data) > end["file_size"]


def test_a_large_read_goes_on_beside_others(pair: Pair, folder: Path) -> None:
    client = pair[1]
    with (folder / "big").open("wb") as f:
        f.truncate(30_000_000)
    number = client.send("read", path=str(folder / "big"))
    assert client.call("ping")["pong"]
    assert client.finish(number)[0]["size"] == 30_000_000


def test_reading_what_is_no_file_is_refused(pair: Pair, folder: Path) -> None:
    agent, client = pair
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(folder / "sock"))
    (folder / "loop").symlink_to(folder / "loop")
    before = agent.fds()
    cases = [
        (folder / "fifo", "NotRegular", "a FIFO"),
        (folder / "sock", "NotRegular", "a socket"),
        (Path("/dev/zero"), "NotRegular", "a device"),
        (folder, "IsADirectoryError", "directory"),
        (folder / "missing", "FileNotFoundError", "No such file"),
        (folder / "loop", "OSError", "symbolic links"),
        (folder / ("x" * 300), "OSError", "too long"),
    ]
    for path, kind, text in cases:
        for reply in (client.read_file(path)[0], client.write_file(path, b"x")):
            if kind == "FileNotFoundError" and reply["ev"] == "end":
                continue  # writing is how a missing file comes to be
            assert (reply["ev"], reply["type"]) == ("error", kind), path
            assert text in reply["error"]
    assert agent.fds() == before


def test_a_link_is_followed_and_stays_a_link(pair: Pair, folder: Path) -> None:
    client = pair[1]
    (folder / "real").write_text("old")
    (folder / "link").symlink_to("real")
    client.write_file(folder / "link", b"new")
    assert (folder / "link").is_symlink()
    assert (folder / "real").read_text() == "new"
    assert client.read_file(folder / "link")[1] == b"new"


def test_a_replaced_file_keeps_its_mode_and_owner(pair: Pair, folder: Path) -> None:
    path = folder / "a"
    path.write_text("old")
    path.chmod(0o751)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1235)
    before = path.stat()
    pair[1].write_file(path, b"new")
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino


def test_folders_are_made_only_when_asked_for(pair: Pair, folder: Path) -> None:
    client = pair[1]
    deep = folder / "a" / "b" / "c"
    assert client.write_file(deep, b"x")["type"] == "FileNotFoundError"
    assert client.write_file(deep, b"x", mkdirs=True)["size"] == 1
    assert deep.read_bytes() == b"x"
    assert client.write_file(deep / "d", b"x", mkdirs=True)["type"] in (
        "NotADirectoryError",
        "FileExistsError",
    )


def test_a_full_disk_is_named_and_left_as_it_was(pair: Pair, small_disk: Path) -> None:
    client = pair[1]
    (small_disk / "a").write_text("old")
    reply = client.write_file(small_disk / "a", bytes(200_000))
    assert (reply["ev"], reply["type"]) == ("error", "OSError")
    assert "No space left on device" in reply["error"]
    assert [p.name for p in small_disk.iterdir()] == ["a"]
    assert (small_disk / "a").read_text() == "old"
    assert client.write_file(small_disk / "b", b"fits")["size"] == 4


@pytest.mark.parametrize("how", ["cancel", "damage", "hello", "disconnect"])
def test_an_unfinished_write_leaves_nothing(pair: Pair, folder: Path, how: str) -> None:
    client = pair[1]
    (folder / "a").write_text("old")
    number = client.send("write", path=str(folder / "a"))
    client.feed(number, b"new")
    client.call("ping")
    assert len(list(folder.iterdir())) == 2
    if how == "cancel":
        client.more(number, "cancel")
        assert client.finish(number)[0]["type"] == "Cancelled"
    elif how == "damage":
        client.more(number, "data", b="*")
        assert client.finish(number)[0]["type"] == "BadRequest"
    elif how == "hello":
        client.hello()
    else:
        client.close()
    wait_for(lambda: [p.name for p in folder.iterdir()] == ["a"], "the unfinished file is removed")
    assert (folder / "a").read_text() == "old"


def test_a_read_nobody_finishes_is_closed(pair: Pair, folder: Path) -> None:
    agent, client = pair
    with (folder / "big").open("wb") as f:
        f.truncate(50_000_000)
    before = agent.fds()
    first = client.send("read", path=str(folder / "big"))
    client.next(first)
    client.more(first, "cancel")
    assert client.finish(first)[0]["type"] == "Cancelled"
    second = client.send("read", path=str(folder / "big"))
    client.next(second)
    client.hello()
    assert client.call("ping")["pong"]
    assert agent.fds() == before
