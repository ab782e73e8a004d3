"""The request (about 300 bytes of JSON) and the answer (five fields) of the route floors."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, Field

BODY = (
    b'{"attempt_token":"0b9f6f0e-52a1-4d4e-9f6e-0d9a3c1b7e55","worker_id":"worker-7.rack-12.example",'
    b'"lease_seconds":30.5,"count":17,"labels":["north","retry"],'
    b'"note":"resize the three pictures of order 48151 and put them beside the originals, then tell the shop",'
    b'"done":false,"share":0.62,"place":"tray 4"}'
)


class Ask(BaseModel):
    attempt_token: UUID
    worker_id: str = Field(min_length=1, max_length=200)
    lease_seconds: float = Field(ge=1, le=43200)
    count: int
    labels: list[str]
    note: str
    done: bool
    share: float
    place: str


class Answer(BaseModel):
    id: UUID
    status: str
    lease_expires_at: datetime
    cancel_requested: bool
    fence: int
