import json
from pathlib import Path

from schedtrace.model.trace_facts import Fact
from tests.makers import run_folder, step

ROOT = Path(__file__).parents[3]
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
