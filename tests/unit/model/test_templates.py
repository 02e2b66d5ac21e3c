"""Every template that stands in a call of ``say`` parses, and each of its places has a value.

mypy does not see names in templates. A place without an argument of its name must be a field of the evidence,
the second argument of ``say``. Its class is taken from annotations of parameters and locals, from calls of
classes and annotated functions, from fields of what is known, and from elements of lists and dicts of these.
"""

import ast
import importlib
import re
import types
from pathlib import Path
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

import schedtrace
from schedtrace.model.say import argument_names, parsed

HOUSE = Path(schedtrace.__file__).parent
MODULES = [
    path
    for path in sorted(HOUSE.rglob("*.py"))
    if re.search(r"\b(say|advise|(finding_of|(step|wait|limit)_finding))\(", path.read_text())
]
OPEN = types.SimpleNamespace
"""Its fields are known at run time only: the columns of a table's row. Parameters of a lambda, which have no
annotation, are taken for open, too: whoever shows the table that it stands in runs it."""
NOT_RESOLVED = {
    "finding_of(evidence, shown, values=values, **of_engine)": "``step_finding`` hands on its values",
    "step_finding(timeline, waits.steps, evidence, values=values, **of_wait)": "likewise",
    "wait_finding(timeline, waits, evidence, values=values, **fields)": "likewise",
    "wait_finding(timeline, waits, evidence, values=values, **full)": "likewise",
}
"""Template, or call, to the reason why nothing but a run can tell where its values come from."""

WORDS = ("title", "verdict", "holder", "message")
"""Fields of a finding that a template may be given for; ``example``, too, about a row of ``cases``."""
OF_A_FINDING = {"steps", "tokens", "share"}
OF_STEPS = OF_A_FINDING | {"trials"}
BUILDERS = {
    "finding_of": (0, OF_A_FINDING),
    "step_finding": (2, OF_STEPS),
    "wait_finding": (2, OF_STEPS),
    "limit_finding": (2, OF_STEPS),
    "advise": (1, {"option", "value"}),
}
"""Function to where its evidence stands and what its templates may name besides."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def faults(source: str, module: Any) -> list[str]:
    """What is wrong with the calls of ``say`` in a module whose template is literal, or a name of a literal.

    Args:
        source: Of the module.
        module: Of that name; or a function that imports it, called where a class must be known.
    """
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "say":
            continue
        for template in literals(call.args[0], tree):
            if template not in NOT_RESOLVED:
                found += _of_call(call, template, parents, module)
    return found + [fault for call in calls(tree) for fault in _of_builder(call, tree, parents, module)]


def calls(tree: ast.AST) -> list[ast.Call]:
    """Of the functions that take templates in place of sentences (``rules/common.py``)."""
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in BUILDERS
    ]


def _of_builder(call, tree, parents, module):
    """What is wrong with the templates of a finding or an advice; what is given by ``**`` is not seen."""
    place, known = BUILDERS[ast.unparse(call.func)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    evidence = keywords.get("evidence") or next(iter(call.args[place:]), None)
    values = keywords.get("values")
    if values is not None and not isinstance(values, ast.Dict):
        return [] if ast.unparse(call) in NOT_RESOLVED else [f"{ast.unparse(values)} is no dict as it stands"]
    known = (
        {*known, *(key.value for key in values.keys if isinstance(key, ast.Constant))}
        if values
        else {*known, *keywords}
    )
    sentences = {name: keywords[name] for name in (*WORDS, "example", "costs") if name in keywords}
    if ast.unparse(call.func) == "advise":
        sentences["words"] = call.args[0]
    scope = Scope(call, parents, module() if callable(module) else module)
    found = []
    for name, sentence in sentences.items():
        for template in literals(sentence, tree):
            missing = set(argument_names(parsed(template))) - known
            owners = scope.classes(evidence) if evidence is not None and missing else []
            if name == "example" and "cases" in keywords:  # about a row of these
                owners = [OPEN]
            if missing and not owners:
                found.append(f"{template!r}: where are {sorted(missing)} from?")
            found += [
                f"{template!r}: {owner.__name__} has no {one}"
                for owner in owners
                for one in sorted(missing)
                if not has(owner, one)
            ]
    return found


def literals(template: ast.expr, tree: ast.Module) -> list[str]:
    """The texts that a template may be, of a name its last assignment before; none: made at run time."""
    if isinstance(template, ast.IfExp):
        return literals(template.body, tree) + literals(template.orelse, tree)
    if isinstance(template, ast.Name):
        assigned = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == template.id
            and node.lineno <= template.lineno
        ]
        last = max(assigned, key=lambda node: node.lineno, default=None)
        return literals(last.value, tree) if last else []
    return [template.value] if isinstance(template, ast.Constant) and template.value is not None else []


def _of_call(call, template, parents, module):
    try:
        places = set(argument_names(parsed(template)))
    except ValueError as error:
        return [str(error)]
    given = {keyword.arg for keyword in call.keywords}
    found = [f"{template!r} has no place for {name}" for name in sorted(given - places - {None})]
    missing = sorted(places - given)
    if not missing or None in given:  # what ``**`` gives is checked by ``say`` itself
        return found
    if len(call.args) < 2:
        return [*found, f"{template!r} lacks {missing}"]
    scope = Scope(call, parents, module() if callable(module) else module)
    classes = scope.classes(call.args[1])
    if not classes:
        return [*found, f"{template!r}: of what class is {ast.unparse(call.args[1])}?"]
    lacking = [(one, name) for one in classes for name in missing if not has(one, name)]
    return [*found, *(f"{template!r}: {one.__name__} has no {name}" for one, name in lacking)]


def has(one: type, name: str) -> bool:
    return one is OPEN or hasattr(one, name) or name in get_type_hints(one)


class Scope:
    """What names stand for where a call stands.

    Args:
        node: The call.
        parents: Of each node of the module.
        module: With its globals.
    """

    def __init__(self, node: ast.AST, parents: dict[ast.AST, ast.AST], module: types.ModuleType) -> None:
        self._globals = vars(module)
        self._functions: list[Function] = []
        self._class: ast.ClassDef | None = None
        while node in parents:
            node = parents[node]
            if isinstance(node, Function):
                self._functions.append(node)
            elif isinstance(node, ast.ClassDef):
                self._class = self._class or node

    def classes(self, expression: ast.expr) -> list[type]:
        """All that an expression may be; empty: not known."""
        return classes(self._hint(expression))

    def _hint(self, expression: ast.expr) -> Any:
        if isinstance(expression, ast.IfExp):
            expression = expression.body
        if isinstance(expression, ast.Name):
            return self._of_name(expression.id)
        if isinstance(expression, ast.Attribute):
            return next((hint_of(one, expression.attr) for one in self.classes(expression.value)), None)
        if isinstance(expression, ast.Subscript):
            hint = self._hint(expression.value)
            return hint if isinstance(expression.slice, ast.Slice) else element(hint)
        if isinstance(expression, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            return list[
                self._hint(expression.value if isinstance(expression, ast.DictComp) else expression.elt)
            ]
        if isinstance(expression, ast.Call):
            return self._of_call(expression)
        return None

    def _of_call(self, call: ast.Call) -> Any:
        if isinstance(call.func, ast.Attribute) and call.func.attr in {"values", "items"}:
            value = element(self._hint(call.func.value))
            return list[value] if call.func.attr == "values" else list[tuple[Any, value]]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "pop":
            return element(self._hint(call.func.value))
        if isinstance(call.func, ast.Name) and call.func.id in {"sorted", "reversed", "max", "min", "next"}:
            of = self._hint(call.args[0])
            return of if call.func.id in {"sorted", "reversed"} else element(of)
        called = self._evaluated(call.func)
        if isinstance(called, type):
            return called
        returned = get_type_hints(called).get("return") if callable(called) else None
        return called.__self__ if returned is Self else returned

    def _of_name(self, name: str) -> Any:
        for function in self._functions:
            arguments = function.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if argument.arg == name and name == "self" and self._class:
                    return self._globals.get(self._class.name)
                if argument.arg == name and isinstance(function, ast.Lambda):
                    return OPEN
                if argument.arg == name:
                    return self._evaluated(argument.annotation)
            for node in ast.walk(function):
                hint = self._bound(node, name)
                if hint is not None:
                    return hint
        return type(self._globals[name]) if name in self._globals else None

    def _bound(self, node: ast.AST, name: str) -> Any:
        """What a statement or a loop makes of this name; None: nothing, or not known."""
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return self._evaluated(node.annotation)
        if isinstance(node, ast.NamedExpr) and node.target.id == name:
            return self._hint(node.value)
        if isinstance(node, ast.Assign) and mentions(node.targets[0], name):
            return None if mentions(node.value, name) else part(node.targets[0], self._hint(node.value), name)
        if isinstance(node, ast.For | ast.comprehension) and mentions(node.target, name):
            return (
                None if mentions(node.iter, name) else part(node.target, element(self._hint(node.iter)), name)
            )
        return None

    def _evaluated(self, expression: ast.expr | None) -> Any:
        if expression is None:
            return None
        text = expression.value if isinstance(expression, ast.Constant) else ast.unparse(expression)
        try:
            return eval(str(text), dict(self._globals))  # noqa: S307  # our own source
        except (NameError, AttributeError, TypeError):
            return None


def mentions(expression: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(expression))


def part(target: ast.expr, hint: Any, name: str) -> Any:
    """What a name within a target gets of a value of this type."""
    if isinstance(target, ast.Name):
        return hint if target.id == name else None
    if isinstance(target, ast.Tuple | ast.List):
        hint = next(iter(alternatives(hint)), None)
        inner = get_args(hint) if get_origin(hint) is tuple else ()
        pairs = zip(target.elts, inner or [element(hint)] * len(target.elts), strict=False)
        return next((found for one, of in pairs if (found := part(one, of, name)) is not None), None)
    return None


def element(hint: Any) -> Any:
    """Of a list or the like the type of an element; of a dict that of a value."""
    return next((get_args(one)[-1] for one in alternatives(hint) if get_args(one)), None)


def alternatives(hint: Any) -> list[Any]:
    """The parts of a union without None; a bound instead of its variable."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__
    parts = get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)
    return [one for one in parts if one not in {None, type(None)}]


def classes(hint: Any) -> list[type]:
    found = [get_origin(one) or one for one in alternatives(hint)]
    return found if all(isinstance(one, type) for one in found) else []


def hint_of(one: type, name: str) -> Any:
    """The type of a field or a property."""
    held = getattr(one, name, None)
    if isinstance(held, property):
        return get_type_hints(held.fget).get("return")
    return get_type_hints(one).get(name)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_every_template_parses_and_every_place_has_a_value(path):
    name = ".".join(path.relative_to(HOUSE.parent).with_suffix("").parts)
    assert faults(path.read_text(), lambda: importlib.import_module(name)) == []


class Inner(msgspec.Struct):
    steps: int

    @property
    def half(self) -> float:
        return self.steps / 2


class Outer(msgspec.Struct):
    parts: list[Inner]
    by_name: dict[str, Inner]
    one: Inner | None = None


TOY = types.ModuleType("toy")
vars(TOY).update(SimpleNamespace=OPEN, Inner=Inner, Outer=Outer, E=TypeVar("E", bound=Inner))


@pytest.mark.parametrize(
    "function",
    [
        "def f(e: Inner): say('{steps:n} {half:n1}', e)",
        "def f(e: Inner | None): say('{steps:n} {b}', e, b='x')",
        "def f(e: 'Inner | Outer'): say('x[{b}]', e, b='')",
        "def f(): e = Inner(1); say('{steps:n}', e)",
        "def f(o: Outer): say('{steps:n}', o.one)",
        "def f(o: Outer): e = o.parts[0]; say('{steps:n}', e)",
        "def f(o: Outer): return [say('{steps:n}', e) for e in sorted(o.parts)]",
        "def f(o: Outer): e = [p for p in o.parts if p]; say('{steps:n}', e[0])",
        "def f(o: Outer): e = next(p for p in o.parts if p); say('{steps:n}', e)",
        "def f(o: Outer): d = {p.steps: p for p in o.parts}; e = d.pop(1); say('{steps:n}', e)",
        "def f(o: Outer):\n for a, e in o.by_name.items(): say('{steps:n}', e)",
        "def f(e: E): say('{steps:n}', e)",
        "def f(**values): say('{a:n}', **values)",
        "f = lambda row: say('{a:n}', row)",
        "def f(): row = SimpleNamespace(**{'a': 1}); say('{a:n}', row)",
        "def f(template): say(template, a=1)",
        "T = 'a'\ndef f():\n T = '{b}'\n say(T, b='x')",
    ],
)
def test_a_call_whose_places_have_values_has_no_faults(function):
    assert faults(function, TOY) == []


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("say('{a')", "'{a': a bracket has no partner"),
        ("say('{a:x}', a=1)", "'{a:x}': 'x' is no kind of argument"),
        ("say('a', b=1)", "'a' has no place for b"),
        ("T = 'a'; say(T, b=1)", "'a' has no place for b"),
        ("say('{a:n}' if True else 'b', a=1)", "'b' has no place for a"),
        ("say('[{a:?}b]')", "'[{a:?}b]' lacks ['a']"),
        ("def f(e: Inner): say('{step:n}', e)", "'{step:n}': Inner has no step"),
        ("def f(e: Inner | Outer): say('{steps:n}', e)", "'{steps:n}': Outer has no steps"),
        ("def f(e): say('{steps:n}', e)", "'{steps:n}': of what class is e?"),
        ("def f(o: Outer): say('{parts:n}', o.one)", "'{parts:n}': Inner has no parts"),
    ],
)
def test_a_fault_is_named(function, fault):
    assert faults(function, TOY) == [fault]
