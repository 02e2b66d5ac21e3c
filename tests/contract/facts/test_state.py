"""What is read after every step, against the same asked of vLLM's objects one by one."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from schedtrace.record.traced import traced_class
from tests.contract.causes.models import image, sees_images
from tests.contract.causes.toy_connectors import KV, ToyKV
from tests.contract.facts.told import Traced, steps
from tests.contract.loads import under_load

pytestmark = pytest.mark.vllm

NAMES = ["finished_holding", "deferred_free_blocks", "sessions_paused", "prefix_keys"]
NAMES += ["encoder_slots_free", "encoder_slots_freeable", "kv_loads_parked", "wave", "step_counter"]


class Counting(Traced):
    """Counts, request by request and key by key."""

    def __init__(self, **options):
        super().__init__(traced_class, **options)
        self.seen = []

    def schedule(self, *args):
        output = super().schedule(*args)
        scheduler = self.scheduler
        pool, encoder = scheduler.kv_cache_manager.block_pool, scheduler.encoder_cache_manager
        statuses = [request.status for request in scheduler.requests.values()]
        referenced = {mm_hash for mm_hash, users in encoder.cached.items() if users}
        used = sum(encoder.num_embeds_by_hash[one] for one in encoder.cached)
        in_use = sum(encoder.num_embeds_by_hash[one] for one in referenced)
        keys = {block.block_hash for block in pool.blocks} - {None}
        size = encoder.cache_size
        self.seen.append(
            {
                "finished_holding": sum(map(RequestStatus.is_finished, statuses)),
                "deferred_free_blocks": sum(len(blocks) for _, blocks in scheduler.deferred_frees),
                "sessions_paused": statuses.count(RequestStatus.WAITING_FOR_STREAMING_REQ),
                "prefix_keys": len(keys) if pool.enable_caching else None,
                "encoder_slots_free": size - used if size else None,
                "encoder_slots_freeable": size - in_use if size else None,
                "kv_loads_parked": statuses.count(RequestStatus.WAITING_FOR_REMOTE_KVS)
                if scheduler.connector
                else None,
                "wave": None,
                "step_counter": None,
            }
        )
        return output


def told(run):
    return [{name: step[name] for name in NAMES} for step in steps(run)]


@pytest.mark.parametrize("name", ["fcfs", "prefix_caching_tight", "streaming_input", "async_resets", "mixed"])
def test_counts(name, recording):
    engine = under_load(Counting, name)
    assert told(recording) == engine.seen
    shown = {name for name in NAMES if len({row[name] for row in engine.seen}) > 1}
    assert (
        shown
        == {
            "fcfs": set(),
            "prefix_caching_tight": {"prefix_keys"},
            "streaming_input": {"sessions_paused"},
            "async_resets": {"prefix_keys"},
            "mixed": {"prefix_keys"},
        }[name]
    )


def test_encoder_slots(recording):
    engine = Counting(**sees_images(), max_num_batched_tokens=64)
    for number in range(4):
        engine.add(f"r{number}", prompt=60, mm_features=[image(f"picture{number % 3}", 4)], max_tokens=3)
        engine.step()
    engine.finish()
    assert told(recording) == engine.seen
    assert {row["encoder_slots_free"] for row in engine.seen} != {engine.seen[0]["encoder_slots_free"]}


def test_finished_requests_that_a_transfer_keeps_are_counted_until_it_is_done(recording, monkeypatch):
    monkeypatch.setattr(ToyKV, "request_finished_all_groups", lambda *_: (True, None))
    engine = Counting(kv_transfer_config=KV)
    engine.add("sends", prompt=40, max_tokens=1)
    engine.step()
    engine.add("next", prompt=40, max_tokens=3)
    engine.step()
    output = engine.scheduler.schedule()
    sent = ModelRunnerOutput(["next"], {"next": 0}, [[7]])
    sent.kv_connector_output = KVConnectorOutput(finished_sending={"sends"})
    engine.scheduler.update_from_output(output, sent)
    engine.step()
    engine.scheduler.shutdown()
    assert [step["finished_holding"] for step in steps(recording)] == [0, 1, 1, 0]
    assert [step["kv_blocks_free_after"] for step in steps(recording)] == [996, 993, 993, 996]


def test_blocks_that_a_batch_in_flight_may_still_write_are_counted(recording):
    engine = Counting(kv_transfer_config=KV, async_scheduling=True)
    engine.add("aborted", prompt=40, max_tokens=9)
    engine.add("goes_on", prompt=10, max_tokens=9)
    engine.schedule()
    engine.schedule()
    engine.abort("aborted")
    engine.update()
    engine.schedule()
    engine.update()
    engine.update()
    engine.schedule()
    engine.finish()
    assert told(recording) == engine.seen
    assert [row["deferred_free_blocks"] for row in engine.seen][:4] == [0, 0, 3, 0]
