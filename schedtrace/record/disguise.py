"""Temporary change of the class of a user's object, without setting anything on the object.

A class may refuse attributes or their deletion, copy all attributes of its objects, or read their
``__class__``. Facts about an object are therefore kept in a separate table (``Beside``), its class is
assigned without calling any of its methods, and the object looks and copies like an object of its original
class (``disguises``).
"""

import copyreg
import weakref
from functools import cache
from typing import Any, Generic, TypeVar

PLAIN = "_schedtrace_plain"
"""Name of the attribute of a traced class that holds the plain class that it replaces."""

set_class: Any = vars(object)["__class__"].__set__
"""Function that assigns an object's class as plain Python does, even if the object's class overrides
assignment."""

_T = TypeVar("_T")


class Beside(Generic[_T]):
    """Facts about objects, stored by the objects' identity and dropped when an object is deleted.

    No hash or attribute of an object is read. An object that does not support weak references is kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, _T] = {}
        self._alive: dict[int, Any] = {}
        self.by_id = self._known.get
        """Fastest look-up: ``by_id(id(thing))``."""

    def look_up(self, thing: Any) -> _T | None:
        """Return the facts about an object."""
        return self._known.get(id(thing))

    def __getitem__(self, thing: Any) -> _T:
        return self._known[id(thing)]

    def store(self, thing: Any, value: _T) -> None:
        """Store facts about an object."""
        number = id(thing)
        try:
            self._alive[number] = weakref.ref(thing, lambda _: self._forget(number))
        except TypeError:
            self._alive[number] = thing
        self._known[number] = value

    def drop(self, thing: Any) -> None:
        """Forget the facts about an object."""
        self._forget(id(thing))

    def _forget(self, number: int) -> None:
        self._known.pop(number, None)
        self._alive.pop(number, None)


RECORDERS: Beside[Any] = Beside()
"""Recorder (``Recorder``) of each recorded scheduler."""


def plain_class(kind: type) -> type:
    """Return the plain class that a traced class replaces; for any other class, the class itself."""
    plain: type = vars(kind).get(PLAIN, kind)
    return plain


def disguises(base: type, root: type) -> list[type]:
    """Return classes with which an object of a subclass of ``base`` looks and copies like one of ``base``.

    Args:
        base: The plain class.
        root: The base of these classes.
    """
    shows, reduces, copies, deep = _disguises(root)
    own = any("__class__" in vars(owner) for owner in base.__mro__[:-1])
    classes = [reduces] if own else [shows, reduces]
    classes += [copies] if hasattr(base, "__copy__") else []
    return classes + ([deep] if hasattr(base, "__deepcopy__") else [])


@cache
def _disguises(root: type) -> tuple[type, ...]:
    class Shows(root):  # type: ignore[misc]  # mypy knows no class that is found at run time
        """Class whose objects report the plain class as ``__class__``, for code that makes copies by it."""

        __slots__ = ()
        __class__ = property(lambda self: plain_class(type(self)), _given)  # as mocks do

    class Reduces(root):  # type: ignore[misc]  # likewise
        """Class whose objects are copied and pickled as objects of the plain class."""

        __slots__ = ()

        def __reduce_ex__(self, protocol: Any) -> Any:
            kind: Any = type(self)  # hashable, as every class
            plain = plain_class(kind)
            reducer: Any = copyreg.dispatch_table.get(plain)
            reduced = super().__reduce_ex__(protocol) if reducer is None else reducer(self)
            if not isinstance(reduced, tuple) or plain is kind:
                return reduced
            make, arguments, *rest = reduced
            named = tuple(plain if argument is kind else argument for argument in arguments)
            return (plain if make is kind else make, named, *rest)

    class Copies(root):  # type: ignore[misc]  # likewise
        """Class whose objects are copied with their own copy method."""

        __slots__ = ()

        def __copy__(self, *args: object, **kwargs: object) -> Any:
            return _as_plain(super().__copy__(*args, **kwargs), self)

    class CopiesDeeply(root):  # type: ignore[misc]  # likewise
        """Class whose objects are deep-copied with their own method."""

        __slots__ = ()

        def __deepcopy__(self, *args: object, **kwargs: object) -> Any:
            return _as_plain(super().__deepcopy__(*args, **kwargs), self)

    return Shows, Reduces, Copies, CopiesDeeply


def _given(thing: Any, kind: type) -> None:
    """Assign the class that a user's code chose, and notify the recorder that recording ends."""
    if kind is plain_class(type(thing)):
        return
    set_class(thing, kind)
    if (recorder := RECORDERS.look_up(thing)) is not None:
        recorder.class_changed(kind)


def _as_plain(copied: Any, original: Any) -> Any:
    if copied is not original and type(copied) is type(original):
        set_class(copied, plain_class(type(copied)))
    return copied
