"""vLLM's Prometheus metrics: dumps, several of them, servers."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.read.kinds import kind_of
from schedtrace.read.records.metrics import NAME, fetched_metrics, parsed_metrics, read_metrics

FILES = Path(__file__).parents[2] / "data" / "files"
SAMPLE = FILES / "16-metrics.txt"
RUNNING = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0'


def values(*lines):
    [dump] = parsed_metrics("x", lines)
    [engine] = dump.engines
    return engine.values


def test_the_public_sample_is_read():
    [dump] = read_metrics(SAMPLE)
    [engine] = dump.engines
    assert (engine.engine, engine.model, dump.broken) == ("0", "opt-125m-tp2", 0)
    names = ("num_requests_running", "num_requests_waiting", "waiting_capacity", "num_preemptions_total")
    assert [engine.values[name] for name in names] == [64.0, 64.0, 64.0, 0.0]
    assert engine.values["prefix_cache_hits_total"] == 2480.0
    assert (dump.server.kv_cache_tokens, dump.server.max_concurrency) == (400_448, 195.53125)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} 1.5e-01', 0.15),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.15 1786929018000', 0.15),
        ('  vllm:kv_cache_usage_perc{engine="0",model_name="m"}   0.15\r', 0.15),
        ('vllm:kv_cache_usage_perc{model_name="m",engine="0",pid="a\\"b,c"} 0.15', 0.15),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} NaN', None),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} +Inf', None),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} -1', None),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} many', None),
        ('# vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.15', None),
        ('other:kv_cache_usage_perc{engine="0",model_name="m"} 0.15', None),
    ],
)
def test_a_value_is_read_or_unknown(line, value):
    assert values(RUNNING, line).get("kv_cache_usage_perc") == value


def test_engines_and_models_are_apart_and_reasons_summed():
    lines = [
        f'vllm:num_requests_running{{engine="{engine}",model_name="{model}"}} {place}'
        for place, (engine, model) in enumerate([("0", "a"), ("1", "a"), ("0", "b")])
    ]
    [dump] = parsed_metrics("x", lines)
    assert [(each.engine, each.model, each.values["num_requests_running"]) for each in dump.engines] == [
        ("0", "a", 0.0),
        ("1", "a", 1.0),
        ("0", "b", 2.0),
    ]


def test_engines_of_several_servers_are_apart():
    lines = [
        f'vllm:{name}{{engine="0",model_name="m",instance="{host}"}} {value}'
        for host in ("a:8000", "b:8000")
        for name, value in (("num_requests_running", 2), ("kv_cache_usage_perc", 0.4))
    ]
    [dump] = parsed_metrics("x", lines)
    assert [(each.engine, each.values["kv_cache_usage_perc"]) for each in dump.engines] == [
        ("0 (a:8000)", 0.4),
        ("0 (b:8000)", 0.4),
    ]


def test_a_line_with_labels_left_out_is_not_understood():
    elided = 'vllm:num_requests_waiting_by_reason{...,reason="capacity"} 6.0'
    [dump] = parsed_metrics("x", [RUNNING, elided])
    assert dump.broken == 1
    assert [set(engine.values) for engine in dump.engines] == [{"num_requests_running"}]


def test_the_sizes_of_a_cache_count_although_labels_are_left_out():
    elided = 'vllm:cache_config_info{...,kv_cache_max_concurrency="1.0",num_gpu_blocks="118",...} 1.0'
    [dump] = parsed_metrics("x", [RUNNING, elided])
    assert (dump.broken, dump.server.kv_blocks, dump.server.max_concurrency) == (0, 118, 1.0)


def test_a_part_of_a_dump_without_running_requests_is_read():
    part = ('vllm:kv_cache_usage_perc{engine="0"} 0.25', 'vllm:prompt_tokens_total{engine="0"} 32.0')
    assert values(*part) == {"kv_cache_usage_perc": 0.25, "prompt_tokens_total": 32.0}
    router = 'vllm:prompt_tokens_total{engine="1"} 9.0'
    [dump] = parsed_metrics("x", [RUNNING, router])
    assert [engine.engine for engine in dump.engines] == ["0"]


def test_requests_are_whole_numbers():
    """An average over time, such as a recording rule writes, is no number of requests."""
    [dump] = parsed_metrics("x", [RUNNING, 'vllm:num_requests_waiting{engine="0",model_name="m"} 0.5'])
    assert (dump.broken, set(dump.engines[0].values)) == (1, {"num_requests_running"})


def test_a_size_of_the_cache_that_differs_between_engines_is_unknown():
    sizes = [f'vllm:cache_config_info{{engine="{at}",num_gpu_blocks="{at}000"}} 1.0' for at in (1, 4)]
    [dump] = parsed_metrics("x", [RUNNING, *sizes])
    assert dump.server.kv_blocks is None
    [dump] = parsed_metrics("x", [RUNNING, sizes[0], sizes[0].replace('"1"', '"2"')])
    assert dump.server.kv_blocks == 1000


def test_metrics_without_labels_are_of_the_only_engine():
    assert values("vllm:num_requests_running 2", "vllm:num_requests_waiting 1") == {
        "num_requests_running": 2.0,
        "num_requests_waiting": 1.0,
    }


def test_a_metric_that_occurs_again_begins_another_dump(tmp_path):
    path = tmp_path / "both"
    path.write_text(SAMPLE.read_text() + SAMPLE.read_text().replace(" 64.0", " 65.0"))
    assert [dump.engines[0].values["num_requests_running"] for dump in read_metrics(path)] == [64.0, 65.0]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((RUNNING, "vllm:num_requests_swapped 0"), "V0 engine"),
        (('vllm:lora_requests_info{x="1"} 1',), "no metrics of an engine"),
        ((), "no metrics of an engine"),
        (("vllm:num_requests_running{...} 0.0",), "labels are left out"),
    ],
)
def test_metrics_without_a_v1_engine_are_refused(lines, why):
    with pytest.raises(InputError, match=why):
        parsed_metrics("x", lines)


def test_a_few_lines_in_a_text_are_no_dump(tmp_path):
    path = tmp_path / "x"
    path.write_text(f"we saw\n{RUNNING}\nand then\n")
    assert kind_of(path) is None
    path.write_text(f"{RUNNING}\n" * 3)
    assert kind_of(path).name == NAME


@pytest.fixture
def server():
    """A server that answers with the next of ``texts``, and the paths it was asked for."""

    class Handler(BaseHTTPRequestHandler):
        texts: list[str] = []  # noqa: RUF012  # filled by the test
        asked: list[str] = []  # noqa: RUF012  # read by the test

        def do_GET(self):  # of the protocol
            self.asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.texts.pop(0).encode())

        def log_message(self, *_):
            pass

    Handler.texts, Handler.asked = [], []
    with HTTPServer(("127.0.0.1", 0), Handler) as answering:
        thread = threading.Thread(target=answering.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{answering.server_port}", Handler
        answering.shutdown()
        thread.join()


@pytest.mark.parametrize("end", ["", "/", "/metrics"])
def test_a_server_is_read_a_bounded_number_of_times(server, end):
    url, handler = server
    handler.texts += [f"{RUNNING}\n", f"{RUNNING}\n"]
    first, second = fetched_metrics(url + end, reads=2, pause_s=0)
    assert second.at_s > first.at_s
    assert handler.asked == ["/metrics", "/metrics"]


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    url, handler = server
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    handler.texts += [f"{RUNNING}\n"]
    assert len(fetched_metrics(url, reads=1)) == 1


@pytest.mark.parametrize(
    ("url", "why"), [("ftp://host", "expected a server"), ("file:///etc/passwd", "expected a server")]
)
def test_other_addresses_are_refused(url, why):
    with pytest.raises(UsageError, match=why):
        fetched_metrics(url)


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(
        InputError, match=r"--url 127\.0\.0\.1:1: http://127\.0\.0\.1:1/metrics does not answer"
    ):
        fetched_metrics("127.0.0.1:1")
