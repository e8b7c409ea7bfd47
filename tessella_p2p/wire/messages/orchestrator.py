"""The unions: what may be asked of an orchestrator, what it answers, and what it orders."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import MAX_REFUSAL_CHARS
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.auditing import AuditOrder, AuditReport
from tessella_p2p.wire.messages.federation import PullSnapshot, SnapshotPage
from tessella_p2p.wire.messages.membership import (
    Acknowledged,
    Announce,
    Assigned,
    Deregister,
    ListStages,
    Ready,
    Register,
    ReportFailure,
    Stages,
    Subscribe,
    UpdateAssignment,
)
from tessella_p2p.wire.messages.operating import Operate, OperatorAnswer
from tessella_p2p.wire.messages.payments import Credits, Granted, ReadCredits, SessionGrant, WorkDone, WorkSettled
from tessella_p2p.wire.messages.reads import PublicAnswer, PublicRequest
from tessella_p2p.wire.messages.types import Count, Name


class Refused(Message):
    """Any request may be refused; ``code`` is the error's code in ``base.errors``."""

    kind: Literal["refused"] = "refused"
    code: Name
    reason: Annotated[str, Field(max_length=MAX_REFUSAL_CHARS)]


SignedRequest = (
    Register
    | Ready
    | Announce
    | Deregister
    | SessionGrant
    | WorkDone
    | ListStages
    | Subscribe
    | ReadCredits
    | ReportFailure
    | AuditReport
    | PullSnapshot
)
"""What its signer may ask."""
OrchestratorRequest = SignedRequest | PublicRequest | Operate
OrchestratorAnswer = (
    Assigned
    | Acknowledged
    | Granted
    | WorkSettled
    | Stages
    | Credits
    | SnapshotPage
    | PublicAnswer
    | OperatorAnswer
    | Refused
)


class RequestBody(Message):
    """The payload of a request envelope (domain `REQUEST`, audience the orchestrator)."""

    body: Annotated[OrchestratorRequest, Field(discriminator="kind")]


class AnswerBody(Message):
    """The payload of an answer envelope (domain `ANSWER`, audience the asker); ``to`` is the request's sequence."""

    to: Count
    body: Annotated[OrchestratorAnswer, Field(discriminator="kind")]


class OrderBody(Message):
    """The payload of an order (domain `ORDER`, audience the worker)."""

    body: Annotated[UpdateAssignment | AuditOrder, Field(discriminator="kind")]
