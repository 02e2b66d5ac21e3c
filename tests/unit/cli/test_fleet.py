"""``schedtrace fleet`` as a command."""

import json

import polars as pl
import pytest

from schedtrace.errors import InputError
from schedtrace.model.printable import hashed
from tests import makers
from tests.unit.fleet.conftest import engine_lines


@pytest.fixture
def logs(tmp_path):
    for number in range(2):
        folder = tmp_path / "logs" / f"host={number}" / "engine-0"
        makers.run_folder(folder, *engine_lines(), host=f"host-{number}", pid=number, about=makers.manifest())
    return tmp_path / "logs"


def test_a_fleet_and_its_second_call(cli, logs, tmp_path):
    options = ("--jobs", 1, "--format", "json", "--cache-folder", tmp_path / "kept")
    for cached in (False, True):
        code, out, err = cli("fleet", logs, *options)
        assert (code, err) == (0, "")
        report = json.loads(out)
        assert {engine["engine"]: engine["cached"] for engine in report["read"]["engines"]} == {
            "host=0/engine-0": cached,
            "host=1/engine-0": cached,
        }
    assert [sentence["text"] for sentence in report["verdict"]] == [
        "2 engines have too few peers to be compared."
    ]


def test_no_cache_keeps_nothing(cli, logs, tmp_path):
    cli("fleet", logs, "--jobs", 1, "--no-cache", "--cache-folder", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_an_engine_s_own_report_is_that_of_analyze(cli, logs):
    trace = logs / "host=1" / "engine-0" / "engine-0.jsonl"
    _, own, _ = cli("fleet", logs, "--engine", "host=1/engine-0", "--format", "json")
    _, analyzed, _ = cli("analyze", trace, "--format", "json")
    assert json.loads(own)["runs"] == json.loads(analyzed)["runs"]


def test_summaries_as_parquet(cli, logs, tmp_path):
    code, _, err = cli("fleet", logs, "--jobs", 1, "--output", tmp_path / "fleet.parquet")
    assert (code, err) == (0, "")
    frame = pl.read_parquet(tmp_path / "fleet.parquet")
    assert frame.select("engine", "host", "requests").rows() == [
        ("host=0/engine-0", "host-0", 3),
        ("host=1/engine-0", "host-1", 3),
    ]


def test_tenants_with_their_costs_and_with_names_that_are_hashed(cli, logs):
    options = ("--jobs", 1, "--no-cache", "--tenant", "priority", "--format", "json")
    _, out, _ = cli("fleet", logs, *options, "--price-per-gpu-hour", 3.6)
    tenants = json.loads(out)["tenants"]
    assert (tenants["key"], tenants["price_per_gpu_hour"]) == ("priority", 3.6)
    assert [(tenant["tenant"], tenant["requests"]) for tenant in tenants["tenants"]] == [("0", 6)]
    assert tenants["gpu_us"] is tenants["idle_cost"] is None  # no parallel settings are recorded
    _, out, _ = cli("fleet", logs, *options, "--hash-tenants")
    assert [tenant["tenant"] for tenant in json.loads(out)["tenants"]["tenants"]] == [hashed("0")]


def test_a_replay_without_vllm_is_refused(cli, logs, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, out, err = cli("fleet", logs, "--replay-engines", 1)
    assert (code, out) == (2, "")
    assert "vLLM is not installed here" in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nothing"], 3, "nothing: no such file or folder"),
        (["logs", "--engine", "x"], 3, "--engine x: no engines have this name; there are"),
        (["logs", "--engine", "x", "--output", "y"], 2, "--output writes the summaries of all engines"),
        (["logs", "--engine", "x", "--tenant", "priority"], 2, "--tenant divides the figures of all engines"),
        (["logs", "--tenant", "color"], 2, "there are priority, adapter, id:REGEX"),
        (["logs", "--hash-tenants"], 2, "need --tenant"),
        (["logs", "--price-per-gpu-hour", "2"], 2, "need --tenant"),
        (["logs", "--router", "round-robin", "--last", "5s"], 2, "do not go with"),
        (["logs", "--from", "5h", "--jobs", "1"], 3, "no step began in --from 18000s"),
        (["nosuch://bucket"], 3, "nosuch://bucket"),
    ],
)
def test_errors_are_one_line(cli, logs, monkeypatch, arguments, code, says):
    monkeypatch.chdir(logs.parent)
    got, out, err = cli("fleet", *arguments)
    assert (got, out) == (code, "")
    assert err.startswith("schedtrace: ")
    assert says in err


def test_tasks_of_a_cluster_get_absolute_paths_and_addresses_unchanged(cli, monkeypatch, tmp_path):
    asked = []

    def find_fleet(paths):
        asked.extend(paths)
        msg = "none"
        raise InputError(msg)

    monkeypatch.setattr("schedtrace.fleet.inputs.find_fleet", find_fleet)
    monkeypatch.chdir(tmp_path)
    assert cli("fleet", "logs", "s3://bucket", "--on", "ray")[0] == 3
    assert asked == [str(tmp_path / "logs"), "s3://bucket"]
