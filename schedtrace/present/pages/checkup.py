"""Page of ``doctor``: a row for each check, with its state and what to do."""

from schedtrace.model.checkup import Check, Checkup, State
from schedtrace.model.say import say
from schedtrace.present.sections import Field, Note, Page, Style, Styled, table

STYLES: dict[State, Style] = {"ok": Style.GOOD, "note": Style.INFO, "wrong": Style.BAD}

FIELDS: list[Field[Check]] = [
    Field("check", lambda check: Styled(check.name, Style.STRONG)),
    Field("state", lambda check: Styled(check.state, STYLES[check.state])),
    Field("result", lambda check: say("{text}[. To do: {advice}]", check)),
]


def checkup_page(checkup: Checkup) -> Page[Checkup]:
    """Return the page of a checkup; its last line states how many checks found something wrong."""
    wrong = sum(check.state == "wrong" for check in checkup.checks)
    end = say("{wrong:n check} failed.", wrong=wrong) if wrong else "Nothing is wrong."
    return Page(checkup, lambda shown: [table(shown.checks, FIELDS), Note(end)])
