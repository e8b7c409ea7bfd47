"""The orchestrator's routes (manual, section 07) as data: what serves them, describes them and counts them reads this one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import MAX_PROOFS_PER_BATCH
from tessella_p2p.bridge import orchestrator_json as j
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import Message

Access = Literal["public", "signed", "operator"]
ENVELOPE_HEADER: Final = "x-tessella-envelope"
"""Where a signed GET carries its envelope, base64url."""
NEXT_HEADER: Final = "x-tessella-next"
"""On a page that is not the last: the ``after`` of the page behind it."""
DEFAULT_DEVICE: Final = "cpu"
REQUEST_KINDS: Final = frozenset(
    kind.model_fields["kind"].default for kind in get_args(m.OrchestratorRequest) if issubclass(kind, Message)
)
"""The word that tells each request apart in its sealed form."""


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One route.

    Attributes:
        access: whoever; a peer whose sealed request is the body (POST) or the header (GET); whoever has the admin token.
        request: the message that it stands for. A public or operator GET takes its fields as parameters, a POST of the operator as
            JSON; a signed route takes the sealed message itself.
        answer: what `orchestrator_json.schema_of` describes the body by.
        of: the answer's message as a body: models, or a list of them.
        summary: one line for the docs.
        defaults: fields that the message wants and the route fills in.
        also: parameters that are no field of the message, with what they say.
        next_key: the field of the last row by which the page behind it is asked for; None where there are no pages.
        max_proofs: that one request may bring.
    """

    method: Literal["GET", "POST"]
    path: str
    access: Access
    request: type[Message]
    answer: Any
    summary: str
    of: Callable[[Any], Any] = lambda answer: answer
    defaults: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    next_key: str | None = None
    max_proofs: int = MAX_PROOFS_PER_BATCH

    def check(self, request: Message) -> None:
        """Whether a verified request is one of this route's.

        Raises:
            InvalidRequest: names what it is instead.
        """
        if not isinstance(request, self.request):
            kind = self.request.model_fields["kind"].default
            raise InvalidRequest(f"the envelope holds another request; {self.path} takes {kind}", "kind")
        if isinstance(request, m.WorkDone) and len(request.proofs) > self.max_proofs:
            raise InvalidRequest(f"{self.path} takes {self.max_proofs} proof; there is a route for batches", "proofs")


ALL = {"all": "`true`: the whole table, in pages, instead of one `peer_id`"}

PUBLIC: Final = (
    ApiRoute(
        "GET",
        "/peers",
        "public",
        m.ListPeers,
        j.PeerRows,
        "The routing contract: the workers of a model, with where to dial them. A model that nobody serves gives `[]`.",
        of=lambda answer: list(answer.peers),
        next_key="peer_id",
    ),
    ApiRoute(
        "GET",
        "/api/network/models",
        "public",
        m.ListModels,
        j.ModelRows,
        "What the mesh can render, and how many workers are Healthy.",
        of=lambda answer: list(answer.models),
    ),
    ApiRoute(
        "GET",
        "/workers",
        "public",
        m.ListWorkers,
        j.WorkerRows,
        "The monitoring view: every worker, no addresses.",
        of=lambda answer: list(answer.workers),
        next_key="peer_id",
    ),
    ApiRoute(
        "GET",
        "/model_health",
        "public",
        m.ReadModelHealth,
        m.ModelHealth,
        "Coverage, holes, and the memory terms that a claim is sized with.",
        defaults={"device": DEFAULT_DEVICE},
    ),
    ApiRoute(
        "GET",
        "/api/v1/assignment",
        "public",
        m.PreviewAssignment,
        j.AssignmentPreview,
        "The range that a claim would get now. Nothing is changed.",
        of=j.preview,
        defaults={"device": DEFAULT_DEVICE},
    ),
    ApiRoute(
        "GET",
        "/weights/manifest",
        "public",
        m.ReadManifest,
        m.ManifestSummary,
        "The manifest that a worker has to own to serve a model.",
    ),
    ApiRoute(
        "GET",
        "/weights/manifests",
        "public",
        m.ListManifests,
        j.ManifestRows,
        "The manifests that are served here.",
        of=lambda answer: list(answer.manifests),
    ),
    ApiRoute("GET", "/p2p_id", "public", m.ReadIdentity, m.Identity, "Who the orchestrator is: what a node pins."),
    ApiRoute(
        "GET",
        "/federation/status",
        "public",
        m.ReadFederation,
        m.Federation,
        "The head of this orchestrator's journal, and how far it has followed each other orchestrator.",
    ),
)

SIGNED: Final = (
    ApiRoute(
        "POST",
        "/register",
        "signed",
        m.Register,
        j.Registration,
        "Join with a claim; the answer is the range to serve, its lease, and the peers to dial.",
    ),
    ApiRoute(
        "POST",
        "/ready",
        "signed",
        m.Ready,
        j.Announcement,
        "The range is loaded: from now on `/peers` lists this worker.",
    ),
    ApiRoute(
        "POST",
        "/announce",
        "signed",
        m.Announce,
        j.Announcement,
        "Heartbeat. A lease of which half is over comes back renewed.",
    ),
    ApiRoute("POST", "/deregister", "signed", m.Deregister, j.Acknowledgement, "Leave cleanly."),
    ApiRoute(
        "GET",
        "/api/v1/session_grant",
        "signed",
        m.SessionGrant,
        m.Granted,
        "The tier of a request and its ticket, in one round trip.",
    ),
    ApiRoute(
        "POST",
        "/api/v1/audit_report",
        "signed",
        m.AuditReport,
        j.Acknowledgement,
        "What a sampled audit saw, by the auditor that the order names.",
    ),
    ApiRoute(
        "POST",
        "/work_done",
        "signed",
        m.WorkDone,
        m.Settled,
        "Settle one proof. What became of it is in `status`, also where it is refused.",
        of=lambda answer: answer.results[0],
        max_proofs=1,
    ),
    ApiRoute(
        "POST",
        "/api/v1/work_done_batch",
        "signed",
        m.WorkDone,
        j.SettledBatch,
        "Settle several proofs; the answers are in their order.",
        of=lambda answer: j.SettledBatch(results=answer.results),
    ),
    ApiRoute(
        "POST",
        "/report_failure",
        "signed",
        m.ReportFailure,
        j.Acknowledgement,
        "A peer failed the signer: a counter, not a verdict.",
    ),
)

OPERATOR: Final = (
    ApiRoute(
        "GET",
        "/ledger",
        "operator",
        m.ReadLedger,
        m.LedgerLines,
        "The newest entries of the ledger, newest first. `before` is the last `sequence` of the page before.",
    ),
    ApiRoute(
        "GET",
        "/ledger/evidence",
        "operator",
        m.ReadEvidence,
        m.Evidence,
        "What the verdict at `sequence` rests on: the proof and the auditors' reports, as they were sealed.",
    ),
    ApiRoute(
        "GET",
        "/ledger/snapshot",
        "operator",
        m.PullSnapshot,
        m.SnapshotPage,
        "Signed entries behind `since`, as a federated orchestrator pulls them. Without `chain`: of the chain in force.",
        defaults={"chain": 0, "since": 0},
    ),
    ApiRoute(
        "GET",
        "/credits",
        "operator",
        m.ReadAccounts,
        j.Account | j.AccountRows,
        "One identity's balance, or the table.",
        of=lambda answer: [j.account(entry) for entry in answer.accounts],
        also=ALL,
        next_key="name",
    ),
    ApiRoute(
        "GET",
        "/reputation",
        "operator",
        m.ReadReputation,
        m.ReputationEntry | j.ReputationRows,
        "One identity's score, or the table.",
        of=lambda answer: list(answer.entries),
        also=ALL,
        next_key="peer_id",
    ),
    ApiRoute(
        "POST",
        "/slash",
        "operator",
        m.Slash,
        j.Penalty,
        "Take credits off an identity, put it on the blacklist (`true`) or take it off (`false`).",
        of=j.penalty,
    ),
    ApiRoute(
        "POST",
        "/rebalance",
        "operator",
        m.Rebalance,
        m.RebalancePlan,
        "Recompute the split and move the mesh to it; `dry_run` only says how.",
    ),
    ApiRoute(
        "POST",
        "/weights/manifest",
        "operator",
        m.PublishManifest,
        m.ManifestSummary,
        "Publish the manifest that a model has to match from now on, and what it costs.",
    ),
)

ROUTES: Final = (*PUBLIC, *SIGNED, *OPERATOR)
METRICS_PATH: Final = "/metrics"
OPENAPI_PATH: Final = "/openapi.json"
DOCS_PATH: Final = "/docs"
