"""``schedtrace analyze`` of records weaker than a trace: formats, pipes, folders, pairs, options."""

import gzip
import io
import json
import shutil
import sys
from pathlib import Path

import jsonschema
import pytest
import zstandard

from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import find_runs
from tests.console_logs import START, every_10_s
from tests.makers import run_folder, step

ROOT = Path(__file__).parents[3]
FILES = ROOT / "tests" / "data" / "files"
CONSOLE, DUMP, METRICS = (
    FILES / name for name in ("12-console-v1.log", "14-scheduler-dump-k8s.log", "16-metrics.txt")
)


@pytest.fixture
def stdin(monkeypatch):
    """``stdin(b"...")``: standard input has this content."""

    def give(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


def test_the_text_ends_with_the_command_that_shows_the_rest(cli):
    code, out, err = cli("analyze", CONSOLE)
    assert (code, err) == (0, "")
    assert "likely   kv-cache-full" in out
    assert out.endswith(
        "To find out more:\n  schedtrace attach --for 60s\n  SCHEDTRACE_DIR=logs vllm serve ...\n"
    )


@pytest.mark.parametrize("output_format", ["text", "markdown", "html"])
@pytest.mark.parametrize("path", [CONSOLE, DUMP, METRICS], ids=lambda path: path.name)
def test_every_format_has_every_statement(cli, path, output_format):
    statements = json.loads(cli("analyze", path, "--format", "json")[1])["records"][0]["statements"]
    code, out, _ = cli("analyze", path, "--format", output_format)
    assert code == 0
    assert all(statement["code"] in out for statement in statements)


@pytest.mark.parametrize("path", [CONSOLE, DUMP, METRICS], ids=lambda path: path.name)
def test_the_json_follows_its_schema(cli, path):
    schema = json.loads((ROOT / "docs" / "schema" / "records.schema.json").read_text())
    document = json.loads(cli("analyze", path, "--format", "json")[1])
    jsonschema.validate(document, schema)
    assert document["schema_version"] == 1


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
def test_standard_input_is_read_like_a_file(cli, stdin, pack):
    expected = cli("analyze", CONSOLE)[1]
    stdin(pack(CONSOLE.read_bytes()))
    code, out, _ = cli("analyze", "-")
    assert (code, out.split()) == (0, expected.replace(str(CONSOLE), "-").split())


def test_standard_input_may_hold_steps(cli, stdin):
    stdin((FILES / "01-iteration-kv-full.log").read_bytes())
    code, out, _ = cli("analyze", "-")
    assert (code, "76 steps" in out, "schedtrace-" in out) == (0, True, False)


@pytest.mark.parametrize(
    ("text", "arguments", "code", "says"),
    [
        (b"", ["-", "-"], 2, "-: a pipe can be read only once\n"),
        (b"hello\n", ["-"], 3, "-: not understood; expected a trace"),
        (b"", [], 2, "Missing argument 'paths': name a run, a log or - (standard input), or give --url\n"),
    ],
)
def test_a_wrong_or_missing_standard_input_is_refused_by_its_name(cli, stdin, text, arguments, code, says):
    stdin(text)
    refused, _, err = cli("analyze", *arguments)
    assert (refused, err[: len(says) + 12]) == (code, f"schedtrace: {says}")


def test_two_dumps_of_one_server_are_a_window(cli, tmp_path):
    later = tmp_path / "later.txt"
    text = METRICS.read_text().replace(
        '_total{engine="0",model_name="opt-125m-tp2"} 165293.0',
        '_total{engine="0",model_name="opt-125m-tp2"} 165393.0',
    )
    later.write_text(text)
    [shown] = json.loads(cli("analyze", METRICS, later, "--format", "json")[1])["records"]
    assert shown["path"] == f"{METRICS} and {later}"
    assert shown["metrics"][0]["window"]["generation_tokens"] == 100
    shown = json.loads(cli("analyze", later, METRICS, "--format", "json")[1])["records"]
    assert [record["metrics"][0]["window"] for record in shown] == [None, None]


def test_a_folder_holds_runs_and_weaker_records(cli, tmp_path):
    for path in (CONSOLE, METRICS, FILES / "01-iteration-kv-full.log"):
        shutil.copy(path, tmp_path)
    (tmp_path / "notes.md").write_text("hello\n")
    code, out, err = cli("analyze", tmp_path)
    assert (code, err) == (0, "schedtrace: skipped notes.md: not understood\n")
    assert "76 steps" in out
    assert "kv-cache-full" in out
    assert "time-computing" in out
    code, _, err = cli("analyze", tmp_path, "--format", "json")
    assert (code, "has no steps; analyze it apart from the traces" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (("--last", "5s"), 2, "--last is about traces"),
        (("--only", "kv-bound"), 2, "--only is about traces"),
        (("--predict",), 2, "--predict is about traces"),
        (("--fail-on", "warning"), 3, "--fail-on warning cannot be judged"),
    ],
)
def test_options_of_traces(cli, options, code, why):
    exit_code, _, err = cli("analyze", CONSOLE, *options)
    assert (exit_code, why in err) == (code, True)


def test_other_commands_pass_over_records_without_steps(cli, tmp_path):
    shutil.copy(CONSOLE, tmp_path)
    code, _, err = cli("diff", tmp_path, tmp_path)
    why = "no traces in it; only schedtrace analyze reads 12-console-v1.log (vLLM's console log)"
    assert (code, err) == (3, f"schedtrace: {tmp_path}: {why}\n")
    shutil.copy(FILES / "01-iteration-kv-full.log", tmp_path)
    assert [path.name for path in find_runs([tmp_path])] == ["01-iteration-kv-full.log"]


def test_texts_of_strangers_stay_on_their_line(cli, tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(
        every_10_s({}).encode()
        + b"INFO Initializing a V1 LLM engine (v1) with config: model='\x1b[31m\xe2\x80\xaeevil', x\n"
    )
    code, out, _ = cli("analyze", path)
    assert (code, "\x1b" in out, "\u202e" in out) == (0, False, False)


def test_periodic_lines_of_a_log_of_iterations_show_its_queue(cli, tmp_path):
    path = tmp_path / "x.log"
    queue = every_10_s({"waiting": 9, "kv": 96, "running": 7}, {"waiting": 8, "kv": 93, "running": 8})
    path.write_text(START + (FILES / "01-iteration-kv-full.log").read_text() + "\n" + queue)
    code, out, _ = cli("analyze", path)
    assert code == 0
    assert "budget 2,048, max_num_seqs 64, model Qwen/Qwen3-8B, vLLM 0.11.0" in out
    assert "It shows 76 steps" in out
    assert "kv-cache-full" in out
    assert "runs" in json.loads(cli("analyze", path, "--format", "json")[1])


THREAD = ROOT / "examples" / "forum-thread"
FIRST, OTHER = THREAD / "profile_1025_bs16_in1024_out64.log", THREAD / "profile_1031_bs16_in1024_out64.log"
ITERATIONS = ROOT / "tests/unit/read/data/iteration-details.log"


def test_the_threads_log_is_told_as_far_as_it_goes(cli):
    code, out, err = cli("analyze", FIRST, "--details")
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "budget 16,384, max_num_seqs 256, model unknown, vLLM unknown" in said
    assert "by its name: batch size 16, 1,024 tokens + 64" in said
    assert "all 2 2 / 2,048 2, 14 - - - - -" in said
    assert "waiting not recorded" in said
    assert "not judged: " in said
    assert {"arrival-limited,", "blocked-budget,"} <= {*said.split("not judged: ")[1].split()}
    assert "it does not show whether requests had not arrived yet or were refused" in said


def test_an_iteration_log_tells_its_figures_and_no_findings(cli):
    code, out, err = cli("analyze", ITERATIONS)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "budget 2,048, max_num_seqs unknown, model examples/tiny-qwen3, vLLM 0.32.0" in said
    assert "all 6 1 / 300 - - - - - -" in said
    assert "highest KV cache usage 7 %" in said
    assert "mean 6.79, p50 1.43" in said
    assert "budget use" not in said.replace("budget used", "")


def test_a_folder_of_logs_is_told_log_by_log(cli):
    code, out, _ = cli("analyze", THREAD, "--format", "json")
    runs = json.loads(out)["runs"]
    assert (code, [run["label"] for run in runs]) == (
        0,
        ["10:25 bs16 in1024 out64", "10:31 bs16 in1024 out64", "wrapped.log"],
    )
    assert [run["trials"][0]["new_per_step"] for run in runs] == [[2, 14], [5], [2, 14]]
    assert [run["trials"][0]["requests_finished"] for run in runs] == [None] * 3


def test_what_is_missing_for_each_rule_is_told_as_data(cli):
    [run] = json.loads(cli("analyze", FIRST, "--format", "json")[1])["runs"]
    missing = {rule["code"]: rule["missing"] for rule in run["not_judged"]}
    assert missing["blocked-budget"] == [str(Fact.QUEUE), str(Fact.EXITS)]
    assert missing["preemption"] == [str(Fact.PREEMPTIONS)]
    assert "budget-underused" not in missing


def test_two_logs_are_compared_in_what_both_tell(cli):
    code, out, _ = cli("diff", FIRST, OTHER, "--format", "json")
    comparison = json.loads(out)
    assert (code, comparison["causes"]) == (0, None)
    assert [change["code"] for change in comparison["findings"]] == ["budget-underused"]
    [first] = [metric for metric in comparison["metrics"] if metric["name"] == "first-step requests"]
    assert (first["base"]["mean"], first["new"]["mean"]) == (2, 5)
    assert any(
        note["text"].startswith("base and new: log of a patched schedule()") for note in comparison["notes"]
    )


def test_a_log_and_a_trace_are_not_compared_in_what_one_of_them_cannot_tell(cli, tmp_path):
    folder = run_folder(tmp_path / "run", step(0, got={"a": 10}, waiting=1, waiting_tokens_after=9))
    code, out, _ = cli("diff", FIRST, folder, "--format", "json")
    comparison = json.loads(out)
    assert (code, comparison["findings"], comparison["causes"]) == (0, [], None)
    assert not [change for change in comparison["config"] if "unknown" in {change["base"], change["new"]}]


def test_logs_whose_names_tell_other_workloads_are_said_to_differ(cli, tmp_path):
    other = tmp_path / "profile_1040_bs4_in1024_out64.log"
    other.write_bytes(OTHER.read_bytes())
    comparison = json.loads(cli("diff", FIRST, other, "--format", "json")[1])
    said = "different workloads: base batch size 16, 1,024 + 64 tokens, new batch size 4, 1,024 + 64 tokens"
    assert {"text": said} in comparison["notes"]
    assert cli("diff", FIRST, other)[0] == 0


def test_a_record_that_lost_its_line_has_no_time(cli, tmp_path):
    """Two records on one line: the second one's step is there, and when it began is not known."""
    first, second, third = FIRST.read_text().splitlines()[:3]
    log = tmp_path / "joined.log"
    log.write_text(f"{first}{second}\n{third}\n")
    code, out, _ = cli("analyze", log, "--format", "json")
    assert (code, json.loads(out)["runs"][0]["trials"][0]["steps"]) == (0, 3)
