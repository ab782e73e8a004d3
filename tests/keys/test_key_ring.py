# ruff: noqa: E501
"""The key ring on a real table: who is let in, how soon a revocation works, what happens without the database."""

import asyncio
import hashlib
import time

import pytest

from app.errors import KeyRejected, Unavailable
from app.keys import ops
from app.keys.ops import Caller, KeyRing, is_loopback

ADMIN = "a-long-enough-admin-secret"


def ring(db, host="127.0.0.1") -> KeyRing:
    return KeyRing(db, host=host)


async def add(db, secret: str, **columns) -> None:
    row = {
        "id": secret[:8],
        "name": "n",
        "scopes": ["read"],
        "queues": ["*"],
        "expires": None,
        "revoked": None,
        **columns,
    }
    row["digest"] = hashlib.sha256(secret.encode()).digest()
    async with db.begin() as tx:
        await tx.run(
            "INSERT INTO api_keys (id, name, secret_sha256, scopes, queues, expires_at, revoked_at) VALUES (%(id)s, %(name)s, "
            "%(digest)s, %(scopes)s, %(queues)s, now() + %(expires)s * interval '1 s', now() + %(revoked)s * interval '1 s')",
            row,
        )


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("", False), ("10.1.1.1", False), ("example.org", False), ("localhost.evil.example", False), ("::ffff:10.0.0.1", False)],
)  # fmt: skip
def test_loopback(host, local):
    assert is_loopback(host) is local


async def test_nobody_passes_before_the_table_was_read(db):
    with pytest.raises(Unavailable):
        ring(db).check(None)


async def test_keyless_is_only_loopback_and_only_until_the_first_key(db):
    local, open_ = ring(db), ring(db, "0.0.0.0")
    await local.refresh()
    await open_.refresh()
    assert local.keyless
    assert local.check(None) == Caller("keyless", "keyless", frozenset(ops.SCOPES))
    assert not open_.keyless
    with pytest.raises(KeyRejected):
        open_.check(None)
    await add(db, "fp_one_0123456789abcdef")
    await local.refresh()
    assert not local.keyless
    with pytest.raises(KeyRejected):
        local.check(None)


async def test_a_revoked_row_ends_keyless_too(db):
    await add(db, "fp_one_0123456789abcdef", revoked=-1)
    local = ring(db)
    await local.refresh()
    assert not local.keyless
    with pytest.raises(KeyRejected):
        local.check("Bearer fp_one_0123456789abcdef")


async def test_the_admin_key(db):
    keys = ring(db, "0.0.0.0")
    await keys.install_admin(ADMIN)
    caller = keys.check(f"Bearer {ADMIN}")
    assert caller.key_id == "bootstrap"
    assert all(caller.allows(scope) for scope in ops.SCOPES)
    assert caller.may("anything")
    assert keys.check(f"bearer  {ADMIN} ").key_id == "bootstrap"
    await asyncio.gather(*(ring(db).install_admin(ADMIN) for _ in range(5)))
    await keys.install_admin("another-long-enough-secret")
    with pytest.raises(KeyRejected):
        keys.check(f"Bearer {ADMIN}")
    async with db.begin() as tx:
        rows = await tx.rows("SELECT * FROM api_keys")
    assert len(rows) == 1
    assert "another-long-enough-secret" not in repr(rows)


@pytest.mark.parametrize(
    "secret", ["", "short", "with a space in it!", "ключ-ключ-ключ-ключ", "x" * 513, "line\nline-line-line"]
)
async def test_a_weak_admin_key_is_refused(db, secret):
    with pytest.raises(ValueError, match="FENCEPOST_ADMIN_KEY"):
        await ring(db).install_admin(secret)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", f"Basic {ADMIN}", ADMIN, f"Bearer {ADMIN}x", f"Bearer {ADMIN[:-1]}", f"Bearer {ADMIN}, Bearer {ADMIN}",
     f"Bearer {ADMIN} {ADMIN}", f"Token {ADMIN}", "Bearer \x00", "Bearer é", "Bearer " + "x" * 10_000, f"Bearer {ADMIN.upper()}", f"Bearer\t{ADMIN}"],
)  # fmt: skip
async def test_what_is_no_key(db, header):
    keys = ring(db, "0.0.0.0")
    await keys.install_admin(ADMIN)
    with pytest.raises(KeyRejected) as caught:
        keys.check(header)
    assert ADMIN not in caught.value.detail


async def test_expiry_works_between_two_readings(db):
    await add(db, "fp_soon_0123456789abcdef", expires=0.5)
    await add(db, "fp_past_0123456789abcdef", expires=-1)
    keys = ring(db, "0.0.0.0")
    await keys.refresh()
    assert keys.check("Bearer fp_soon_0123456789abcdef").scopes == {"read"}
    with pytest.raises(KeyRejected):
        keys.check("Bearer fp_past_0123456789abcdef")
    assert await becomes(keys, "fp_soon_0123456789abcdef", KeyRejected)


async def test_a_revocation_works_within_five_seconds(db):
    await add(db, "fp_gone_0123456789abcdef")
    keys = ring(db, "0.0.0.0")
    stop = asyncio.Event()
    task = asyncio.create_task(keys.run(stop))
    try:
        assert await becomes(keys, "fp_gone_0123456789abcdef", Caller)
        async with db.begin() as tx:
            await tx.run("UPDATE api_keys SET revoked_at = now()")
        assert await becomes(keys, "fp_gone_0123456789abcdef", KeyRejected)
    finally:
        stop.set()
        await asyncio.wait_for(task, 5)


def verdict(keys: KeyRing, secret: str) -> type:
    try:
        return type(keys.check(f"Bearer {secret}"))
    except (KeyRejected, Unavailable) as refusal:
        return type(refusal)


async def becomes(keys: KeyRing, secret: str, wanted: type, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while verdict(keys, secret) is not wanted and time.monotonic() < deadline:  # noqa: ASYNC110 nobody tells us
        await asyncio.sleep(0.01)
    return verdict(keys, secret) is wanted


async def test_old_knowledge_lets_nobody_in(db, monkeypatch):
    keys = ring(db, "0.0.0.0")
    await keys.install_admin(ADMIN)
    async with db.begin() as tx:
        await tx.run("ALTER TABLE api_keys RENAME TO api_keys_away")
    stop = asyncio.Event()
    monkeypatch.setattr(ops, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(ops, "STALE_SECONDS", 0.3)
    task = asyncio.create_task(keys.run(stop))
    try:
        assert await becomes(keys, ADMIN, Unavailable)
        async with db.begin() as tx:
            await tx.run("ALTER TABLE api_keys_away RENAME TO api_keys")
        assert await becomes(keys, ADMIN, Caller)
    finally:
        stop.set()
        await asyncio.wait_for(task, 5)


def test_queue_patterns():
    caller = Caller("k", "k", frozenset({"work"}), ("mail-*", "exact"))
    assert [caller.may(q) for q in ("mail-x", "mail-", "mail", "exact", "exact1", "EXACT")] == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    assert not caller.allows("read")
