"""``requirements/lock.txt`` pins what ``pyproject.toml`` asks for: ``make lock`` writes it."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements" / "lock.txt").read_text()
PINS = [Requirement(line.partition("#")[0]) for line in LOCK.splitlines() if line.partition("#")[0].strip()]


def asked_for():
    yield from PROJECT["build-system"]["requires"]
    yield from PROJECT["project"]["dependencies"]
    for group in PROJECT["dependency-groups"].values():
        yield from (one for one in group if isinstance(one, str))
    yield from PROJECT["tool"]["uv"]["override-dependencies"]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_what_the_project_asks_for_is_pinned_once(python):
    machine = {"sys_platform": "linux", "platform_machine": "x86_64"}
    here = {"python_version": python, "python_full_version": f"{python}.0", **machine}
    pins = [pin for pin in PINS if pin.marker is None or pin.marker.evaluate(here)]
    versions = {canonicalize_name(pin.name): pin.specifier for pin in pins}
    assert len(versions) == len(pins)
    for wanted in map(Requirement, sorted(set(asked_for()))):
        [version] = versions[canonicalize_name(wanted.name)]
        assert version.operator == "==", wanted
        assert wanted.specifier.contains(version.version), wanted


def test_it_names_no_place_to_get_packages_from():
    assert all(pin.url is None for pin in PINS)
    assert not [line for line in LOCK.splitlines() if line.startswith("-") or "://" in line or "/" in line]
