"""The smallest app that `start_worker` and `load_app` can use."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

from celery import Celery

PR_GET_PDEATHSIG = 2  # of <linux/prctl.h>

app = Celery(
    "echo",
    broker=os.environ["DLOCK_TEST_BROKER_URL"],
    backend=os.environ["DLOCK_TEST_RESULT_URL"],
)
app.conf.broker_connection_retry_on_startup = True


@app.task
def worker_pid() -> int:
    return os.getpid()


@app.task
def facts() -> dict[str, Any]:
    """Return what a process inherited from the process that started it. In the solo pool, that is the worker itself."""
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death_signal))
    umask = os.umask(0)
    os.umask(umask)
    return {
        "argv": sys.argv,
        "environ": dict(os.environ),
        "streams": [str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)],
        "session": os.getsid(0),
        "death_signal": death_signal.value,
        "umask": umask,
        "path": sys.path,
        "flags": list(sys.flags),
        "ignored": [number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN],
    }
