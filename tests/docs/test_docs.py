"""The pages say what the code does: every option, cause, rule and field; real traces pass the schemas."""

import json
import re
from functools import cache
from pathlib import Path

import msgspec
import pytest
import typer
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from schedtrace.cli.main import app, main
from schedtrace.compare.comparability import WORK
from schedtrace.compare.metric_changes import METRICS
from schedtrace.diagnose.analyze import analyze
from schedtrace.diagnose.rules import KINDS
from schedtrace.diagnose.serving_metrics import FINISHED
from schedtrace.errors import ExitCode
from schedtrace.model.causes import Cause
from schedtrace.model.say import say
from schedtrace.model.trace import Preemption, Step
from schedtrace.model.what_if import Configuration
from schedtrace.present.renderers import Format, renderer
from schedtrace.present.sections import Page
from schedtrace.read.chain import expanded_lines
from schedtrace.read.run import read_run
from schedtrace.read.trace import read_trace
from schedtrace.record import settings, switches
from tests.makers import arrival, run_folder, step
from tests.unit.whatif.conftest import a_document, a_figure

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORDED = ROOT / "tests" / "data" / "findings"
SAMPLE = Path(__file__).parent / "data" / "base"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
MINIMAL = Path(__file__).parent / "data" / "minimal.jsonl"
"""One line of each kind, with nothing but required fields, and a step with an entry of each kind."""
DELTAS = Path(__file__).parent / "data" / "deltas.jsonl"
"""The steps of the sample in version 2 of the format."""


def schema_file(path):
    return json.loads((DOCS / "schema" / path).read_text())


@cache
def validator(name):
    """A schema that finds the one beside it."""
    schema = schema_file(f"{name}.schema.json")
    Draft202012Validator.check_schema(schema)
    beside = Registry(retrieve=cache(lambda uri: Resource.from_contents(schema_file(uri))))
    return Draft202012Validator(schema, registry=beside)


@cache
def written_about(command):
    """The page of a command's options; all pages for one that has none of its own."""
    own = dict.fromkeys(["", "run", "diff"], "run.md")
    own |= dict.fromkeys(["analyze", "step", "request", "findings", "export"], "commands.md")
    return "\n".join(page.read_text() for page in ([DOCS / own[command]] if command in own else PAGES))


def printed_json(capsys, *arguments):
    assert main([*map(str, arguments), "--format", "json"]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)


def options():
    group = typer.main.get_command(app)
    for name, command in [("", group), *group.commands.items()]:
        for parameter in command.params:
            yield from ((name, option) for option in [*parameter.opts, *parameter.secondary_opts])


def test_every_option_of_the_command_line_is_written_about():
    long = [(command, option) for command, option in options() if option.startswith("--")]
    assert [
        (command, option)
        for command, option in long
        if not re.search(rf"{option}(?![\w-])", written_about(command))
    ] == []


def test_every_command_is_written_about():
    commands = typer.main.get_command(app).commands
    assert [name for name in commands if f"schedtrace {name}" not in written_about(name)] == []


def test_every_rule_has_its_page_and_every_page_its_rule():
    pages = {page.stem for page in (DOCS / "findings").glob("*.md")} - {"README"}
    assert pages == set(KINDS)


def test_every_finding_is_in_the_list():
    page = (DOCS / "findings" / "README.md").read_text()
    assert [code for code in KINDS if f"[{code}]({code}.md)" not in page] == []


@pytest.mark.parametrize("code", [rule.code for rule in KINDS.values() if rule.symptom_of])
def test_a_symptom_names_its_root_causes(code):
    page = (DOCS / "findings" / f"{code}.md").read_text()
    [section] = re.findall(r"^## Root causes\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    [row] = re.findall(
        rf"^\| \[{code}\]\({code}\.md\) .*$", (DOCS / "findings" / "README.md").read_text(), re.MULTILINE
    )
    roots = KINDS[code].symptom_of
    assert re.findall(r"\[([\w-]+)\]\(\1\.md\)", section) == list(roots)
    assert row.split(" | ")[2] == ", ".join(roots)


VARIABLES = (switches.DIR, switches.RUN_DIR, settings.TRIAL_IDS, settings.HASH_IDS, switches.METRICS)


@pytest.mark.parametrize("variable", [*VARIABLES, settings.TRACE, switches.KEEP, settings.SNAPSHOT_ON])
def test_every_variable_has_a_row(variable):
    assert f"| `{variable}` |" in (DOCS / "recording.md").read_text()


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_has_a_row(code):
    assert f"| {code.value} |" in (DOCS / "report-format.md").read_text()


@pytest.mark.parametrize(
    "trace", [MINIMAL, SAMPLE / "engine-0.jsonl", DELTAS], ids=["minimal", "real", "deltas"]
)
def test_every_line_of_a_trace_passes_its_schema(trace):
    check = validator("trace-line")
    for line in trace.read_text().splitlines():
        check.validate(json.loads(line))


def test_lines_with_nothing_but_required_fields_are_a_trace():
    trace = read_trace(MINIMAL)
    assert trace.problems.sentences(MINIMAL) == []
    assert trace.steps["output_us"].to_list() == [None, 9]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param({"type": "end", "at_us": 9}, id="required field missing"),
        pytest.param({"type": "notice", "at_us": "9", "message": "m"}, id="number as text"),
        pytest.param({"type": "newer", "at_us": 9}, id="unknown type"),
        pytest.param({"at_us": 9, "steps": 1}, id="no type"),
    ],
)
def test_the_schema_refuses_what_is_no_line(line):
    assert not validator("trace-line").is_valid(line)


def test_a_real_manifest_passes_its_schema():
    validator("manifest").validate(json.loads((SAMPLE / "run.json").read_text()))


def test_the_json_of_analyze_passes_its_schema(capsys):
    report = printed_json(capsys, "analyze", SAMPLE)
    validator("report").validate(report)
    assert "arrival-limited" in {finding["code"] for finding in report["runs"][0]["findings"]}


def test_the_json_of_diff_passes_its_schema(capsys, all_findings):
    comparison = printed_json(capsys, "diff", SAMPLE, all_findings)
    validator("comparison").validate(comparison)
    assert {change["state"] for change in comparison["findings"]} == {"appeared", "stayed", "went"}


def test_the_json_of_a_what_if_passes_its_schema_alone_and_in_a_report():
    """``tests/contract/whatif`` has the commands print theirs."""
    configuration = Configuration(changes={"max_num_seqs": 8}, figures=[a_figure("output", 0.5)], place=1)
    document = a_document(Configuration(changes={}, recorded=True), configuration, notes=[say("A note.")])
    validator("what-if").validate(to_json(document))
    report = analyze([read_run(SAMPLE)], None, lambda _, findings: (findings, document))
    validator("report").validate(to_json(report))
    changed = to_json(report)
    del changed["runs"][0]["tested"]["load"]["label"]
    assert not validator("report").is_valid(changed)


def to_json(document):
    return json.loads(renderer(Format.JSON)(Page(document, lambda _: ()), width=None))


@pytest.fixture
def all_findings(tmp_path):
    """A run in which several rules find something."""
    a_victim = Preemption("v", lost_tokens=50, for_request_id="v")
    return run_folder(
        tmp_path / "all",
        step(0, got={"a": 100}, new="a", arrived=[arrival("a", -20)]),
        step(1, got={"b": 100}, new="b", arrived=[arrival("b", 500)]),
        step(2, got={"a": 1}, waiting=1, ended=Cause.MAX_NUM_SEQS),
        step(3, got={"a": 1000}, waiting=1, ended=Cause.TOKEN_BUDGET, waiting_tokens_after=7),
        step(4, got={"a": 1}, preempted=[a_victim]),
    )


@pytest.mark.parametrize("code", sorted(KINDS))
def test_a_page_has_the_table_of_its_evidence(code):
    """``generate.py --check`` compares it with the fields."""
    [table] = re.findall(
        f"<!-- evidence: {code} -->(.*?)<!-- end -->",
        (DOCS / "findings" / f"{code}.md").read_text(),
        re.DOTALL,
    )
    assert "| field | type | meaning |" in table


@pytest.mark.parametrize("code", sorted(path.parent.name for path in RECORDED.glob("*/sentences.txt")))
def test_a_page_has_what_the_finding_says(code):
    page = " ".join((DOCS / "findings" / f"{code}.md").read_text().split())
    lines = (RECORDED / code / "sentences.txt").read_text().splitlines()
    assert [line for line in lines if line.replace(": ", " ", 1) not in page] == []


@pytest.mark.parametrize("command", ["analyze", "step", "request"])
def test_a_command_has_an_example(command):
    """``generate.py --check`` compares it with what the command prints."""
    assert f"```\n$ schedtrace {command} " in (DOCS / "commands.md").read_text()


def test_every_key_of_the_configuration_is_on_the_page():
    (run,) = analyze([read_run(SAMPLE)]).runs
    page = (DOCS / "report-format.md").read_text()
    assert [key for key in run.config if f"`{key}`" not in page] == []


def test_the_example_line_of_the_format_is_from_the_real_trace():
    shown = re.search(r"```json\n(.*?)```", (DOCS / "trace-format.md").read_text(), re.DOTALL)
    lines = [json.loads(line) for line in (SAMPLE / "engine-0.jsonl").read_text().splitlines()]
    assert msgspec.json.decode(shown[1]) in lines


def test_the_example_deltas_of_the_format_are_from_the_trace():
    page = (DOCS / "trace-format.md").read_text().split("## Delta", 1)[1]
    shown = re.search(r"```json\n(.*?)```", page, re.DOTALL)[1].split("\n\n")
    lines = [json.loads(line) for line in DELTAS.read_text().splitlines()]
    assert [json.loads(one) in lines for one in shown] == [True, True]


def test_the_rebuilding_on_the_page_gives_what_export_gives():
    page = (DOCS / "trace-format.md").read_text().split("### Rebuilding", 1)[1]
    found = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], found)  # noqa: S102  # our own page
    told = [msgspec.convert(step, Step) for step in found["in_full"](DELTAS.read_text().splitlines())]
    lines = [line for line in expanded_lines(DELTAS) if line.startswith(b'{"type":"step"')]
    assert list(map(msgspec.json.encode, told)) == lines
    assert len(lines) > 20


def test_every_metric_is_on_the_page():
    page = (DOCS / "report-format.md").read_text()
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in page] == []


def test_what_makes_the_same_work_is_on_the_page():
    [same] = re.findall(
        r"^\* Different workloads: .*?\.$", (DOCS / "report-format.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert [name for name in WORK if f"`{name}`" not in same] == []


def test_what_a_finished_request_is_is_on_the_page():
    row, *_ = re.findall(
        r"^\| `requests_finished` .*$", (DOCS / "report-format.md").read_text(), re.MULTILINE
    )
    assert [status for status in FINISHED if f"`{status}`" not in row] == []


def anchor(heading):
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{target}#{fragment}"
