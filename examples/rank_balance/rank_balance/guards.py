"""What schedtrace is to call the exits that only this scheduler has. Imported by schedtrace alone."""

from schedtrace.record.guards import Guard

GUARDS = [
    Guard(
        module="rank_balance.scheduler",
        names=frozenset({"balance_flag"}),
        cause="rank_balance",
        meaning="a data-parallel rank runs as many requests as each may: no rank admits more",
    ),
]
