"""Findings of other packages, named below an entry point group of theirs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path("docs/python.md")
SAMPLE = Path("tests/data/findings/head-of-line/shows")
POINTS = """
[schedtrace.findings]
absent = no_such_package:RULE
taken = failing_rule:TAKEN
failing = failing_rule:RULE
large-steps = large_steps:RULE
"""
FAILING = """
from schedtrace import Rule

def find(timeline):
    raise ValueError("no such column")

RULE = Rule(code="failing", summary="never found", needs=frozenset(), find=find)
TAKEN = Rule(code="kv-bound", summary="never found", needs=frozenset(), find=find)
"""


@pytest.fixture
def installed(tmp_path):
    """Return the environment of a command beside which a package of such findings is installed."""
    [example] = [
        code for code in re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "RULE" in code
    ]
    (tmp_path / "large_steps.py").write_text(example)
    (tmp_path / "failing_rule.py").write_text(FAILING)
    about = tmp_path / "large_steps-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: large-steps\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


TWO_COMMANDS = """
import sys
from schedtrace.cli.main import main

ended = [main([*words, "--format", "json"]) for words in (["findings"], ["analyze", sys.argv[1]])]
sys.exit(max(ended))
"""


def documents(environment):
    """Return what ``findings`` and ``analyze`` print in a process with this environment."""
    command = [sys.executable, "-c", TWO_COMMANDS, str(SAMPLE)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, end = json.JSONDecoder().raw_decode(ended.stdout)
    return first, json.loads(ended.stdout[end:])


def test_the_rule_of_the_page_is_judged_and_one_that_fails_is_named(installed):
    listed, analyzed = documents(installed)
    kinds = [kind["code"] for kind in listed["findings"]]
    assert kinds[-2:] == ["failing", "large-steps"]
    [run] = analyzed["runs"]
    [finding] = [finding for finding in run["findings"] if finding["code"] == "large-steps"]
    assert finding["evidence"]["requests"] >= 3
    assert finding["count"] == len(finding["steps"]) > 0
    problems = " ".join(problem["text"] for problem in run["problems"])
    assert "no_such_package" in problems
    assert "no such column" in problems
    assert "there is a finding kv-bound already" in problems
