"""Made-up prompts share exactly the blocks that the load's prompts shared."""

from itertools import pairwise

import pytest

from schedtrace.workloads import LoadRequest, token_ids


def request(name, prompt, *prefix):
    return LoadRequest(request_id=name, arrived_us=0, prompt_tokens=prompt, output_tokens=1, prefix=prefix)


def test_a_known_block_is_its_number_and_the_rest_is_the_requests_own():
    ids = token_ids(request("a", 11, 7, 52), 4, vocabulary=20)
    assert ids[:8] == [7, 0, 0, 0, 2, 5, 0, 0]
    assert len(ids) == 11
    assert all(10 <= token < 20 for token in ids[8:])


def test_prompts_share_the_blocks_that_they_shared():
    first = token_ids(request("a", 64, 1, 2, 3), 16)
    same = token_ids(request("b", 64, 1, 2, 4), 16)
    assert first[:32] == same[:32]
    assert first[32:48] != same[32:48]
    assert first[48:] != same[48:]


def test_no_two_blocks_are_equal_unless_their_numbers_are():
    numbers = [0, 1, 999, 1000, 1001, 2**24 - 1]
    blocks = [tuple(token_ids(request("a", 16, number), 16)) for number in numbers]
    unknown = [tuple(token_ids(request(f"r{number}", 16), None)) for number in range(3000)]
    assert len({*blocks, *unknown}) == len(numbers) + 3000


def test_the_same_request_has_the_same_tokens():
    assert token_ids(request("a", 50, 3), 16) == token_ids(request("a", 50, 3), 16)


def test_a_prefix_may_end_within_a_block():
    ids = token_ids(request("a", 18, 5, 6), 16)
    assert ids == [5, *[0] * 15, 6, 0]


def test_prompts_that_share_nothing_differ_from_the_first_block_on():
    prompts = sorted(token_ids(request(f"r{number}", 16), None) for number in range(2000))
    assert all(one[:8] != other[:8] for one, other in pairwise(prompts))


def test_tokens_stay_within_the_vocabulary():
    assert max(token_ids(request("a", 600, 999, 10**15), 16, vocabulary=2000)) < 2000


@pytest.mark.parametrize(
    ("made", "block", "says"),
    [(request("a", 9, 1), None, "no size"), (request("a", 16, 1, 2), 16, "2 blocks, 16 prompt tokens")],
)
def test_a_prefix_that_does_not_fit_is_refused(made, block, says):
    with pytest.raises(ValueError, match=says):
        token_ids(made, block)
