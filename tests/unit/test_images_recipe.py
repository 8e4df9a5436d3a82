from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkd.errors import BadField
from forkd.images import load_recipe
from forkd.images.recipe import parse_recipe
from forkd.models import Machine

REPOSITORY = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    (folder / "warmup.py").write_text("import json\n")
    (folder / "recipe.toml").write_text(text)
    return folder


def test_a_full_recipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "conf").write_text("x")
    recipe = load_recipe(
        write(
            tmp_path,
            """
            name = "mine"
            description = "a test"
            [machine]
            vcpus = 2
            memory_mib = 512
            disk_mib = 64
            [packages]
            debian = ["python3", "g++", "libc6-dev"]
            pip = ["six==1.16.0", "requests[socks] >=2, <3"]
            [files]
            "/etc/mine.conf" = "conf"
            [env]
            MODE = "$(reboot); `id`"
            [warmup]
            script = "warmup.py"
            [kernel]
            package = "linux-image-amd64"
            """,
        )
    )
    assert recipe.machine == Machine(vcpus=2, memory_mib=512)
    assert recipe.disk_mib == 64
    assert recipe.debian == ("python3", "g++", "libc6-dev")
    assert recipe.pip == ("six==1.16.0", "requests[socks] >=2, <3")
    assert recipe.files == {"/etc/mine.conf": tmp_path / "conf"}
    assert recipe.env == {"MODE": "$(reboot); `id`"}  # data: no shell ever reads it
    assert recipe.warmup == "import json\n"
    assert recipe.kernel_package == "linux-image-amd64"


def test_the_shipped_recipe_is_valid() -> None:
    recipe = load_recipe(REPOSITORY / "recipes/python-numpy")
    assert recipe.name == "python-numpy"
    assert "import numpy" in recipe.warmup


GOOD = 'name = "x"\n'
DEBIAN = '[packages]\ndebian = ["python3"]\n'
BAD = [
    ("name", DEBIAN),
    ("name", f"name = 3\n{DEBIAN}"),
    ("name", f'name = "../up"\n{DEBIAN}'),
    ("colour", f'{GOOD}colour = "red"\n{DEBIAN}'),
    ("description", f'{GOOD}description = "two\\nlines"\n{DEBIAN}'),
    ("machine", f"{GOOD}machine = 3\n{DEBIAN}"),
    ("machine.cores", f"{GOOD}{DEBIAN}[machine]\ncores = 2"),
    ("machine.vcpus", f"{GOOD}{DEBIAN}[machine]\nvcpus = true"),
    ("machine.vcpus", f"{GOOD}{DEBIAN}[machine]\nvcpus = 0"),
    ("machine.memory_mib", f'{GOOD}{DEBIAN}[machine]\nmemory_mib = "256"'),
    ("machine.disk_mib", f"{GOOD}{DEBIAN}[machine]\ndisk_mib = -1"),
    ("packages.debian", GOOD),
    ("packages.debian", f'{GOOD}[packages]\ndebian = "python3"'),
    ("packages.debian", f'{GOOD}[packages]\ndebian = ["python3", 3]'),
    ("packages.debian", f'{GOOD}[packages]\ndebian = ["--purge"]'),
    ("packages.debian", f'{GOOD}[packages]\ndebian = ["Python3"]'),
    ("packages.debian", f'{GOOD}[packages]\ndebian = ["python3-"]'),
    ("packages.debian", f'{GOOD}[packages]\ndebian = ["a,b"]'),
    ("packages.debian", f'{GOOD}[packages]\ndebian = ["python3\\n"]'),
    ("packages.pip", f'{GOOD}[packages]\ndebian = ["python3"]\npip = ["-r/etc/passwd"]'),
    ("packages.pip", f'{GOOD}[packages]\ndebian = ["python3"]\npip = ["./here"]'),
    ("packages.pip", f'{GOOD}[packages]\ndebian = ["python3"]\npip = ["x @ https://h/x.whl"]'),
    ("packages.pip", f'{GOOD}[packages]\ndebian = ["python3"]\npip = ["x; rm -rf /"]'),
    ("files./etc/x", f'{GOOD}{DEBIAN}[files]\n"/etc/x" = "/etc/passwd"'),
    ("files./etc/x", f'{GOOD}{DEBIAN}[files]\n"/etc/x" = "../secret"'),
    ("files./etc/x", f'{GOOD}{DEBIAN}[files]\n"/etc/x" = "link-out"'),
    ("files./etc/x", f'{GOOD}{DEBIAN}[files]\n"/etc/x" = "loop"'),
    ("files./etc/x", f'{GOOD}{DEBIAN}[files]\n"/etc/x" = "fifo"'),
    ("files./etc/x", f'{GOOD}{DEBIAN}[files]\n"/etc/x" = "missing"'),
    ("files./etc/x", f'{GOOD}{DEBIAN}[files]\n"/etc/x" = "."'),
    ("files.etc/x", f'{GOOD}{DEBIAN}[files]\n"etc/x" = "warmup.py"'),
    ("files./a/../b", f'{GOOD}{DEBIAN}[files]\n"/a/../b" = "warmup.py"'),
    ("files.//dev/x", f'{GOOD}{DEBIAN}[files]\n"//dev/x" = "warmup.py"'),
    ("files./tmp/x", f'{GOOD}{DEBIAN}[files]\n"/tmp/x" = "warmup.py"'),
    ("files./", f'{GOOD}{DEBIAN}[files]\n"/" = "warmup.py"'),
    ("env.A", f'{GOOD}{DEBIAN}[env]\nA = "x\\ny"'),
    ("env.A", f'{GOOD}{DEBIAN}[env]\nA = "x\\u0000y"'),
    ("env.A", f"{GOOD}{DEBIAN}[env]\nA = 1"),
    ("env.A=B", f'{GOOD}{DEBIAN}[env]\n"A=B" = "x"'),
    ("warmup.script", f'{GOOD}{DEBIAN}[warmup]\nscript = "../w.py"'),
    ("warmup.script", f'{GOOD}{DEBIAN}[warmup]\nscript = "folder"'),
    ("source.rootfs", f'{GOOD}[source]\nrootfs = "/var/root.tar"'),
    ("source.rootfs", f'{GOOD}[source]\nrootfs = "fifo"'),
    ("packages.debian", f'{GOOD}{DEBIAN}[source]\nrootfs = "folder"'),
    ("kernel.package", f'{GOOD}{DEBIAN}[kernel]\npackage = "bash"'),
    ("recipe", "name = "),
]


@pytest.mark.parametrize(("field", "text"), BAD)
def test_a_bad_recipe_is_refused_by_the_name_of_the_key(tmp_path: Path, field: str, text: str) -> None:
    (tmp_path / "link-out").symlink_to("/etc/passwd")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadField) as refused:
        load_recipe(write(tmp_path, text))
    assert refused.value.field == field


def test_a_recipe_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadField, match="No such file"):
        load_recipe(tmp_path / "nowhere" / "recipe.toml")


_SECTIONS = ["machine", "packages", "files", "env", "warmup", "source", "kernel", "name", "description"]
_INNER = ["vcpus", "memory_mib", "disk_mib", "debian", "pip", "script", "rootfs", "package", "/etc/x", "A"]
_KEYS = st.sampled_from(_SECTIONS + _INNER) | st.text(max_size=5)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("warmup.py"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(data=st.dictionaries(_KEYS, _VALUES, max_size=6))
def test_no_data_does_more_than_be_refused(tmp_path: Path, data: dict[str, Any]) -> None:
    try:
        parse_recipe({"name": "x", **data}, tmp_path)
    except BadField:
        pass
