"""What is mutated, and that a mutant is one edit."""

from pathlib import Path

from tools.mutants.__main__ import copied
from tools.mutants.mutations import mutants, sample

SOURCE = b'''"""Docs with 1 == 2."""
LIMIT = 5

def f(a: "Literal[3]", b):
    """Docs."""
    logger.info("more than", 7)
    self.total += a
    c = f"{a == 1}"
    if a is not None and b <= 2:
        return Cause.KV_BLOCKS
    return Cause.OTHER
'''


def edits(source):
    return {(m.line, m.operator, m.before, m.after) for m in mutants(Path("m.py"), source)}


def test_each_operator_makes_its_edits():
    assert edits(SOURCE) == {
        (7, "line dropped", "self.total += a", "pass"),
        (9, "comparison flipped", "is not", "is"),
        (9, "comparison flipped", "<=", ">"),
        (9, "off by one", "<=", "<"),
        (9, "off by one", "2", "3"),
        (10, "cause swapped", "Cause.KV_BLOCKS", "Cause.OTHER"),
        (11, "cause swapped", "Cause.OTHER", "Cause.KV_BLOCKS"),
    }


def test_a_mutant_changes_its_place_and_nothing_else():
    [mutant] = [m for m in mutants(Path("m.py"), SOURCE) if m.before == "is not"]
    assert mutant.applied(SOURCE) == SOURCE.replace(b"is not None", b"is None")


def test_a_statement_of_several_lines_is_dropped_as_a_whole():
    assert edits(b"def f():\n    g(\n        h,\n    )\n") == {
        (2, "line dropped", "g(\n        h,\n    )", "pass")
    }


def test_the_only_cause_of_a_module_becomes_other():
    assert edits(b"def f():\n    return Cap.LORA\n") == {(2, "cause swapped", "Cap.LORA", "Cap.OTHER")}


def test_a_sample_takes_the_operators_in_turn_and_is_the_same_for_the_same_seed(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "m.py").write_bytes(SOURCE)
    taken = sample(tmp_path, "package", 4, seed=1)
    assert {mutant.operator for mutant in taken} == {
        "comparison flipped",
        "off by one",
        "line dropped",
        "cause swapped",
    }
    assert sample(tmp_path, "package", 4, seed=1) == taken
    assert len(sample(tmp_path, "package", 100, seed=1)) == 7


def test_the_copy_lacks_what_runs_leave_at_the_root_and_keeps_packages_of_that_name(tmp_path):
    names = ["schedtrace/demo/run.json", "schedtrace/__pycache__/a.pyc", "demo/page.html", ".venv/python"]
    for name in names:
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.touch()
    tree = copied(tmp_path / "tree", tmp_path / "root")
    assert [str(path.relative_to(tree)) for path in tree.rglob("*.*")] == ["schedtrace/demo/run.json"]
