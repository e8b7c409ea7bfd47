"""What a run's report says, as values, as JSON and as tables."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from rich.console import Console
from rich.table import Table

from simulations.checkers import CHECKERS, Violation
from simulations.observations import Observations
from simulations.scenario import Scenario
from tessella_p2p.base.limits import MICRO_PER_CREDIT
from tessella_p2p.ledger.accounts import ISSUANCE

_SHOWN_VIOLATIONS = 20

Value = str | int | float | bool | None | Sequence["Value"] | Mapping[str, "Value"]


@dataclass(frozen=True, slots=True)
class Report:
    """A run in numbers. ``sections`` are what happened, by topic; ``replay`` is the command line that runs it again."""

    scenario: Scenario
    sections: Mapping[str, Mapping[str, Value]]
    violations: tuple[Violation, ...]
    replay: str

    @property
    def content(self) -> bool:
        """Whether every checker is."""
        return not self.violations


def replay_command(scenario: str, *, nodes: int | None, seed: int) -> str:
    """The command line that runs a scenario again."""
    words = ["tessella-p2p", "sim", scenario, *(("--nodes", str(nodes)) if nodes is not None else ())]
    return shlex.join([*words, "--seed", str(seed)])


def report_of(seen: Observations, scenario: Scenario, violations: Sequence[Violation], replay: str) -> Report:
    """The report of what was seen."""
    sections = {
        "mesh": _mesh(seen),
        "discovery": _discovery(seen),
        "requests": _requests(seen, violations),
        "credits": _credits(seen),
    }
    return Report(scenario, sections, tuple(violations), replay)


def _mesh(seen: Observations) -> dict[str, Value]:
    counts = seen.counts
    refused = {kind: number for kind, number in sorted(counts.items()) if kind.startswith(("register:", "announce:"))}
    whole = [sample.at_s for sample in seen.coverage if sample.whole]
    broken = [sample for sample in seen.coverage if not sample.whole]
    return {
        "registrations": counts.get("register", 0),
        "leases": len(seen.leases),
        "announces": counts.get("announce", 0) + counts.get("ready", 0),
        "refused": refused,
        "absences": len(seen.absences),
        "partitions": len(seen.separations),
        "orchestrator_outages": len(seen.outages),
        "first_whole_s": min(whole, default=None),
        "samples": len(seen.coverage),
        "samples_not_whole": len(broken),
        "messages": counts.get("messages", 0),
    }


def _discovery(seen: Observations) -> dict[str, Value]:
    known = sorted(len(stages) for stages in seen.views.values())
    took_ms = [lookup.took_s * 1000 for lookup in seen.lookups]
    return {
        "lookups": len(seen.lookups),
        "lookups_found": sum(lookup.found > 0 for lookup in seen.lookups),
        "lookup_ms": _spread(took_ms),
        "hops": _spread([lookup.hops for lookup in seen.lookups]),
        "stages_ever_known": _spread(known),
    }


def _requests(seen: Observations, violations: Sequence[Violation]) -> dict[str, Value]:
    outcomes = Counter(asked.outcome for asked in seen.asked)
    answered = [asked for asked in seen.asked if asked.outcome == "answered"]
    rerouted = {chain.request_id for chain in seen.chains if chain.epoch}
    return {
        "asked": len(seen.asked),
        "answered": outcomes["answered"],
        "answered_unpaid": sum(not asked.paid for asked in answered),
        "abandoned": outcomes["abandoned"],
        "entry_lost": outcomes["entry lost"],
        "refused": dict(sorted(Counter(asked.code for asked in seen.asked if asked.outcome == "refused").items())),
        "chains": len(seen.chains),
        "rerouted": len(rerouted),
        "tokens": sum(len(asked.tokens) for asked in seen.asked),
        "wrong_answers": sum(violation.checker == "tokens" for violation in violations),
        "stages_of_a_route": _spread([len(chain.stages) for chain in seen.chains]),
        "first_token_ms": _spread([(asked.token_at_s[0] - asked.at_s) * 1000 for asked in answered]),
        "token_ms": _spread([(two - one) * 1000 for asked in answered for one, two in pairwise(asked.token_at_s)]),
        "answer_s": _spread([asked.done_s - asked.at_s for asked in answered]),
    }


def _credits(seen: Observations) -> dict[str, Value]:
    earned = sorted(account.micro_credits / MICRO_PER_CREDIT for account in seen.accounts if account.name != ISSUANCE)
    judged = {
        kind.removeprefix("proof:"): number for kind, number in sorted(seen.counts.items()) if kind[:6] == "proof:"
    }
    return {
        "tickets": seen.counts.get("session_grant", 0),
        "proofs": judged,
        "paid_workers": sum(amount > 0 for amount in earned),
        "credits": round(sum(earned), 6),
        "credits_of_a_worker": _spread(earned),
        "sum_of_accounts": sum(account.micro_credits for account in seen.accounts),
    }


def _spread(values: Sequence[float]) -> dict[str, Value] | None:
    """The median, the 99th percentile (nearest rank) and the maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[ceil(rank * len(ordered)) - 1], 3) for name, rank in ranks.items()}


def report_json(report: Report) -> str:
    """The report as one JSON object on one line; the same run gives the same bytes."""
    scenario = report.scenario
    return json.dumps(
        {
            "scenario": scenario.name,
            "seed": scenario.seed,
            "nodes": scenario.nodes,
            "duration_s": scenario.duration_s,
            **report.sections,
            "checkers": {name: sum(violation.checker == name for violation in report.violations) for name in CHECKERS},
            "violations": [
                {"checker": one.checker, "at_s": one.at_s, "problem": one.problem} for one in report.violations
            ],
            "content": report.content,
            "replay": report.replay,
        },
        ensure_ascii=False,
    )


def print_report(report: Report, console: Console | None = None) -> None:
    """The report as tables on standard output."""
    console = console or Console()
    scenario = report.scenario
    title = f"{scenario.name}: {scenario.nodes} nodes, {scenario.duration_s:g} virtual seconds, seed {scenario.seed}"
    table = Table("", "", title=title, show_header=False)
    for topic, values in report.sections.items():
        table.add_section()
        for name, value in values.items():
            table.add_row(f"{topic}: {name.replace('_', ' ')}", _words(value))
    console.print(table)
    verdicts = Table("checker", "violations", "holds the mesh to")
    for name, checker in CHECKERS.items():
        number = sum(violation.checker == name for violation in report.violations)
        verdicts.add_row(name, str(number) if number else "none", (checker.__doc__ or "").strip())
    console.print(verdicts)
    for violation in report.violations[:_SHOWN_VIOLATIONS]:
        at = "at the end" if violation.at_s is None else f"at {violation.at_s:.3f} s"
        console.print(f"violation ({violation.checker}, {at}): {violation.problem}", markup=False, highlight=False)
    if report.violations:
        rest = len(report.violations) - _SHOWN_VIOLATIONS
        if rest > 0:
            console.print(f"and {rest} more; --json has them all")
        console.print(f"seed {scenario.seed}; replay it with: {report.replay}", markup=False, highlight=False)


def _words(value: Value) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(part)}" for name, part in value.items()) or "none"
    return str(value)
