"""Scheduler classes as users write them: closed, copied, delegating, counting, raising."""

import abc
import copy
import copyreg
import pickle
import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler

from tests.contract.subclasses import timed

EVERY = 6
"""Steps between two plans."""


class Mistake(Exception):  # noqa: N818  # what a user's class raises
    """An error of a user's own."""


class Speechless(Mistake):
    """One that cannot be shown."""

    def __repr__(self):
        raise Mistake

    __str__ = __repr__


@contextmanager
def deep_enough():
    """vLLM's free blocks are a linked list."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class RefusesNewAttributes(Scheduler):
    """Closed once it is built."""

    _built = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._built = True

    def __setattr__(self, name, value):
        if self._built and name not in vars(self):
            raise Mistake(name)
        super().__setattr__(name, value)


class RefusesUnknownNames(Scheduler):
    """Closed from the beginning, as a class of Pydantic's."""

    def __setattr__(self, name, value):
        if "trace" in name:
            raise Mistake(name)
        super().__setattr__(name, value)

    def __getattr__(self, name):
        if "trace" in name:
            raise Mistake(name)
        raise AttributeError(name)


class RefusesDeletion(Scheduler):
    def __delattr__(self, name):
        raise Mistake(name)


class RefusesClasses(Scheduler):
    """Its class is nobody's to change."""

    def __setattr__(self, name, value):
        if name == "__class__":
            raise Mistake(name)
        super().__setattr__(name, value)


class HasSlots(Scheduler):
    __slots__ = ("plan", "steps_planned")

    def schedule(self, *args):
        self.plan = len(self.running)
        return super().schedule(*args)


class HasProperties(Scheduler):
    """A property in place of what vLLM sets."""

    @property
    def running(self):
        return vars(self)["mine"]

    @running.setter
    def running(self, value):
        vars(self)["mine"] = value


class LooksLikeAnother(Scheduler):
    """Scheduler that claims another class, as a mock with a ``spec`` does."""

    __class__ = property(lambda _: Scheduler)


class ChangesItsClass(Scheduler):
    """Has a class for each phase."""

    def schedule(self, *args):
        if self.current_step % EVERY == 0:
            self.__class__ = ChangesItsClass if isinstance(self, Phase) else Phase
        return super().schedule(*args)


class Phase(ChangesItsClass):
    pass


class Newest(FCFSRequestQueue):
    """The newest first."""

    def peek_request(self):
        return self[-1]

    def pop_request(self):
        return self.pop()


class HasAQueue(Scheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waiting = Newest()


class Plans(Scheduler):
    """Asks a copy of itself what it would do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.plans, self.kinds, self.is_copy = [], set(), False

    def copied(self):
        raise NotImplementedError  # each subclass copies itself in its own way

    def schedule(self, *args):
        if self.current_step % EVERY == 0 and not self.is_copy:
            self.plan(*args)
        return super().schedule(*args)

    def plan(self, *args):
        with deep_enough():
            ahead = self.copied()
        ahead.is_copy = True
        self.kinds.add(f"{type(ahead).__module__}.{type(ahead).__name__}")
        self.plans.append(len(ahead.schedule(*args).num_scheduled_tokens))


class CopiesDeeply(Plans):
    def copied(self):
        return copy.deepcopy(self)


class Pickles(Plans):
    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name not in _UNPICKLED}

    def copied(self):
        ahead = pickle.loads(pickle.dumps(self))  # noqa: S301  # its own
        vars(ahead).update({name: getattr(self, name) for name in _UNPICKLED if hasattr(self, name)})
        return ahead


_UNPICKLED = ("structured_output_manager", "vllm_config", "kv_metrics_collector")


class CopiesShallowly(Plans):
    def copied(self):
        return copy.copy(self)

    def plan(self, *_):
        ahead = self.copied()
        self.kinds.add(f"{type(ahead).__module__}.{type(ahead).__name__}")
        self.plans.append(ahead.get_num_unfinished_requests())


class ClonesItself(Plans):
    """By its class, as much code does."""

    def copied(self):
        ahead = self.__class__.__new__(self.__class__)
        ahead.__dict__.update(copy.deepcopy(self.__dict__))
        return ahead


class ClonesByType(Plans):
    def copied(self):
        ahead = type(self).__new__(type(self))
        ahead.__dict__.update(copy.deepcopy(self.__dict__))
        return ahead

    def plan(self, *args):
        super().plan(*args)
        self.kinds.clear()  # of a class that stands in for this one


class HasItsOwnCopies(Plans):
    """By methods for the purpose."""

    def __copy__(self):
        ahead = type(self).__new__(type(self))
        vars(ahead).update(vars(self))
        return ahead

    def __deepcopy__(self, memo):
        ahead = copy.copy(self)
        memo[id(self)] = ahead
        vars(ahead).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return ahead

    def copied(self):
        return copy.deepcopy(self)


class Reduces(Plans):
    def __reduce__(self):
        return _rebuilt, (type(self), vars(self))

    def copied(self):
        return copy.deepcopy(self)


def _rebuilt(kind, state):
    made = kind.__new__(kind)
    vars(made).update(state)
    return made


class Registered(Plans):
    """Scheduler with a reducer that is registered for its class."""

    def copied(self):
        return copy.deepcopy(self)


copyreg.pickle(Registered, lambda scheduler: (_rebuilt, (Registered, vars(scheduler))))


class PlansInTheMiddle(CopiesDeeply):
    """A decorated ``schedule()``, whose exits are inferred, copies itself while it is watched."""

    schedule = timed(Plans.schedule)


class RaisesBefore(Scheduler):
    def schedule(self, *args):
        if self.current_step % EVERY == 0 and not vars(self).pop("raised", False):
            self.raised = True
            raise Mistake
        return super().schedule(*args)


class RaisesAfter(Scheduler):
    """In the middle, as requests are taken: vLLM's own call is over, and nothing is undone."""

    def _update_after_schedule(self, *args):
        super()._update_after_schedule(*args)
        if self.current_step % EVERY == 0:
            raise Speechless


class RaisesInUpdates(Scheduler):
    def update_from_output(self, *args):
        told = super().update_from_output(*args)
        if self.current_step % EVERY == 0:
            raise Speechless
        return told


class Meta(type(Scheduler)):
    """Closes its classes, and counts their objects."""

    made = 0

    def __call__(cls, *args, **kwargs):
        Meta.made += 1
        return super().__call__(*args, **kwargs)

    def __setattr__(cls, name, value):
        if not name.startswith(("_abc", "__abstract", "__slotnames__")):
            raise Mistake(name)
        super().__setattr__(name, value)

    def __getattr__(cls, name):
        raise Mistake(name) if name == "scheduler_class_for" else AttributeError(name)

    def __repr__(cls):
        raise Mistake


class HasAMetaclass(Scheduler, metaclass=Meta):
    pass


class Final(Scheduler):
    """Has no subclasses."""

    def __init_subclass__(cls, **_):
        raise Speechless


_T = TypeVar("_T")


class IsGeneric(Scheduler, Generic[_T]):
    pass


class IsAsync(AsyncScheduler):
    pass


class HasNoHash(Scheduler):
    """Equal to all, true of none."""

    __hash__ = None

    def __eq__(self, _other):
        return True

    def __bool__(self):
        return False

    def __len__(self):
        return 0


class TakesMore(Scheduler):
    """Has parameters of its own, and names of its own for vLLM's."""

    def add_request(self, who, tenant=None):  # noqa: ARG002  # of its own
        super().add_request(request=who)

    def schedule(self, hold_back=False, *, hint=None):  # noqa: ARG002  # likewise
        return super().schedule(throttle_prefills=hold_back)

    def update_from_output(self, planned, sampled, *, strict=True):  # noqa: ARG002  # likewise
        return super().update_from_output(scheduler_output=planned, model_runner_output=sampled)

    def finish_requests(self, who, status, reason="none"):  # noqa: ARG002  # likewise
        return super().finish_requests(who, status)

    def _free_request(self, who, *args, **kwargs):
        return super()._free_request(*args, request=who, **kwargs)

    def _preempt_request(self, who, at, **of_later_releases):
        return super()._preempt_request(request=who, timestamp=at, **of_later_releases)


class CallsByNewNames(TakesMore):
    def schedule(self, *args):
        return TakesMore.schedule(self, *args, hint="x")

    def add_request(self, *args, **kwargs):
        return TakesMore.add_request(self, *args, tenant="t", **kwargs)

    def _preempt_request(self, *args, **kwargs):
        return TakesMore._preempt_request(self, *args, **kwargs)


class Counts(Scheduler):
    """Decides by how often its attributes were set or deleted."""

    sets = 0

    def __setattr__(self, name, value):
        vars(self)["sets"] = self.sets + 1
        super().__setattr__(name, value)

    def __delattr__(self, name):
        vars(self)["sets"] = self.sets + 1
        super().__delattr__(name)

    def schedule(self, *args):
        if self.sets % 3 == 0:
            self.running.reverse()
        return super().schedule(*args)


class HasThreads(Scheduler):
    """Looks at itself on a thread of its own, under a lock."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock, self.seen = threading.Lock(), 0

    def schedule(self, *args):
        with self.lock:
            planned = super().schedule(*args)
        looker = threading.Thread(target=self.look)
        looker.start()
        looker.join()
        return planned

    def look(self):
        with self.lock:
            self.seen += len(self.running)


class WrapsItself(Scheduler):
    """Puts methods on the object."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = 0
        self.schedule = partial(self.counted, self.schedule)

    def counted(self, schedule, *args):
        self.calls += 1
        return schedule(*args)


class HasAShadow(Scheduler):
    """Builds another one of its kind."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.given, self.shadow = (args, kwargs), None

    def schedule(self, *args):
        if self.shadow is None:
            given, named = self.given
            self.shadow = type(self)(*given, **named)
            self.shadow.shadow = self
        return super().schedule(*args)


class Delegates(SchedulerInterface):
    """Wraps vLLM's scheduler; none of its methods is inherited."""

    def __init__(self, *args, **kwargs):
        self.inner = Scheduler(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(vars(self)["inner"], name)


def _delegated(name):
    def method(self, *args, **kwargs):
        return getattr(self.inner, name)(*args, **kwargs)

    return method


for _name in {*SchedulerInterface.__abstractmethods__, *vars(SchedulerInterface)}:
    if not _name.startswith("_") and callable(getattr(SchedulerInterface, _name)):
        setattr(Delegates, _name, _delegated(_name))
Delegates.pause_state = property(lambda self: self.inner.pause_state)
abc.update_abstractmethods(Delegates)

STEPS_ASIDE: dict[str, Any] = {"Final": "could not be wrapped"}
"""Classes that nobody can record, and what is said."""
CANNOT_BE_ATTACHED_TO = {"WrapsItself": "schedule() is set on the object"}
"""Schedulers whose calls do not come to the class once they are built."""
CLASSES = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, SchedulerInterface) and kind.__module__ == __name__
    if kind not in {Plans, Phase}
}
