"""What is simulated: a scenario, as it stands in a TOML file.

A scenario says how many nodes there are, what the network between them is like, what they are asked, and what goes wrong when. Every
key has a bound; an unknown key, or a value out of bounds, is refused with the file's and the key's name. Times are virtual seconds
since the start.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import LEASE_TTL_S, MAX_BOOTSTRAP, MAX_STAGES

SCENARIOS = Path(__file__).parent / "scenarios"
MAX_NODES = 5000
MAX_DURATION_S = 24 * 3600.0
LAST_ANSWERS_S = 12.0
"""From the last request to the end, at the least: what runs at the end counts as left behind."""


def _ascending(span: tuple[float, float]) -> tuple[float, float]:
    if span[0] > span[1]:
        raise ValueError(f"{span[0]} to {span[1]} is no span: the first number is the smaller one")
    return span


Seconds = Annotated[float, Field(ge=0.0, le=MAX_DURATION_S)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Tokens = Annotated[int, Field(ge=1, le=1024)]
TokenSpan = Annotated[tuple[Tokens, Tokens], AfterValidator(_ascending), Field(strict=False)]
SecondsSpan = Annotated[tuple[Seconds, Seconds], AfterValidator(_ascending), Field(strict=False)]
Lie = Literal["withhold", "garbage", "records"]


class Section(BaseModel):
    """Base of every table: frozen, unknown keys refused, no value of another type taken for the right one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Window(Section):
    """When something begins and ends."""

    from_s: Seconds
    until_s: Seconds

    @model_validator(mode="after")
    def _forwards(self) -> Self:
        if self.from_s >= self.until_s:
            raise ValueError(f"from_s ({self.from_s:g}) is before until_s ({self.until_s:g})")
        return self


class MeshTable(Section):
    """``[mesh]``: the model and how it is split.

    Attributes:
        layers, min_stages: of the toy model, and into how many stages it is split at least.
        bootstraps, dead_bootstraps: bootstrap nodes that answer, and addresses in everybody's list at which nobody does.
        join_within_s: nodes start at times drawn from ``[0, join_within_s]``.
        compute_ms: virtual milliseconds that a turn's first row takes on a stage; more rows cost a tenth each.
    """

    layers: Annotated[int, Field(ge=1, le=256)] = 12
    min_stages: Annotated[int, Field(ge=1, le=MAX_STAGES)] = 4
    bootstraps: Annotated[int, Field(ge=1, le=8)] = 1
    dead_bootstraps: Annotated[int, Field(ge=0, le=8)] = 0
    join_within_s: Seconds = 20.0
    compute_ms: Annotated[float, Field(ge=0.0, le=1000.0)] = 2.0
    checkpoint_s: Annotated[float, Field(ge=0.1, le=60.0)] = 5.0
    hop_timeout_s: Annotated[float, Field(ge=1.0, le=60.0)] = 10.0


class NetworkTable(Section):
    """``[network]``: one-way latencies are log-normal; ``loss`` is the probability that a message has to be sent again."""

    latency_ms: Annotated[float, Field(ge=0.1, le=5000.0)] = 50.0
    sigma: Annotated[float, Field(ge=0.0, le=2.0)] = 0.5
    loss: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0


class LoadTable(Window):
    """``[load]``: what clients ask, of nodes drawn at random among those that are up.

    Attributes:
        per_s: requests a second on average.
        shape: ``steady`` (a Poisson process), ``bursts`` (five at a time), or ``waves`` (a rate that swings by 90 % once a minute).
        prompt_tokens, max_tokens: lengths are drawn evenly from these spans.
        sampled: the share of requests that draw at a temperature instead of taking the best token.
        abandoned: the share of clients that leave in mid-answer.
    """

    per_s: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    shape: Literal["steady", "bursts", "waves"] = "steady"
    prompt_tokens: TokenSpan = (4, 48)
    max_tokens: TokenSpan = (4, 24)
    sampled: Share = 0.25
    abandoned: Share = 0.1


class ChurnTable(Window):
    """``[[churn]]``: a share of the nodes leaves in the window and comes back.

    Attributes:
        share: of all nodes.
        down_s: how long each is away; all are back at ``until_s``.
        graceful: the share of them that drains and says good-bye; the others die without a word.
    """

    share: Share
    down_s: SecondsSpan = (5.0, 30.0)
    graceful: Share = 0.0


class PartitionTable(Window):
    """``[[partitions]]``: a share of the nodes hears nobody but itself; the orchestrator is on the other side."""

    share: Share


class FreezeTable(Window):
    """``[[freezes]]``: a share of the nodes falls silent with all its connections open."""

    share: Share


class OutageTable(Window):
    """``[[outages]]``: the orchestrator's process is dead; its ledger stays."""


class LiarsTable(Section):
    """``[liars]``: hostile peers beside the nodes.

    Attributes:
        count: how many there are, with the kinds in turn.
        kinds: ``withhold`` answers lookups with nothing, ``garbage`` with bytes that are no message; ``records`` answers and gossips
            records that are forged, expired, replayed, or without a lease that counts.
    """

    count: Annotated[int, Field(ge=0, le=1000)] = 0
    kinds: Annotated[tuple[Lie, ...], Field(min_length=1, strict=False)] = ("withhold", "garbage", "records")


class BoundsTable(Section):
    """``[bounds]``: what the checkers hold the mesh to.

    Attributes:
        recovery_s: after the last fault, how long until every entry has a route and every request is answered.
        offline_s: how long after its last sign of life a peer may still be chosen.
    """

    recovery_s: Seconds = 60.0
    offline_s: Seconds = 22.5


class Scenario(Section):
    """One scenario."""

    name: Annotated[str, Field(pattern=r"^[\w-]{1,64}$")]
    description: Annotated[str, Field(max_length=1024)] = ""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    seed: Annotated[int, Field(ge=0)] = 1
    duration_s: Annotated[float, Field(gt=0.0, le=MAX_DURATION_S)]
    lookups_per_s: Annotated[float, Field(ge=0.0, le=100.0)] = 0.5
    mesh: MeshTable = MeshTable()
    network: NetworkTable = NetworkTable()
    load: LoadTable | None = None
    churn: Annotated[tuple[ChurnTable, ...], Field(strict=False)] = ()
    partitions: Annotated[tuple[PartitionTable, ...], Field(strict=False)] = ()
    freezes: Annotated[tuple[FreezeTable, ...], Field(strict=False)] = ()
    outages: Annotated[tuple[OutageTable, ...], Field(strict=False)] = ()
    liars: LiarsTable = LiarsTable()
    bounds: BoundsTable = BoundsTable()

    @property
    def faults_end_s(self) -> float:
        """When the last fault is over, and everybody has joined."""
        return max([self.mesh.join_within_s, *(window.until_s for _, window in self._faults())])

    def _faults(self) -> Iterator[tuple[str, Window]]:
        tables: dict[str, tuple[Window, ...]] = {
            "churn": self.churn,
            "partitions": self.partitions,
            "freezes": self.freezes,
            "outages": self.outages,
        }
        for name, windows in tables.items():
            for index, window in enumerate(windows):
                yield f"{name}.{index}", window

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """What concerns several keys; each message begins with the key that is wrong."""
        mesh = self.mesh
        if mesh.min_stages > mesh.layers:
            raise ValueError(f"mesh.min_stages: {mesh.min_stages} stages of {mesh.layers} layers")
        if mesh.min_stages > self.nodes:
            raise ValueError(f"mesh.min_stages: {mesh.min_stages} stages need as many nodes; nodes is {self.nodes}")
        if mesh.bootstraps + mesh.dead_bootstraps > MAX_BOOTSTRAP:
            raise ValueError(f"mesh.dead_bootstraps: a node takes {MAX_BOOTSTRAP} bootstrap addresses at most")
        if self.load is not None and self.load.until_s + LAST_ANSWERS_S > self.duration_s:
            raise ValueError(
                f"load.until_s: {self.load.until_s:g} leaves less than {LAST_ANSWERS_S:g} s for the last answers and proofs"
                f" (duration_s {self.duration_s:g})"
            )
        if self.faults_end_s + self.bounds.recovery_s > self.duration_s:
            raise ValueError(
                f"duration_s: {self.duration_s:g} is less than the end of the last fault ({self.faults_end_s:g}) and"
                f" bounds.recovery_s ({self.bounds.recovery_s:g})"
            )
        for index, churn in enumerate(self.churn):
            if churn.from_s + churn.down_s[1] > churn.until_s:
                raise ValueError(f"churn.{index}.down_s: {churn.down_s[1]:g} s do not fit between from_s and until_s")
        if any(one.until_s > two.from_s for one, two in _neighbours(self.partitions)):
            raise ValueError("partitions: they overlap; there is one partition at a time")
        if any(one.until_s > two.from_s for one, two in _neighbours(self.outages)):
            raise ValueError("outages: they overlap")
        if any(outage.until_s - outage.from_s > LEASE_TTL_S / 2 for outage in self.outages):
            raise ValueError(f"outages: one that is longer than half a lease ({LEASE_TTL_S / 2:g} s) is not modelled")
        return self


def _neighbours(windows: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    ordered = sorted(windows, key=lambda window: window.from_s)
    return pairwise(ordered)


def scenario_names() -> tuple[str, ...]:
    """The scenarios that come with the project."""
    return tuple(sorted(path.stem for path in SCENARIOS.glob("*.toml")))


def load_scenario(name_or_file: str, *, nodes: int | None = None, seed: int | None = None) -> Scenario:
    """The scenario of that name, or the one in that file.

    Args:
        name_or_file: a file when it ends in ``.toml`` or has a folder in it.
        nodes, seed: in place of the scenario's own.

    Raises:
        ConfigurationError: no such scenario, no TOML, or a key that is unknown or out of bounds; it names the file and the key.
    """
    named = not name_or_file.endswith(".toml") and Path(name_or_file).name == name_or_file
    path = SCENARIOS / f"{name_or_file}.toml" if named else Path(name_or_file)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(scenario_names())
        problem = f"no scenario {name_or_file!r}; there are {known}" if named else f"{path}: there is no such file"
        raise ConfigurationError(problem) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: it cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: no TOML: {error}") from error
    data |= {key: value for key, value in (("nodes", nodes), ("seed", seed)) if value is not None}
    return parse_scenario(data, str(path))


def parse_scenario(data: dict[str, Any], source: str) -> Scenario:
    """The scenario in ``data``; ``source`` is what errors name it by.

    Raises:
        ConfigurationError: a key that is missing, unknown or out of bounds.
    """
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ConfigurationError("\n".join(f"{source}: {line}" for line in _lines(error))) from error


def _lines(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in problem["loc"])
        words = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            words = "there is no such key"
        elif problem["type"] == "missing":
            words = "this key is needed"
        yield f"{where}: {words}" if where else words
