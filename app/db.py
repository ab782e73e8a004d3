"""The way to PostgreSQL: a pool, transactions, and what a lost connection means to a caller.

It knows no capability. psycopg executes; every connection is in autocommit mode and `begin` speaks BEGIN and
COMMIT itself, so that a connection found dead before anything was done is replaced without the caller noticing,
and one lost while committing is told apart (`OutcomeUnknown`) from one lost before (`Unavailable`).
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import psycopg
from psycopg import errors as pg
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from app.errors import OutcomeUnknown, Unavailable
from app.tables import REVISION

log = logging.getLogger("fencepost.db")

Connection = psycopg.AsyncConnection[dict[str, Any]]
OnConnect = Callable[[Connection], Awaitable[None]]
Hearer = Callable[[str, dict[str, Any]], None]
T = TypeVar("T")

PING_SECONDS = 0.4
CONNECT_SECONDS = 2.0
GENERIC_PLAN = "; SET LOCAL plan_cache_mode = force_generic_plan"
BY_KEY = "; SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"

READY = """
SELECT NOT pg_is_in_recovery() AND NOT current_setting('transaction_read_only')::boolean AS writable,
       EXISTS (SELECT FROM schema_compatibility WHERE revision = %(revision)s) AS revision_ok
"""

# Classes of SQLSTATE in which the database, not the call, is at fault: nothing was done, and it may be repeated.
# 25 read-only or aborted, 42 a right revoked or a schema in the middle of change, 53 and 58 resources, 55 locks,
# 57 operator intervention and time-outs.
_SICK = ("08", "25", "40", "42", "53", "55", "57", "58", "XX")


def unavailable(error: BaseException) -> Unavailable | None:
    """The refusal that a psycopg error means, or None where the statement itself is to blame."""
    if isinstance(error, (PoolTimeout, TooManyRequests, PoolClosed)):
        return Unavailable("No database connection became free in time.")
    if isinstance(error, psycopg.Error):
        state = error.sqlstate or "08000" if isinstance(error, psycopg.OperationalError) else error.sqlstate or ""
        if state[:2] in _SICK:
            log.warning("database refused: %s %s", state, str(error).splitlines()[0] if str(error) else "")
            return Unavailable("The database cannot do this now.")
    if isinstance(error, (OSError, TimeoutError)):
        return Unavailable("The database cannot be reached.")
    return None


class Tx:
    """One open transaction. Facts told here are published after the commit, and only then."""

    def __init__(self, connection: Connection, prepare: bool | None) -> None:
        self._connection = connection
        self._prepare = prepare
        self.facts: list[tuple[str, dict[str, Any]]] = []
        self.answered = 0
        """Statements that the database has answered."""
        self.whole = True
        """Whether all statements are one transaction; else each is one of its own."""

    async def rows(self, sql: str, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        cursor = await self._connection.execute(sql, params, prepare=self._prepare)
        self.answered += 1
        return await cursor.fetchall()

    async def row(self, sql: str, params: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        cursor = await self._connection.execute(sql, params, prepare=self._prepare)
        self.answered += 1
        return await cursor.fetchone()

    async def run(self, sql: str, params: Mapping[str, Any] | None = None) -> int:
        """The number of rows changed: the verdict of a guarded statement."""
        cursor = await self._connection.execute(sql, params, prepare=self._prepare)
        self.answered += 1
        return cursor.rowcount

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        async with self._connection.transaction():
            yield

    def tell(self, fact: str, **facts: Any) -> None:
        self.facts.append((fact, facts))


class _Deadline:
    """Cuts the connection when the time is over: a frozen server answers neither a statement nor its time-out.

    The socket is shut down, so that whoever waits on it gets an OperationalError at once. Cancelling the wait instead
    would make psycopg ask the frozen server to stop and wait ten seconds for its answer.
    """

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self.over = False

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._cut)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _cut(self) -> None:
        self.over = True
        with (
            contextlib.suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(self._connection.fileno())) as cut,
        ):
            cut.shutdown(socket.SHUT_RDWR)


class Database:
    """A pool on one URL. `on_connect` sees each new connection before it serves; `hearers` get committed facts."""

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 10,
        statement_timeout: float = 5.0,
        prepared: bool = True,
        on_connect: Sequence[OnConnect] = (),
    ) -> None:
        self.url = url
        self.hearers: list[Hearer] = []
        self._pool_size = pool_size
        self._prepare = None if prepared else False
        self._on_connect = on_connect
        self._begin = "BEGIN"
        kwargs: dict[str, Any] = {
            "autocommit": True,
            "row_factory": dict_row,
            "prepare_threshold": 5 if prepared else None,
            "connect_timeout": 3,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            "application_name": "fencepost",
        }
        timeouts = {
            "statement_timeout": f"{int(statement_timeout * 1000)}ms",
            "lock_timeout": "1s",
            "idle_in_transaction_session_timeout": "10s",
        }
        self._kwargs = dict(kwargs)
        self._timeouts = timeouts
        if prepared:
            kwargs["options"] = _options(timeouts)
        else:
            # Behind a pooler neither start-up options nor SET hold; SET LOCAL goes with the transaction.
            self._begin = "; ".join(["BEGIN", *(f"SET LOCAL {name} = '{value}'" for name, value in timeouts.items())])
        self._answer_within = statement_timeout + 2.0
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            url,
            connection_class=cast(type[Connection], psycopg.AsyncConnection),
            kwargs=kwargs,
            min_size=1,
            max_size=pool_size,
            timeout=CONNECT_SECONDS,
            open=False,
            configure=self._configure,
            reconnect_timeout=10.0,
            name="fencepost",
        )

    def own(self, **options: str) -> "Own":
        """A connection beside the pool. `options` are set for its session, unless a pooler is in between."""
        return Own(self, options)

    async def connect(self, options: Mapping[str, str]) -> Connection:
        """A connection as those of the pool, with more settings. Raises Unavailable, within CONNECT_SECONDS."""
        kwargs = dict(self._kwargs)
        if self._prepare is None:
            kwargs |= {"options": _options({**self._timeouts, **options}), "prepare_threshold": 0}
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection: Connection = await psycopg.AsyncConnection.connect(self.url, **kwargs)
                try:
                    await self._configure(connection)
                except BaseException:
                    await connection.close()
                    raise
        except (psycopg.Error, OSError, TimeoutError) as error:
            raise Unavailable("The database cannot be reached.") from error
        return connection

    async def _configure(self, connection: Connection) -> None:
        for look in self._on_connect:
            await look(connection)

    async def open(self) -> None:
        """Start the pool. Does not wait for the database: an instance may start before it and serve 503 until then."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        await self._pool.close(timeout=2.0)

    def pool_stats(self) -> dict[str, int]:
        return self._pool.get_stats()

    @contextlib.asynccontextmanager
    async def begin(
        self, *, generic_plan: bool = False, by_key: bool = False, within: float | None = None
    ) -> AsyncIterator[Tx]:
        """A transaction: committed when the block ends well, rolled back when it raises.

        `generic_plan` is for a statement whose plan does not depend on its values (the claim): PostgreSQL overestimates
        a LIMIT that it does not know and would plan anew each time, which costs as much as the claim itself.

        `by_key` is for statements that change given rows: each is looked up by its key, in the order given. A hash join
        would lock them in the order of the table, and two batches over the same rows would deadlock.

        `within` seconds each of connecting, working and committing must answer (the statement time-out and a little);
        who has less time says so here rather than by a cancel, for which psycopg would wait on a frozen server.

        Raises Unavailable (nothing done) and OutcomeUnknown (lost in the COMMIT). An error that the statement itself
        deserves (a unique violation, a check) passes through as psycopg raised it.
        """
        try:
            begin = self._begin + GENERIC_PLAN if generic_plan and self._prepare is None else self._begin
            begin += BY_KEY if by_key else ""
            seconds = self._answer_within if within is None else within
            connection = await self._connection_in_transaction(begin, seconds, within)
        except (psycopg.Error, PoolTimeout, TooManyRequests, PoolClosed, OSError) as error:
            raise unavailable(error) or error from error
        tx = Tx(connection, self._prepare)
        try:
            try:
                with _Deadline(connection, seconds):
                    yield tx
            except BaseException as error:
                await self._roll_back(connection)
                refusal = unavailable(error) if isinstance(error, Exception) else None
                if refusal is not None:
                    raise refusal from error
                raise
            try:
                with _Deadline(connection, seconds):
                    await connection.execute("COMMIT")
            except BaseException as error:
                await connection.close()
                if isinstance(error, psycopg.Error) and error.sqlstate and error.sqlstate[:2] in ("23", "40"):
                    raise Unavailable("The database refused the commit; nothing was done.") from error
                if isinstance(error, (psycopg.Error, OSError, TimeoutError)):
                    raise OutcomeUnknown(
                        "The connection was lost while committing: this may or may not have happened. "
                        "Repeat the same call with the same keys."
                    ) from error
                raise
        finally:
            await self._pool.putconn(connection)
        self.publish(tx)

    def publish(self, tx: Tx) -> None:
        for fact, facts in tx.facts:
            for hear in self.hearers:
                hear(fact, facts)

    async def _connection_in_transaction(self, begin: str, seconds: float, patience: float | None) -> Connection:
        # After a restart of the server every pooled connection is dead; nothing was done on them, so each is replaced
        # here until one answers.
        for attempt in range(self._pool_size + 2):
            connection = await self._pool.getconn(patience)
            deadline = _Deadline(connection, seconds)
            try:
                with deadline:
                    await connection.execute(begin)
            except BaseException as error:
                await connection.close()
                await self._pool.putconn(connection)
                if not isinstance(error, psycopg.OperationalError) or deadline.over or attempt > self._pool_size:
                    raise
                continue
            return connection
        raise PoolTimeout("no live connection")

    @staticmethod
    async def _roll_back(connection: Connection) -> None:
        try:
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.UNKNOWN:
                with _Deadline(connection, 2.0):
                    await connection.execute("ROLLBACK")
        except BaseException:
            await connection.close()

    async def again(self, act: Callable[[Tx], Awaitable[T]], *, generic_plan: bool = False) -> T:
        """Run `act`, which changes rows by their keys, in a transaction; a deadlock or serialisation failure is tried
        anew, three times in all."""
        for attempt in range(3):
            try:
                async with self.begin(generic_plan=generic_plan, by_key=True) as tx:
                    return await act(tx)
            except Unavailable as refusal:
                cause = refusal.__cause__
                if attempt == 2 or not isinstance(cause, (pg.DeadlockDetected, pg.SerializationFailure)):
                    raise
                await asyncio.sleep(0.01 * (attempt + 1))
        raise AssertionError("unreachable")

    async def statement(self, sql: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first row of one statement that is a transaction of its own and may be repeated.

        Unlike in `begin` no lock of it can be held by a process that is frozen before its COMMIT, for none is sent.
        """
        if self._begin != "BEGIN":
            async with self.begin() as tx:
                return await tx.row(sql, params)
        for attempt in range(2):
            try:
                connection = await self._pool.getconn()
                try:
                    with _Deadline(connection, self._answer_within):
                        return await Tx(connection, self._prepare).row(sql, params)
                finally:
                    await self._pool.putconn(connection)
            except (psycopg.Error, PoolTimeout, TooManyRequests, PoolClosed, OSError) as error:
                # A pooled connection of before a restart of the server.
                if attempt == 0 and isinstance(error, psycopg.OperationalError) and error.sqlstate in (None, "57P01"):
                    continue
                raise unavailable(error) or error from error
        raise AssertionError("unreachable")

    async def ping(self) -> dict[str, bool]:
        """Whether the database takes writes and serves this build's schema. Raises Unavailable, within a second."""
        async with self.begin(within=PING_SECONDS) as tx:
            row = await tx.row(READY, {"revision": REVISION})
        return {"writable": bool(row and row["writable"]), "revision_ok": bool(row and row["revision_ok"])}


class Own:
    """A connection of one user, who sends one piece of work after another. It is made when it is first used, and anew
    when it was lost.

    Where nothing stands in the way each statement is a transaction of its own, committed when its result is here: a
    third of the round trips of BEGIN, statement, COMMIT. Behind a pooler and under a pretended clock, whose settings
    go with a transaction, it is the three.
    """

    def __init__(self, db: Database, options: Mapping[str, str]) -> None:
        self._db = db
        self._options = options
        self._connection: Connection | None = None

    async def run(self, act: Callable[[Tx], Awaitable[T]]) -> T:
        """What `act` answers; its facts are told.

        Raises NotConnected (nothing was done), OutcomeUnknown (lost on the way), PartlyDone (something failed after a
        statement that was a transaction of its own), or what `act` raised, with nothing done.
        """
        connection = await self._alive()
        tx = Tx(connection, self._db._prepare)
        split = self._db._begin == "BEGIN"
        tx.whole = not split
        try:
            with _Deadline(connection, self._db._answer_within):
                if split:
                    answer = await act(tx)
                else:
                    await connection.execute(self._db._begin, prepare=False)
                    answer = await act(tx)
                    await connection.execute("COMMIT")
        except BaseException as error:
            lost = connection.closed or connection.info.transaction_status == psycopg.pq.TransactionStatus.UNKNOWN
            if lost or not isinstance(error, Exception) or not (split or await self._rolled_back(connection)):
                self._connection = None
                await connection.close()
            if lost and isinstance(error, (psycopg.Error, OSError)) and not _said_by_server(error):
                raise OutcomeUnknown(
                    "The connection was lost: this may or may not have happened. "
                    "Repeat the same call with the same keys."
                ) from error
            if split and tx.answered and isinstance(error, Exception):
                self._db.publish(tx)
                raise PartlyDone from error
            raise
        self._db.publish(tx)
        return answer

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _alive(self) -> Connection:
        connection = self._connection
        if connection is not None and (connection.closed or not _quiet(connection)):
            self._connection = None
            await connection.close()
            connection = None
        if connection is None:
            try:
                connection = self._connection = await self._db.connect(self._options)
            except Unavailable as refusal:
                raise NotConnected(refusal.detail) from refusal.__cause__
        return connection

    @staticmethod
    async def _rolled_back(connection: Connection) -> bool:
        try:
            with _Deadline(connection, 2.0):
                await connection.execute("ROLLBACK")
        except psycopg.Error:
            return False
        return True


class NotConnected(Unavailable):
    """There is no connection, so nothing was done."""


class PartlyDone(Exception):
    """The cause came after a statement that is committed."""


def _options(values: Mapping[str, str]) -> str:
    return " ".join(f"-c {name}={value}" for name, value in values.items())


def _said_by_server(error: BaseException) -> bool:
    """An error that the server reported was reported in place of a commit. Class 08 is what a pooler says of a server
    that it lost, commit or no commit."""
    return isinstance(error, psycopg.Error) and error.sqlstate is not None and error.sqlstate[:2] != "08"


def _quiet(connection: Connection) -> bool:
    """Whether nothing came while nobody asked: what comes then is the server's farewell, or the end."""
    try:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return not poll.poll(0)
    except (OSError, psycopg.Error):
        return False
