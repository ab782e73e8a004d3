"""One client without concurrency: the latency of a complete against one plain statement on a pooled connection."""

import json
import subprocess
import sys
import time

from bench import rig
from bench.compare import Figure, Row
from bench.context import Bench
from bench.stats import Goal, quantile

GROUP = "alone"
ROWS = 20_000


def run(bench: Bench) -> list[Row]:
    table, size = bench.table(), bench.size
    with bench.product() as ours:
        complete = bench.http(ours.server, "complete-alone", "complete", guess=1500, connections=1)

        def over_http() -> Figure:
            figure = complete()
            return Figure(figure.details["p50_ms"], figure.problems, figure.details)

        def statement() -> Figure:
            table.processing(ROWS)
            time.sleep(0.1)
            address, secret = rig.without_password(table.url)
            command = [sys.executable, "-P", "-m", "bench.floors.pooled_statement", address, "1", str(ROWS)]
            command += [str(size.warm), str(size.window)]
            done = subprocess.run(command, env=rig.environment(secret), capture_output=True, text=True, check=True)
            told = json.loads(done.stdout)
            latencies = [1000 * each for each in told["latencies"]]
            return Figure(quantile(latencies, 0.5), (told["problem"],) if told["problem"] else ())

        found = bench.interleave({"ours": over_http, "pooled statement": statement})
    what = "complete by one client, p50"
    return [bench.row(GROUP, what, "ms", found, "pooled statement", Goal(1.1, 0.8, lower_is_better=True))]
