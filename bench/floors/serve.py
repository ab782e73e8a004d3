"""Serve one of the floors' applications: `python -m bench.floors.serve fastapi_route`. Tells its port when ready.

uvicorn in one process with uvloop and httptools, without an access log: as our own server runs.
"""

import importlib
import resource
import socket
import sys

import uvicorn


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            sys.stdout.write(f"ready on http://127.0.0.1:{each.getsockname()[1]}\n")
            sys.stdout.flush()


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    config = uvicorn.Config(
        importlib.import_module(f"bench.floors.{sys.argv[1]}").app,
        loop="uvloop",
        http="httptools",
        ws="none",
        backlog=2048,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_level="warning",
    )
    _Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
