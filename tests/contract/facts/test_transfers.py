"""What a request's ``kv_transfer_params`` say of its other engine, and blocks kept until they are sent."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.contract.causes.toy_connectors import KV, ToyKV
from tests.contract.facts.told import Traced, events

pytestmark = pytest.mark.vllm
FIELDS = ("remote", "remote_request_id", "transfer_id")


def arrived(recording, params):
    engine = Traced()
    request = engine.make_request("r")
    request.kv_transfer_params = params
    engine.enqueue(request)
    engine.finish()
    [arrival] = events(recording, "arrived")
    return {name: arrival[name] for name in FIELDS if name in arrival}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, {}),
        ({}, {}),
        (["no", "dict"], {}),
        (
            {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "p-1"},
            {"remote": "prefill", "remote_request_id": "p-1"},
        ),
        ({"do_remote_decode": True, "remote_host": "10.0.0.1"}, {"remote": "decode"}),
        ({"transfer_id": "xfer-1", "do_remote_decode": "yes"}, {"transfer_id": "xfer-1"}),
        ({"remote_request_id": 7, "transfer_id": ""}, {}),
    ],
)
def test_the_other_engine_of_a_request(recording, params, expected):
    assert arrived(recording, params) == expected


def test_ids_on_the_other_engine_are_bounded_and_hashed_as_other_ids_are(recording, monkeypatch):
    from schedtrace.model.printable import LONGEST, hashed

    long = arrived(recording, {"remote_request_id": "x" * 10_000})["remote_request_id"]
    assert len(long) <= LONGEST
    for file in recording.rglob("*"):
        file.unlink()
    monkeypatch.setenv("SCHEDTRACE_HASH_IDS", "1")
    params = {"remote_request_id": "secret-1", "transfer_id": "secret-2", "do_remote_prefill": True}
    told = arrived(recording, params)
    assert told == {
        "remote": "prefill", "remote_request_id": hashed("secret-1"), "transfer_id": hashed("secret-2")
    }  # fmt: skip
    assert not [file for file in recording.rglob("*") if b"secret" in file.read_bytes()]


def test_blocks_are_kept_from_the_end_of_a_request_until_they_are_sent(recording, monkeypatch):
    """Send one of two requests: the end of its sending is in the trace although no step follows it."""
    monkeypatch.setattr(ToyKV, "request_finished_all_groups", lambda *_: (True, None))
    engine = Traced(kv_transfer_config=KV)
    engine.add("sent", prompt=40, max_tokens=1)
    engine.add("kept", prompt=20, max_tokens=1)
    engine.step()
    output = engine.scheduler.schedule()
    done = ModelRunnerOutput([], {}, [])
    done.kv_connector_output = KVConnectorOutput(finished_sending={"sent"})
    engine.scheduler.update_from_output(output, done)
    engine.scheduler.shutdown()
    sends = events(recording, "kv_sends")
    assert [(send["request_id"], send["event"], send["blocks"]) for send in sends] == [
        ("sent", "begun", [3]), ("kept", "begun", [2]), ("sent", "ended", [3])
    ]  # fmt: skip
    times = [send["at_us"] for send in sends]
    assert times == sorted(times)


def test_without_a_connector_nothing_is_kept(recording):
    engine = Traced()
    engine.add("r", max_tokens=1)
    engine.finish()
    assert events(recording, "kv_sends") == []
