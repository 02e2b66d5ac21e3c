"""Members of vLLM's classes that come from files of other packages."""

from functools import cached_property

import pytest

from schedtrace.record.vllms_own import _is_own_owner

HOMES = ("/site-packages/vllm/",)


def function_in(file):
    names = {}
    exec(compile("def function(self): return 1", file, "exec"), names)  # noqa: S102  # a file that is not there
    return names["function"]


@pytest.mark.parametrize("wrapped", [lambda function: function, property, staticmethod, cached_property])
@pytest.mark.parametrize(
    ("file", "own"),
    [("/site-packages/vllm/queue.py", True), ("<string>", True), ("/home/user/queue.py", False)],
)
def test_a_class_of_vllm_is_its_own_unless_a_function_is_from_another_file(wrapped, file, own):
    member = wrapped(function_in(file))
    vllms = type("Queue", (), {"__module__": "vllm.queue", "member": member})
    assert _is_own_owner(vllms, HOMES) is own
    users = type("Queue", (), {"__module__": "user.queue", "member": member})
    assert _is_own_owner(users, HOMES) is False
