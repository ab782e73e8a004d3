"""A short run of everything at once. The long one is `./fencepost soak --part mixed`.

FENCEPOST_TEST_SEED draws another run; what met in a deadlock is printed.
"""

import json
import os

import pytest

from tests.reliability.mixed import ROOM, run

SEED = int(os.environ.get("FENCEPOST_TEST_SEED", "3"))
JOBS = 1_200


@pytest.mark.slow
def test_single_and_batch_calls_on_the_same_jobs_end_without_a_deadlock_and_without_a_5xx():
    outcome = run(SEED, jobs=JOBS, seconds=8)
    found = outcome.figures
    print(json.dumps(found, indent=1))
    assert not outcome.violations, "\n".join(map(str, outcome.violations[:20]))
    assert (found["deadlocks"], found["answers_5xx"], found["jobs_lost"], found["completed_twice"]) == (0, 0, 0, 0)
    assert found["jobs_acknowledged"] == JOBS
    assert found["most_in_narrow_queue"] == ROOM
    # It was a crowd.
    did = found["by_operation"]
    assert min(did[verb]["ok"] for verb in ("heartbeat", "complete", "fail", "release", "cancel", "requeue")) > 10
    assert min(did["keyed"].get(code, 0) for code in ("ok", "unique-key-held")) > 10
    assert found["refused_stale"] > 100
    assert found["extra_after_worker_fault"] > 0, "reclaim took part"
