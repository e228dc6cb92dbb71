"""The forms that change something. Each names the acquisition, run or message that its page showed."""

from __future__ import annotations

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

__all__ = ["FORMS", "acting"]

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


def release(control: LockControl, form: Form) -> bool:
    control.release(form["name"], form["acquisition"], force=form.get("force") == "yes", reason=form.get("reason", ""))
    return True


def hold(control: LockControl, form: Form) -> str:
    try:
        seconds = parse_duration(form.get("for", "").strip())
    except ValueError as error:
        raise InvalidLockOptions(str(error)) from error
    return "hold" if control.hold(form["name"], seconds, form.get("reason", "")) else "hold_later"


def unhold(control: LockControl, form: Form) -> bool:
    return control.unhold(form["name"], hold=form["hold"], reason=form.get("reason", ""))


def resolve(control: LockControl, form: Form) -> bool:
    if form.get("sent") not in ("yes", "no"):
        raise HTTPException(400, "the form does not say whether the run did its work")
    sent, tick = form["sent"] == "yes", form.get("tick", "")
    return control.resolve(form["name"], sent=sent, tick=tick, mark=form["mark"], reason=form.get("reason", ""))


def forget(control: LockControl, form: Form) -> bool:
    return control.forget(form["name"], tick=form.get("tick", ""), mark=form["mark"], reason=form.get("reason", ""))


def requeue(control: LockControl, form: Form) -> bool:
    return control.requeue(form["name"], form["identity"], reason=form.get("reason", ""))


def drop(control: LockControl, form: Form) -> bool:
    return control.drop(form["name"], form["identity"], reason=form.get("reason", ""))


def drop_claim(control: LockControl, form: Form) -> bool:
    return control.drop_claim(form["name"], task_id=form["task_id"], reason=form.get("reason", ""))


#: What the forms do. Each returns False if there is nothing any more to act on, or else True or a key of ``DONE``.
FORMS: Final[Mapping[str, Callable[[LockControl, Form], bool | str]]] = {
    "release": release,
    "hold": hold,
    "unhold": unhold,
    "resolve": resolve,
    "forget": forget,
    "requeue": requeue,
    "drop": drop,
    "drop_claim": drop_claim,
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
            done = FORMS[verb](control, form)
    except KeyError as error:
        raise HTTPException(400, f"the form lacks the field {error}") from error
    except ActionRefused as error:
        raise Refused(409, str(error), back) from error
    except (InvalidLockOptions, LockKeyError) as error:
        raise Refused(400, str(error), back) from error
    if not done:
        raise Refused(409, f"Not done: {ACTIONS[verb].gone}.", back)
    dashboard.forget_counts()
    said = verb if done is True else done
    return RedirectResponse(f"{back}{'&' if '?' in back else '?'}done={said}", 303)


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
