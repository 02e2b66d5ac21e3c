"""The guard of an exit is its innermost condition, whose names and numbers tell the cause."""

import pytest

from tests.unit.record.bodies import WAITING, within

GUARDS = {
    ("if self.late:", "    continue"): [("continue", "self.late")],
    ("if self.late:", "    pass", "else:", "    break"): [("break", "not self.late")],
    ("if self.late:", "    pass", "elif self.early:", "    break"): [("break", "self.early")],
    ("if self.late:", "    pass", "elif self.early:", "    pass", "else:", "    return"): [
        ("break", "not self.early")
    ],
    ("if self.late:", "    if self.early:", "        break", "    continue"): [
        ("break", "self.early"),
        ("continue", "self.late"),
    ],
    ("break",): [("break", "True")],
    ("with self.timed():", "    if self.late:", "        break"): [("break", "self.late")],
    (
        "try:",
        "    break",
        "except KeyError:",
        "    continue",
        "else:",
        "    return",
        "finally:",
        "    pass",
    ): [
        ("break", "True"),
        ("continue", "KeyError"),
        ("break", "True"),
    ],
    ("try:", "    pass", "except:", "    continue"): [("continue", "True")],
    ("try:", "    pass", "finally:", "    if self.late:", "        break"): [("break", "self.late")],
    ("try:", "    pass", "except* KeyError:", "    self.seen += 1", "if self.late:", "    break"): [
        ("break", "self.late")
    ],
    ("match request.kind:", "    case 1:", "        continue", "    case _:", "        break"): [
        ("continue", "request.kind"),
        ("break", "request.kind"),
    ],
}


@pytest.mark.parametrize(("lines", "expected"), GUARDS.items())
def test_the_innermost_condition_is_the_guard(lines, expected, sites):
    found = sites(within(WAITING, *lines))
    assert [(site[1], site[3]) for site in found if site[1] != "condition"] == expected
    assert {site[2] for site in found if site[1] != "condition"} == {("other",)}


CAUSES = {
    "len(self.running) >= self.max_num_running_reqs": "max_num_seqs",
    "len(self.running) >= self.max_num_running_reqs - 4": "other",
    "len(self.running) >= self.max_num_running_reqs and self.draining": "other",
    "num_new_tokens == 0": "(zero tokens)",
    "num_new_tokens < 64": "other",
    "new_blocks is None": "kv_blocks",
    "new_blocks is None and self.late": "other",
    "request.num_output_placeholders > 0 and request.num_computed_tokens + 2 >= request.max_tokens": "other",
    "num_external_computed_tokens is None": "connector_undecided",
    "not self.scheduler_config.chunked_prefill_enabled and num_new_tokens > 0": "chunked_prefill_off",
}


@pytest.mark.parametrize(("guard", "cause"), CAUSES.items())
def test_a_guard_is_known_only_if_all_names_and_numbers_in_it_are(guard, cause, sites):
    found = sites(within(WAITING, f"if {guard}:", "    break"))
    assert [site[2] for site in found if site[1] == "break"] == [(cause,)]


def test_a_full_batch_may_end_a_loop_by_its_condition(sites):
    head = "while self.waiting and len(self.running) < self.max_num_running_reqs"
    [site] = sites(within(WAITING, "pass").replace("while self.waiting and token_budget > 0", head))
    assert site[2] == ("queue_empty", "max_num_seqs")
