"""The simulation's short form."""

import random

from tests.schedules.simulation import simulate


async def test_half_a_year_without_a_doubled_or_a_missed_slot(database_url):
    seed = random.SystemRandom().randrange(10**6)
    report = await simulate(database_url, seed, 0.5)
    print(report)
    assert (report.doubled, report.missed, report.wrong) == (0, 0, []), report
    assert report.fired > 5_000
    assert report.events["kills"]
