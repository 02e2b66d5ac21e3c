"""What schedtrace is to call the exits that only this scheduler has. Imported by schedtrace alone."""

from schedtrace.record.marks.guards import Guard

GUARDS = [
    Guard(
        module="rank_balance.scheduler",
        names=frozenset({"balance_flag"}),
        cause="ranks_full",
        meaning="a data-parallel rank runs as many requests as each may: no rank admits more",
    ),
]
