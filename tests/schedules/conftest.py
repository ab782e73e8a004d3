"""The database of these tests has a pretended clock and none of the service's own schedules."""

import pytest_asyncio

from tests.schedules.clock import Clock, only_mine


@pytest_asyncio.fixture
async def clock(db):
    await only_mine(db)
    return Clock(db)
