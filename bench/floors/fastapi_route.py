"""Floor: a FastAPI route with pydantic models in and out, and no database."""

from datetime import UTC, datetime

from fastapi import FastAPI

from bench.floors.models import Answer, Ask

app = FastAPI()


@app.post("/route", response_model=Answer)
async def route(ask: Ask) -> Answer:
    return Answer(
        id=ask.attempt_token,
        status="processing",
        lease_expires_at=datetime.now(UTC),
        cancel_requested=ask.done,
        fence=ask.count,
    )
