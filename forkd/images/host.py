"""What the building host is: its distribution, suite, architecture, and how its apt reaches the archive.

Reads files and apt's configuration; changes nothing.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import Unsupported
from forkd.images import tools

# A release's own suites. Prefix matching would let in third parties ("bookworm-pgdg") and backports.
_SUITE_SUFFIXES = ("", "-updates", "-security")
_APT_SETTING = re.compile(
    r"Acquire::(?:(?:http|https)::(?:[^ ]+::)?(?:Proxy|Proxy-Auto-Detect|CaInfo|CaPath)(?:::[^ ]+)?"
    r"|Check-Valid-Until) "
)

Stanza = dict[str, str]  # one deb822 paragraph, keys in lower case


@dataclass(frozen=True, slots=True)
class Host:
    distribution: str  # "debian", "ubuntu", ...
    suite: str  # "bookworm"; empty where os-release has none
    arch: str = "amd64"


def this_host() -> Host:
    if os.uname().machine != "x86_64":
        raise Unsupported(f"images are built for x86-64 only, and this host is {os.uname().machine}")
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return Host(release.get("ID", ""), release.get("VERSION_CODENAME", ""))


def apt_settings() -> list[str]:
    """Proxies and trust of the host's apt, as configuration lines; mmdebstrap reads none of it by itself."""
    lines = tools.ask([tools.find("apt-config"), "dump", "--format", '%f "%v";%n', "Acquire"]).splitlines()
    return [line for line in lines if _APT_SETTING.match(line) and not line.endswith(' "";')]


def archive_sources(suite: str, etc: Path = Path("/etc/apt")) -> str:
    """The host's own sources of this release, in deb822 form; empty if it has none."""
    found: list[Stanza] = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        found += parse_deb822(text) if path.suffix == ".sources" else parse_one_line(text)
    chosen = [s for stanza in found if (s := _of_release(stanza, suite)) is not None]
    if not any(suite in stanza["suites"].split() for stanza in chosen):
        return ""  # without the release itself its updates are of no use
    return "\n".join(_render(stanza) for stanza in chosen)


def parse_deb822(text: str) -> list[Stanza]:
    stanzas: list[Stanza] = []
    for paragraph in re.split(r"\n\s*\n", text):
        stanza: Stanza = {}
        key = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and key:
                stanza[key] += f"\n{line}"  # kept as it is: a key block inside Signed-By
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                stanza[key] = value.strip()
        if stanza:
            stanzas.append(stanza)
    return stanzas


def parse_one_line(text: str) -> list[Stanza]:
    stanzas: list[Stanza] = []
    for line in text.splitlines():
        found = re.match(r"\s*(deb(?:-src)?)\s+(?:\[([^\]]*)\]\s*)?([^#]+)", line)
        if found is None:
            continue
        kind, options, rest = found[1], found[2], found[3]
        words = rest.split()
        stanza = {
            "types": kind,
            "uris": words[0],
            "suites": " ".join(words[1:2]),
            "components": " ".join(words[2:]),
        }
        for option in (options or "").split():
            key, _, value = option.partition("=")
            key = {"arch": "architectures", "lang": "languages"}.get(key, key)
            stanza[key] = value.replace(",", " ")
        stanzas.append(stanza)
    return stanzas


def _of_release(stanza: Stanza, suite: str) -> Stanza | None:
    own = [f"{suite}{suffix}" for suffix in _SUITE_SUFFIXES]
    suites = [word for word in stanza.get("suites", "").split() if word in own]
    usable = (
        "deb" in stanza.get("types", "").split()
        and stanza.get("enabled", "yes").lower() not in ("no", "false", "0")
        and "main" in stanza.get("components", "").split()
        and stanza.get("uris", "")
    )
    return {**stanza, "types": "deb", "suites": " ".join(suites)} if usable and suites else None


def _render(stanza: Stanza) -> str:
    return "".join(f"{key.title()}: {value}\n" for key, value in stanza.items())
