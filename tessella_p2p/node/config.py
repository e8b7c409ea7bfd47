"""The configuration of each role: the manual's keys, sections and variables (sections 02 and 09), and ours beside them."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

import platformdirs
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator

from tessella_p2p.base.errors import ConfigurationError, NotCertified
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    AUDIT_SHARE,
    CHECKPOINT_S,
    HOP_TIMEOUT_S,
    ISSUANCE_PER_REQUESTER_DAY,
    KIB,
    MAX_ADMIN_TOKEN_CHARS,
    MAX_BOOTSTRAP,
    MAX_CORS_ORIGINS,
    MAX_FEDERATION_PEERS,
    MAX_POSITIONS,
    MAX_SETTLE_PROCESSES,
    MAX_STAGES,
    MICRO_PER_CREDIT,
    MIN_ADMIN_TOKEN_CHARS,
    MIN_CLAIM_MB,
    OOM_STREAK,
    OUTAGE_GRACE_S,
    REGISTRATION_GRACE_S,
    REPAIR_AFTER_S,
    SETTLE_PROCESSES,
    STREAK_WINDOW_S,
    TRUST_LIMIT_CREDITS,
)
from tessella_p2p.base.urls import check_http_url, check_origin
from tessella_p2p.model.recipe import DEFAULT_RECIPE, RECIPES, RecipeName
from tessella_p2p.node import settings
from tessella_p2p.node.peer_address import (
    PeerAddress,
    check_peer_id,
    parse_orchestrator,
    parse_peer_address,
)
from tessella_p2p.node.settings import Form, Given, Settings, Spelling
from tessella_p2p.weights.catalog import SMOLLM2_135M_INSTRUCT
from tessella_p2p.weights.store import default_models_dir

EVERY_HOST = "0.0.0.0"  # noqa: S104 - peers have to reach a node; its HTTP API is local unless a setting says otherwise
_MAX_CLAIM_MB = 1 << 24
_TORCH_THREADS = 2
"""With more threads than this nobody has measured that torch's bits stay the same; the native engine's do not depend on it."""
_MAX_THREADS = 1024

_WORKER = Spelling(sections=("worker",))
_GPU = Spelling(sections=("gpu",))
_EITHER = Spelling(sections=("", "worker"))
"""The manual's optional keys: it does not say where they stand."""
_FLAG_ONLY = Spelling(only="flag", hidden=True)


NOT_SUPPORTED: Final[Mapping[str, tuple[object, str]]] = {
    "model_cache_prune": ("off", "a stage maps its layers out of one local file, so there are no shards to delete"),
    "registration_grace_secs": (None, "a node that is not registered is an entry, and retries for ever"),
    "allow_private_addrs": (True, "whom a node dials its orchestrator decides, whose setting it is"),
    "callback_allowed_hosts": ((), "tokens go back over the peer's authenticated stream, to no HTTP host"),
}
"""Keys of the manual whose behaviour does not exist yet: the one value that is accepted, and what holds instead."""


# ---- Types of settings: what TOML, a variable and a flag may hold for each ----


def _no_bool(value: object) -> object:
    """``true`` is no number, though Python says it is 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


def _listed(value: object) -> object:
    """A list out of a variable or a flag is comma-separated."""
    if isinstance(value, str):
        return tuple(part for part in (part.strip() for part in value.split(",")) if part)
    return value


def _as_layers(value: object) -> object:
    if isinstance(value, str):
        try:
            value = json.loads(value if value.startswith("[") else f"[{value}]")
        except ValueError:
            value = None
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(edge) is int for edge in value)):
        raise ValueError("two layer numbers are expected, START,END, of which the second is not included")
    return LayerRange(*value)


def _as_path(value: object) -> object:
    if isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError("a path is expected")
        return Path(value).expanduser()
    return value


def _as_ip(value: str) -> str:
    return str(ipaddress.ip_address(value))


def _as_http_url(value: str) -> str:
    check_http_url(value)
    return value


def _as_peer_id(value: str) -> PeerId:
    try:
        return check_peer_id(value)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


def _as_pinned(value: str) -> str:
    try:
        return parse_peer_address(value).multiaddr
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


def _as_admin_token(value: SecretStr) -> SecretStr:
    token = value.get_secret_value()
    if not (MIN_ADMIN_TOKEN_CHARS <= len(token) <= MAX_ADMIN_TOKEN_CHARS and token.isascii() and token.isprintable()):
        raise ValueError(f"{MIN_ADMIN_TOKEN_CHARS} to {MAX_ADMIN_TOKEN_CHARS} letters, digits and signs are expected")
    if " " in token:
        raise ValueError("no space belongs into it")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]
Port = Annotated[Whole, Field(ge=0, le=65_535)]
Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=86_400, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
FilePath = Annotated[Path, BeforeValidator(_as_path)]
IpAddress = Annotated[str, AfterValidator(_as_ip), Form("an IP address")]
HttpUrl = Annotated[str, AfterValidator(_as_http_url), Form("an http or https URL")]
PinnedAddress = Annotated[str, AfterValidator(_as_pinned), Form("/ip4/HOST/tcp/PORT/p2p/PEER_ID")]
PeerIdText = Annotated[PeerId, AfterValidator(_as_peer_id), Form("a peer id")]
AdminToken = Annotated[
    SecretStr,
    AfterValidator(_as_admin_token),
    Form(f"{MIN_ADMIN_TOKEN_CHARS} to {MAX_ADMIN_TOKEN_CHARS} letters, digits and signs"),
]


# ---- Settings that several roles have, under their own sections ----

P2pHost = Annotated[IpAddress, Field(description="the address that peers reach this node on; 0.0.0.0 is every one")]
P2pPort = Annotated[Port, Field(description="the TCP port for peers; 0 takes a free one")]
DataDir = Annotated[FilePath, Field(description="the folder of this node's journal and databases")]
ModelsDir = Annotated[FilePath, Field(description="the folder of pulled models")]
RecipeSetting = Annotated[
    RecipeName,
    Field(description="the arithmetic: f32 keeps the weights as stored, q8_0 and q4_0 quantise them; a mesh has one"),
]
MaxPositions = Annotated[
    Annotated[Whole, Field(ge=1, le=MAX_POSITIONS)] | None,
    Field(description="the longest session, prompt and answer; else 2048, or the model's limit"),
]


ApiNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_-])?$")], ...],
    BeforeValidator(_listed),
    Field(
        max_length=16,
        description="names under which the HTTP API may be asked beside localhost, where it listens on loopback: a proxy's",
    ),
]


CorsOrigins = Annotated[
    tuple[Annotated[Text, AfterValidator(check_origin), Form("http(s)://HOST[:PORT] or *")], ...],
    BeforeValidator(_listed),
    Field(
        max_length=MAX_CORS_ORIGINS,
        description="an origin whose web pages may use the HTTP API: https://HOST[:PORT]; * is every page",
    ),
]


Quantization = Literal["none", "Q8_0", "Q4_0", "INT8", "INT4"]
_RECIPE_OF: Final[Mapping[str, RecipeName]] = {
    "none": "f32",
    "Q8_0": "q8_0",
    "INT8": "q8_0",
    "Q4_0": "q4_0",
    "INT4": "q4_0",
}
"""What the manual's ``quantization`` means; INT8 and INT4 are its other names for the two."""


def _default_data_dir(role: str) -> Path:
    return platformdirs.user_data_path("tessella-p2p", appauthor=False) / role


def _usable_cores() -> int:
    """Cores that this process may use: those of its affinity mask, where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RoleConfig(Settings):
    """What every role has."""

    keypair_path: Annotated[FilePath, Field(description="the Ed25519 key file that is this node's identity")]
    public_ip: Annotated[
        IpAddress | None, _EITHER, Field(description="the address that a NAT rule maps to this machine")
    ] = None
    public_p2p_port: Annotated[
        Port | None, _EITHER, Field(description="the public port that a NAT rule maps to p2p_port")
    ] = None
    bootstrap: Annotated[
        tuple[PinnedAddress, ...],
        BeforeValidator(_listed),
        Field(max_length=MAX_BOOTSTRAP, description="a node to join the DHT through: /ip4/HOST/tcp/PORT/p2p/PEER_ID"),
    ] = ()
    muxer: Annotated[
        Literal["fast", "stock"],
        Field(
            description="the Noise session and Yamux muxer: this project's, or py-libp2p's own; they speak the same bytes"
        ),
    ] = "fast"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="what is logged: this level and above")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Field(description="how lines look; auto is console on a terminal and JSON elsewhere"),
    ] = "auto"
    ready_file: Annotated[
        FilePath | None, _FLAG_ONLY, Field(description="where the node writes its addresses once it is up")
    ] = None
    exit_with_stdin: Annotated[bool, _FLAG_ONLY, Field(description="leave at the end of standard input")] = False

    @model_validator(mode="after")
    def _check_public_address(self) -> Self:
        if self.public_p2p_port is not None and self.public_ip is None:
            raise ValueError("public_p2p_port needs public_ip beside it: the address that the NAT rule listens on")
        return self


class ModelRoleConfig(RoleConfig):
    """What the roles have that know a model."""

    default_model: Annotated[
        Text,
        Spelling(flags=("--model-id",), variables=("TESSELLA_MODEL_ID",)),
        Field(description="the model: a catalogue id, a GGUF file or its folder"),
    ] = SMOLLM2_135M_INSTRUCT.model_id


class NodeConfig(ModelRoleConfig):
    """``tessella-p2p daemon``: worker and entry."""

    orchestrator_peer_id: Annotated[
        PeerIdText | None, Field(description="the orchestrator's peer id, where its URL does not hold it")
    ] = None
    orchestrator_url: Annotated[
        Text,
        Spelling(flags=("--tracker-url", "--musivum-url"), variables=("ORCHESTRATOR_URL",)),
        Field(description="the orchestrator, with its pin: /ip4/HOST/tcp/PORT/p2p/PEER_ID or tcp://PEER_ID@HOST:PORT"),
    ]
    orchestrators: Annotated[
        tuple[PinnedAddress, ...],
        BeforeValidator(_listed),
        Field(
            max_length=MAX_FEDERATION_PEERS,
            description="another orchestrator of the same federation, asked while those before it do not answer; "
            "the same ones in the same order on every node",
        ),
    ] = ()
    data_dir: DataDir = Field(default_factory=lambda: _default_data_dir("node"))
    hf_token: Annotated[
        SecretStr | None,
        Spelling(only="environment", variables=("HF_TOKEN",)),
        Field(description="a token for gated weights"),
    ] = None

    vram_mb: Annotated[
        Whole,
        _WORKER,
        Field(ge=MIN_CLAIM_MB, le=_MAX_CLAIM_MB, description="the claim that the layer split is computed from"),
    ] = 2048
    models_dir: Annotated[ModelsDir, _WORKER] = Field(default_factory=default_models_dir)
    api_host: Annotated[IpAddress, _WORKER, Field(description="the address of the HTTP API")] = "127.0.0.1"
    api_port: Annotated[Port, _WORKER, Field(description="the port of the HTTP API; 0 takes a free one")] = 8080
    api_names: Annotated[
        ApiNames,
        _WORKER,
        Field(
            description="names under which the HTTP API may be asked beside localhost, where it listens on loopback or asks for "
            "no key: its own in the network, a proxy's"
        ),
    ] = ()
    api_keys: Annotated[
        Literal["off", "required"] | None,
        _WORKER,
        Field(
            description="whether the HTTP API asks for a key of `tessella-p2p keys api`; else off, "
            "and to be said where api_host is no loopback address, or clients are told a public one"
        ),
    ] = None
    cors_origins: Annotated[CorsOrigins, _WORKER] = ()
    p2p_host: Annotated[P2pHost, _WORKER] = EVERY_HOST
    p2p_port: Annotated[P2pPort, _WORKER] = 9080
    device: Annotated[Literal["cuda", "metal", "cpu"], _WORKER, Field(description="where layers are computed")] = "cpu"
    layers: Annotated[
        LayerRange | None,
        BeforeValidator(_as_layers),
        _WORKER,
        Field(description="serve layers within START,END only (END is not included)"),
    ] = None
    recipe: Annotated[RecipeSetting, _WORKER] = DEFAULT_RECIPE
    threads: Annotated[
        Whole | None,
        _WORKER,
        Field(
            ge=1,
            le=_MAX_THREADS,
            description="threads that compute; else one for each of cpus, or for each core that this process may use",
        ),
    ] = None
    cpus: Annotated[
        tuple[Annotated[Whole, Field(ge=0, le=65_535)], ...],
        BeforeValidator(_listed),
        _WORKER,
        Field(
            max_length=_MAX_THREADS,
            description="cores that compute (Linux); give each of several nodes on one machine its own",
        ),
    ] = ()
    sleep_after_secs: Annotated[
        float,
        BeforeValidator(_no_bool),
        _WORKER,
        Field(
            ge=0,
            le=86_400,
            allow_inf_nan=False,
            description="without a session for so long, weights and KV leave the memory until the next one; 0 is never",
        ),
    ] = 0.0
    max_positions: Annotated[MaxPositions, _WORKER] = None

    oom_streak: Annotated[
        Whole,
        _GPU,
        Field(ge=1, le=1024, description="failures of the engine, out of memory or other, that mean saturated"),
    ] = OOM_STREAK
    streak_window_secs: Annotated[Seconds, _GPU, Field(description="within how many seconds they count")] = (
        STREAK_WINDOW_S
    )

    public_api_port: Annotated[
        Port | None, _EITHER, Field(description="the public port that a NAT rule maps to api_port")
    ] = None
    public_api_url: Annotated[
        HttpUrl | None,
        _EITHER,
        Field(
            description="the public URL of this node's API behind a proxy; clients find it in the orchestrator's list"
        ),
    ] = None
    max_input_tokens: Annotated[
        Whole | None,
        _EITHER,
        Field(ge=1, le=MAX_POSITIONS, description="the longest prompt that this node accepts; else it is measured"),
    ] = None
    p2p_inference_timeout_secs: Annotated[Seconds, _EITHER, Field(description="how long one hop may take")] = (
        HOP_TIMEOUT_S
    )
    quantization: Annotated[
        Quantization | None,
        _EITHER,
        Field(description="how weights are kept in memory: the manual's key for a recipe (none is f32)"),
    ] = None
    canary_mode: Annotated[
        Literal["off", "echo", "scale"],
        _EITHER,
        Field(
            description="an operator's tool: answer with a known-wrong tensor, so that audits catch whoever copies it"
        ),
    ] = "off"
    model_cache_prune: Annotated[
        Literal["off", "dry-run", "on"], _EITHER, Field(description="delete shards that the assignment does not need")
    ] = "off"
    kademlia_enabled: Annotated[
        bool, _EITHER, Field(description="join the DHT, or stay with gossip and the orchestrator's list")
    ] = True
    registration_grace_secs: Annotated[
        Seconds | None, _EITHER, Field(description="how long a node that is not registered may go on")
    ] = None
    outage_grace_secs: Annotated[
        Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=30 * 86_400, allow_inf_nan=False)],
        _EITHER,
        Field(description="without an orchestrator, leases count and requests are served for so long; then 503"),
    ] = OUTAGE_GRACE_S
    wal_checkpoint_interval_secs: Annotated[
        Seconds, _EITHER, Field(description="how often an open session's work is journaled")
    ] = CHECKPOINT_S
    allow_private_addrs: Annotated[
        bool, _EITHER, Field(description="private addresses may be announced and dialled")
    ] = True
    callback_allowed_hosts: Annotated[
        tuple[Text, ...], BeforeValidator(_listed), _EITHER, Field(description="hosts that tokens may be sent back to")
    ] = ()

    @model_validator(mode="before")
    @classmethod
    def _quantization_names_a_recipe(cls, given: dict[str, object]) -> dict[str, object]:
        """``quantization`` alone chooses the recipe; beside one it has to mean the same."""
        quantization = given.get("quantization")
        meant = _RECIPE_OF.get(quantization) if isinstance(quantization, str) else None
        if meant is None:
            return given
        if given.get("recipe", meant) != meant:
            raise ValueError(
                f"quantization = {quantization!r} means recipe = {meant!r}, and recipe is {given['recipe']!r}; leave one out"
            )
        return {**given, "recipe": meant}

    @field_validator(*NOT_SUPPORTED)
    @classmethod
    def _refuse_unsupported(cls, value: object, info: ValidationInfo) -> object:
        neutral, instead = NOT_SUPPORTED[str(info.field_name)]
        if value != neutral:
            or_at = "" if neutral is None else f", or at {neutral!r}"
            raise ValueError(f"not supported yet: {instead} (leave it out{or_at})")
        return value

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        try:
            RECIPES[self.recipe].check_device(self.device)
        except NotCertified as error:
            raise ValueError(str(error)) from error
        return self

    @field_validator("orchestrator_url")
    @classmethod
    def _check_pin(cls, value: str, info: ValidationInfo) -> str:
        try:
            parse_orchestrator(value, info.data.get("orchestrator_peer_id"))
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        return value

    @property
    def compute_threads(self) -> int:
        """``threads``, or its default."""
        if self.threads is not None:
            return self.threads
        most = _TORCH_THREADS if RECIPES[self.recipe].engine == "torch" else _MAX_THREADS
        return min(most, len(self.cpus) or _usable_cores())

    @model_validator(mode="after")
    def _check_public_api(self) -> Self:
        if self.public_api_port is not None and self.public_ip is None:
            raise ValueError("public_api_port needs public_ip beside it: the address that the NAT rule listens on")
        if self.public_api_port is not None and self.public_api_url is not None:
            raise ValueError("public_api_url and public_api_port both say where the API is: leave one out")
        return self

    @model_validator(mode="after")
    def _check_who_may_ask(self) -> Self:
        if self.api_keys is None and self.is_open_to_others:
            is_wide = not ipaddress.ip_address(self.api_host).is_loopback
            what = f"api_host = {self.api_host!r}" if is_wide else f"the public address {self.announced_api_url}"
            raise ValueError(
                f"{what} lets other machines use this node: say api_keys = 'required', and make keys with "
                "`tessella-p2p keys api add`, or api_keys = 'off' where whoever reaches the port may use it"
            )
        return self

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines reach the HTTP API, by its own address or by one that they are told."""
        return self.announced_api_url is not None or not ipaddress.ip_address(self.api_host).is_loopback

    @property
    def announced_api_url(self) -> str | None:
        """Where clients are told that this node's API is; None where the configuration names no public place."""
        if self.public_api_url is not None or self.public_api_port is None or self.public_ip is None:
            return self.public_api_url
        host = f"[{self.public_ip}]" if ":" in self.public_ip else self.public_ip
        return f"http://{host}:{self.public_api_port}"

    @property
    def orchestrator(self) -> PeerAddress:
        """The orchestrator's address and the peer id it is pinned by."""
        return parse_orchestrator(self.orchestrator_url, self.orchestrator_peer_id)

    @property
    def standbys(self) -> tuple[PeerAddress, ...]:
        """The other orchestrators, in order of preference."""
        parsed = (parse_peer_address(address) for address in self.orchestrators)
        others = {each.peer_id: each for each in parsed if each.peer_id != self.orchestrator.peer_id}
        return tuple(others.values())


class OrchestratorConfig(ModelRoleConfig):
    """``tessella-p2p orchestrator``."""

    p2p_host: P2pHost = EVERY_HOST
    p2p_port: P2pPort = 9090
    api_host: Annotated[IpAddress, Field(description="the address of the HTTP API")] = "127.0.0.1"
    api_port: Annotated[Port, Field(description="the port of the HTTP API; 0 takes a free one")] = 9091
    api_names: ApiNames = ()
    data_dir: DataDir = Field(default_factory=lambda: _default_data_dir("orchestrator"))
    models_dir: ModelsDir = Field(default_factory=default_models_dir)
    recipe: RecipeSetting = DEFAULT_RECIPE
    max_positions: MaxPositions = None
    min_stages: Annotated[
        Whole,
        Field(ge=1, le=MAX_STAGES, description="how many workers share the model at least, though fewer could hold it"),
    ] = 1
    allow: Annotated[
        tuple[PeerIdText, ...],
        BeforeValidator(_listed),
        Field(max_length=65_536, description="a private mesh: a peer id that may register; none means everybody"),
    ] = ()
    min_vram_gb: Annotated[
        float,
        BeforeValidator(_no_bool),
        Field(
            ge=0,
            le=_MAX_CLAIM_MB / KIB,
            allow_inf_nan=False,
            description="the least claim that may register; the hard floor is 256 MB, and what one layer needs",
        ),
    ] = 0.0
    terms: Annotated[
        FilePath | None,
        Field(description="a TOML file of measured memory and costs by recipe and device; else they are computed"),
    ] = None
    registration_grace_secs: Annotated[
        Seconds, Field(description="how long a worker that loads its layers may stay silent before others get them")
    ] = REGISTRATION_GRACE_S
    allow_private_addrs: Annotated[
        bool, Field(description="workers may be at addresses that are not reached from everywhere, as in a LAN")
    ] = False
    repair_after_secs: Annotated[
        float,
        BeforeValidator(_no_bool),
        Field(
            ge=0,
            le=86_400,
            allow_inf_nan=False,
            description="after so long a replica is moved to a hole in the chain; 0 moves nobody unasked",
        ),
    ] = REPAIR_AFTER_S
    federation: Annotated[
        tuple[PinnedAddress, ...],
        BeforeValidator(_listed),
        Field(
            max_length=MAX_FEDERATION_PEERS,
            description="another orchestrator whose ledger is followed, and that may follow this one: /ip4/HOST/tcp/PORT/p2p/PEER_ID",
        ),
    ] = ()
    trust_limit: Annotated[
        Whole,
        Field(
            ge=0,
            le=2**53 // MICRO_PER_CREDIT,
            description="credits that an identity has with one of those orchestrators and that count here, at most",
        ),
    ] = TRUST_LIMIT_CREDITS
    issuance_per_day: Annotated[
        Whole,
        Field(
            ge=0,
            le=2**53 // MICRO_PER_CREDIT,
            description="credits that the tickets on one account may bring into being in one day",
        ),
    ] = ISSUANCE_PER_REQUESTER_DAY
    settle_processes: Annotated[
        Whole,
        Field(
            ge=0,
            le=MAX_SETTLE_PROCESSES,
            description="processes that verify proofs where batches of them come; 0 leaves that to the orchestrator's own",
        ),
    ] = SETTLE_PROCESSES
    requester_pays: Annotated[
        bool,
        Field(
            description="workers are paid off the account that a ticket is on, which never goes below 0, "
            "and nothing is brought into being"
        ),
    ] = False
    audit_share: Annotated[
        float,
        BeforeValidator(_no_bool),
        Field(
            ge=0,
            le=1,
            allow_inf_nan=False,
            description="share of the settled proofs that another worker recomputes; at 0 only those that contradict a neighbour's",
        ),
    ] = AUDIT_SHARE
    audit_tolerances: Annotated[
        FilePath | None,
        Field(description="a TOML file of deviations measured between recipes, for audits by another recipe's workers"),
    ] = None
    admin_token: Annotated[
        AdminToken | None,
        Spelling(only="secret"),
        Field(
            description="what the operator's requests are authorised by; without one nobody operates over the network"
        ),
    ] = None


class BootstrapConfig(RoleConfig):
    """``tessella-p2p bootstrap``."""

    p2p_host: P2pHost = EVERY_HOST
    p2p_port: P2pPort = 9070


ROLES: Final[Mapping[str, type[RoleConfig]]] = {
    "node": NodeConfig,
    "orchestrator": OrchestratorConfig,
    "bootstrap": BootstrapConfig,
}
"""Each role's configuration; the name is also that of its key file."""

ConfigT = TypeVar("ConfigT", bound=RoleConfig)


def default_key_path(role: str, environ: Mapping[str, str]) -> Path:
    """``~/.config/tessella/<role>.key``; ``TESSELLA_CONFIG_DIR`` moves the folder."""
    return Path(environ.get("TESSELLA_CONFIG_DIR") or "~/.config/tessella").expanduser() / f"{role}.key"


def load_config(
    kind: type[ConfigT], *, flags: Mapping[str, Given], environ: Mapping[str, str], file: Path | None = None
) -> ConfigT:
    """The configuration of one role: a flag wins over the environment, that over the file, that over the default.

    Args:
        kind: the role.
        flags: by setting; only those that were typed.
        environ: the process environment.
        file: a TOML file, or None.

    Raises:
        ConfigurationError: says where the wrong value was given, and the rule that it breaks.
    """
    role = next(name for name, role_kind in ROLES.items() if role_kind is kind)
    of_all_roles = {
        variable
        for role_kind in ROLES.values()
        for name, field in role_kind.model_fields.items()
        for variable in settings.variables_of(name, field)
    }
    key_path = Given(default_key_path(role, environ), "keypair_path (its default)")
    return settings.load(
        kind,
        flags=flags,
        environ=environ,
        file=file,
        defaults={"keypair_path": key_path},
        known_variables=of_all_roles,
    )
