#!/usr/bin/env python3
"""A worker in plain Python, standard library only: SHA-256 checksums of files below a folder.

    python examples/checksum_worker.py --url http://127.0.0.1:8080 --worker-id ada --queue checksums

`./fencepost demo` runs this very file. To make a worker of your own, copy it and replace `work`; the rest is what
every worker does, in whatever language: claim, heartbeat at a third of the lease, end the attempt once, and drop the
work when the service says that the attempt is over.
"""

import argparse
import hashlib
import http.client
import json
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

LOST = ("lease-lost", "attempt-ended", "worker-mismatch", "job-not-found")


class Refused(Exception):
    """An answer that no repeat will change; `problem` is its document."""

    def __init__(self, problem):
        super().__init__(problem.get("detail", ""))
        self.problem = problem
        self.code = problem.get("code", "")


class Service:
    def __init__(self, url, key=None):
        parts = urlsplit(url)
        self.connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host = parts.netloc
        self.headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def post(self, path, body, until):
        """The answer. Where it is unknown or the service cannot now: again, until that monotonic time."""
        pause = 0.1
        while True:
            try:
                connection = self.connection(self.host, timeout=40)
                try:
                    connection.request("POST", path, json.dumps(body), self.headers)
                    answer = connection.getresponse()
                    content, status = json.loads(answer.read()), answer.status
                finally:
                    connection.close()
                if status < 300:
                    return content
                if status not in (408, 429, 500, 503):
                    raise Refused(content)
                pause = max(pause, float(answer.headers.get("Retry-After", 0)))
            except (OSError, http.client.HTTPException, ValueError) as error:
                content = {"code": "unreachable", "detail": str(error)}
            if time.monotonic() + pause > until:
                raise Refused(content)
            time.sleep(pause)
            pause = min(2 * pause, 5)


class Attempt:
    """The right to work on one job, kept alive by a thread until it is ended or lost."""

    def __init__(self, service, worker_id, job, server_time, sent):
        self.service, self.worker_id, self.job = service, worker_id, job
        self.progress = None
        self.over = threading.Event()  # ended by us, or lost
        self.lost = None  # why
        # What is left of the lease counts from the moment of sending, by our own clock: a wrong wall clock does no
        # harm, and neither does an answer that was slow to arrive.
        left = seconds_between(server_time, job["lease_expires_at"])
        self.every = max(0.1, left / 3)
        self.good_until = sent + left
        self.thread = threading.Thread(target=self.keep, daemon=True)
        self.thread.start()

    def keep(self):
        while not self.over.wait(self.every):
            sent = time.monotonic()
            body = {"attempt_token": self.job["attempt_token"], "worker_id": self.worker_id, "progress": self.progress}
            try:
                beat = self.service.post(f"/v1/jobs/{self.job['id']}/heartbeat", body, self.good_until)
            except Refused as refused:
                self.lost = refused
                self.over.set()
                return
            self.good_until = sent + seconds_between(beat["server_time"], beat["lease_expires_at"])
            if beat["cancel_requested"]:
                self.lost = Refused({"code": "cancel-requested", "detail": "An operator asked to stop."})
                self.over.set()

    def end(self, verb, **body):
        """Complete, fail or release. The same call may be repeated safely: only its first arrival counts."""
        self.over.set()
        self.thread.join()
        body["attempt_token"] = self.job["attempt_token"]
        return self.service.post(f"/v1/jobs/{self.job['id']}/{verb}", body, time.monotonic() + 60)


class Stopped(Exception):
    pass


def work(job, attempt, root):
    """The work itself. Between steps it looks whether it still has the right to go on."""
    path = (root / job["payload"]["path"]).resolve()
    if not path.is_relative_to(root):
        raise ValueError("the path leads out of the folder")
    seconds = job["payload"].get("seconds", 0)  # to be as slow as real work
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(max(1, size // 20)):
            digest.update(chunk)
            done += len(chunk)
            attempt.progress = {"bytes": done, "of": size}
            if attempt.over.wait(seconds / 20):
                raise Stopped
    return {"sha256": digest.hexdigest(), "bytes": done}


def seconds_between(earlier, later):
    from datetime import datetime

    moments = [datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (earlier, later)]
    return (moments[1] - moments[0]).total_seconds()


def say(**event):
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def do(service, arguments, job, server_time, sent):
    root = Path(arguments.root).resolve()
    say(event="claimed", id=job["id"], fence=job["fence"], path=job["payload"].get("path"))
    attempt = Attempt(service, arguments.worker_id, job, server_time, sent)
    try:
        try:
            result = work(job, attempt, root)
        except Stopped:
            if attempt.lost.code == "cancel-requested":
                attempt.end("release", reason="stopped as asked")
                return say(event="stopped", id=job["id"])
            raise attempt.lost from None
        except Exception as error:
            answer = attempt.end("fail", error_type=type(error).__name__, error_message=str(error))
        else:
            answer = attempt.end("complete", result=result)
        say(event="ended", id=job["id"], status=answer["status"])
    except Refused as refused:
        # The attempt is over: the work is dropped, and nothing of it is kept.
        say(event="lost" if refused.code in LOST else "gave up", id=job["id"], problem=refused.problem)
    finally:
        attempt.over.set()


def resume(service, arguments, job):
    """Go on with the attempt of an earlier life of this worker, if it is still ours."""
    sent = time.monotonic()
    body = {"attempt_token": job["attempt_token"], "worker_id": arguments.worker_id}
    try:
        beat = service.post(f"/v1/jobs/{job['id']}/heartbeat", body, sent + 30)
    except Refused as refused:
        say(event="lost", id=job["id"], problem=refused.problem)
    else:
        do(service, arguments, {**job, "lease_expires_at": beat["lease_expires_at"]}, beat["server_time"], sent)


def main():
    parser = argparse.ArgumentParser(description="SHA-256 checksums of files, as a Fencepost worker.")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", help="an API key, where the service asks for one")
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--queue", action="append", required=True, help="may be given several times; tried in order")
    parser.add_argument("--lease-seconds", type=float, default=30)
    parser.add_argument("--wait-seconds", type=float, default=10, help="how long a claim waits for a job")
    parser.add_argument("--root", default=".", help="the folder that payloads' paths are below")
    parser.add_argument("--notes", help="a file for the attempt in hand, which a restarted worker goes on with")
    parser.add_argument("--once", action="store_true", help="end after one job")
    arguments = parser.parse_args()
    service = Service(arguments.url, arguments.key)
    notes = Path(arguments.notes) if arguments.notes else None
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())  # the job in hand is finished first

    if notes and notes.exists():
        resume(service, arguments, json.loads(notes.read_text()))
        notes.unlink()
        if arguments.once:
            return
    while not ending.is_set():
        # With a request id a claim whose answer was lost can be repeated: it never takes a second job.
        body = {
            "worker_id": arguments.worker_id,
            "queues": arguments.queue,
            "lease_seconds": arguments.lease_seconds,
            "wait_seconds": arguments.wait_seconds,
            "request_id": str(uuid.uuid4()),
        }
        sent = time.monotonic()
        try:
            answer = service.post("/v1/jobs/claim", body, sent + 30)
        except Refused as refused:
            say(event="no claim", problem=refused.problem)
            if refused.code != "unreachable":
                sys.exit(1)
            continue
        for job in answer["jobs"]:
            if notes:
                notes.touch(mode=0o600)  # the token in it is a secret
                notes.write_text(json.dumps(job))
            do(service, arguments, job, answer["server_time"], sent)
            if notes:
                notes.unlink(missing_ok=True)
            if arguments.once:
                return


if __name__ == "__main__":
    main()
