"""Every bound of the protocols, in one place. Sizes are in bytes, times in seconds, unless the name says otherwise."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# Control messages
MAX_MESSAGE_BYTES = 1 * MIB
"""One length-prefixed control message."""
MAX_ENVELOPE_BYTES = 256 * KIB
MAX_CBOR_DEPTH = 16
CLOCK_SKEW_MS = 60_000
REQUEST_TTL_MS = 60_000
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 256

# Hops
MAX_HOP_BYTES = 64 * MIB
"""Decoded size of one hop's tensor."""
MAX_STAGES = 64
"""Stages of one route."""
MAX_EPOCHS = 1_000_000
MAX_POSITIONS = 1 << 20
HOP_TIMEOUT_S = 10.0
PREFILL_CHUNK = 128
"""Positions of one prefill step."""
MAX_SESSIONS_PER_STAGE = 64
MAX_QUEUED_STEPS = 256
"""Steps that wait at one stage."""
MAX_QUEUED_FRAMES = 64
"""Frames that wait for one neighbour's stream."""

# Liveness
HEARTBEAT_S = 5.0
STALE_AFTER_MISSED = 2
OFFLINE_AFTER_MISSED = 3
PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 10.0

# Discovery
RECORD_TTL_S = 60.0
REPUBLISH_S = 20.0
KAD_K = 20
KAD_ALPHA = 3
KAD_MAX_VALUES = 64
"""Values that one key may have on one node."""
KAD_MAX_KEYS = 4096
KAD_MAX_VALUE_BYTES = 16 * KIB
MAX_SWARM_RECORDS = 4096
GOSSIP_FANOUT = 8
GOSSIP_SEEN = 8192

# Leases and tickets
LEASE_TTL_S = 600.0
OUTAGE_GRACE_S = 24 * 3600.0
TICKET_OPEN_S = 3600.0
TICKET_SETTLE_S = 7 * 24 * 3600.0
MAX_PROOFS_PER_BATCH = 64
CHECKPOINT_S = 5.0
DIGEST_MARK_POSITIONS = 256
"""A proof carries its running digests at each multiple of this, so that neighbours have a common prefix to compare."""
MAX_DIGEST_MARKS = 4096
MICRO_PER_CREDIT = 1_000_000
MICRO_PER_LAYER_POSITION = 1_000
"""1 credit = 1,000 layer·positions, in micro-credits."""

# Artifacts
MAX_GGUF_ENTRIES = 1 << 16
"""Tensors, and metadata pairs, of one GGUF file."""
MAX_GGUF_STRING_BYTES = 1 * MIB
MAX_MODEL_LAYERS = 4096
MAX_MODEL_WIDTH = 1 << 18
"""Hidden size, feed-forward size and the like."""
MAX_VOCABULARY = 1 << 20

# Stages
DEFAULT_MAX_POSITIONS = 2048
"""Positions that one session may have on a stage, unless the node says otherwise; its KV slot is this long."""
DEFAULT_MAX_SESSIONS = 16
MAX_PREFILL_ROWS_PER_TURN = 256
"""Prompt rows that one turn of a stage computes, so that a long prompt does not starve the sessions that decode."""
