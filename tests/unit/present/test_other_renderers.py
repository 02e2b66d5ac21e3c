"""Renderers of other packages, named below an entry point group."""

import json
from importlib.metadata import EntryPoint

import pytest

from schedtrace.errors import UsageError
from schedtrace.present import renderers
from schedtrace.present.renderers import ENTRY_POINTS, renderer
from schedtrace.present.sections import Page


def codes_as_lines(page, *, width=None):  # noqa: ARG001  # of the protocol
    """Render a catalogue of findings as a code a line."""
    return "".join(f"{kind.code}\n" for kind in page.document.findings)


def raising(page, *, width=None):  # noqa: ARG001  # of the protocol
    """Fail."""
    msg = "no width"
    raise ValueError(msg)


@pytest.fixture
def installed(monkeypatch):
    """Stand in for packages that name a renderer, two of which fail."""
    points = {
        "codes": EntryPoint("codes", f"{__name__}:codes_as_lines", ENTRY_POINTS),
        "raising": EntryPoint("raising", f"{__name__}:raising", ENTRY_POINTS),
        "broken": EntryPoint("broken", "no_such_package:render", ENTRY_POINTS),
    }

    def entry_points(*, group, name=None):
        assert group == ENTRY_POINTS
        return tuple(point for key, point in points.items() if name in {None, key})

    monkeypatch.setattr(renderers, "entry_points", entry_points)


@pytest.mark.usefixtures("installed")
def test_a_command_prints_with_another_packages_renderer(cli):
    _, codes, _ = cli("findings", "--format", "codes")
    _, document, _ = cli("findings", "--format", "json")
    assert codes.split() == [kind["code"] for kind in json.loads(document)["findings"]]


@pytest.mark.usefixtures("installed")
def test_an_unknown_format_is_a_usage_error_that_names_all_formats(cli):
    code, _, message = cli("findings", "--format", "yaml")
    assert code == 2
    assert all(name in message for name in ("text", "json", "codes", "broken"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "reason"), [("broken", "no_such_package"), ("raising", "no width")])
def test_a_renderer_that_fails_is_named(name, reason):
    with pytest.raises(UsageError, match=reason):
        renderer(name)(Page(None, lambda _: []))
