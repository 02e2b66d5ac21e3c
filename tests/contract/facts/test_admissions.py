"""What the caches gave at first scheduling, and why they gave nothing."""

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.contract.causes.toy_connectors import KV
from tests.contract.facts.told import Traced, events
from tests.contract.loads import under_load

pytestmark = pytest.mark.vllm


def told(recording):
    return {entry.pop("request_id"): entry for entry in events(recording, "admitted")}


def test_found_or_not_yet_cached_or_too_short(recording):
    engine = Traced(enable_prefix_caching=True)
    engine.add("first", prompt=50, shared=40)
    engine.add("short", prompt=16, shared=16)
    engine.step()
    engine.add("second", prompt=50, shared=40)
    engine.add("other", prompt=50)
    engine.finish()
    none = {"local_tokens": 0, "external_tokens": 0}
    assert told(recording) == {
        "first": none | {"full_blocks": 3, "miss": "not_cached"},
        "short": none | {"full_blocks": 1, "miss": "short"},
        "second": {"local_tokens": 32, "external_tokens": 0, "full_blocks": 3},
        "other": none | {"full_blocks": 3, "miss": "not_cached"},
    }


def test_not_looked_for_at_all(recording):
    engine = Traced(enable_prefix_caching=True)
    engine.add("first", prompt=50, shared=40)
    engine.step()
    request = engine.make_request("asks", prompt=50, shared=40)
    request.sampling_params = SamplingParams(prompt_logprobs=1, max_tokens=4)
    request.skip_reading_prefix_cache = request.get_skip_reading_prefix_cache()
    engine.requests["asks"] = request
    engine.scheduler.add_request(request)
    engine.finish()
    assert told(recording)["asks"] == {
        "local_tokens": 0, "external_tokens": 0, "full_blocks": 3, "miss": "skipped"
    }  # fmt: skip


def test_a_salt_keeps_prompts_apart(recording):
    engine = Traced(enable_prefix_caching=True)
    for number, salt in enumerate(("mine", "mine", "yours", None)):
        engine.add(f"r{number}", prompt=50, shared=40, cache_salt=salt)
        engine.step()
    engine.finish()
    assert [(entry.get("salted", False), entry["local_tokens"]) for entry in told(recording).values()] == [
        (True, 0), (True, 32), (True, 0), (False, 0)
    ]  # fmt: skip


def test_no_prefix_caching(recording):
    engine = Traced()
    engine.add("r", prompt=50)
    engine.finish()
    assert told(recording) == {"r": {"local_tokens": 0, "external_tokens": 0}}


def test_local_and_external_hits_apart(recording):
    engine = Traced(enable_prefix_caching=True, kv_transfer_config=KV)
    engine.add("first", prompt=50, shared=40)
    engine.step()
    engine.scheduler.connector.has["second"] = (16, False)
    engine.add("second", prompt=80, shared=40)
    engine.finish()
    assert told(recording)["second"] == {"local_tokens": 32, "external_tokens": 16, "full_blocks": 5}


@pytest.mark.parametrize("name", ["prefix_caching", "prefix_caching_tight", "async_mixed"])
def test_each_is_told_once_with_the_tokens_of_its_first_step(name, recording):
    """The witness: a request's computed tokens in the first ``SchedulerOutput`` that has it."""
    firsts = {}

    class Watched(Traced):
        def schedule(self, *args):
            output = super().schedule(*args)
            for new in output.scheduled_new_reqs:
                firsts.setdefault(new.req_id, new.num_computed_tokens)
            return output

    under_load(Watched, name, 2)
    entries = events(recording, "admitted")
    assert [entry["request_id"] for entry in entries] == list(firsts)
    assert {entry["request_id"]: entry["local_tokens"] for entry in entries} == firsts
    assert all(("miss" in entry) == (entry["local_tokens"] == 0) for entry in entries)
    assert {entry.get("miss") for entry in entries} >= {None, "not_cached"}


def test_kv_loads_are_told_from_beginning_to_end(recording):
    engine = Traced(kv_transfer_config=KV)
    connector = engine.scheduler.connector
    connector.has |= {"arrives": (16, True), "aborted": (16, True)}
    engine.add("arrives", prompt=40, max_tokens=2)
    engine.add("aborted", prompt=70, max_tokens=2)
    output = engine.scheduler.schedule()
    held = {
        request_id: [len(ids) for ids in engine.scheduler.kv_cache_manager.get_block_ids(request_id)]
        for request_id in ("arrives", "aborted")
    }
    arrived = ModelRunnerOutput([], {}, [])
    arrived.kv_connector_output = KVConnectorOutput(finished_recving={"arrives"})
    engine.scheduler.update_from_output(output, arrived)
    engine.abort("aborted")
    engine.step()
    engine.step()
    engine.scheduler.shutdown()
    loads = events(recording, "kv_loads")
    assert [(load["request_id"], load["event"]) for load in loads] == [
        ("arrives", "begun"), ("aborted", "begun"), ("arrives", "arrived")
    ]  # fmt: skip
    assert {load["request_id"]: load["blocks"] for load in loads[:2]} == held
    times = [load["at_us"] for load in loads]
    assert times == sorted(times)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_kv_load_that_fails(policy, recording):
    engine = Traced(kv_transfer_config=KV | {"kv_load_failure_policy": policy})
    engine.scheduler.connector.has["fails"] = (16, True)
    engine.add("fails", prompt=40, max_tokens=2)
    output = engine.scheduler.schedule()
    [[first]] = engine.scheduler.kv_cache_manager.get_block_ids("fails")
    failed = ModelRunnerOutput([], {}, [])
    failed.kv_connector_output = KVConnectorOutput(finished_recving={"fails"}, invalid_block_ids={first})
    engine.scheduler.update_from_output(output, failed)
    engine.scheduler.connector.has.clear()
    engine.step()
    engine.finish()
    assert [load["event"] for load in events(recording, "kv_loads")] == ["begun", "failed"]
    status = {"recompute": "LENGTH_CAPPED", "fail": "ERROR"}[policy]
    assert [finish["status"] for finish in events(recording, "finished")] == [status]
