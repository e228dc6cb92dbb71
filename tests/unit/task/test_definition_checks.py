"""A function that Celery cannot run as a task's body is refused where the task is defined."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, current_app

from celery_dlock import InvalidLockOptions, LockOptions, SingletonTask, singleton_task

app = Celery("bodies", set_as_current=False)


async def coroutine(number: int) -> int:
    return number


async def generator(number: int) -> AsyncIterator[int]:
    yield number


class Callee:
    __name__ = "callee"

    async def __call__(self, number: int) -> int:
        return number


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return run


def as_decorated(body: Any) -> Any:
    return singleton_task(app=app, name="shop.bill")(body)


def as_base(body: Any) -> Any:
    return app.task(base=SingletonTask, name="shop.bill", lock_options=LockOptions(), lazy=False)(body)


def as_shared(body: Any) -> Any:
    return singleton_task(name="shop.bill")(body)


@pytest.mark.parametrize(
    ("define", "body"),
    [
        *((define, body) for define in (as_decorated, as_shared, as_base) for body in (coroutine, generator)),
        # Celery itself takes neither of these without a name of its own.
        *((define, body) for define in (as_decorated, as_shared) for body in (Callee(), partial(coroutine, 1))),
    ],
)
def test_async_body_is_refused_with_the_remedy(define: Any, body: Any) -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        define(body)
    assert str(refused.value) == (
        "task 'shop.bill': invalid body: Celery never awaits an async def function. Use a plain function that runs "
        "it with asyncio.run(...) or asgiref's async_to_sync"
    )


@pytest.mark.parametrize("define", [as_decorated, as_shared, as_base])
def test_a_body_with_yield_is_refused(define: Any) -> None:
    """Celery would take the generator for its result, and never run it."""

    def rows(number: int) -> Iterator[int]:
        yield number

    with pytest.raises(InvalidLockOptions, match=r"task 'shop\.bill': invalid body: Celery never runs a function"):
        define(rows)


def test_an_async_run_of_a_class_is_refused_when_the_task_is_made() -> None:
    class Bill(SingletonTask):
        name = "shop.bill_class"

        async def run(self, number: int) -> int:
            return number

    with pytest.raises(InvalidLockOptions, match=r"task 'shop\.bill_class': invalid body: .* async def"):
        Bill()


def test_async_run_of_a_nameless_class_is_refused() -> None:
    class Nameless(SingletonTask):
        async def run(self, number: int) -> int:
            return number

    with pytest.raises(InvalidLockOptions, match=r"Nameless': invalid body: .* async def"):
        Nameless()


def test_async_body_behind_pydantic_wrapper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", SimpleNamespace(BaseModel=dict))
    with pytest.raises(InvalidLockOptions, match=r"invalid body: .* async def"):
        app.task(base=SingletonTask, name="shop.modelled", pydantic=True, lazy=False)(coroutine)


def test_a_plain_function_around_an_async_one_is_a_body_and_runs() -> None:
    made = singleton_task(app=Celery("plain", set_as_current=False), name="shop.bill")(plain(coroutine))
    assert made(7) == 7


def lonely() -> None: ...


def by_name_only(*, number: int) -> None: ...


@pytest.mark.parametrize("define", [singleton_task, partial(app.task, base=SingletonTask, lazy=False)])
@pytest.mark.parametrize("body", [lonely, by_name_only])
def test_bound_function_without_a_self_argument_is_refused_with_the_tasks_name(define: Any, body: Any) -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        define(name=f"shop.{body.__name__}", bind=True)(body)
    assert str(refused.value) == (
        f"task 'shop.{body.__name__}': {body.__name__}() has no argument for the task itself. "
        "Add self as its first argument, or remove bind=True"
    )


def test_a_run_without_self_is_refused_with_the_tasks_name() -> None:
    class Selfless(SingletonTask):
        name = "shop.selfless"

        def run() -> None: ...  # type: ignore[misc]  # the mistake

    with pytest.raises(InvalidLockOptions, match=r"task 'shop\.selfless': run\(\) has no argument for the task itself"):
        Selfless()


def test_bound_function_with_var_args_is_accepted() -> None:
    def collects(*numbers: int) -> int:
        return len(numbers)

    made = singleton_task(app=Celery("all", set_as_current=False), name="shop.all", bind=True, key=["numbers"])(
        collects
    )
    assert made.lock_name(1, 2) == made.lock_name(1, 2) != made.lock_name(1)


@pytest.mark.parametrize("define", [as_decorated, as_shared])
def test_class_as_body_is_refused_with_the_remedy(define: Any) -> None:
    class Bill(SingletonTask):
        def run(self) -> None: ...

    with pytest.raises(InvalidLockOptions) as refused:
        define(Bill)
    assert str(refused.value) == (
        "task 'shop.bill': invalid body: Bill is a class. Use a function, or app.register_task(Bill()) "
        "of a class that derives from SingletonTask and has a run method"
    )


@pytest.mark.parametrize("define", [as_decorated, as_shared])
@pytest.mark.parametrize("lazy", [True, False])
def test_a_task_is_refused_as_a_body(define: Any, lazy: bool) -> None:
    """Celery would find its name taken, and give the plain task back."""
    with pytest.raises(InvalidLockOptions) as refused:
        define(Celery("another", set_as_current=False).task(lazy=lazy)(lonely))
    assert str(refused.value) == (
        "task 'shop.bill': invalid body: it is a task already. Use @singleton_task alone, above the function"
    )


@pytest.mark.parametrize("given", ["shop", 7, SingletonTask])
def test_invalid_app_is_refused_with_expected_values(given: Any) -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        singleton_task(app=given, name="shop.bill")(lonely)
    told = f"task 'shop.bill': invalid app={given!r}: expected a Celery app, or none for a shared task"
    assert str(refused.value) == told


def test_current_app_proxy_is_accepted() -> None:
    assert singleton_task(app=current_app, name="shop.current")(lonely).name == "shop.current"


@pytest.mark.parametrize("given", [(app,), ("shop",), (lonely, app)])
def test_positional_decorator_argument_is_refused_with_the_remedy(given: Any) -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        singleton_task(*given)
    assert str(refused.value) == (
        f"invalid @singleton_task({', '.join(map(repr, given))}): expected @singleton_task, or options by "
        "keyword only, such as @singleton_task(app=app, ttl=30)"
    )
