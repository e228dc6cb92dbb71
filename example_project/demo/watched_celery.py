"""The `celery` command with the recorder: `python -m example_project.demo.watched_celery worker ...`.

Celery's own `--include` would suffice for a worker, but beat has no such option.
"""

import json
import os
import sys
from pathlib import Path

from celery.__main__ import main

from example_project.demo import recorder, unlocked
from example_project.demo.history import History

HISTORY = "SHOP_DEMO_HISTORY"
WITHOUT_LOCKS = "SHOP_DEMO_WITHOUT_LOCKS"
SETTINGS = "SHOP_DEMO_SETTINGS"

if __name__ == "__main__":
    if os.environ.get(WITHOUT_LOCKS):
        unlocked.install()
    from example_project.shop import app

    app.conf.update(json.loads(os.environ.get(SETTINGS, "{}")))
    recorder.install(app, History(Path(os.environ[HISTORY])))
    sys.argv[:] = ["celery", "-A", "example_project.shop", *sys.argv[1:]]
    main()
