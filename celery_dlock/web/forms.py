"""The forms that change something. Each names the acquisition, run or message that its page showed."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response

from ..control import ActionRefused, LockControl
from ..errors import InvalidLockOptions, LockKeyError
from ..reports.actions import ACTIONS
from ..reports.durations import parse_duration
from . import csrf
from .state import DashboardState, Visit, root_of

__all__ = ["acting"]

#: Bytes and fields of a form.
LONGEST, MOST_FIELDS = 64 * 1024, 20
#: The lists to which a form can lead back.
_LISTS: Final = frozenset({"waiting", "unknown", "dead"})

Form = Mapping[str, str]


class Refused(HTTPException):
    """A form that changed nothing, and the path of the page to load again."""

    def __init__(self, status: int, text: str, back: str) -> None:
        super().__init__(status, text)
        self.back = back


#: The fields that a form may lack: a checkbox that is not checked is no field.
_DEFAULTS: Final = {"force": "no", "reason": "", "tick": ""}


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"expected 'yes' or 'no', and not {text!r}")
    return text == "yes"


#: What makes an argument of the text of these fields. All others are texts.
_READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "force": _yes,
    "sent": _yes,
    "for_": lambda text: parse_duration(text.strip()),
}


def acting(dashboard: DashboardState, verb: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a form."""

    async def endpoint(request: Request) -> Response:
        visit = await dashboard.visit(request)
        if verb not in visit.may:
            raise HTTPException(403, f"You may not do this: {verb}.")
        form = await _form(request)
        reason = csrf.forged(request, form.get(csrf.FIELD, ""))
        if reason:
            raise HTTPException(403, f"Nothing was changed: {reason}.")
        return await dashboard.threads.ask_store(_act, visit, verb, form)

    return endpoint


def _act(visit: Visit, verb: str, form: Form) -> Response:
    dashboard = visit.dashboard
    dashboard.tasks()  # the end of a message is stored by its task, and a window is read from it
    back = _back(visit, form)
    try:
        with LockControl(dashboard.app, visit.user) as control:
            done = getattr(control, verb)(**_arguments(verb, form)) is not False
    except ActionRefused as error:
        raise Refused(409, str(error), back) from error
    except (InvalidLockOptions, LockKeyError) as error:
        raise Refused(400, str(error), back) from error
    if not done and verb != "hold":
        raise Refused(409, f"Not done: {ACTIONS[verb].gone}.", back)
    dashboard.forget_counts()
    return RedirectResponse(f"{back}{'&' if '?' in back else '?'}done={verb if done else 'hold_later'}", 303)


def _arguments(verb: str, form: Form) -> dict[str, object]:
    """Return the arguments of a method of ``LockControl``. Its form has fields of the same names."""
    texts = {**_DEFAULTS, **form}
    _self, *fields = inspect.signature(getattr(LockControl, verb)).parameters
    try:
        return {field: _READERS.get(field, str)(texts[field]) for field in fields}
    except KeyError as error:
        raise HTTPException(400, f"the form lacks the field {error}") from error
    except ValueError as error:
        raise InvalidLockOptions(str(error)) from error


def _back(visit: Visit, form: Form) -> str:
    """Return the path of the page from which a form came: one of this dashboard."""
    root, page = root_of(visit.request), form.get("back", "")
    return f"{root}/{page}" if page in _LISTS else f"{root}/lock?{urlencode({'name': form.get('name', '')})}"


async def _form(request: Request) -> dict[str, str]:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(400, "expected a form")
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > LONGEST:
                raise HTTPException(413, f"A form has at most {LONGEST} bytes.")
    except ClientDisconnect as error:  # else the server logs a traceback
        raise HTTPException(400, "the form is not complete") from error
    try:
        text = body.decode("ascii")
        return dict(parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS))
    except ValueError as error:
        raise HTTPException(400, "the form cannot be read") from error
