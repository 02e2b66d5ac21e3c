from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.vllm  # commands that look for vLLM before they begin

FILES = Path(__file__).parents[2] / "data" / "files"


@pytest.fixture
def ran(cli, plans, tmp_path):
    """``ran("trials: 2", "--trials", "3")``: the plan made from a file and a command line."""

    def run(text, *arguments):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        code, _, err = cli("run", "--config", path, "--output", tmp_path / "logs", *arguments)
        assert (code, err) == (0, "")
        return plans[-1]

    return run


def test_a_command_line_alone_makes_a_plan_with_the_documented_defaults(cli, plans, tmp_path):
    line = ["run", "--model", "org/tiny", "--output", str(tmp_path), "--label", "x"]
    code, out, _ = cli(*line)
    [plan] = plans
    spec = plan.spec
    assert code == 0
    assert out.splitlines()[-1] == f"next: schedtrace analyze {tmp_path / 'x'}"
    assert "0 findings" in " ".join(out.split())
    assert plan.manifest.command == ["schedtrace", *line]
    assert (spec.dataset, spec.input_len, spec.output_len, spec.num_prompts) == ("random", 1024, None, None)
    assert (spec.trials, spec.warmup, spec.prequeue, spec.request_rate, spec.seed) == (1, 1, False, None, 0)
    assert spec.engine_args == ["--model", "org/tiny", "--seed", "0"]
    assert (plan.folder, plan.label) == (tmp_path / "x", "x")


def test_without_a_label_the_folder_is_named_by_model_and_time(cli, plans, tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20260102-030405")
    cli("run", "--model", "org/tiny", "--output", tmp_path)
    assert plans[0].folder == tmp_path / "tiny-20260102-030405"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(ran):
    spec = ran("model: tiny\ntrials: 2\nwarmup: 5\nseed: 3", "--trials", "7").spec
    assert (spec.trials, spec.warmup, spec.input_len) == (7, 5, 1024)
    assert spec.engine_args == ["--model", "tiny", "--seed", "3"]


def test_a_value_typed_wins_even_if_it_is_the_default(ran):
    assert ran("model: tiny\ntrials: 2", "--trials", "1").spec.trials == 1


@pytest.mark.parametrize("name", ["input_len", "input-len", "--input-len"])
def test_names_in_the_file_may_be_written_with_dashes_or_underscores(ran, name):
    assert ran(f"model: tiny\n{name}: 64").spec.input_len == 64


def test_model_label_and_output_may_stand_in_the_file(cli, plans, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: a\nlabel: named\noutput: {tmp_path / 'there'}\nforce: true\n")
    assert cli("run", "--config", path)[0] == 0
    assert plans[0].folder == tmp_path / "there" / "named"
    assert plans[0].spec.engine_args[:2] == ["--model", "a"]


def test_a_name_that_yaml_takes_for_a_number_is_a_name_all_the_same(ran):
    plan = ran("model: 5\nlabel: 64")
    assert (plan.folder.name, plan.spec.engine_args[:2]) == ("64", ["--model", "5"])


def test_an_endless_rate_is_vllms_word_for_all_at_once(cli, plans, tmp_path):
    code, _, _ = cli("run", "--model", "tiny", "--request-rate", "inf", "--output", tmp_path)
    assert (code, plans[0].spec.request_rate) == (0, None)


def test_an_endless_rate_may_stand_in_the_file(ran):
    assert ran("model: tiny\nrequest-rate: .inf").spec.request_rate is None


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enable-chunked-prefill": False}, ["--no-enable-chunked-prefill"]),
        ({"max-num-seqs": 4}, ["--max-num-seqs", "4"]),
        ({"watermark": 0.5}, ["--watermark", "0.5"]),
        ({"tokenizer": None}, []),
        ({"lora-modules": ["a=b", "c=d"]}, ["--lora-modules", "a=b", "c=d"]),
        ({"sizes": [1, 2]}, ["--sizes", "1", "2"]),
        ({"speculative-config": {"method": "ngram"}}, ["--speculative-config", '{"method": "ngram"}']),
        ({"a": 1, "b": True}, ["--a", "1", "--b"]),
    ],
)
def test_options_of_vllm_in_the_file_become_its_arguments(ran, given, arguments):
    assert ran(yaml.safe_dump({"model": "tiny", **given})).spec.engine_args[4:] == arguments


def test_options_of_vllm_on_the_command_line_come_last_where_they_win(ran):
    spec = ran("model: tiny\nmax-num-seqs: 4", "--max-num-seqs", "9", "--enforce-eager").spec
    assert spec.engine_args[4:] == ["--max-num-seqs", "4", "--max-num-seqs", "9", "--enforce-eager"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("trials: many", "trials"),
        ("trials: 1.5", "trials"),
        ("trials: null", "trials"),
        ("num-prompts: 0", "num-prompts"),
        ("prequeue: 'yes'", "prequeue"),
        ("request_rate: 0", "request-rate"),
        ("range-ratio: 1.5", "range-ratio"),
        ("dataset: [a, b]", "dataset"),
        ("lines: short", "lines"),
    ],
)
def test_a_wrong_type_in_the_file_is_one_line_that_names_the_option(cli, plans, tmp_path, line, names):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: tiny\n{line}\n")
    code, out, err = cli("run", "--config", path, "--output", tmp_path / "logs")
    assert (code, out, plans) == (2, "", [])
    assert err.startswith("schedtrace: --config")
    assert names in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "logs").exists()


def test_a_files_requests_are_sent_at_its_times_and_what_was_left_out_is_said(cli, plans, tmp_path):
    dataset = FILES / "10-burstgpt-failed-row.csv"
    given = ["run", "--model", "org/tiny", "--dataset", dataset, "--output", tmp_path]
    sent = (
        "2 requests are sent at the times in 10-burstgpt-failed-row.csv, over 106 s; --speedup shortens the "
        "gaps, --request-rate inf sends all at once."
    )
    notes = [
        "1 row without output tokens left out.",
        "Which prompts begin alike is not in the file: no prefix is shared.",
        sent,
    ]
    code, _, err = cli(*given, "--label", "times")
    assert (code, err.splitlines()) == (0, [f"schedtrace: {note}" for note in notes])
    assert (plans[-1].notes, plans[-1].spec.at_once) == (notes, False)
    code, _, err = cli(*given, "--label", "once", "--request-rate", "inf")
    assert (plans[-1].spec.request_rate, plans[-1].spec.at_once) == (None, True)
    assert err.splitlines()[-1] == (
        "schedtrace: The arrival times in 10-burstgpt-failed-row.csv are not used."
    )
