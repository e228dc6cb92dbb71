"""Tasks that are put together into every shape of canvas; each tells that its body ran."""

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import chain, chord, group

from celery_dlock import SingletonTask, singleton_task
from tests.support.apps.base import make_app

app = make_app(
    "canvas",
)

RAN = "canvas-ran"


def member(*words: Any) -> str:
    """The value that a canvas passes on comes first, and the name that the test gave to this member last."""
    return str(words[-1])


def ran(*words: Any) -> list[Any]:
    backend: Any = app.backend  # Redis
    backend.client.rpush(RAN, member(*words))
    return [member(*words), *words[:-1]]


@singleton_task(app=app, key=member)
def step(*words: Any) -> list[Any]:
    return ran(*words)


@singleton_task(app=app, key=member, ignore_result=True)
def quiet(*words: Any) -> list[Any]:
    return ran(*words)


@singleton_task(app=app, key=member, skip_result="kept")
def keeping(*words: Any) -> list[Any]:
    return ran(*words)


@singleton_task(app=app, key=member, on_conflict="raise")
def loud(*words: Any) -> list[Any]:
    return ran(*words)


@singleton_task(app=app)
def told(name: str) -> list[Any]:
    """An errback; one that took more than one argument would be called in the failing task, not sent."""
    return ran(name)


@singleton_task(app=app, key=member, bind=True)
def into_step(self: SingletonTask, *words: Any) -> Any:
    return self.replace(step.s(member(*words)))


@singleton_task(app=app, key=member, bind=True)
def into_chain(self: SingletonTask, *words: Any) -> Any:
    name = member(*words)
    return self.replace(chain(named(sibling(name, "before")), step.s(name)))


@singleton_task(app=app, key=member, bind=True)
def into_group(self: SingletonTask, *words: Any) -> Any:
    name = member(*words)
    return self.replace(group(named(sibling(name, "held")), named(sibling(name, "beside"))))


def named(name: str) -> Any:
    return step.s(name).set(task_id=name)


def sibling(name: str, other: str) -> str:
    return f"{name.rpartition('-')[0]}-{other}"


@app.task
def mark() -> None:
    """Once it has run, all that was published before it has: the worker has one process."""


class Names(dict[str, Any]):
    """Resolve a name in a shape: a canvas, a modifier of a member, or else a member of that name.

    Args:
        prefix: Told from all other shapes by it, a member's name is the id of its task and what is locked.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(chain=chain, group=group, chord=chord, linked=self.linked)
        self.prefix = prefix
        self["ignored"] = lambda member: member.set(ignore_result=True)
        self["stamped"] = lambda canvas: (canvas.stamp(by="test"), canvas)[1]
        for task in (quiet, keeping, loud, into_step, into_chain, into_group):
            self[task.__name__] = partial(self.made_of, task.s)

    def __missing__(self, name: str) -> Any:
        return named(self.prefix + name)

    def linked(self, member: Any, link: Any, errback: Any) -> Any:
        return member.set(link=[link], link_error=[self.made_of(told.si, errback)])

    def made_of(self, signature: Callable[..., Any], member: Any) -> Any:
        return signature(*member.args).set(task_id=member.id)
