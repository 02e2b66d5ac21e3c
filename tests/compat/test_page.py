"""What is told of the releases that were tried: the same everywhere."""

import tomllib

from schedtrace.record.header import notices_about
from schedtrace.record.vllms_own import TESTED_RELEASES
from tests.compat.environment import ROOT
from tests.compat.page import PAGE, page, read_results


def numbers(release):
    return [int(part) for part in release.split(".")]


def test_the_page_is_what_the_results_make_it():
    assert PAGE.read_text() == page(read_results())


def test_a_release_counts_as_tried_if_nothing_failed_on_it():
    whole = {
        release.removesuffix("+cpu")
        for release, found in read_results().items()
        if not (found["failed"] or found["refused"] or found["unknown_guards"])
    }
    assert list(TESTED_RELEASES) == sorted(whole, key=numbers)


def test_the_oldest_of_them_is_the_oldest_to_install():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = TESTED_RELEASES[0].rpartition(".")[0]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={oldest}"]


def test_nothing_is_said_about_a_release_that_was_tried_whatever_its_build():
    assert notices_about("0.32.0") == notices_about("0.32.0+cpu") == []


def test_another_release_is_told_with_those_that_were_tried():
    [notice] = notices_about("0.32.1")
    assert notice.startswith(
        "vLLM 0.32.1 has not been tested with this version of schedtrace (tested: 0.10.0, "
    )
    assert notice.endswith(", 0.33.0)")
