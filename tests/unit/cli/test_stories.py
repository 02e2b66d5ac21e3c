"""``step``, ``request``, ``findings``, ``export`` and the choice of findings, as a person types them."""

import json

import pytest

from schedtrace.diagnose.analyze import Catalogue
from schedtrace.diagnose.rules import KINDS
from schedtrace.model.comparison import Comparison
from schedtrace.model.report import Report
from schedtrace.model.story import Life, StepStory


def test_a_trace_file_is_a_run(cli, warned):
    assert cli("step", warned / "engine-0.jsonl", 0)[0] == 0


@pytest.mark.parametrize(
    ("line", "struct"),
    [
        ("analyze {}", Report),
        ("diff {} {}", Comparison),
        ("step {} 0", StepStory),
        ("request {} a", Life),
        ("findings", Catalogue),
    ],
)
def test_json_is_one_object_with_the_keys_of_the_answer_and_nothing_else(cli, quiet, line, struct):
    code, out, err = cli(*line.format(quiet, quiet).split(), "--format", "json")
    assert (code, err, out[-1]) == (0, "", "\n")
    assert list(json.loads(out)) == list(struct.__struct_fields__)


@pytest.mark.parametrize("line", ["step {} 0", "diff {} {}"])
def test_a_trace_that_is_left_out_is_named_on_stderr(cli, quiet, line):
    (quiet / "engine-1.jsonl").touch()
    code, out, err = cli(*line.format(quiet, quiet).split())
    assert (code, bool(out)) == (0, True)
    assert err.startswith(f"schedtrace: {quiet / 'engine-1.jsonl'}: empty")


def test_the_catalogue_lists_every_code(cli):
    _, out, _ = cli("findings")
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == ["finding", *KINDS]


@pytest.mark.parametrize(
    ("kind", "line", "file", "what"),
    [
        ("parquet", 1, "requests.parquet", "rows"),
        ("csv", 1, "requests.csv", "rows"),
        ("perfetto", 0, "trace.pftrace", "events"),
        ("chrome", 0, "trace.json.gz", "events"),
        ("jsonl", 0, "engine-0.jsonl", "lines"),
    ],
)
def test_export_says_what_it_wrote(cli, quiet, kind, line, file, what):
    code, out, err = cli("export", quiet, "--to", kind)
    assert (code, err) == (0, "")
    named, count, unit = out.splitlines()[line].split()
    assert (named, unit, int(count) > 0) == (str(quiet / "export" / file), what, True)
    assert (quiet / "export" / file).exists()
    assert ("next: open it in Perfetto UI" in out) is (what == "events")


def codes(out):
    """Of all findings, and of their symptoms."""
    found = json.loads(out)["runs"][0]["findings"]
    return {one["code"] for finding in found for one in (finding, *finding["symptoms"])}


def test_only_and_ignore_choose_what_is_told_and_what_fails(cli, warned):
    everything = codes(cli("analyze", warned, "--format", "json")[1])
    assert "blocked-budget" in everything
    code, out, _ = cli(
        "analyze", warned, "--format", "json", "--only", "blocked-budget", "--fail-on", "warning"
    )
    assert (code, codes(out)) == (1, {"blocked-budget"})
    others = [word for code in everything - {"blocked-budget"} for word in ("--ignore", code)]
    code, out, _ = cli(
        "analyze", warned, "--format", "json", "--ignore", "blocked-budget", *others, "--fail-on", "info"
    )
    assert (code, codes(out)) == (0, set())
