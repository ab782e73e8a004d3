"""Judge a history: every rule that a client could find broken, from what was said and what is there at the end.

The order within a job is witnessed by its fences and by the database's instants, so a check is a sort and a scan.
An unknown answer proves nothing against the service and may explain anything it allows. An ending or heartbeat that
comes after the expiry and before the reclaim is accepted (specification 2.1): what must not be is that it is accepted
after its token was taken away.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tests.reliability.history import ENDINGS, OK, OUTCOME_OF, REJECTED, UNKNOWN, Event, Final, Held, ReadOut, Violation

FREE_RELEASES = 10
BY_FORCE = ("cancelled", "requeued")
"""How an attempt ends that an operator takes away, whatever is left of its lease."""


class _Job:
    """All that the history tells of one job."""

    def __init__(self) -> None:
        self.claims: dict[int, Held] = {}
        self.told: dict[int, tuple[float, float]] = {}
        """By fence: when its claim was sent and when it was answered, by the callers' clock. An instant of the database
        is of a transaction's beginning; of two that ran at once it does not tell which came first."""
        self.calls: dict[str, list[Event]] = defaultdict(list)
        """By token: heartbeats and endings."""

    def latest_lease(self, held: Held) -> int:
        """The end of the lease that the holder was told of: a lower bound of the true one."""
        beats = (call.expires_at for call in self.calls[held.token] if call.op == "heartbeat" and call.answer == OK)
        return max((at for at in beats if at is not None), default=held.expires_at)

    def may_have_ended(self, token: str, verbs: Iterable[str] = ENDINGS) -> bool:
        return any(call.op in verbs and call.answer != REJECTED for call in self.calls[token])


def check(events: Sequence[Event], read: ReadOut, *, quiet: bool = True) -> list[Violation]:
    """All violations. `quiet`: the read-out was taken when nothing was left to do."""
    return list(_check(events, read, quiet))


def _check(events: Sequence[Event], read: ReadOut, quiet: bool) -> Iterator[Violation]:
    jobs: dict[str, _Job] = defaultdict(_Job)
    yield from _claims(events, jobs)
    for event in events:
        if (event.op == "heartbeat" or event.op in ENDINGS) and event.job and event.token:
            jobs[event.job].calls[event.token].append(event)
        if (event.status or 0) >= 500 and event.status != 503:
            yield Violation("I23", event.op, f"answered {event.status}")
    for job_id, job in jobs.items():
        yield from _order(job_id, job, read.jobs.get(job_id))
        yield from _calls(job_id, job, read.jobs.get(job_id))
        yield from _completion(job_id, job, read.jobs.get(job_id))
    yield from _intake(events, read)
    yield from _requests(events)
    for final in read.jobs.values():
        yield from _attempts(final, jobs[final.job])
        if quiet and (final.status == "processing" or (final.status == "queued" and final.due)):
            yield Violation("I12", final.job, f"is left {final.status}")
    yield from _counts(read)


def _claims(events: Sequence[Event], jobs: dict[str, _Job]) -> Iterator[Violation]:
    tokens: dict[str, tuple[str, int]] = {}
    for event in events:
        if event.op != "claim" or event.answer != OK:
            continue
        if len(event.jobs) > event.asked:
            yield Violation("I19", event.worker, f"asked for {event.asked} jobs and got {len(event.jobs)}")
        if len({held.job for held in event.jobs}) < len(event.jobs):
            yield Violation("I19", event.worker, "got one job twice in one claim")
        for held in event.jobs:
            if held.queue not in event.queues:
                yield Violation("I19", held.job, f"of queue {held.queue} was given to a claim of {event.queues}")
            if held.available_at > held.claimed_at:
                yield Violation("I19", held.job, "was claimed before it was due")
            owner = tokens.setdefault(held.token, (held.job, held.fence))
            if owner != (held.job, held.fence):
                yield Violation("I2", held.job, f"has the token of {owner} at fence {held.fence}")
            known = jobs[held.job].claims.setdefault(held.fence, held)
            jobs[held.job].told.setdefault(held.fence, (event.sent, event.received))
            if known.token != held.token or known.worker != held.worker:
                yield Violation("I1", held.job, f"fence {held.fence} was given to {known.worker} and {held.worker}")


def _order(job_id: str, job: _Job, final: Final | None) -> Iterator[Violation]:
    ordered = [job.claims[fence] for fence in sorted(job.claims)]
    by_force = {each.fence for each in final.attempts if each.outcome in BY_FORCE} if final else set()
    for first, then in itertools.pairwise(ordered):
        if then.claimed_at < first.claimed_at and job.told[first.fence][1] < job.told[then.fence][0]:
            yield Violation("I2", job_id, f"fence {then.fence} was given before fence {first.fence}")
        ended = first.fence in by_force or job.may_have_ended(first.token)
        if then.claimed_at < job.latest_lease(first) and not ended:
            yield Violation("I1", job_id, f"fence {then.fence} was given while fence {first.fence} had its lease")
    for held in ordered:
        beats = [call for call in job.calls[held.token] if call.op == "heartbeat" and call.answer == OK]
        # By the callers' clock again: of two heartbeats at once the one that began first may come second.
        known, known_to, told = held.expires_at, 0, sorted(beats, key=lambda call: call.received)
        for beat in sorted(beats, key=lambda call: call.sent):
            if beat.expires_at is None or beat.at is None:
                continue
            while told[known_to].received < beat.sent:
                known = max(known, told[known_to].expires_at or 0)
                known_to += 1
            if beat.expires_at < known:
                yield Violation("I9", job_id, f"a heartbeat of fence {held.fence} made the lease shorter")
            if beat.lease is not None and beat.expires_at < beat.at + beat.lease:
                yield Violation("I9", job_id, f"a heartbeat of fence {held.fence} got less than it asked for")


def _calls(job_id: str, job: _Job, final: Final | None) -> Iterator[Violation]:
    """A token does something only while it is the job's own, and is refused only when it is not."""
    ended = {attempt.fence: attempt for attempt in final.attempts} if final else {}
    for held in job.claims.values():
        attempt = ended.get(held.fence)
        accepted: dict[tuple[str, str], Event] = {}
        for call in job.calls[held.token]:
            if call.answer == UNKNOWN:
                continue
            same = accepted.get((call.op, call.content))
            if call.answer == REJECTED:
                if same is not None and call.op in ENDINGS:
                    yield Violation("I8", job_id, f"a repeated {call.op} was refused with {call.code}")
                if call.status == 409 and final is not None and attempt is None:
                    yield Violation("I3", job_id, f"a {call.op} of fence {held.fence}, still current, was refused")
                if call.ended_at is not None and attempt is not None and call.ended_at != attempt.ended_at:
                    yield Violation("I3", job_id, f"a {call.op} of fence {held.fence} was refused before its end")
                if call.code == "lease-lost" and attempt is not None and attempt.outcome in ("done", "failed"):
                    yield Violation("I3", job_id, f"a {call.op} was refused, yet fence {held.fence} ended by itself")
                continue
            if call.fence is not None and call.fence != held.fence and call.op == "heartbeat":
                yield Violation("I3", job_id, f"a heartbeat of fence {held.fence} moved fence {call.fence}")
            if call.op in ENDINGS:
                if call.fence is not None and call.fence != held.fence:
                    yield Violation("I3", job_id, f"a {call.op} of fence {held.fence} was answered for {call.fence}")
                if same is not None and (same.at, same.after, same.available_at) != (
                    call.at,
                    call.after,
                    call.available_at,
                ):
                    yield Violation("I8", job_id, f"a repeated {call.op} got another answer")
                if len({op for op, _ in accepted} - {call.op}) > 0:
                    yield Violation("I3", job_id, f"fence {held.fence} ended twice, by {call.op} and otherwise")
                accepted[call.op, call.content] = call
                if final is not None and (attempt is None or attempt.outcome != OUTCOME_OF[call.op]):
                    outcome = attempt.outcome if attempt else "no end"
                    yield Violation("I3", job_id, f"an accepted {call.op} of fence {held.fence} is kept as {outcome}")
            elif attempt is not None and attempt.outcome == "reclaimed" and (call.at or 0) > attempt.ended_at:
                yield Violation("I3", job_id, f"a heartbeat of fence {held.fence} was accepted after its end")
            elif any(call.sent > end.received for end in accepted.values()):
                # By the callers' clock: between transactions that ran at once the database's instants are of their
                # beginnings and do not tell which came first.
                yield Violation("I3", job_id, f"a heartbeat of fence {held.fence} was accepted after its ending")
            for fence, later in job.claims.items():
                after_it = fence > held.fence and job.told[fence][1] < call.sent
                if after_it and call.at is not None and later.claimed_at < call.at:
                    yield Violation("I3", job_id, f"a stale {call.op} of fence {held.fence} was accepted")


def _completion(job_id: str, job: _Job, final: Final | None) -> Iterator[Violation]:
    accepted = [(held, call) for held in job.claims.values() for call in job.calls[held.token]]
    completed = [(held, call) for held, call in accepted if call.op == "complete" and call.answer == OK]
    if len({held.token for held, _ in completed}) > 1:
        yield Violation("I4", job_id, "was completed by two attempts")
    for held, call in completed[:1]:
        if any(fence > held.fence for fence in job.claims):
            yield Violation("I4", job_id, "was claimed after its completion")
        if final is not None and final.status != "done":
            yield Violation("I4", job_id, f"was completed and is {final.status}")
        if final is not None and final.status == "done" and final.result != call.content:
            yield Violation("I4", job_id, "has another result than was accepted")
    if final is not None and final.status == "done" and not completed:
        possible = {
            call.content
            for held, call in accepted
            if call.op == "complete" and call.answer == UNKNOWN and held.fence == final.fence
        }
        if final.result not in possible:
            yield Violation("I4", job_id, "is done, and nobody completed it")


def _intake(events: Sequence[Event], read: ReadOut) -> Iterator[Violation]:
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    contents: dict[tuple[str, str], set[str]] = defaultdict(set)
    fresh: dict[tuple[str, str], int] = defaultdict(int)
    possible: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in events:
        if event.op != "enqueue" or event.key is None or event.queue is None:
            continue
        named = (event.queue, event.key)
        if event.answer != REJECTED:
            possible[named].add(event.content)
        if event.answer == OK and event.job is not None:
            ids[named].add(event.job)
            contents[named].add(event.content)
            fresh[named] += bool(event.fresh)
            if event.job not in read.jobs:
                yield Violation("I5", event.job, "was acknowledged and is gone")
    for named in ids:
        if len(ids[named]) > 1:
            yield Violation("I7", named[1], f"made {len(ids[named])} jobs")
        if len(contents[named]) > 1:
            yield Violation("I7", named[1], "was accepted with different contents")
        if fresh[named] > 1:
            yield Violation("I7", named[1], "was new twice")
    seen: dict[tuple[str, str | None], str] = {}
    for final in read.jobs.values():
        named = (final.queue, final.key or "")
        if named not in possible:
            yield Violation("I6", final.job, "was enqueued by nobody")
        elif final.content not in (contents[named] or possible[named]):
            yield Violation("I6", final.job, "has a content that nobody sent")
        if seen.setdefault(named, final.job) != final.job:
            yield Violation("I7", named[1], "has two jobs at the end")


def _requests(events: Sequence[Event]) -> Iterator[Violation]:
    """A repeated claim gives what the first one took, and nothing else."""
    by_request: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.op == "claim" and event.request is not None and event.answer == OK:
            by_request[event.worker, event.request].append(event)
    for (worker, _), claims in by_request.items():
        new = [claim for claim in claims if claim.jobs and not claim.replayed]
        if len(new) > 1:
            yield Violation("I8", worker, "a repeated claim took new jobs")
        taken = {(held.job, held.fence, held.token) for claim in new for held in claim.jobs}
        for claim in claims:
            given = {(held.job, held.fence, held.token) for held in claim.jobs}
            if claim.replayed and new and not given <= taken:
                yield Violation("I8", worker, "a repeated claim was answered with other jobs")
        if len({(held.job, held.fence) for claim in claims for held in claim.jobs}) > claims[0].asked:
            yield Violation("I8", worker, "a claim and its repeats took more than was asked for")


def _attempts(final: Final, job: _Job) -> Iterator[Violation]:
    ended = final.attempts
    fences = [attempt.fence for attempt in ended]
    expected = list(range(1, final.fence + (final.status != "processing")))
    if fences != expected:
        yield Violation("I11", final.job, f"has ended attempts {fences} and fence {final.fence}")
    if final.count > final.max_attempts:
        yield Violation("I11", final.job, f"had {final.count} attempts of {final.max_attempts}")
    number, releases = 0, 0
    for attempt in ended:
        if attempt.number != number + 1:
            yield Violation("I11", final.job, f"fence {attempt.fence} is attempt {attempt.number} after {number}")
        releases = releases + 1 if attempt.outcome == "released" else 0
        number = attempt.number - (attempt.outcome == "released" and releases <= FREE_RELEASES)
    if final.status != "processing" and fences == expected and number != final.count:
        yield Violation("I11", final.job, f"counts {final.count} attempts, its history {number}")
    if sum(attempt.outcome == "reclaimed" for attempt in ended) != final.reclaims:
        yield Violation("I11", final.job, "has another number of reclaims than its history")
    by_fence = {attempt.fence: attempt for attempt in ended}
    for held in job.claims.values():
        attempt = by_fence.get(held.fence)
        if attempt is None:
            if held.fence != final.fence or final.status != "processing":
                yield Violation("I11", final.job, f"has no end of fence {held.fence}, which was claimed")
            continue
        if attempt.worker != held.worker or attempt.claimed_at != held.claimed_at or attempt.number != held.number:
            yield Violation("I11", final.job, f"fence {held.fence} is kept otherwise than it was given")
        if attempt.outcome == "reclaimed" and attempt.ended_at < job.latest_lease(held):
            yield Violation("I9", final.job, f"fence {held.fence} was reclaimed before its lease was over")
        verb = next((verb for verb, outcome in OUTCOME_OF.items() if outcome == attempt.outcome), None)
        if verb in ("complete", "fail") and not job.may_have_ended(held.token, [verb]):
            yield Violation("I3", final.job, f"fence {held.fence} is {attempt.outcome}, which its holder never said")


def _counts(read: ReadOut) -> Iterator[Violation]:
    if read.counts is None:
        return
    own: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for final in read.jobs.values():
        own[final.queue][final.status] += 1
    for queue in own.keys() | read.counts.keys():
        told = {status: count for status, count in read.counts.get(queue, {}).items() if count}
        if told != dict(own[queue]):
            yield Violation("I13", queue, f"counts {told}, the list has {dict(own[queue])}")
