"""The state of one dashboard: its app, ``LockControl``, templates and counts. And a request for one of its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode

import jinja2
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ..control import Counts, Health, LockControl, LockView, Page, Workers
from ..errors import StoreUnavailable
from ..reports import tables
from ..reports.actions import ACTIONS
from ..reports.checks import Check, checks_of
from ..reports.documents import iso
from ..reports.durations import parse_duration, shown_duration
from ..runtime import BREAKER_RESET, Runtime
from . import csrf
from .access import Access, User, rights_of, user_of
from .charts import HEIGHT, WIDTH
from .page_threads import PageThreads
from .samples import Sampler
from .shared import Shared

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["FOLDER", "DashboardState", "Visit", "root_of"]

T = TypeVar("T")

FOLDER: Final = Path(__file__).parent
#: Seconds for which the counts are kept: counting scans the store.
COUNTS_KEPT: Final = 5.0
#: Seconds for which the answer to a probe is kept.
PROBE_KEPT: Final = 1.0
#: The answers of workers are asked for again after ANSWERS_KEPT seconds. If the new ones take long, pages show the old
#: ones until these are ANSWERS_STALE seconds old.
ANSWERS_KEPT, ANSWERS_STALE = 15.0, 60.0


class DashboardState:
    """The state of one dashboard between requests.

    Args:
        app: The Celery app.
        access: Returns the rights of a request.
        user: Returns the name of the user of a request; None for the user that a middleware authenticated.
    """

    def __init__(self, app: Celery, access: Access, user: User | None) -> None:
        self.app = app
        self.control = LockControl(app)
        settings = Runtime.of(app).settings
        self.store = ", ".join(location.shown for location in settings.locations)
        self.timeout = settings.timeout
        self.threads = PageThreads(settings.timeout, BREAKER_RESET)
        #: Whether the store answers.
        self.probe = Shared("probe", lambda: self.control.health().up, PROBE_KEPT)
        self._access = access
        self._user = user
        self._counts = Shared("count-for-pages", self.control.counts, COUNTS_KEPT)
        self._workers = Shared("ask-workers-for-pages", self.control.workers, ANSWERS_KEPT, ANSWERS_STALE)
        #: The last hour, for the charts.
        self.sampler = Sampler(self.control, self.workers)
        self._templates = _templates()

    async def visit(self, request: Request) -> Visit:
        """Return a request with its rights.

        Raises:
            HTTPException: 403, it may not read.
        """
        rights = await rights_of(self._access, request)
        if rights is None:
            raise HTTPException(403, "You have no access to this dashboard.")
        return Visit(self, request, rights, await user_of(self._user, request))

    def health(self) -> Health:
        """Return how the store is set up.

        Raises:
            StoreUnavailable: It does not answer.
        """
        found = self.control.health()
        if not found.up:
            raise StoreUnavailable(found.error)
        return found

    def counts(self) -> Counts:
        """Return the counts of everything in the store, at most 5 s old. Requests that wait for them share an error."""
        return self._counts.attempt().answer.result()

    def forget_counts(self) -> None:
        """Forget the counts after a change, so that the next page counts again."""
        self._counts.forget()

    def checks(self) -> list[Check]:
        """Return the checks that ``celery dlock check`` does."""
        return checks_of(self.app, self.health(), self.counts(), self.workers())

    def workers(self, within: float = 0.0) -> Workers | None:
        """Return what live workers answered, at most a minute ago.

        Args:
            within: Seconds to wait for answers, if there are none yet.

        Returns:
            The answers; None if there are none yet.
        """
        return self._workers.result(within)

    def tasks(self) -> Mapping[str, Any]:
        """Return the singleton tasks of the app by name, after their modules were imported."""
        self.app.loader.import_default_modules()
        self.app.finalize()
        return {name: task for name, task in sorted(self.app.tasks.items()) if hasattr(task, "lock_options")}

    def render(self, template: str, **values: Any) -> str:
        """Return a page."""
        return self._templates.get_template(template).render(values)


@dataclass(frozen=True)
class Visit:
    """A request for a page.

    Args:
        dashboard: The dashboard.
        request: The request.
        may: The actions that it may do.
        user: The name of its user.
    """

    dashboard: DashboardState
    request: Request
    may: frozenset[str]
    user: str

    @property
    def control(self) -> LockControl:
        return self.dashboard.control

    @property
    def query(self) -> QueryParams:
        return self.request.query_params

    def given(self, key: str) -> str | None:
        """Return a value of the query; None if it is not given or empty."""
        return self.query.get(key, "").strip() or None

    @property
    def states(self) -> list[str]:
        """The states of locks that the query names."""
        return [state for text in self.query.getlist("state") for state in text.split(",") if state]

    def locks(self, name: str | None, limit: int) -> Page[LockView]:
        """Return the page of the locks that the query chooses, with names that match this pattern."""
        older = self.given("older")
        with malformed_is_400():
            return self.control.locks(
                task=self.given("task"),
                name=name,
                state=self.states or None,  # type: ignore[arg-type]  # it checks them
                older_than=parse_duration(older) if older else None,
                cursor=self.query.get("cursor", ""),
                limit=limit,
            )

    def read(self, ask: Callable[..., Page[T]], limit: int, *filters: str) -> Page[T]:
        """Return the page of another list that the query chooses.

        Args:
            ask: The method of ``LockControl``.
            limit: The highest number of entries.
            filters: The arguments of the method that the query may have.
        """
        with malformed_is_400():
            chosen = {key: self.given(key) for key in filters}
            return ask(cursor=self.query.get("cursor", ""), limit=limit, **chosen)

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        """Return the response with a page."""
        self.dashboard.sampler.opened()
        root = root_of(self.request)
        token = csrf.token_of(self.request) if self.may else ""
        text = self.dashboard.render(
            template,
            root=root,
            here=self.request.scope["path"].removeprefix(root) or "/",
            may=self.may,
            csrf=token,
            user=self.user,
            store=self.dashboard.store,
            **values,
        )
        response = HTMLResponse(text, status)
        if token:
            csrf.send_token(self.request, response, token)
        return response


@contextmanager
def malformed_is_400() -> Iterator[None]:
    """Answer with 400 if a value of the query is malformed."""
    try:
        yield
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def root_of(request: Request) -> str:
    """Return the path at which the dashboard is mounted; "" at the root of a site."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["clock"] = _clock
    made.filters["iso"] = iso
    made.filters["span"] = shown_duration
    made.filters["query"] = lambda values: urlencode({key: value for key, value in values.items() if value})
    made.globals.update(width=WIDTH, height=HEIGHT, actions=ACTIONS, tables=tables)
    return made


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""
