"""The checks of ``schedtrace doctor``: of an environment without vLLM, of engines, and of a server's URL."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from schedtrace.engine import doctor, running_engines, unprepared
from schedtrace.errors import UsageError
from schedtrace.model import live
from schedtrace.model.checkup import Check, Checkup
from schedtrace.model.live import Status
from schedtrace.version import __version__


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Environment without vLLM, engines, a GPU and schedtrace's variables."""
    monkeypatch.setattr(live, "FOLDER", tmp_path)
    monkeypatch.setattr(unprepared, "_processes", lambda _: [])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(doctor, "_gpus", lambda: "")
    monkeypatch.chdir(tmp_path)
    for name in ("SCHEDTRACE", "SCHEDTRACE_DIR", "SCHEDTRACE_KEEP", "SCHEDTRACE_TRACE", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def states(checks):
    return {check.name: check.state for check in checks}


def test_without_vllm_only_that_is_wrong(cli):
    code, out, err = cli("doctor", "--format", "json")
    checks = msgspec.json.decode(out, type=Checkup).checks
    assert (code, err) == (1, "")
    assert [check.name for check in checks if check.state == "wrong"] == ["vllm"]
    assert states(checks) == {
        "vllm": "wrong",
        "device": "note",
        "plugin": "ok",
        "settings": "ok",
        "socket": "ok",
        "disk": "ok",
        "clocks": "ok",
        "extras": "note",
        "engines": "ok",
    }


def test_without_vllm_nothing_is_said_to_load_the_plugin():
    [plugin] = [check for check in doctor.environment_checks() if check.name == "plugin"]
    assert plugin.text == "a vLLM that is installed here would load schedtrace in each of its processes"


def test_with_vllm_the_probes_checks_decide(cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr(doctor, "vllm_version", lambda: "0.32.0+cpu")
    exits = Check(name="exits", state="ok", text="a")
    monkeypatch.setattr(doctor, "_probe", lambda _: [exits])
    assert cli("doctor")[0] == 0
    exits.state = "wrong"
    code, out, _ = cli("doctor")
    assert code == 1
    assert out.splitlines()[-1] == "1 check failed."


def test_a_release_that_was_not_tried_is_a_note():
    assert doctor._release("vllm", "0.32.0+cpu").state == "ok"
    assert doctor._release("vllm", "0.99.0").state == "note"


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("SCHEDTRACE", "off", "settings"),
        ("SCHEDTRACE", "perhaps", "settings"),
        ("SCHEDTRACE_TRACE", "maxsize=1", "settings"),
        ("VLLM_PLUGINS", "other,another", "plugin"),
    ],
)
def test_a_variable_that_keeps_the_recorder_out_is_wrong(variable, value, name, monkeypatch):
    monkeypatch.setenv(variable, value)
    found = states(doctor.environment_checks())
    assert found[name] == "wrong"
    assert [check for check, state in found.items() if state == "wrong"] == ["vllm", name]


def test_plugins_that_name_schedtrace_are_right(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,schedtrace")
    assert states(doctor.environment_checks())["plugin"] == "ok"


def test_a_folder_of_sockets_that_others_may_enter_is_wrong():
    live.own_folder().chmod(0o755)
    assert states(doctor.environment_checks())["socket"] == "wrong"


def test_a_disk_without_room_for_the_bound_is_wrong(tmp_path):
    assert doctor.disk_check(tmp_path / "a" / "b", 1).state == "ok"
    assert doctor.disk_check(tmp_path, None).state == "ok"
    assert doctor.disk_check(tmp_path, 10**18).state == "wrong"


def test_the_class_goes_with_no_server(cli):
    code, _, err = cli("doctor", "--url", "localhost:1", "--scheduler-cls", "a.B")
    assert (code, len(err.splitlines())) == (2, 1)


def status(**fields):
    given = {"role": "engine", "pid": 7, "engine_pid": 7, "rank": 0, "vllm_version": "0.32.0"}
    return Status(**{**given, "schedtrace_version": __version__, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["ok", "ok"]),
        ({"recording": "logs/a"}, ["ok", "ok"]),
        ({"vllm_version": "0.99.0"}, ["note", "ok"]),
        ({"schedtrace_version": "0.0.1"}, ["ok", "wrong", "ok"]),
        ({"stopped": "the disk is full"}, ["ok", "wrong"]),
        ({"stalled_s": 12.0, "stall": "a worker died"}, ["ok", "ok", "wrong"]),
    ],
)
def test_an_engine_is_judged_by_its_answer(fields, expected):
    assert [check.state for check in doctor._status_checks("engine 0", status(**fields))] == expected


def test_an_engine_without_a_socket_is_wrong_and_its_variables_tell_why(monkeypatch):
    monkeypatch.setattr(doctor, "any_engine", lambda _: True)
    monkeypatch.setattr(unprepared, "_processes", lambda _: [7])
    monkeypatch.setattr(doctor, "_why_silent", lambda pid: f"{pid} said why")
    [check] = doctor.engine_checks("7")
    assert (check.name, check.state, check.advice) == ("engine", "wrong", "7 said why")


def test_what_is_no_process_id_is_refused(monkeypatch):
    monkeypatch.setattr(running_engines, "STATUS_S", 0.2)
    with pytest.raises(UsageError):
        doctor.engine_checks("all")


METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1234"} 1.0
"""


@pytest.fixture
def server():
    """``server({path: text or seconds})``: the address of a server that answers so."""
    servers = []

    def serve(answers):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                answer = answers.get(self.path)
                self.send_response(200 if answer is not None else 404)
                if isinstance(answer, str) and answer.startswith("http"):
                    self.send_header("Location", answer)
                self.end_headers()
                if isinstance(answer, str):
                    self.wfile.write(answer.encode())
                elif answer is not None:
                    until = time.monotonic() + answer
                    while time.monotonic() < until:
                        self.wfile.write(b"x")
                        time.sleep(0.02)

            def log_message(self, *_):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for one in servers:
        one.shutdown()
        one.server_close()


def test_a_server_tells_its_release_and_its_load(server):
    address = server({"/version": '{"version": "0.32.0"}', "/metrics": METRICS})
    for url in (address, f"{address}/v1/", address.removeprefix("http://")):
        version, metrics, plugin = doctor.url_checks(url)
        assert (version.state, metrics.state, plugin.state) == ("ok", "ok", "note")
        assert metrics.text == "2 engines: 7 running, 2 waiting, 1234 KV blocks"


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/version": "<html>", "/metrics": "sglang:num_running_reqs 1.0\n"},
        {"/version": "[]", "/metrics": ""},
    ],
)
def test_another_server_is_wrong(answers, server):
    version, metrics = doctor.url_checks(server(answers))
    assert (version.state, metrics.state) == ("wrong", "wrong")


def test_an_answer_has_one_deadline_however_it_trickles(server, monkeypatch):
    monkeypatch.setattr(doctor, "URL_S", 0.2)
    began = time.monotonic()
    version, metrics = doctor.url_checks(server({"/version": 3.0, "/metrics": 3.0}))
    assert (version.state, metrics.state) == ("wrong", "wrong")
    assert time.monotonic() - began < 2.5


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    address = server({"/version": '{"version": "0.32.0"}', "/metrics": METRICS})
    assert doctor.url_checks(address)[0].state == "ok"


@pytest.mark.parametrize("url", ["ftp://a", "file:///etc/passwd", "http://", "http://a:b", "http://a\nb", ""])
def test_what_is_no_address_of_a_server_is_refused(url, cli):
    code, _, err = cli("doctor", f"--url={url}")
    assert (code, len(err.splitlines())) == (2, 1)
