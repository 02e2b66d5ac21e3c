"""Facts about each step that the search for slow steps compares."""

from schedtrace.read.run import read_run
from schedtrace.timeline.excess import features, judged_steps
from schedtrace.timeline.timeline import make_timeline
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
