"""What has to hold in every simulation: pure functions from `Observations` to violations.

Each says in one line of its docstring what it holds the mesh to. None asks a role what it thinks: the truth is recomputed from what
was seen on the wire, at the engines, in the journal and of the faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from simulations.ledger_check import ledger_problems
from simulations.observations import ChainOpened, LeaseGranted, Observations, unix_ms
from simulations.scenario import Scenario
from simulations.toy_model import ROOT, whole_model_tokens
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import OUTAGE_GRACE_S
from tessella_p2p.ledger.accounts import ISSUANCE
from tessella_p2p.stages.toy import ToyModel
from tessella_p2p.wire.messages import Sampling

_GRACE_MS = round(OUTAGE_GRACE_S * 1000)
_NOTICED_S = 20.0
"""How long after an outage's end an entry may still count it: it asks every few seconds, and redials with patience."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that may never happen, and did."""

    checker: str
    at_s: float | None
    problem: str


Checker = Callable[[Observations, Scenario], Iterable[tuple[float | None, str]]]


def check(seen: Observations, scenario: Scenario) -> tuple[Violation, ...]:
    """Every violation that every checker finds, in the order of `CHECKERS`."""
    return tuple(
        Violation(name, at_s, problem)
        for name, checker in CHECKERS.items()
        for at_s, problem in checker(seen, scenario)
    )


# ---- Answers


def check_tokens(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """What a client got is what the whole model in one piece says, to the last token or up to where the client left."""
    del scenario
    model = ToyModel(seen.layers)
    for asked in seen.asked:
        if not asked.tokens and asked.outcome != "answered":
            continue
        params = Sampling(temperature=asked.temperature, seed=asked.seed)
        truth = whole_model_tokens(model, asked.prompt, asked.max_tokens, params)
        wrong = next((i for i, (got, true) in enumerate(zip(asked.tokens, truth, strict=False)) if got != true), None)
        if wrong is not None:
            yield asked.done_s, f"request {asked.number} to {asked.entry}: token {wrong} is wrong"
        elif len(asked.tokens) > len(truth) or (asked.outcome == "answered" and len(asked.tokens) < len(truth)):
            yield asked.done_s, f"request {asked.number} to {asked.entry}: {len(asked.tokens)} tokens of {len(truth)}"


def check_answered(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """Once the mesh has had its time after the last fault, every request is answered."""
    healthy_s = scenario.faults_end_s + scenario.bounds.recovery_s
    for asked in seen.asked:
        if asked.at_s >= healthy_s and asked.outcome in ("refused", "entry lost"):
            yield (
                asked.done_s,
                f"request {asked.number} to {asked.entry} was not answered: {asked.code or asked.outcome}",
            )


# ---- Stages and routes


def check_epochs(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """No stage goes back: once it has served an epoch of a session it serves no earlier one."""
    del scenario
    newest: dict[tuple[PeerId, int, bytes], int] = {}
    for served in seen.epochs:
        key = (served.peer, served.start, served.session)
        if served.epoch < newest.get(key, 0):
            yield (
                served.at_s,
                (
                    f"{served.peer} served epoch {served.epoch} of session {served.session.hex()} after epoch {newest[key]}"
                ),
            )
        newest[key] = max(served.epoch, newest.get(key, 0))


def check_routes(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """Every route covers each layer once, in order, with a peer for each stage."""
    del scenario
    for chain in seen.chains:
        edges = [(0, 0), *(layers for _, layers in chain.stages)]
        whole = all(one[1] == two[0] < two[1] for one, two in pairwise(edges)) and edges[-1][1] == seen.layers
        if not whole or len({peer for peer, _ in chain.stages}) != len(chain.stages):
            yield chain.at_s, f"{_chain(chain)} is no chain over {seen.layers} layers: {edges[1:]}"


def check_leases(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """No route uses a stage whose peer has no lease in force for exactly these layers, or was given another range since."""
    granted = _by_peer(seen.leases)
    for chain in seen.chains:
        for peer, layers in chain.stages:
            problem = _lease_problem(granted.get(peer, []), layers, chain, seen, scenario.bounds.offline_s)
            if problem is not None:
                yield chain.at_s, f"{_chain(chain)} uses layers {list(layers)} of {peer}, {problem}"


def _by_peer(leases: Iterable[LeaseGranted]) -> Mapping[PeerId, list[LeaseGranted]]:
    found: dict[PeerId, list[LeaseGranted]] = {}
    for lease in leases:
        found.setdefault(lease.peer, []).append(lease)
    return found


def _lease_problem(
    leases: list[LeaseGranted], layers: tuple[int, int], chain: ChainOpened, seen: Observations, offline_s: float
) -> str | None:
    before = [lease for lease in leases if lease.at_s <= chain.at_s]
    fitting = [lease for lease in before if lease.layers == layers]
    if not fitting:
        return "for which it never had a lease"
    newest = fitting[-1]
    since = [lease for lease in before if lease.serial > newest.serial]
    if since and since[0].at_s + offline_s < chain.at_s:
        return f"although it has had layers {list(since[0].layers)} since {since[0].at_s:.1f} s"
    grace_ms = _GRACE_MS if _orchestrator_away(seen, chain.entry, chain.at_s) else 0
    if unix_ms(chain.at_s) >= newest.expires_ms + grace_ms:
        return "whose lease is over"
    return None


def _orchestrator_away(seen: Observations, entry: PeerId, at_s: float) -> bool:
    if any(outage.since_s <= at_s < outage.until_s + _NOTICED_S for outage in seen.outages):
        return True
    return any(
        entry in apart.peers and apart.since_s <= at_s < apart.until_s + _NOTICED_S for apart in seen.separations
    )


def check_stale(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """No entry opens a chain over a peer that it cannot have heard of for longer than the offline limit."""
    limit_s = scenario.bounds.offline_s
    for chain in seen.chains:
        for peer, _ in chain.stages:
            gone_s = _gone_for(seen, chain.entry, peer, chain.at_s)
            if gone_s > limit_s:
                yield chain.at_s, f"{_chain(chain)} uses {peer}, which has been gone for {gone_s:.1f} s"


def _gone_for(seen: Observations, entry: PeerId, peer: PeerId, at_s: float) -> float:
    """For how long ``peer`` has been dead, frozen or cut off from ``entry`` at ``at_s``; 0 if it is there."""
    since = [gone.since_s for gone in seen.absences if gone.peer == peer and gone.since_s <= at_s < gone.until_s]
    since += [
        cut.since_s
        for cut in seen.separations
        if cut.since_s <= at_s < cut.until_s and (entry in cut.peers) != (peer in cut.peers)
    ]
    return at_s - min(since, default=at_s)


def check_hostile(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """Nobody ever holds, and no route ever uses, a stage of a peer that the orchestrator did not admit."""
    del scenario
    admitted = {lease.peer for lease in seen.leases}
    for node, stages in seen.views.items():
        for peer in stages:
            if peer not in admitted:
                yield None, f"the view of {node} held a stage of {peer}, which never had a lease"
    for chain in seen.chains:
        for peer, _ in chain.stages:
            if peer in seen.hostile:
                yield chain.at_s, f"{_chain(chain)} uses the hostile {peer}"


def _chain(chain: ChainOpened) -> str:
    return f"epoch {chain.epoch} of {chain.request_id} at {chain.entry}"


# ---- Credits


def check_credits(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """Accounts sum to 0; each layer and position of a ticket is paid once; every credit rests on a proof that holds."""
    del scenario
    total = sum(account.micro_credits for account in seen.accounts)
    if total:
        yield None, f"the accounts sum to {total} micro-credits"
    yield from ((None, problem) for problem in ledger_problems(seen, ROOT))
    paid = Counter({account.name: account.micro_credits for account in seen.accounts if account.name != ISSUANCE})
    earned: Counter[str] = Counter()
    for entry in seen.journal:
        if entry.change.kind == "proof_settled":
            earned[entry.change.worker] += entry.change.micro_credits
    for name in sorted({*paid, *earned}):
        if paid[name] != earned[name]:
            yield None, f"the account of {name} has {paid[name]} micro-credits; the journal gives {earned[name]}"


def check_settled(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """At the end every proof of every node is settled: none is open, waits, is held or was refused."""
    del scenario
    for end in seen.ends:
        counts = end.proofs
        if counts is not None and (counts.open or counts.pending or counts.held or counts.refused):
            yield (
                None,
                (
                    f"{end.peer} ends with {counts.open} open, {counts.pending} waiting, {counts.held} held and"
                    f" {counts.refused} refused proofs"
                ),
            )
    for judged in seen.proofs:
        if judged.settled.status in ("held", "refused"):
            settled = judged.settled
            yield judged.at_s, f"an honest proof was {settled.status}: {settled.code}: {settled.reason}"


# ---- Recovery and what is left


def check_coverage(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """From a while after the last fault on, the model is whole for the orchestrator and for every entry."""
    healthy_s = scenario.faults_end_s + scenario.bounds.recovery_s
    for sample in seen.coverage:
        if sample.at_s < healthy_s:
            continue
        if not sample.whole:
            yield sample.at_s, "the orchestrator does not see the whole model"
        if sample.without_route:
            first = sample.without_route[0]
            yield (
                sample.at_s,
                f"{len(sample.without_route)} of {sample.entries} entries have no route, {first} among them",
            )


def check_leaks(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """At the end every node is up, and none holds a session or its KV."""
    del scenario
    for end in seen.ends:
        if not end.up:
            yield None, f"{end.peer} is not up"
        if end.kv_sessions or end.hop_sessions:
            yield None, f"{end.peer} holds the KV of {end.kv_sessions} sessions, and {end.hop_sessions} open ones"


def check_failures(seen: Observations, scenario: Scenario) -> Iterator[tuple[float | None, str]]:
    """No role meets an error that it did not expect."""
    del scenario
    yield from ((None, failure) for failure in seen.failures)


CHECKERS: Mapping[str, Checker] = {
    "tokens": check_tokens,
    "answered": check_answered,
    "epochs": check_epochs,
    "routes": check_routes,
    "leases": check_leases,
    "stale records": check_stale,
    "hostile": check_hostile,
    "credits": check_credits,
    "settled": check_settled,
    "coverage": check_coverage,
    "leaks": check_leaks,
    "failures": check_failures,
}
