"""The checker of histories: catches every bug that was put in, and cries wolf at no right history."""

import pytest

from tests.reliability.checker import check
from tests.reliability.simulated import BUGS, Simulation

RIGHT, WRONG = 400, 12


def test_a_right_history_has_no_violation():
    events, refused, unknown, reclaimed = 0, 0, 0, 0
    for seed in range(RIGHT):
        run = Simulation(seed)
        found = check(run.events, run.read_out())
        assert not found, f"seed {seed}: " + "; ".join(map(str, found[:5]))
        events += len(run.events)
        refused += sum(event.answer == "rejected" for event in run.events)
        unknown += sum(event.answer == "unknown" for event in run.events)
        reclaimed += sum(job.reclaims for job in run.jobs.values())
    # The runs have what makes judging hard: lost answers, stale tokens, lapsed leases.
    assert min(refused, unknown, reclaimed) > 5 * RIGHT, (events, refused, unknown, reclaimed)


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(bug):
    rules = set()
    for seed in range(WRONG):
        run = Simulation(seed, bug)
        rules |= {violation.rule for violation in check(run.events, run.read_out())}
    assert BUGS[bug] in rules, f"{bug} was seen only as {sorted(rules)}"
