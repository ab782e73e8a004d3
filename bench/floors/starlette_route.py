"""Floor: the same as fastapi_route.py in plain Starlette, the models called by hand."""

from datetime import UTC, datetime

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.floors.models import Answer, Ask


async def route(request: Request) -> Response:
    ask = Ask.model_validate_json(await request.body())
    answer = Answer(
        id=ask.attempt_token,
        status="processing",
        lease_expires_at=datetime.now(UTC),
        cancel_requested=ask.done,
        fence=ask.count,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


app = Starlette(routes=[Route("/route", route, methods=["POST"])])
