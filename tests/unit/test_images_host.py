from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forkd.errors import EngineFailed, NoSpace, Unsupported
from forkd.images import host, tools
from forkd.images.tools import Silent


def sources(etc: Path, **files: str) -> str:
    (etc / "sources.list.d").mkdir()
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        path = etc / "sources.list" if stem == "main" else etc / "sources.list.d" / f"{stem}.{suffix}"
        path.write_text(text)
    return host.archive_sources("bookworm", etc)


DEB822 = """\
# the archive
Types: deb deb-src
URIs: http://archive.test/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://archive.test/security
Suites: bookworm-security
Components: main
"""


def test_deb822_sources_of_the_release_are_kept_and_others_left_out(tmp_path: Path) -> None:
    text = sources(
        tmp_path,
        debian_sources=DEB822,
        node_sources="Types: deb\nURIs: https://node.test\nSuites: nodistro\nComponents: main\n",
        off_sources="Enabled: no\nTypes: deb\nURIs: http://off.test\nSuites: bookworm\nComponents: main\n",
        old_disabled="Types: deb\nURIs: http://disabled.test\nSuites: bookworm\nComponents: main\n",
    )
    stanzas = host.parse_deb822(text)
    assert [s["uris"] for s in stanzas] == ["http://archive.test/debian", "http://archive.test/security"]
    assert stanzas[0]["types"] == "deb"
    assert stanzas[0]["suites"] == "bookworm bookworm-updates"
    assert stanzas[0]["signed-by"].count("\n") == 4  # the key block came through whole


def test_one_line_sources_keep_their_options(tmp_path: Path) -> None:
    text = sources(
        tmp_path,
        main_list="deb [arch=amd64,i386 signed-by=/k.gpg] http://a.test bookworm main  # note\n"
        "# deb http://b.test bookworm main\n"
        "deb-src http://c.test bookworm main\n",
        docker_list="deb https://docker.test bookworm stable\n",
        pgdg_list="deb https://pg.test bookworm-pgdg main\n",
        sdk_list="deb https://sdk.test cloud-sdk-bookworm main\n",
    )
    assert host.parse_deb822(text) == [
        {
            "types": "deb",
            "uris": "http://a.test",
            "suites": "bookworm",
            "components": "main",
            "architectures": "amd64 i386",
            "signed-by": "/k.gpg",
        }
    ]


def test_updates_without_the_release_are_no_source(tmp_path: Path) -> None:
    assert sources(tmp_path, main_list="deb http://a.test bookworm-updates main\n") == ""
    assert host.archive_sources("bookworm", tmp_path / "nowhere") == ""


def test_proxy_settings_are_passed_on_and_unrelated_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        'Acquire "";',
        'Acquire::http::Proxy "http://proxy.test:3128";',
        'Acquire::http::Proxy::archive.test "DIRECT";',
        'Acquire::https::Proxy "";',
        'Acquire::Languages:: "none";',
    ]
    program = tmp_path / "apt-config"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert host.apt_settings() == [lines[1], lines[2]]


def test_missing_tools_are_named_with_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda name, path: "/x" if name == "mke2fs" else None)
    with pytest.raises(Unsupported) as refused:
        tools.need("mmdebstrap", "mke2fs", "depmod")
    assert "mmdebstrap, depmod" in str(refused.value)
    assert refused.value.hint == "apt-get install -y kmod mmdebstrap"


class Lines(Silent):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def line(self, text: str) -> None:
        self.seen.append(text)


def test_output_is_passed_on_and_a_failure_carries_its_end() -> None:
    lines = Lines()
    with pytest.raises(EngineFailed, match=r"sh: ended with status 3: one; two") as failed:
        tools.run(["sh", "-c", "echo one; echo two >&2; exit 3"], lines)
    assert lines.seen == ["one", "two"]
    assert failed.value.step == "sh"


def test_a_full_disk_is_told_apart() -> None:
    with pytest.raises(NoSpace):
        tools.run(["sh", "-c", "echo 'write: No space left on device'; exit 1"], Silent())


def test_arguments_are_never_read_by_a_shell(tmp_path: Path) -> None:
    lines = Lines()
    tools.run(["printf", "%s\n", f"$(touch {tmp_path}/made); `id`"], lines)
    assert lines.seen == [f"$(touch {tmp_path}/made); `id`"]
    assert not (tmp_path / "made").exists()


def test_an_exception_in_the_builder_ends_the_whole_tree_of_the_program() -> None:
    mark = "31415.9265"

    class Stops(Silent):
        def line(self, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tools.run(["sh", "-c", f"setsid sleep {mark} & setsid sleep {mark} & echo go; wait"], Stops())
    found = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, text=True, check=False)
    assert found.stdout == ""
