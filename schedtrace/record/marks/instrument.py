"""Creation of a copy of ``schedule()`` that notes each exit, for every class that defines ``schedule()``.

The copy is the proven source with marks (``marking.py``), compiled as a part of its module, with the
original's globals, defaults and closure. It becomes the method of a class between the original's class and
the traced class. So nothing in vLLM is patched, and ``super()`` resolves as before.
"""

from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from schedtrace.record.marks.exits import SITES, Marks
from schedtrace.record.marks.marking import MARK, Marker
from schedtrace.record.marks.source import UnprovableError, copy_of, prove


@dataclass(frozen=True)
class Instrumented:
    """Result for the ``schedule()`` methods of a scheduler class."""

    classes: tuple[type, ...]
    """Subclasses with a ``schedule()`` that notes its exits, to be added to the bases."""
    refused: tuple[str, ...]
    """A line for each class that keeps its own ``schedule()``, with the reason."""
    sites: tuple[int, ...] = ()
    """Numbers of the marked places in the table of all sites."""


def instrument(base: type) -> Instrumented:
    """Instrument every ``schedule()`` that has exits of its own and that a call on ``base`` can reach.

    That is the first ``schedule()`` in the MRO, and each further one that earlier code can call through
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
        goes_on = goes_on or _asks_super(owner)
    if not classes and not refused:
        refused.append(
            f"{_name(base)}.schedule: it stops nowhere, and does not go on with super().schedule()"
        )
    return Instrumented(tuple(classes), tuple(refused), tuple(sites))


def _name(owner: type) -> str:
    return f"{owner.__module__}.{owner.__qualname__}"


def _asks_super(owner: type) -> bool:
    """Return whether a method of the class can call ``super().schedule()``: its code contains both names."""
    methods = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
    return any({"super", "schedule"} <= _mentioned(method.__code__) for method in methods)


def _mentioned(code: CodeType) -> set[str]:
    """Return the names and texts in a function and its nested functions."""
    names = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    within = [_mentioned(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return names.union(*within)


@cache
def _with_marks(owner: type) -> tuple[type | None, range]:
    """Return a subclass of ``owner`` with a marked copy of its ``schedule()``, and the numbers of its sites.

    Return None and no sites if it has no exits.
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
