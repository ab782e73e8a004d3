"""Floor for one client alone: the article's complete as one statement in a transaction on a pooled psycopg connection.

It completes jobs first, first + 1, … for so many seconds after a warm-up, one after the other, and prints latencies.
"""

import json
import sys
import time
from uuid import UUID

import uvloop
from psycopg_pool import AsyncConnectionPool

COMPLETE = """
UPDATE jobs
SET status = 'done', reserved_by = NULL, reserved_at = NULL, heartbeat_at = NULL, lease_expires_at = NULL,
    attempt_token = NULL, finished_at = now(), updated_at = now()
WHERE id = %(id)s AND status = 'processing' AND attempt_token = %(token)s
"""


async def run(url: str, first: int, last: int, warm: float, seconds: float) -> dict[str, object]:
    latencies: list[float] = []
    problem = ""
    async with AsyncConnectionPool(url, min_size=4, max_size=4, open=False) as pool:
        await pool.wait()
        began = time.perf_counter()
        for number in range(first, last):
            at = time.perf_counter()
            async with pool.connection() as connection:
                cursor = await connection.execute(COMPLETE, {"id": number, "token": UUID(int=number)})
            now = time.perf_counter()
            if cursor.rowcount != 1:
                problem = "a complete moved no row"
                break
            if now > began + warm:
                latencies.append(now - at)
            if now > began + warm + seconds:
                break
        else:
            problem = "the table ran dry"
    return {"latencies": latencies, "problem": problem, "next": number + 1}


if __name__ == "__main__":
    url, first, last, warm, seconds = sys.argv[1:]
    answer = uvloop.run(run(url, int(first), int(last), float(warm), float(seconds)))
    print(json.dumps(answer))
