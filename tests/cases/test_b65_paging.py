"""B65: a walk over pages sees each row that was there all the time exactly once, whatever happens meanwhile."""

import base64

import pytest

from tests.cases.support import at_once, books, new_queue


def walk(api, path, member="jobs", limit=7, between=lambda page: None):
    """All rows of all pages; `between` is called with the number of each page but the last."""
    rows, cursor, page = [], None, 0
    while True:
        sign = "&" if "?" in path else "?"
        found = api.call("GET", f"{path}{sign}limit={limit}" + (f"&cursor={cursor}" if cursor else ""), expect=200).body
        assert len(found[member]) <= limit
        rows += found[member]
        cursor = found["next_cursor"]
        page += 1
        assert page < 200
        if cursor is None:
            return rows
        assert len(found[member]) == limit
        between(page)


def once(rows, wanted):
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids))
    assert set(wanted) <= set(ids)
    return ids


def test_rows_of_one_transaction_while_everything_moves(pair):
    """A hundred rows of one instant; meanwhile others are claimed, completed, deleted and added."""
    queue = new_queue("page")
    pair.a.call("PUT", f"/v1/queues/{queue}", {"retention_seconds": 0}, expect=201)
    ids = pair.a.enqueued(queue, 100)
    assert pair.sql("SELECT count(DISTINCT created_at) AS n FROM jobs WHERE queue = %s", queue) == [{"n": 1}]
    gone, added = [], []

    def move(page):
        claimed = pair.each(page).claim(queue, 3, worker="w", lease=60)
        # Completed ones are deleted at once by the retention of this queue.
        pair.a.end_many("complete", claimed[:2])
        gone.extend(job["id"] for job in claimed[:2])
        added.extend(pair.b.enqueued(queue, 2))

    rows = walk(pair.b, f"/v1/jobs?queue={queue}", between=move)
    found = once(rows, set(ids) - set(gone))
    assert set(found) <= set(ids) | set(added)
    # Downward by creation; what came later is not in the way of the walk.
    places = [(row["created_at"], row["id"]) for row in rows]
    assert places == sorted(places, reverse=True)


def test_a_filter_that_rows_leave_during_the_walk(pair):
    queue = new_queue("page")
    ids = pair.a.enqueued(queue, 100)
    left = []

    def leave(page):
        claimed = pair.each(page).claim(queue, 4, lease=60)
        left.extend(job["id"] for job in claimed)

    rows = walk(pair.a, f"/v1/jobs?queue={queue}&status=queued", between=leave)
    once(rows, set(ids) - set(left))
    assert {row["status"] for row in rows} == {"queued"}
    both = walk(pair.b, f"/v1/jobs?queue={queue}&status=queued&status=processing", limit=9)
    assert sorted(once(both, ids)) == sorted(ids)
    books(pair.a, pair.sql, queue, 100)


def test_microseconds_and_equal_instants_are_not_lost(pair):
    """Rows a microsecond apart, and groups of the same instant across the edge of a page."""
    queue = new_queue("page")
    ids = pair.a.enqueued(queue, 60)
    pair.sql(
        "UPDATE jobs SET created_at = timestamptz '2026-01-01 00:00:00.123456+00' + (n / 6) * interval '1 microsecond' "
        "FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM jobs WHERE queue = %s) r WHERE r.id = jobs.id",
        queue,
    )
    for limit in (1, 5, 7, 59, 60, 61, 500):
        found = once(walk(pair.a, f"/v1/jobs?queue={queue}", limit=limit), ids)
        assert len(found) == 60
    after = walk(pair.b, f"/v1/jobs?queue={queue}&created_after=2026-01-01T00:00:00.123458Z")
    before = walk(pair.b, f"/v1/jobs?queue={queue}&created_before=2026-01-01T00:00:00.123459Z")
    assert sorted(row["id"] for row in after + before) == sorted(ids)


def test_walks_at_once_with_writers(pair):
    queue = new_queue("page")
    ids = pair.a.enqueued(queue, 60)

    def write(api):
        for number in range(15):
            api.enqueued(queue, 2)
            job = api.claim_one(queue, lease=60)
            (api.complete if number % 2 else api.fail)(job)

    walks = at_once(
        *[lambda n=n: walk(pair.each(n), f"/v1/jobs?queue={queue}", limit=5) for n in range(4)],
        lambda: write(pair.a),
        lambda: write(pair.b),
    )[:4]
    for rows in walks:
        once(rows, ids)


def test_an_old_cursor_goes_on_where_it_was(pair):
    queue = new_queue("page")
    ids = pair.a.enqueued(queue, 30)
    path = f"/v1/jobs?queue={queue}&limit=10"
    first = pair.a.call("GET", path).body
    before = pair.a.call("GET", f"{path}&cursor={first['next_cursor']}").body
    pair.b.enqueued(queue, 20)
    for job in pair.b.claim(queue, 30, lease=60):
        pair.b.complete(job)
    again = pair.b.call("GET", f"{path}&cursor={first['next_cursor']}").body
    assert [job["id"] for job in again["jobs"]] == [job["id"] for job in before["jobs"]]
    assert again["next_cursor"] == before["next_cursor"]
    # Its own row was deleted: the place is still known.
    pair.sql("DELETE FROM jobs WHERE id = %s", first["jobs"][-1]["id"])
    assert pair.a.call("GET", f"{path}&cursor={first['next_cursor']}").body["jobs"][0]["id"] == before["jobs"][0]["id"]
    assert len(ids) == 30


def test_a_cursor_of_other_filters_is_refused(pair):
    queue, other = new_queue("page"), new_queue("page")
    pair.a.enqueued(queue, 5)
    pair.a.enqueued(other, 5)
    cursor = pair.a.call("GET", f"/v1/jobs?queue={queue}&limit=2").body["next_cursor"]
    for query in (
        f"queue={other}",
        "",
        f"queue={queue}&status=queued",
        f"queue={queue}&kind=x",
        f"queue={queue}&worker_id=w",
    ):
        reply = pair.b.call("GET", f"/v1/jobs?{query}&cursor={cursor}".replace("?&", "?"))
        assert (reply.status, reply.code) == (422, "invalid-input"), query
        assert "cursor" in reply.body["errors"][0]["place"]
    for path in ("/v1/queues", f"/v1/jobs/{pair.a.enqueued(queue)[0]}/attempts"):
        assert pair.a.call("GET", f"{path}?cursor={cursor}").status == 422, path
    # The size of a page is no filter.
    assert pair.a.call("GET", f"/v1/jobs?queue={queue}&limit=1&cursor={cursor}").status == 200


def forged(text):
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "cursor",
    [
        "garbage",
        "",
        "%00",
        "A",
        "....",
        "ÄÖ",
        "null",
        forged(b"null"),
        forged(b"[]"),
        forged(b"{}"),
        forged(b'["x"]'),
        forged(b'["x", "2026-01-01T00:00:00Z", "y"]'),
        forged(b'["x", 1e400, 2]'),
        forged(b"\xff\xfe"),
        forged(b"[" * 50),
        "A" * 401,
        "A" * 5000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/queues", "attempts"])
def test_a_garbage_cursor_is_refused(pair, path, cursor):
    if path == "attempts":
        path = f"/v1/jobs/{pair.a.enqueued('garbage')[0]}/attempts"
    reply = pair.a.call("GET", f"{path}?cursor={cursor}")
    assert (reply.status, reply.code) == (422, "invalid-input")
    assert "cursor" in reply.body["errors"][0]["place"]


@pytest.mark.parametrize("change", range(6))
def test_a_cursor_bent_by_one_byte_is_no_500(pair, change):
    queue = new_queue("page")
    pair.a.enqueued(queue, 5)
    cursor = pair.a.call("GET", f"/v1/jobs?queue={queue}&limit=2").body["next_cursor"]
    raw = bytearray(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    for place in range(change, len(raw), 6):
        bent = bytearray(raw)
        bent[place] ^= 1 + place % 7
        reply = pair.a.call("GET", f"/v1/jobs?queue={queue}&limit=2&cursor={forged(bytes(bent))}")
        assert reply.status in (200, 422)


@pytest.mark.parametrize("limit", ["0", "-1", "501", "1000000000", "x"])
def test_the_size_of_a_page_has_a_stated_cap(pair, limit):
    for path in ("/v1/jobs", "/v1/queues", f"/v1/jobs/{pair.a.enqueued('cap')[0]}/attempts"):
        reply = pair.a.call("GET", f"{path}?limit={limit}")
        assert reply.status == 422, path
        assert "limit" in reply.body["errors"][0]["place"]
    parameters = pair.a.call("GET", "/openapi.json").body["paths"]["/v1/jobs"]["get"]["parameters"]
    [stated] = [parameter["schema"] for parameter in parameters if parameter["name"] == "limit"]
    assert (stated["minimum"], stated["maximum"]) == (1, 500)


def test_other_lists_walk_too(pair):
    prefix = new_queue("walk")
    names = [f"{prefix}-{n:02d}" for n in range(20)]
    for name in names:
        pair.a.call("PUT", f"/v1/queues/{name}", {}, expect=201)
    rows = walk(pair.b, "/v1/queues", "queues", 3, lambda page: pair.a.call("DELETE", f"/v1/queues/{names[-1]}"))
    found = [row["name"] for row in rows if row["name"].startswith(prefix)]
    assert len(found) == len(set(found))
    assert set(names[:-1]) <= set(found)

    queue = new_queue("walk")
    [job_id] = pair.a.enqueued(queue, max_attempts=100)
    for number in range(12):
        job = pair.each(number).claim_one(queue, lease=60)
        pair.a.fail(job, error_message=str(number), retry_after_seconds=0)
    kept = walk(pair.a, f"/v1/jobs/{job_id}/attempts", "attempts", 5)
    assert [attempt["number"] for attempt in kept] == list(range(1, 13))
