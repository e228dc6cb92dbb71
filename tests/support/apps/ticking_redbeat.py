"""The ticking app under celery-redbeat's scheduler."""

import os

from redbeat import RedBeatScheduler

from celery_dlock.beat import TickScheduler
from tests.support.apps.ticking import app

# Without redbeat's own lock, which lets one beat work and the others stand by: here all work.
app.conf.update(redbeat_redis_url=os.environ["DLOCK_TEST_RESULT_URL"], redbeat_lock_key=None, beat_max_loop_interval=1)


class Scheduler(TickScheduler, RedBeatScheduler):
    pass
