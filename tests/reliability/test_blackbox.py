"""A short black-box run. The whole is `./fencepost soak`.

FENCEPOST_TEST_SEED draws another run; the seed and the faults are printed when it fails.
"""

import json
import os

import pytest

from tests.reliability.blackbox import run
from tests.reliability.workload import Size

SEED = int(os.environ.get("FENCEPOST_TEST_SEED", "2"))
SIZE = Size(jobs=1_500, workers=16, produce_seconds=12, lease_seconds=3, fault_share=0.015)


@pytest.mark.slow
def test_no_rule_breaks_while_instances_and_connections_are_killed():
    outcome = run(SEED, SIZE, pause=(0.7, 1.7), safe=False, environment={"FENCEPOST_RECLAIM_INTERVAL_SECONDS": "0.5"})
    print(json.dumps(outcome.figures, indent=1))
    assert not outcome.violations, "\n".join(map(str, outcome.violations[:20]))
    found = outcome.figures
    assert (found["jobs_acknowledged"], found["jobs_lost"], found["completed_twice"]) == (SIZE.jobs, 0, 0)
    assert found["internal_errors"] == 0
    # It was no walk in the park.
    assert sum(found["faults"].values()) >= 4
    assert min(found["no_answer"], found["refused_stale"], found["extra_after_worker_fault"]) > 0
