"""A user's scheduler class decides as ever when traced or attached to, and keeps nothing of ours."""

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig

from schedtrace.read.run import read_run
from schedtrace.record.disguise import RECORDERS, plain_class
from schedtrace.record.live.attachment import Attachment, RefusedError
from schedtrace.record.plugin import register
from schedtrace.record.traced import traced_or_plain
from schedtrace.simulate.driver import engine_config
from tests.contract.deciding import Deciding, first_difference, num_steps
from tests.contract.families import FAMILIES
from tests.contract.loads import make_script
from tests.contract.users_schedulers import CANNOT_BE_ATTACHED_TO, CLASSES, STEPS_ASIDE, Mistake, Plans
from tests.toys import Now, core_of

pytestmark = pytest.mark.vllm

STEPS, WINDOW = 24, (12, 20)
LOAD = FAMILIES["aborts"]
OPTIONS = {"IsAsync": {"async_scheduling": True}}
ENDS_EARLY = {"ChangesItsClass": 1}
"""Steps in the trace of a class that goes out of sight."""
ENDING = {
    "ChangesItsClass": ["schedtrace: recording stopped: the scheduler has given itself the class Phase"]
}


class Enduring(Deciding):
    """Goes on where its scheduler raises an error of its own, as long as that is the plain one's, too."""

    def schedule(self, *args):
        try:
            return super().schedule(*args)
        except Mistake as error:
            self.decisions.append({"raised": type(error)} | self._queues())
            return None

    def update(self):
        try:
            return super().update()
        except Mistake as error:
            self.decisions.append({"raised": type(error)} | self._queues())
            return {}

    def step(self, *args):
        self.schedule(*args)
        if len(self.in_flight) == self.depth:
            self.update()


def played(name, wrap=None, before=lambda _engine, _step: None):
    """An engine with a user's class, after a load."""
    kind = CLASSES[name]
    engine = Enduring(lambda _: wrap(kind) if wrap else kind, **LOAD.engine | OPTIONS.get(name, {}))
    for step, turn in enumerate(make_script(LOAD, 1, STEPS)):
        before(engine, step)
        for event in turn.events:
            event(engine)
        engine.step()
    return engine


def state(scheduler):
    """The names on the object itself, and its class."""
    slots = {name for owner in type(scheduler).__mro__ for name in getattr(owner, "__slots__", ())}
    return set(object.__getattribute__(scheduler, "__dict__")), slots, type(scheduler)


@pytest.fixture(scope="module")
def unrecorded():
    known = {}
    return lambda name: known.get(name) or known.setdefault(name, played(name))


def planned(scheduler):
    return (scheduler.plans, scheduler.kinds) if isinstance(scheduler, Plans) else None


@pytest.mark.parametrize("name", CLASSES)
def test_traced_from_its_beginning(name, unrecorded, recording, warnings):
    engine = played(name, traced_or_plain)
    assert first_difference(unrecorded(name).decisions, engine.decisions) is None
    assert planned(engine.scheduler) == planned(unrecorded(name).scheduler)
    if why := STEPS_ASIDE.get(name):
        assert (len(warnings), why in warnings[0], recording.exists()) == (1, True, False)
        return
    RECORDERS.look_up(engine.scheduler).close()
    assert warnings == ENDING.get(name, [])
    assert state(engine.scheduler)[0] == state(unrecorded(name).scheduler)[0]
    taken = num_steps(engine.decisions)
    assert read_run(recording).traces[0].steps.height == ENDS_EARLY.get(name, taken)


@pytest.mark.parametrize("name", CLASSES)
def test_attached_to_and_detached_from(name, unrecorded, tmp_path, warnings):
    steps, refused = [], []

    def visit(engine, step):
        if step == WINDOW[0]:
            engine.core = core_of(engine)
            engine.attachment = Attachment(engine.core, Now())
            try:
                engine.attachment.start_recording(tmp_path / "attached", None, hash_ids=False)
            except RefusedError as error:
                refused.append(str(error))
        if step == WINDOW[1] and not refused:
            engine.attachment.stop_recording()
        if WINDOW[0] <= step <= WINDOW[1]:
            steps.append(len(engine.decisions))

    engine = played(name, before=visit)
    assert first_difference(unrecorded(name).decisions, engine.decisions) is None
    assert planned(engine.scheduler) == planned(unrecorded(name).scheduler)
    assert state(engine.scheduler) == state(unrecorded(name).scheduler)
    assert RECORDERS.look_up(engine.scheduler) is None
    assert bool(refused) == (name in STEPS_ASIDE | CANNOT_BE_ATTACHED_TO), refused
    if not refused:
        taken = num_steps(engine.decisions[steps[0] : steps[-1]])
        assert read_run(tmp_path / "attached").traces[0].steps.height == ENDS_EARLY.get(name, taken)
    assert warnings == ENDING.get(name, [])


@pytest.mark.parametrize("name", ["HasAMetaclass", "HasItsOwnCopies", "Delegates"])
@pytest.mark.skipif(not hasattr(SchedulerConfig, "get_scheduler_cls"), reason="vLLM asks nobody")
@pytest.mark.usefixtures("recording")
def test_the_plugin_takes_any_class(name, warnings):
    register()
    chosen = engine_config(scheduler_cls=CLASSES[name]).scheduler_config.get_scheduler_cls()
    assert plain_class(chosen) is CLASSES[name]
    assert chosen is not CLASSES[name]
    assert warnings == []
