"""The one tree of errors.

    TessellaError
    ├── ConfigurationError      a setting, a flag or a file of this machine is wrong; nothing was started
    │   ├── KeyFileError        the identity key is damaged, missing or readable by others
    │   └── PortInUseError      a port that a setting names is taken
    ├── StorageError            a database of this machine is full, locked or unwritable
    ├── LocalProtocolError      our own bug: a core was driven against its rules
    ├── RemoteProtocolError     a peer broke a rule: score it, drop the stream
    │   ├── MalformedMessage    bytes that are no message of this protocol
    │   ├── InvalidSignature    a signature that does not verify, or a signer that is not the expected one
    │   ├── Expired             a message outside its time window
    │   ├── Replayed            a sequence number that was used before
    │   ├── VersionMismatch     an unknown major version of a protocol
    │   └── InvalidStep         a step with a wrong shape, dtype, position or checksum
    ├── TransportError          the connection, not the peer's conduct
    │   ├── DialError           a peer could not be reached
    │   ├── StreamReset         a stream ended where it may not (reset, or an end inside a frame)
    │   └── HopTimeout          a hop took longer than it may
    ├── RefusalError            a well-formed request that is declined
    │   ├── InvalidRequest      a value that is not accepted
    │   ├── UnknownModel        a model nobody here serves
    │   ├── UnknownRequest      a request that this node does not remember
    │   ├── NoRoute             no ready stages cover every layer
    │   ├── OrchestratorUnreachable     an entry without its orchestrator for longer than its grace
    │   ├── Overloaded          a node at one of its limits
    │   │   └── TooManyHopBodies    a stage with as many sessions as it serves: full, not broken
    │   ├── HopBodyTooLarge     a prompt whose hidden states do not fit into one hop
    │   ├── PromptTooLong       more positions than the route accepts
    │   ├── StaleEpoch          a session was rerouted; this epoch is over
    │   ├── CacheMiss           the KV of a session is gone
    │   ├── CapabilityRefused   a token stream whose capability is foreign, used or unbound
    │   ├── NotAuthorized       admission, lease or ticket does not allow it
    │   │   ├── WorkerNotAuthorized     a peer that is not on the allow-list of a private mesh
    │   │   ├── Blacklisted             a peer that the operator or a verdict has excluded
    │   │   ├── KeyInUse                two processes use one key
    │   │   ├── NotOperator             an operator's request without the admin token
    │   │   ├── ApiKeyRefused           a client without an API key, or with one that is unknown, revoked or expired
    │   │   └── DelegationRefused       an entry that may not ask in that identity's name
    │   ├── RateLimited         an API key at one of its limits
    │   ├── Moved               an HTTP route of the manual that is a libp2p protocol here
    │   └── ClaimTooSmall       a memory claim that cannot hold one layer
    └── ArtifactError           weights, tokenizer or template: damaged, truncated or not certified
        └── NotCertified        an architecture, tokenizer or quantisation that no test certifies

Each class has a ``code``: the same word on the wire, in HTTP answers and in logs. ``http_status`` is the one table of HTTP
mappings.
"""

from __future__ import annotations

from typing import ClassVar, Self

from tessella_p2p.base.ids import PeerId


class TessellaError(Exception):
    """Root of the tree. ``str(error)`` says what happened, to what, and what to do next."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    peer: PeerId | None = None
    """Whose fault it is, where that is known; `blame` sets it."""

    request_id: str | None = None
    """The request that it ended, where it had begun; its entry sets it."""

    def blame(self, peer: PeerId) -> Self:
        """Name the peer at fault, unless one is named already; returns the error, to be raised."""
        if self.peer is None:
            self.peer = peer
        return self


class ConfigurationError(TessellaError):
    code = "configuration_error"


class KeyFileError(ConfigurationError):
    code = "key_file_error"


class PortInUseError(ConfigurationError):
    code = "port_in_use"


class StorageError(TessellaError):
    code = "storage_error"


class LocalProtocolError(TessellaError):
    code = "internal_error"


class RemoteProtocolError(TessellaError):
    code = "remote_protocol_error"
    http_status = 502


class MalformedMessage(RemoteProtocolError):
    """``param`` names the field at fault, where the bytes have the form of a message."""

    code = "malformed_message"
    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidSignature(RemoteProtocolError):
    code = "invalid_signature"
    http_status = 401


class Expired(RemoteProtocolError):
    code = "expired"
    http_status = 401


class Replayed(RemoteProtocolError):
    code = "replayed"
    http_status = 401


class VersionMismatch(RemoteProtocolError):
    code = "version_mismatch"
    http_status = 400


class InvalidStep(RemoteProtocolError):
    code = "invalid_step"
    http_status = 400


class TransportError(TessellaError):
    code = "transport_error"
    http_status = 502


class DialError(TransportError):
    code = "dial_error"


class StreamReset(TransportError):
    code = "stream_reset"


class HopTimeout(TransportError):
    code = "hop_timeout"
    http_status = 504


class RefusalError(TessellaError):
    code = "refused"
    http_status = 503


class InvalidRequest(RefusalError):
    """``param`` names the offending field, as OpenAI's error object does."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(RefusalError):
    code = "model_not_found"
    http_status = 404


class UnknownRequest(RefusalError):
    code = "request_not_found"
    http_status = 404


class NoRoute(RefusalError):
    """``missing`` holds the half-open layer ranges that nobody ready serves, ``retry_after_s`` when it may be different, if known."""

    code = "no_route"
    http_status = 503

    def __init__(
        self, message: str, missing: tuple[tuple[int, int], ...] = (), *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.retry_after_s = retry_after_s


class OrchestratorUnreachable(RefusalError):
    code = "orchestrator_unreachable"


class Overloaded(RefusalError):
    code = "overloaded"
    http_status = 503


class TooManyHopBodies(Overloaded):
    """To be waited for: whoever turns to another stage at once pushes the same rows at every candidate."""

    code = "too_many_hop_bodies"


class HopBodyTooLarge(RefusalError):
    code = "hop_body_too_large"
    http_status = 413


class PromptTooLong(RefusalError):
    code = "prompt_too_long"
    http_status = 400


class StaleEpoch(RefusalError):
    code = "stale_epoch"
    http_status = 409


class CacheMiss(RefusalError):
    code = "cache_miss"
    http_status = 409


class CapabilityRefused(RefusalError):
    code = "capability_refused"
    http_status = 403


class NotAuthorized(RefusalError):
    code = "not_authorized"
    http_status = 403


class WorkerNotAuthorized(NotAuthorized):
    code = "worker_not_authorized"


class Blacklisted(NotAuthorized):
    code = "blacklisted"


class KeyInUse(NotAuthorized):
    """Whoever uses a key in a second process: the first one goes on."""

    code = "key_in_use"
    http_status = 409


class NotOperator(NotAuthorized):
    code = "admin_token_required"
    http_status = 401


class ApiKeyRefused(NotAuthorized):
    code = "invalid_api_key"
    http_status = 401


class DelegationRefused(NotAuthorized):
    code = "delegation_refused"


class RateLimited(RefusalError):
    code = "rate_limit_exceeded"
    http_status = 429


class Moved(RefusalError):
    code = "moved_to_libp2p"
    http_status = 410


class ClaimTooSmall(RefusalError):
    code = "claim_too_small"
    http_status = 409


class ArtifactError(TessellaError):
    code = "artifact_error"


class NotCertified(ArtifactError):
    code = "not_certified"


def _subclasses(root: type[TessellaError]) -> dict[str, type[TessellaError]]:
    """By code, those of this module: a subclass of another module may need more than a message to be made."""
    found: dict[str, type[TessellaError]] = {}
    for child in root.__subclasses__():
        if child.__module__ == __name__:
            found.setdefault(child.code, child)
        found.update({code: cls for code, cls in _subclasses(child).items() if code not in found})
    return found


def error_from_code(code: str, message: str) -> TessellaError:
    """The typed error that a peer named by ``code``.

    A code that is not in this module's tree, or one that only this machine can meet (its configuration, its storage, its bugs),
    gives a `RemoteProtocolError` that says so.
    """
    cls = _subclasses(TessellaError).get(code)
    if cls is None or issubclass(cls, ConfigurationError | StorageError | LocalProtocolError):
        return RemoteProtocolError(f"peer answered with code {code!r}: {message}")
    return cls(message)
