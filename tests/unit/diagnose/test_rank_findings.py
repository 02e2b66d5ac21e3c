"""Findings about ranks: which rank, since when, how much; and none where there is nothing."""

import msgspec
import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules import RANK_RULES
from schedtrace.model.manifest import write_manifest
from schedtrace.model.report import Report
from schedtrace.present.pages.report import MOST_LINES, WIDTH, report_page
from schedtrace.read.run import read_run
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.timeline import make_timeline
from tests import rank_traces
from tests.makers import arrival, finish, header, manifest, step, write_trace
from tests.rank_traces import prefills, write_ranks
from tests.unit.diagnose.sentences import flat
from tests.unit.present.test_goldens import text_of

OF_LOCKSTEP = {"prefill-stall"}
CONFIG = {"max_num_seqs": 16, "policy": "fcfs", "prefill_schedule_interval": 1}


@pytest.fixture
def report_of(tmp_path):
    """``report_of(passes, ...)``: the report of a run with these common steps."""
    return lambda passes, **fields: analyze_run(
        read_run(write_ranks(tmp_path / "run", passes, **{"scheduler_config": CONFIG, **fields}))
    )


@pytest.fixture
def rank_codes(tmp_path):
    """``rank_codes(passes, ...)``: what is said of these ranks, whatever is said of each engine."""

    def said(passes, **fields):
        run = read_run(write_ranks(tmp_path / "run", passes, **{"scheduler_config": CONFIG, **fields}))
        ranks = RecordedRanks.from_timelines([make_timeline(trace, run.manifest) for trace in run.traces])
        return {finding.code for rule in RANK_RULES.values() for finding in rule(ranks)}

    return said


@pytest.fixture
def lengthened(monkeypatch):
    """``lengthened(function)``: replace the length of a common step by that of its plain length and turns."""
    plain_length = rank_traces.length_us

    def replace(length):
        monkeypatch.setattr(
            rank_traces, "length_us", lambda turns, factors: length(plain_length(turns, factors), turns)
        )

    return replace


def codes(report):
    return {finding.code for finding in flat(report.findings)}


def test_the_stall_names_the_rank_that_prefilled_and_the_one_that_waited(report_of, recorded_words):
    report = report_of(prefills(60, {0: 10}, {0: 5}))
    found = report.findings[0]
    assert (found.code, found.engine_rank, found.engine_ranks, found.count) == ("prefill-stall", 0, [1], 6)
    assert found.steps == [5, 15, 25, 35, 45, 55]
    assert found.evidence.stalled_ms == pytest.approx(60)
    [advice] = found.advice
    assert (advice.setting, advice.value) == (None, None)
    recorded_words(advice, report.verdict[1])


def test_a_full_rank_makes_balance_scheduling_an_advice(report_of, recorded_words):
    """8 requests and the prefill on 10 seats: the gate closes at 9."""
    found = report_of(prefills(60, {0: 10}, {0: 5}), max_num_running_reqs=10).findings[0]
    assert (found.advice[1].setting, found.advice[1].value) == ("balance_ranks", True)
    recorded_words(found.advice[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"scheduler_config": {**CONFIG, "prefill_schedule_interval": 4}},
        {"scheduler_class": "schedtrace.balance.BalanceScheduler"},
    ],
)
def test_what_is_on_already_is_not_advised(report_of, fields):
    report = report_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 9}), **fields)
    [stall] = [one for one in report.findings if one.code == "prefill-stall"]
    assert stall.advice == []
    assert stall.evidence.aligned_saved_ms is None


def test_a_stall_has_what_aligned_prefills_save_at_most(report_of, recorded_words):
    stall = report_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 9})).findings[0]
    evidence = stall.evidence
    whole = 60 * 5.8 - 0.1 + 12 * 10
    assert evidence.aligned_saved_ms == pytest.approx(60, rel=0.01)
    assert evidence.most_gain_frac == pytest.approx(whole / (whole - 60) - 1, rel=0.01)
    recorded_words(stall.message)


def test_the_prefills_of_a_single_rank_cannot_be_aligned(report_of):
    assert report_of(prefills(60, {0: 10}, {0: 5})).findings[0].evidence.aligned_saved_ms is None


def test_uneven_ranks_have_their_dummy_batches_as_figures(report_of, recorded_words):
    """Rank 1 has requests in the first 20 of 60 steps."""
    report = report_of([[(8, 0), (8, 0) if step < 20 else None] for step in range(60)])
    [finding] = [finding for finding in flat(report.findings) if finding.code == "rank-imbalance"]
    assert bool(finding.title)
    assert finding.evidence.dummies.batches == 40
    assert finding.evidence.dummies.most.rank == 1
    recorded_words(finding.message)


@pytest.mark.parametrize(("factor", "frac"), [(1.0, None), (1.05, None), (2.0, 1.0)])
def test_steps_that_are_longer_while_a_rank_has_no_request(
    report_of, recorded_words, lengthened, factor, frac
):
    """60 of 120 steps of 5.8 ms; in the other 60, rank 1 runs dummy batches."""
    lengthened(lambda plain_us, turns: round(plain_us * (factor if None in turns else 1)))
    report = report_of([[(8, 0), (8, 0) if step // 10 % 2 else None] for step in range(120)])
    [finding] = [finding for finding in flat(report.findings) if finding.code == "rank-imbalance"]
    dummies = finding.evidence.dummies
    assert dummies.longer_frac == (frac and pytest.approx(frac, rel=0.05))
    assert dummies.longer_ms == (frac and pytest.approx(60 * 5.8, rel=0.05))
    if frac:
        recorded_words(finding.verdict)


def test_independent_ranks_have_no_findings_of_lockstep(report_of):
    report = report_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 9}), lockstep=False)
    assert codes(report) & OF_LOCKSTEP == set()
    assert [row.stalled_ms for row in report.statistics.engines] == [None] * 3


def test_a_rank_that_refuses_while_another_has_room(report_of, recorded_words):
    report = report_of([[(16, 0), (2, 0)]] * 40, lockstep=False, refused="max_num_seqs")
    found = report.findings[0]
    assert (found.code, found.engine_rank, found.evidence.why) == ("rank-imbalance", 0, "requests")
    assert (found.evidence.since_s, found.evidence.uneven_frac) == (0, 1)
    assert "max-num-seqs-bound" in {symptom.code for symptom in found.symptoms}
    assert found.share_frac == pytest.approx(1 / 19)
    recorded_words(found.advice)


@pytest.mark.parametrize(("other", "found"), [(12, False), (11, False), (8, True), (7, True)])
def test_uneven_from_a_quarter_on(rank_codes, other, found):
    """16 and 8 requests: the mean is 12, a quarter less than 16."""
    said = rank_codes([[(16, 0), (other, 0)]] * 40, lockstep=False)
    assert ("rank-imbalance" in said) is found


def test_one_engine_has_no_findings_of_several(report_of):
    assert codes(report_of([[(8, 0)]] * 40, lockstep=False)) & (OF_LOCKSTEP | {"rank-imbalance"}) == set()


def test_the_same_finding_on_all_engines_is_one(report_of):
    report = report_of([[(8, 0)] * 4] * 40, lockstep=False)
    kinds = [(finding.code, finding.cause) for finding in report.findings]
    assert len(kinds) == len(set(kinds))
    assert [finding.engine_ranks for finding in report.findings if finding.code == "client-limited"] in (
        [],
        [[0, 1, 2, 3]],
    )


def test_sixty_four_ranks_fit_on_one_screen(report_of):
    """The figures of two ranks stand for those of 64: analysing so many takes a minute."""
    report = report_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 9}))
    first, second, whole = report.statistics.engines
    each = [msgspec.structs.replace(one, engine_rank=rank) for rank in range(32) for one in (first, second)]
    report.statistics.engines = [*each, whole]
    report.config["engines"], report.path = 64, "logs/run"
    for finding in report.findings:
        finding.engine_ranks = [*range(64)]
    lines = text_of(report_page(Report(runs=[report]))).splitlines()
    assert sum(max(1, -(-len(line) // WIDTH)) for line in lines) <= MOST_LINES
    assert max(len(line) for line in lines if not line.startswith("  schedtrace ")) <= WIDTH
    assert any("62 engines between these" in line for line in lines)


def test_as_many_requests_of_other_lengths_are_uneven_in_tokens(report_of, recorded_words):
    """Every tenth step rank 0 prefills 500 tokens, rank 1 five: 8 prompts each."""

    def turn(rank, counter):
        return 8, (500, 5)[rank] if counter % 10 == 5 else 0

    report = report_of([[turn(rank, counter) for rank in (0, 1)] for counter in range(80)])
    [found] = [one for one in report.findings if one.code == "rank-imbalance"]
    evidence = found.evidence
    assert (found.engine_rank, evidence.measure, evidence.why) == (0, "tokens", "lengths")
    recorded_words(found.verdict)


def test_lengths_on_other_ranks_are_means_over_their_requests(report_of):
    """Eight decode on each rank after prompts of a token; ranks 1 and 2 have 8 prompts of 5 and 2 of 50."""
    tokens = [(500, 10), (5, 10), (50, 40)]
    passes = [[(8, size if step % every == 5 else 0) for size, every in tokens] for step in range(80)]
    [found] = [one for one in flat(report_of(passes).findings) if one.code == "rank-imbalance"]
    said = found.holder.arguments
    assert [rank.mean_prompt_tokens for rank in found.evidence.ranks] == [250.5, 3, 10.8]
    assert said["prompts"].value == (8 + 8 * 5 + 8 + 2 * 50) / 26


@pytest.mark.parametrize("extra_us", [0, 4000])
def test_a_long_context_on_one_rank_makes_common_steps_longer(
    report_of, lengthened, recorded_words, extra_us
):
    """Rank 0 has 7 short requests and, in every other 20 steps, one of 20,000 tokens; rank 1 has 8 short."""
    lengthened(lambda plain_us, turns: plain_us + extra_us * (turns[0][0] == 8))
    passes = [[(8 if step // 20 % 2 else 7, 0), (8, 0)] for step in range(160)]
    report = report_of(passes, prompts={"0-7": 20_000})
    found = [one for one in flat(report.findings) if one.code == "rank-imbalance"]
    context = [one.evidence.context for one in found if one.evidence.context is not None]
    assert len(context) == bool(extra_us)
    if extra_us:
        # Half of the extra time in 76 of 160 steps of 5,800 us, in which all 16 requests run.
        assert context[0].requests_frac == pytest.approx(
            76 * 2000 * 16 / (80 * 9800 * 16 + 80 * 5800 * 15), rel=0.1
        )
        assert (context[0].request_id, context[0].prompt_tokens) == ("0-7", 20_000)
        assert found[0].evidence.measure == "context"
        recorded_words(found[0].verdict)


def slow_rank(report):
    [found] = [one for one in flat(report.findings) if one.code == "slow-rank"]
    return found


def test_an_independent_rank_that_takes_half_as_long_again(report_of):
    """6,650 us a step on average on rank 0, of which 200 us are the host's, as on rank 1."""
    passes = [[(8 - step // 10 % 4, 500 if step % 10 == 5 else 0)] * 2 for step in range(40)]
    found = slow_rank(report_of(passes, lockstep=False, factors=[1.0, 1.5]))
    evidence, factor = found.evidence, (1.5 * 6650 - 200) / (6650 - 200)
    assert (found.engine_rank, evidence.rank, evidence.lockstep) == (1, 1, False)
    assert (evidence.own_us, evidence.others_us) == pytest.approx((9775, 6450), rel=0.005)
    assert (evidence.factor, evidence.compared) == (pytest.approx(factor, rel=0.001), 2)
    assert found.share_frac == pytest.approx(0.6 * (1 - 1 / factor), rel=0.005)


def test_an_independent_rank_so_slow_that_its_requests_pile_up(report_of, recorded_words):
    """Rank 0 never has as many; what an average step of its takes both have shown."""
    passes = [
        [
            (5 - step // 10, 500 if step % 10 == 5 else 0),
            (24 if step < 30 else 3, 500 if step % 10 == 5 else 0),
        ]
        for step in range(40)
    ]
    found = slow_rank(report_of(passes, lockstep=False, factors=[1.0, 2.0]))
    evidence = found.evidence
    assert (evidence.rank, evidence.work_of) == (1, 0)
    assert (evidence.own_us, evidence.others_us) == pytest.approx((12_500, 6_150), rel=0.005)
    recorded_words(found.message)


def test_equal_independent_ranks_of_which_one_has_more_to_do(rank_codes):
    passes = [
        [(8 - step // 10 % 4, 500 if step % 10 == 5 else 0), (12, 500 if step % 5 == 2 else 0)]
        for step in range(40)
    ]
    assert "slow-rank" not in rank_codes(passes, lockstep=False, factors=[1.0, 1.0])


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_in_lockstep(report_of, slow):
    """8,700 us a common step; 500 tokens make it 1.5 * 15,800 on the slow rank, 15,800 on the other one."""
    factors = [1.5 if rank == slow else 1.0 for rank in (0, 1)]
    found = slow_rank(report_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 9}), factors=factors))
    evidence = found.evidence
    assert (found.engine_rank, evidence.rank, evidence.lockstep) == (slow, slow, True)
    assert (evidence.own_us, evidence.others_us) == pytest.approx((30_000, 14_200), rel=0.001)
    assert evidence.factor == pytest.approx(30 / 14.2, rel=0.001)
    whole = 60 * 8700 + 6 * 15_000 + 6 * 7100
    lost, spent = 6 * 17 * 500 * 15.8, 16 * whole + 6 * (23_700 + 15_800)
    assert found.share_frac == pytest.approx(lost / spent, rel=0.005)


def test_whose_prefills_alone_make_common_steps_longer(report_of):
    """100 tokens: 7,800 us on the equal rank, less than the 8,700 us of any step of the slow one."""
    found = slow_rank(report_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 9}, tokens=100), factors=[1.0, 1.5]))
    assert (found.evidence.rank, found.evidence.factor, found.evidence.others_us) == (1, None, 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [((8, 500), (8, 500)), ((8, 500), (8, 100)), ((12, 500), (4, 100)), ((30, 100), (4, 100))],
)
@pytest.mark.parametrize("together", [False, True])
def test_equal_ranks_in_lockstep_with_uneven_load(rank_codes, first, second, together):
    """Prefills of a rank with few requests hide beneath the decodes of the other one."""
    passes = [
        [
            (first[0], first[1] if step % 10 == 5 else 0),
            (second[0], second[1] if step % 10 == (5 if together else 9) else 0),
        ]
        for step in range(60)
    ]
    assert "slow-rank" not in rank_codes(passes, max_num_running_reqs=32)


def test_a_fixed_cost_of_prefills_makes_no_rank_with_short_prompts_slow(rank_codes, lengthened):
    """5 ms for any prefill: 70 us a token of 100, 21 us a token of 3,000."""
    lengthened(lambda plain_us, turns: plain_us + 5000 * any(turn and turn[1] for turn in turns))
    passes = [[(8, 3000 if step % 10 == 5 else 0), (8, 100 if step % 10 == 9 else 0)] for step in range(60)]
    assert "slow-rank" not in rank_codes(passes)


EVERY_20TH = dict.fromkeys(range(19, 400, 20), 50_000)
EXPERTS = {
    "parallel_config.enable_eplb": True,
    "eplb_config.step_interval": 20,
    "eplb_config.policy": "default",
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        EXPERTS | {"eplb_config.use_async": False},
        EXPERTS | {"eplb_config.use_async": False, "eplb_config.communicator": "pynccl"},
        EXPERTS | {"eplb_config.step_interval": 300},
    ],
    ids=["nothing known", "experts", "experts that cannot move beside steps", "another interval"],
)
def test_all_ranks_stop_at_intervals(report_of, settings, recorded_words):
    report = report_of([[(2, 0), (3, 0)]] * 400, stops=EVERY_20TH, settings=settings)
    [finding] = [one for one in report.findings if one.code == "interruption"]
    assert (finding.cause, finding.count, finding.engine_ranks) == ("periodic_of_all_ranks", 20, [0, 1])
    assert finding.cost_ms == pytest.approx(1000, rel=0.01)
    recorded_words(finding.title, finding.verdict, finding.message, *finding.advice)


@pytest.mark.parametrize(("ranks", "dummy_frac"), [(2, 0.5), (1, None)])
def test_fewer_requests_at_once_than_ranks_in_lockstep(tmp_path, ranks, dummy_frac, recorded_words):
    """One client: each of its requests takes five common steps on rank 0, and then the next one comes."""
    lines = [
        step(
            number,
            start=10_000 * number,
            back=9_900,
            got={f"r{number // 5}": 1},
            new=[] if number % 5 else [f"r{number // 5}"],
            arrived=[] if number % 5 else [arrival(f"r{number // 5}", 10_000 * number - 20)],
            finished=[finish(f"r{number // 5 - 1}", finished_us=10_000 * number - 50)]
            if number % 5 == 0 < number
            else [],
            wave=0,
            step_counter=number,
        )
        for number in range(100)
    ]
    for rank in range(ranks):
        head = header(engine_rank=rank, data_parallel_size=ranks)
        write_trace(tmp_path / "run" / f"engine-{rank}.jsonl", head, *([] if rank else lines))
    write_manifest(tmp_path / "run", manifest())
    findings = analyze_run(read_run(tmp_path / "run")).findings
    [client] = [one for one in flat(findings) if one.code == "client-limited"]
    assert (client.evidence.clients, client.evidence.dummy_frac) == (1, dummy_frac)
    recorded_words(client.verdict, *client.advice)
