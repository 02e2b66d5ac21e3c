"""Marked copies of ``schedule()``: a mark at every place where it stops, skips a request or cuts a chunk.

The copy is the proven source (``source.py``) with marks, compiled as a part of its module, with the
original's globals, defaults and closure. It becomes the method of a class between the original's class and
the traced class (``instrument``). Nothing in vLLM is patched, and ``super()`` resolves as before.

A mark is a call on the string ``MARK``, which the compiled copy replaces with an object. The only name that
is added to the function is ``BEFORE``, which holds a number of tokens while a limit is applied to it. A mark
gets only names that are certainly bound at its place. Places at which a request succeeds are not marked. A
worked example, in which the first site has number 5 and ``mark`` stands for the object::

    while self.waiting and token_budget > 0:
        if len(self.running) == self.max_num_running_reqs:
            break
        request = self.waiting.peek_request()
        num_new_tokens = min(request.num_tokens, token_budget)
        new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
        if new_blocks is None:
            break

====================================  ================================================================
statement                             marked copy
====================================  ================================================================
``while self.waiting and ...:``       ``while self.waiting:`` with ``if token_budget > 0:`` around the body;
                                      ``mark.end(self, 7, token_budget, None, None, 1)`` in the ``else`` of
                                      the ``if``, ``..., 0)`` in that of the ``while``; none where a list
                                      of running requests ends, if the waiting loop certainly follows
``break``                             ``mark.exit_at_head(self, 5, token_budget, None)`` before it
``num_new_tokens = min(...)``         no mark where the number is bound first; a later ``min`` that makes it
                                      smaller has ``BEFORE = num_new_tokens`` before it, and behind it
                                      ``if num_new_tokens < BEFORE: mark.cap(...)``
``break``, after a failed allocation  ``mark.allocation_refused(self, 6, token_budget, request, arguments)``
                                      before it, with the arguments of ``allocate_slots``
====================================  ================================================================

``exits.py`` describes what the object notes for each call.
"""

import ast
import copy
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from schedtrace.model.causes import Cause
from schedtrace.model.trace import ExitKind, Loop
from schedtrace.record.marks import guards, syntax
from schedtrace.record.marks.conditions import DecidedCondition, as_true, explained
from schedtrace.record.marks.exits import SITES, Marks, Site
from schedtrace.record.marks.source import Proven, UnprovableError, copy_of, prove

MARK = "schedtrace mark"
BEFORE = "_schedtrace_tokens_before"

_PADDING = frozenset({"pad_spec_decode", "padded_num_tokens", "num_spec_tokens"})
"""Names of token counts that are padded for draft tokens; a statement that reduces such a count is no cap."""

_OF_PARTS = frozenset({Cause.OTHER, Cause.SPEC_DECODE_PADDING, guards.QUEUE_OR_INPUT_BUDGET})
"""Causes of whole conditions whose parts may lead to different causes."""

_Limit = ast.Assign | ast.AugAssign
"""Statement that may reduce the number of tokens."""


@dataclass(frozen=True)
class _Scope:
    """Context of a statement while marks are inserted."""

    loop: Loop | None = None
    nested: bool = False
    """Whether the statement is in an inner loop, which allocates again after each preemption."""
    takes_head: bool = False
    """Whether the loop takes the first request of the queue (``while``) rather than all requests in turn
    (``for``).
    """
    tests: tuple[tuple[ast.expr, bool], ...] = ()
    """Conditions around the statement within the loop, outermost first, each with whether the statement
    is in its ``else`` part."""
    bound: frozenset[str] = frozenset()
    """Names that are certainly bound."""
    fresh: frozenset[str] = frozenset()
    """Names in ``bound`` that were bound in this iteration of the loop."""
    allocation: ast.Call | None = None
    """Call of ``allocate_slots`` that certainly precedes the statement in this iteration, with the same
    arguments."""

    def scope_after(self, node: ast.stmt) -> "_Scope":
        names = syntax.binds(node)
        simple = isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr)
        call = (simple and syntax.call_of(node, "allocate_slots")) or self.allocation
        if call and not syntax.rebinds(node).isdisjoint(syntax.names_in(call)):
            call = None
        return replace(self, bound=self.bound | names, fresh=self.fresh | names, allocation=call)

    def with_test(self, test: ast.expr, *, negated: bool) -> "_Scope":
        return replace(self, tests=(*self.tests, (test, negated)))

    def in_loop(self, node: ast.While | ast.For, loop: Loop) -> "_Scope":
        names = syntax.stores(node.target) if isinstance(node, ast.For) else frozenset[str]()
        if self.loop:
            return replace(self, nested=True, fresh=self.fresh | names)
        takes_head = isinstance(node, ast.While)
        return replace(self, loop=loop, takes_head=takes_head, tests=(), fresh=names, allocation=None)


class Marker:
    """Insertion of marks into one function, in place.

    Args:
        proven: Proven source of the function.
        first: Number of the function's first site in the table of all sites.
    """

    def __init__(self, proven: Proven, first: int) -> None:
        function = self._function = proven.node
        self.sites: list[Site] = []
        self._file = proven.file
        self._module = proven.function.__module__
        self._first = first
        parameters = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
        if not parameters:
            msg = "it does not name the scheduler as its first parameter"
            raise UnprovableError(msg)
        self._self = parameters[0]
        self._tokens = syntax.counted_tokens(function)
        self._request = syntax.allocated_request(function)
        self._blocks = syntax.allocated_blocks(function)
        self._victims = syntax.victim_names(function)
        self._peeked = syntax.assigned_from(function, "peek_request")
        self._decided: dict[int, DecidedCondition] = {}
        """Conditions whose parts are distinguished, by the id of their syntax node."""
        self._conditions: set[int] = set()
        """Ids of the conditions of an ``if`` or ``while`` that can be rewritten."""
        self._outcomes = frozenset[str]()
        """Flags that record how an earlier loop of allocations ended."""
        self._unbound = syntax.unbinds(function)
        self._goes_on = syntax.goes_on_to_waiting(function)
        function.body = self._block(function.body, _Scope(bound=frozenset(parameters)))
        ast.fix_missing_locations(proven.module)

    def _block(self, statements: list[ast.stmt], scope: _Scope) -> list[ast.stmt]:
        marked: list[ast.stmt] = []
        left = list(statements)
        while left:
            if scope.loop and (limits := self._limits(left, scope)):
                marked += self._cap(limits, scope.loop, scope)
                done = len(limits)
            else:
                before, after = self._statement(left[0], scope)
                marked += [*before, left[0], *after]
                done = 1
            for statement in left[:done]:
                scope = scope.scope_after(statement)
            left = left[done:]
        return marked

    def _limits(self, statements: list[ast.stmt], scope: _Scope) -> list[_Limit]:
        """Return the limits with which these statements begin: one limit, or a series of ``min`` statements.

        ``min(tokens, ...)`` never raises the number, so one comparison around the series shows whether any of
        them has reduced it.
        """
        limits: list[_Limit] = []
        for node in statements:
            if not isinstance(node, ast.Assign | ast.AugAssign) or not self._reduces(node, scope):
                break
            limits.append(node)
            if not syntax.is_min_of(node, self._tokens):
                break
            scope = scope.scope_after(node)
        if len(limits) > 1 and not syntax.is_min_of(limits[-1], self._tokens):
            limits.pop()
        return limits

    def _statement(self, node: ast.stmt, scope: _Scope) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Insert the marks within a statement; return the statements to put before and after it."""
        loop = scope.loop
        match node:
            case ast.If():
                self._if(node, scope)
            case ast.While() | ast.For():
                self._loop(node, scope)
            case ast.With():
                node.body = self._block(node.body, scope)
            case ast.Match():
                for case in node.cases:
                    case.body = self._block(case.body, scope.with_test(node.subject, negated=False))
            case ast.Try() | ast.TryStar():
                self._try(node, scope)
            case ast.Break() | ast.Continue() | ast.Return() if loop:
                return self._exit(node, loop, scope), []
            case ast.Expr(ast.Call() as call) if loop:
                return self._preemption(node, call, loop, scope)
            case _:
                pass
        return [], []

    def _if(self, node: ast.If, scope: _Scope) -> None:
        self._conditions.add(id(node.test))
        loop = None if scope.loop else syntax.first_loop(node.body)
        if loop == syntax.first_loop(node.orelse):
            loop = None  # one or the other is entered: neither way closes it
        node.body = self._block(node.body, scope.with_test(node.test, negated=False))
        node.orelse = self._block(node.orelse, scope.with_test(node.test, negated=True))
        if loop:
            node.orelse.insert(0, self._end(node, loop, "gate", scope, node.test))
        self._rewrite(node)

    def _loop(self, node: ast.While | ast.For, scope: _Scope) -> None:
        loop = scope.loop or syntax.loop_of(node)
        if loop is None or (scope.loop and syntax.call_of(node, "allocate_slots") is None):
            return  # a helper's loop: leaving it early stops nothing
        if scope.loop:
            self._outcomes |= syntax.outcomes(self._function, node, self._blocks)
        node.body = self._block(node.body, scope.in_loop(node, loop))
        if scope.loop:
            return
        if isinstance(node, ast.For):
            # Whom it skipped has been told, and more there is not.
            site = Site(loop, "condition", (guards.LOOP_DONE,), ast.unparse(node.iter), "")
            node.orelse.insert(0, self._done(node, loop, self._add(node, site)))
        elif not isinstance(node.test, ast.Constant):
            self._conditions.add(id(node.test))
            if node.orelse:
                node.orelse.insert(0, self._end(node, loop, "condition", scope, node.test))
                self._rewrite(node)
            else:
                self._nest(node, loop, scope)

    def _nest(self, node: ast.While, loop: Loop, scope: _Scope) -> None:
        """Nest the parts of the loop's condition; the body itself runs the same instructions as before.

        ``while a and b: body`` becomes ``while a: if b: body; else: mark; break; else: mark``.
        """
        condition = node.test
        [first, *following] = self._ends(node, loop, "condition", scope, condition)
        decided = self._decided[id(condition)]
        for place, mark in reversed([*enumerate(following, start=1)]):
            test, leave = (
                syntax.on_line_of(condition, decided.tests[place]),
                syntax.on_line_of(condition, ast.Break()),
            )
            node.body = [syntax.on_line_of(condition, ast.If(test, node.body, [mark, leave]))]
        node.test, node.orelse = syntax.on_line_of(condition, decided.tests[0]), [first]
        self._conditions.discard(id(condition))

    def _rewrite(self, node: ast.If | ast.While) -> None:
        """Make the condition keep the values that its marks need."""
        self._conditions.discard(id(node.test))
        if (decided := self._decided.get(id(node.test))) is not None:
            node.test = syntax.on_line_of(node.test, decided.test)

    def _decide(self, condition: ast.expr, *, holds: bool) -> DecidedCondition | None:
        """Return a condition's parts; None if it cannot be rewritten, or the other outcome needed it."""
        if id(condition) not in self._conditions:
            return None
        number = len(self._decided)
        decided = self._decided.setdefault(id(condition), DecidedCondition(condition, number, holds=holds))
        return decided if decided.holds is holds else None

    def _try(self, node: ast.Try | ast.TryStar, scope: _Scope) -> None:
        node.body = self._block(node.body, scope)
        for handler in node.handlers:
            caught = scope.with_test(handler.type or ast.Constant(value=True), negated=False)
            handler.body = self._block(handler.body, caught)
        node.orelse = self._block(node.orelse, scope)
        node.finalbody = self._block(node.finalbody, scope)

    def _exit(self, node: ast.stmt, loop: Loop, scope: _Scope) -> list[ast.stmt]:
        test, negated = scope.tests[-1] if scope.tests else (ast.Constant(value=True), False)
        if scope.nested and syntax.is_there(test, self._blocks, negated=negated):
            return []
        kind: ExitKind = "continue" if isinstance(node, ast.Continue) else "break"
        refuses_head = loop == "waiting" and kind == "break" and scope.takes_head
        bound = scope.fresh - self._unbound
        # The request in question: the allocation's argument, or what the code peeked at.
        name = next((name for name in (self._request, *self._peeked) if name in bound), "")
        budget, request = self._budget(scope), self._name(name, bound)
        cause = self._exit_cause(test, loop, scope)
        guarded = Site(loop, kind, (cause,), ast.unparse(as_true(test, holds=not negated)), "", refuses_head)
        if cause == guards.NOT_ELIGIBLE:
            which = _mark_call("why_not_eligible", ast.Name(self._self, ast.Load()), request)
            return [self._mark(node, guarded, "exit", budget, request, ast.Constant(None), which)]
        if cause == Cause.KV_BLOCKS and (arguments := syntax.repeated_arguments(scope.allocation)):
            return [self._mark(node, guarded, "allocation_refused", budget, request, arguments)]
        queue = self._name("request_queue", scope.fresh)
        site, details = self._with_part_causes(guarded, test, loop, scope, holds=not negated)
        if refuses_head and isinstance(request, ast.Constant):
            return [self._mark(node, site, "exit_at_head", budget, queue, *details)]
        return [self._mark(node, site, "exit", budget, request, queue, *details)]

    def _with_part_causes(
        self, site: Site, test: ast.expr, loop: Loop, scope: _Scope, *, holds: bool
    ) -> tuple[Site, list[ast.expr]]:
        """Return the site with a cause for each part of its condition, and the mark's arguments for them."""
        [cause] = site.causes
        if cause not in _OF_PARTS:
            return site, []
        decided = self._decide(test, holds=holds)
        if decided is None:
            true = as_true(test, holds=holds)
            guard = explained(self._function, test, true) if cause == Cause.OTHER else site.guard
            return replace(site, guard=guard), []
        whole = guards.registered(self._module, syntax.names_in(test))
        causes = tuple(
            part_cause
            if (part_cause := self._exit_cause(part, loop, scope)) != Cause.OTHER
            else whole or part_cause
            for part in decided.parts
        )
        return self._with_parts(replace(site, causes=causes), test, decided)

    def _with_parts(
        self, site: Site, test: ast.expr, decided: DecidedCondition
    ) -> tuple[Site, list[ast.expr]]:
        """Return the site with the texts of its parts, and the arguments of its mark.

        The arguments are the number of the part that decided, and the values that this part compared.
        """
        texts = []
        for place, (part, cause) in enumerate(zip(decided.parts, site.causes, strict=True)):
            true = as_true(part, holds=decided.holds)
            texts.append(ast.unparse(true) if cause != Cause.OTHER else explained(self._function, test, true))
            if cause == Cause.OTHER:
                decided.keep_values(place)
        if len(texts) == 1 and site.causes == (Cause.OTHER,):
            site = replace(site, guard=texts[0])
        arguments = [decided.which, decided.values] if any(decided.operands) else [decided.which]
        return replace(site, parts=tuple(texts), operands=decided.operands), arguments

    def _exit_cause(self, test: ast.expr, loop: Loop, scope: _Scope) -> str:
        enclosing = frozenset[str]().union(*(syntax.names_in(outer) for outer, _ in scope.tests[:-1]))
        names = syntax.names_in(test)
        if outcomes := names & self._outcomes:
            names = names - outcomes | {"new_blocks"}
        return guards.exit_cause(self._module, loop, names, enclosing)

    def _end(
        self, node: ast.stmt, loop: Loop, kind: ExitKind, scope: _Scope, condition: ast.expr
    ) -> ast.stmt:
        """Return the mark for a condition that was false; it records which part was false first."""
        site, details, queue = self._false(loop, kind, condition)
        return self._mark(node, site, "end", self._budget(scope), *queue, *details)

    def _ends(
        self, node: ast.stmt, loop: Loop, kind: ExitKind, scope: _Scope, condition: ast.expr
    ) -> list[ast.stmt]:
        """Return one mark for each part of a condition; each part may be the first to be false."""
        site, _, queue = self._false(loop, kind, condition)
        decided, number = self._decided[id(condition)], self._add(node, site)
        marks: list[ast.stmt] = []
        for place, values in enumerate(decided.kept):
            if site.causes[place] == guards.LOOP_DONE:
                marks.append(self._done(node, loop, number))
                continue
            which = [ast.Constant(place), *([values] if values.elts else [])]
            budget = self._budget(scope)
            marks.append(self._call(node, "end", ast.Constant(number), budget, *copy.deepcopy(queue), *which))
        return marks

    def _done(self, node: ast.stmt, loop: Loop, number: int) -> ast.stmt:
        """Return the mark for the end of a list; none if the end of the waiting loop already shows it."""
        if loop == "running" and self._goes_on:
            return syntax.on_line_of(node, ast.Pass())
        return self._call(node, "done", ast.Constant(number))

    def _false(
        self, loop: Loop, kind: ExitKind, condition: ast.expr
    ) -> tuple[Site, list[ast.expr], tuple[ast.expr, ast.expr]]:
        """Return the site of a false condition, its mark's arguments, and the loop's list and index."""
        site = Site(loop, kind, (Cause.OTHER,), ast.unparse(condition), "")
        decided = self._decide(condition, holds=False)
        if decided is None:
            return site, [], (ast.Constant(None), ast.Constant(None))
        causes = tuple(guards.end_cause(self._module, loop, syntax.names_in(part)) for part in decided.parts)
        return (
            *self._with_parts(replace(site, causes=causes), condition, decided),
            syntax.next_in_line(decided.parts[0]),
        )

    def _preemption(
        self, node: ast.Expr, call: ast.Call, loop: Loop, scope: _Scope
    ) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Mark a preemption: up to vLLM 0.11, ``schedule()`` preempts without ``_preempt_request``."""
        match call:
            case ast.Call(ast.Attribute(attr="_preempt_request")):
                victim = None
            case ast.Call(
                ast.Attribute(ast.Attribute(attr="kv_cache_manager"), "free"), [ast.Name(name)]
            ) if name in self._victims:
                victim = call.args[0]
            case _:
                return [], []
        arguments = syntax.repeated_arguments(scope.allocation)
        if arguments is None:
            return [], []
        site = Site(loop, None, (), ast.unparse(node), "")
        mark = self._mark(node, site, "preempts", self._name(self._request, scope.fresh), arguments)
        if victim is None:
            return [mark], []
        return [mark, self._call(node, "preempting", victim)], [self._call(node, "victim_preempted")]

    def _reduces(self, node: ast.Assign | ast.AugAssign, scope: _Scope) -> bool:
        """Return whether the number of tokens is certainly bound here, and the statement may reduce it."""
        if self._tokens not in syntax.binds(node) or self._tokens not in scope.bound - self._unbound:
            return False
        around = syntax.names_in(scope.tests[-1][0]) if scope.tests else frozenset[str]()
        if not _PADDING.isdisjoint(around | syntax.names_in(node)):
            return False
        return isinstance(node, ast.AugAssign) or self._tokens in around | syntax.names_in(node.value)

    def _cap(self, limits: list[_Limit], loop: Loop, scope: _Scope) -> list[ast.stmt]:
        """Return the statements and code that stores the number before each and compares it at the end."""
        now = ast.Name(self._tokens, ast.Load())
        saved_names = [BEFORE if not place else f"{BEFORE}_{place}" for place in range(len(limits))]
        sites = []
        marked: list[ast.stmt] = []
        for node, name in zip(limits, saved_names, strict=True):
            cause = guards.cap_of(self._module, loop, syntax.names_in(node.value))
            sites.append((node, Site(loop, None, (cause,), ast.unparse(node), "")))
            marked += [syntax.on_line_of(node, ast.Assign([ast.Name(name, ast.Store())], now)), node]
        about = [self._budget(scope), self._name(self._request, scope.fresh)]
        counts = [*(ast.Name(name, ast.Load()) for name in saved_names), now]
        first, site = sites[0]
        mark = self._mark(first, site, "cap", *about, *counts)
        for node, site in sites[1:]:
            self._add(node, site)
        check = ast.If(ast.Compare(now, [ast.Lt()], [counts[0]]), [mark], [])
        return [*marked, syntax.on_line_of(limits[-1], check)]

    def _budget(self, scope: _Scope) -> ast.expr:
        return self._name("token_budget", scope.bound)

    def _name(self, name: str, bound: frozenset[str]) -> ast.expr:
        return ast.Name(name, ast.Load()) if name in bound - self._unbound else ast.Constant(None)

    def _mark(self, node: ast.stmt, site: Site, method: str, *arguments: ast.expr) -> ast.stmt:
        return self._call(node, method, ast.Constant(self._add(node, site)), *arguments)

    def _call(self, node: ast.stmt, method: str, *arguments: ast.expr) -> ast.stmt:
        """Return a statement on the line of ``node`` that calls a mark with the scheduler and arguments."""
        return syntax.on_line_of(
            node, ast.Expr(_mark_call(method, ast.Name(self._self, ast.Load()), *arguments))
        )

    def _add(self, node: ast.stmt, site: Site) -> int:
        """Add a site, and return its number."""
        self.sites.append(replace(site, location=f"{self._file}:{node.lineno}"))
        return self._first + len(self.sites) - 1


def _mark_call(method: str, *arguments: ast.expr) -> ast.Call:
    """Return a call of a method of the object that replaces ``MARK``."""
    return ast.Call(ast.Attribute(ast.Constant(MARK), method, ast.Load()), [*arguments], [])


@dataclass(frozen=True)
class Instrumented:
    """Result of instrumenting the ``schedule()`` methods of a scheduler class."""

    classes: tuple[type, ...]
    """Subclasses with a ``schedule()`` that records its exits, to be added to the bases."""
    refused: tuple[str, ...]
    """Line with the reason for each class that keeps its own ``schedule()``."""
    sites: tuple[int, ...] = ()
    """Numbers of the marked places in the table of all sites."""


def instrument(base: type) -> Instrumented:
    """Instrument every ``schedule()`` that a call on ``base`` can reach and that has exits of its own.

    These are the first ``schedule()`` in the MRO, and each further one that earlier code can call through
    ``super()``.
    """
    classes: list[type] = []
    refused: list[str] = []
    sites: list[int] = []
    goes_on = True
    for owner in base.__mro__:
        method = vars(owner).get("schedule")
        if method is not None and goes_on and not getattr(method, "__isabstractmethod__", False):
            goes_on = False
            try:
                marked_class, numbers = _with_marks(owner)
            except Exception as error:
                reason = error if isinstance(error, UnprovableError) else repr(error)
                refused.append(f"{_name(owner)}.schedule: {reason}")
                goes_on = True  # for all that is known
                continue
            if marked_class is not None:
                classes.append(marked_class)
                sites += numbers
        # A method can call ``super().schedule()`` if its code contains both names.
        methods = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
        goes_on = goes_on or any({"super", "schedule"} <= _mentioned(method.__code__) for method in methods)
    if not classes and not refused:
        refused.append(
            f"{_name(base)}.schedule: it stops nowhere, and does not go on with super().schedule()"
        )
    return Instrumented(tuple(classes), tuple(refused), tuple(sites))


def _name(owner: type) -> str:
    return f"{owner.__module__}.{owner.__qualname__}"


def _mentioned(code: CodeType) -> set[str]:
    """Return the names and texts in a function and its nested functions."""
    names = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    within = [_mentioned(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return names.union(*within)


@cache
def _with_marks(owner: type) -> tuple[type | None, range]:
    """Return a subclass of ``owner`` with a marked copy of its ``schedule()``, and the numbers of its sites.

    Return None and no sites if the method has no exits.
    """
    proven = prove(vars(owner)["schedule"])
    original, code = proven.function, proven.function.__code__
    marker = Marker(proven, len(SITES))
    if not marker.sites:
        return None, range(0)
    copied = copy_of(original, _with_constant(proven.compiled(), MARK, Marks))
    numbers = range(len(SITES), len(SITES) + len(marker.sites))

    def schedule(self: Any, *args: object, **kwargs: object) -> Any:
        if owner.__dict__.get("schedule") is original and original.__code__ is code:
            return copied(self, *args, **kwargs)
        # Somebody replaced the method, or its code, after this copy was made: theirs is the one that counts.
        return super(marked_class, self).schedule(*args, **kwargs)

    marked_class: Any = type(
        f"Marked{owner.__name__}", (owner,), {"schedule": schedule, "__module__": __name__}
    )
    SITES.extend(marker.sites)
    return marked_class, numbers


def _with_constant(code: CodeType, name: str, value: Any) -> CodeType:
    """Return ``code`` with the constant ``name`` replaced, also in nested functions."""
    constants = tuple(
        value
        if isinstance(constant, str) and constant == name
        else _with_constant(constant, name, value)
        if isinstance(constant, CodeType)
        else constant
        for constant in code.co_consts
    )
    return code.replace(co_consts=constants)
