"""Facts about each step that the search for slow steps compares."""

from schedtrace.diagnose.excess_features import features, judged_steps
from schedtrace.model.trace_facts import Admission
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, step
from tests.samples import FINDINGS


def test_the_age_of_a_request_is_a_number_of_steps():
    """Slow steps make requests older in time, so that an age in time would explain what makes it."""
    timeline = make_timeline(read_run(FINDINGS / "max-num-seqs-bound" / "shows").traces[0])
    starts = timeline.steps["start_us"].to_list()
    lives = {}
    for row in timeline.request_states.to_dicts():
        if row["state"] != "front_end":
            begin, end = lives.get(row["request_id"], (row["begin_us"], row["end_us"]))
            lives[row["request_id"]] = min(begin, row["begin_us"]), max(end, row["end_us"])
    steps = judged_steps(timeline)
    [age] = [feature for feature in features(timeline, steps, []) if feature.kind == "age"]
    for at, steps_ago in zip(steps["start_us"], age.values, strict=True):
        there = [begin for begin, end in lives.values() if begin <= at < end]
        assert steps_ago == (sum(min(there) <= start < at for start in starts) if there else 0)
    assert max(age.values) > 1


def decodes(count, **fields):
    """Steps of one request; each field lists a value per step."""
    lines = []
    for number in range(count):
        given = {name: values[number] for name, values in fields.items()}
        came = [] if number else [arrival("a", 0)]
        lines.append(step(number, start=20_000 * number, back=1000, got={"a": 1}, arrived=came, **given))
    return lines


def values_of(timeline, kind):
    found = [feature for feature in features(timeline, judged_steps(timeline), []) if feature.kind == kind]
    return [list(feature.values) for feature in found]


def test_tokens_that_a_connector_brought_are_counted_apart_from_cached_ones(view_of):
    admitted = [[], [Admission("b", 16, 2000), Admission("c", 0, 48)], [Admission("d", 32, 0)], []]
    assert values_of(view_of(*decodes(4, admitted=admitted)), "external") == [[0, 2048, 0, 0]]


def test_a_step_encodes_what_it_takes_from_the_encoder_cache(view_of):
    """32 embeddings in step 1, given back before step 2; 64 in step 3."""
    free = [256, 224, 256, 192, 192]
    assert values_of(view_of(*decodes(5, encoder_slots_freeable=free)), "encoder") == [[0, 32, 0, 64, 0]]


def test_without_an_encoder_nothing_is_encoded(view_of):
    assert values_of(view_of(*decodes(4)), "encoder") == []
