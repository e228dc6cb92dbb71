"""The patterns of docs/how-to/use-fencing-tokens.md, for the late holders of tests/faults/test_fencing.py."""

import json
import re
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler

from celery_dlock import LockLost

SET_BALANCE = """
UPDATE account SET balance = :balance, fence = :token
WHERE id = :id AND fence <= :token
"""


def write_fenced(db, statement, **values):
    """Raise LockLost if a newer holder has written."""
    written = db.execute(statement, values).rowcount
    if not written:
        db.rollback()
        raise LockLost("a newer holder has written, or there is no such row")
    db.commit()


OPEN_OR_SET = """
INSERT INTO account (id, balance, fence) VALUES (:id, :balance, :token)
ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, fence = excluded.fence
WHERE account.fence <= excluded.fence
"""

CLAIM = """
INSERT INTO fence (name, token) VALUES (:name, :token)
ON CONFLICT (name) DO UPDATE SET token = excluded.token WHERE fence.token <= excluded.token
"""


def claim(db, name, token):
    """The first statement of a transaction: until its end no other holder passes."""
    if not db.execute(CLAIM, {"name": name, "token": token}).rowcount:
        db.rollback()
        raise LockLost(f"a newer holder of {name} has written")


SET_FENCED = """
local fence = tonumber(redis.call('HGET', KEYS[1], 'fence') or 0)
if fence > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'value', ARGV[2])
return 1
"""


def set_fenced(store, key, value, token):
    if not store.eval(SET_FENCED, 1, key, token, value):
        raise LockLost(f"a newer holder has written {key}")


def put_fenced(url, value, token):
    """Raises LockLost where a newer holder has written."""
    headers = {"X-Fencing-Token": str(token), "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(value).encode(), headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 409:
                raise LockLost(f"a newer holder has written {url}") from error
            raise


class Fenced(BaseHTTPRequestHandler):
    """PUT stores a value unless a newer holder has; GET gives it."""

    def do_PUT(self):
        token = self.headers.get("X-Fencing-Token", "")
        value = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not re.fullmatch("[0-9]{1,19}", token):
            self.send_error(428, "X-Fencing-Token must be a number")
            return
        with self.server.lock:  # compare and set are one step
            fence, _ = self.server.values.get(self.path, (0, b""))
            late = int(token) < fence
            if not late:
                self.server.values[self.path] = int(token), value
        if late:
            self.send_error(409, "a newer holder has written")
        else:
            self.send_response(204)
            self.end_headers()

    def do_GET(self):
        fence, value = self.server.values[self.path]
        self.send_response(200)
        self.send_header("X-Fencing-Token", str(fence))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *_):
        pass
