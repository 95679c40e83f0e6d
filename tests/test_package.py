"""What is published: names, version, wheel, dependencies and their locks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import localspec

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CORE = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = {
    name: [entry for entry in entries if isinstance(entry, str)]
    for name, entries in PROJECT["dependency-groups"].items()
}
LOCKS = {
    "runtime": [*CORE, *GROUPS["build"]],
    "dev": [*CORE, *GROUPS["build"], *GROUPS["dev"], *EXTRAS["plot"]],
}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def locked(lock: str) -> dict[str, Requirement]:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")
    pins = [Requirement(line) for line in text.splitlines() if line[:1].isalnum()]
    return {canonicalize_name(pin.name): pin for pin in pins}


def test_public_names_are_these():
    assert localspec.__all__ == [
        "BatchAnswer",
        "BatchRequest",
        "GenerationResult",
        "LocalspecError",
        "SamplingParams",
        "Session",
        "Stats",
        "TokenEvent",
        "__version__",
        "load_pair",
    ]
    assert dir(localspec) == sorted(localspec.__all__)


@pytest.mark.parametrize("name", localspec.__all__)
def test_public_names_exist(name):
    assert getattr(localspec, name) is not None


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'frob'"):
        _ = localspec.frob


def test_importing_the_package_loads_no_library():
    code = "import sys, localspec; sys.exit(str({'numpy', 'llama_cpp', 'click'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_changelog_starts_with_this_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == localspec.__version__


def test_wheel_holds_the_package_and_the_model_table_and_nothing_else(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"localspec-{localspec.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        content = {name for name in archive.namelist() if ".dist-info/" not in name}
        models = archive.read("localspec/models.toml")
        entry_points = archive.read(f"localspec-{localspec.__version__}.dist-info/entry_points.txt").decode()
    package = {p.relative_to(ROOT).as_posix() for p in (ROOT / "localspec").rglob("*.py")}
    assert content == package | {"localspec/models.toml", "localspec/calibration/prompts.toml", "localspec/py.typed"}
    assert models == (ROOT / "models.toml").read_bytes()
    assert "localspec = localspec.cli:main" in entry_points


def test_every_dependency_has_its_reason_and_every_reason_its_dependency():
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    declared = names(CORE) | names([r for group in GROUPS.values() for r in group])
    declared |= names([r for extra in EXTRAS.values() for r in extra])
    declared |= {f"localspec[{extra}]" for extra in EXTRAS}
    assert sorted(rows) == sorted(declared)


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_covers_what_is_declared_at_allowed_versions(lock):
    pins = locked(lock)
    for requirement in map(Requirement, LOCKS[lock]):
        pin = pins[canonicalize_name(requirement.name)]
        (version,) = [s.version for s in pin.specifier]
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_is_portable(lock):
    text = (ROOT / "requirements" / f"{lock}.txt").read_text("utf-8")
    assert "://" not in text
    assert not re.search(r"^-", text, re.MULTILINE)
    for name in names(CORE):
        marker = locked(lock)[name].marker
        for system in ("linux", "darwin", "win32"):
            for python in ("3.11", "3.12", "3.13"):
                target = {"sys_platform": system, "python_full_version": f"{python}.0"}
                assert marker is None or marker.evaluate(target), name


def test_the_development_lock_holds_the_runtime_one():
    development = locked("dev")
    assert {name: str(pin) for name, pin in locked("runtime").items()}.items() <= {
        name: str(pin) for name, pin in development.items()
    }.items()
