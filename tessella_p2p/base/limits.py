"""Every bound of the protocols, in one place. Sizes are in bytes, times in seconds, unless the name says otherwise."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# Control messages
MAX_MESSAGE_BYTES = 1 * MIB
"""One length-prefixed control message."""
MAX_ENVELOPE_BYTES = 256 * KIB
MAX_CBOR_DEPTH = 16
MAX_CBOR_ITEMS = 1 << 16
"""Values of one message, nested ones included: what bounds the time that a hostile one takes."""
CLOCK_SKEW_MS = 60_000
REQUEST_TTL_MS = 60_000
MAX_OPEN_REQUESTS = 1 << 18
"""Requests whose sequences are remembered until they expire, so that none is accepted twice: twice the heartbeats of `MAX_MEMBERS`."""
MAX_OPEN_REQUESTS_PER_SIGNER = 4096
MAX_REASON_CHARS = 512
"""Of a reason in a message."""
MAX_REFUSAL_CHARS = 1024
"""Of the reason of a refusal, which says what to do as well."""
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 256

# Hops
MAX_HOP_BYTES = 64 * MIB
"""Decoded size of one hop's tensor."""
MAX_STAGES = 64
"""Stages of one route."""
MAX_ROUTE_BYTES = 5 * KIB
"""A sealed route statement, of as many stages."""
MAX_EPOCHS = 1_000_000
MAX_POSITIONS = 1 << 20
HOP_TIMEOUT_S = 10.0
PREFILL_CHUNK = 64
"""Positions of one prefill step."""
MAX_SESSIONS_PER_STAGE = 64
"""Sessions that an engine may be made for; a stage serves as many as its engine was."""
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
KAD_MAX_RECORDS = 4096
"""Values of all keys together that one node stores."""
KAD_MAX_KEYS_PER_SIGNER = 8
"""Keys under which one node stores values of one peer."""
KAD_MAX_VALUE_BYTES = 16 * KIB
KAD_MAX_ADDRESSES = 8
"""Addresses of one contact."""
KAD_MAX_CONTACT_BYTES = 3 * KIB
KAD_REPLACEMENTS = 8
"""Contacts that wait for a place in one full bucket."""
KAD_QUORUM = 2
"""Peers whose values a lookup merges before it ends early."""
KAD_MAX_LOOKUP_PEERS = 512
"""Contacts that one lookup keeps; the farthest are forgotten."""
KAD_MAX_QUERIES = 64
"""Lookups that one node runs at a time."""
KAD_SOFT_DEFAULT_S = 0.5
KAD_SOFT_MIN_S = 0.1
KAD_SOFT_MAX_S = 1.0
"""The soft deadline follows three median round trips, within these."""
KAD_HARD_S = 2.0
KAD_DIAL_S = 10.0
KAD_LOOKUP_S = 10.0
"""Hard deadline of a whole lookup."""
KAD_IDLE_S = 60.0
"""A kad stream on which nothing arrives for so long is closed."""
KAD_LANE_REQUESTS = 64
"""Requests that wait for replies on one kad stream."""
KAD_STREAMS_PER_PEER = 4
"""Inbound kad streams of one peer."""
KAD_MAX_STREAMS = 512
"""Inbound kad streams of all peers."""
KAD_REQUESTS_PER_S = 64.0
KAD_REQUEST_BURST = 512
"""Requests that one peer may send."""
KAD_REPLY_VALUE_BYTES = 160 * KIB
"""Bytes of values in one reply."""
KAD_REFRESH_S = 120.0
KAD_TARGETS_S = 50.0
"""A value is republished at the peers of the last lookup for so long, unless one of them fails."""
BOOTSTRAP_RETRY_MIN_S = 1.0
BOOTSTRAP_RETRY_MAX_S = 60.0
BOOTSTRAP_RECHECK_S = 120.0
"""A reached bootstrap node is asked again after this, so that parts of a mesh that lost each other meet again."""
MAX_BOOTSTRAP = 16
WATCH_RETRY_S = 2.0
"""A watched model of which no stage is known is looked up again after this."""
MAX_WATCHED = 64
MAX_SWARM_RECORDS = 4096
GOSSIP_FANOUT = 8
GOSSIP_ROTATED = 3
"""Neighbours that others replace in each heartbeat period."""
GOSSIP_SEEN = 8192
GOSSIP_TICK_S = 0.25
GOSSIP_TICK_PER_SIGNER_S = 0.03
GOSSIP_TICK_MAX_S = 1.0
"""Heartbeats to forward are collected for so long, then sent as one batch: longer the more peers send them, within these."""
GOSSIP_MAX_BATCH = 64
GOSSIP_MAX_BATCH_BYTES = 128 * KIB
GOSSIP_MAX_QUEUED = 4096
"""Heartbeats that wait for the next batch."""
GOSSIP_QUEUED_BATCHES = 8
"""Batches that wait for one neighbour's stream."""
GOSSIP_SOURCE_PER_S = 128.0
GOSSIP_SOURCE_BURST = 1024
"""Heartbeats that one neighbour may hand over."""
GOSSIP_SIGNER_PER_S = 1.0
GOSSIP_SIGNER_BURST = 8
"""Heartbeats of one peer that are forwarded."""
GOSSIP_IDLE_S = 15.0
GOSSIP_MAX_STREAMS = 512
"""Inbound gossip streams of all peers."""

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
"""Prompt rows that one turn of a stage computes while nobody decodes."""
PREFILL_ROWS_BESIDE_DECODES = 64
"""Prompt rows that one turn computes beside decoding sessions, so that a long prompt does not starve them."""
KV_IDLE_S = 10.0
"""A session that has had no step for so long may lose its KV to others: longer than one round over a route takes."""
KV_OVERCOMMIT = 1.0
"""KV pages that a stage may promise to sessions that are not idle, over those that it has."""
MAX_EVICTED_REMEMBERED = 1024
"""Evicted sessions whose next step is told so."""

# Chat templates and prompts
MAX_TEMPLATE_CHARS = 64 * KIB
"""Source of one chat template."""
MAX_TEMPLATE_WORK = 32 * MIB
"""Work units that one rendering may spend: about one per character that it copies, 1,024 per turn of a loop."""
MAX_PROMPT_CHARS = 2 * MIB
"""Characters of one prompt, rendered or raw."""
MAX_TOKEN_CHARS = 1024
"""One token of a vocabulary."""
MAX_TOOLS = 128
"""Tools that one conversation offers."""
MAX_TOOL_CALLS = 128
"""Calls in one message."""
MAX_TOOL_DEPTH = 32
"""Levels of a tool's definition, or of a call's arguments."""
TOOL_PROBE_WORK = MAX_TEMPLATE_WORK // 8
"""Work units that may be spent on finding out whether a template shows tools."""

# Manifests and the model store
CHUNK_BYTES = 1 * MIB
PULL_TIMEOUT_S = 3600.0

# Connections and streams
MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_PEER = 8
MAX_HALF_OPEN = 256
"""Accepted connections that have not finished their handshake; beyond it, and beyond the next one, the oldest is closed."""
MAX_HALF_OPEN_PER_ADDRESS = 32
MAX_STREAMS_PER_DIRECTION = 256
"""Streams that one side may have open on one connection."""
STREAM_WINDOW_BYTES = 4 * MIB
"""What a peer may send on one stream ahead of its reader."""
CONNECTION_EXTRA_WINDOW_BYTES = 64 * MIB
"""What the streams of one connection may be granted together beyond Yamux's initial 256 KiB each."""
MAX_UNSENT_BYTES = 512 * KIB
"""Bytes that wait behind a full socket before senders wait too."""
MAX_UNSENT_CONTROL_BYTES = 64 * KIB
"""Answers (pongs, resets, window updates) that wait behind a full socket; a peer that causes more is dropped."""
PIPE_WINDOW_BYTES = 256 * KIB
MAX_KNOWN_PEERS = 4096
"""Peers whose addresses are remembered."""
EVENT_BACKLOG = 256
DIAL_TIMEOUT_S = 10.0
DIAL_STAGGER_S = 0.25
"""Wait before the next address of a peer is tried beside the last one."""
HANDSHAKE_TIMEOUT_S = 10.0
NEGOTIATE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0

# Orchestrator and ledger
MIN_CLAIM_MB = 256
"""The manual's hard floor of a claim."""
MAX_MEMBERS = 4096
"""Workers that one orchestrator remembers."""
MAX_MOVES_TOLD = 2048
"""Moves that the answer to a rebalance lists: as many as fit into an envelope for sure. All of a longer plan are made."""
REGISTRATION_GRACE_S = 60.0
"""How long a worker that loads its range may stay silent."""
RESTORED_GRACE_S = 30.0
"""How long after its own start an orchestrator waits for a worker that it knows from before. A worker that could not reach it has a
request in flight (`ORCHESTRATOR_REQUEST_S`) and then a pause: a heartbeat's, or 15 s where it registers."""
LEASE_SERIAL_BLOCK = 1024
"""Lease serials that one durable write reserves."""
MAX_LISTED_STAGES = 256
MAX_LISTED_BYTES = 192 * KIB
"""Stage records, peers or lines of the ledger in one answer; the rest of an envelope's bytes is for everything else."""
GRANT_RATE_PER_S = 20
GRANT_BURST = 200
"""Grants of one requester: so many at once, then so many a second."""
MAX_REQUESTERS = 65_536
"""Requesters whose rate is remembered."""
ORCHESTRATOR_REQUEST_S = 10.0
"""From the first byte of a request to the last of its answer."""
VIP_ABOVE_CREDITS = 1_000
ISSUANCE_PER_REQUESTER_DAY = 10_000
"""Credits that the tickets on one account may bring into being in one day (UTC)."""
MAX_PROOFS_PER_TICKET_AND_WORKER = 32
MAX_EXPIRED_PER_CHANGE = 256
"""Tickets whose facts one change of the ledger drops."""
LEDGER_MAP_BYTES = 64 * 1024 * MIB
PROOF_LOG_MAP_BYTES = 512 * MIB
"""Sizes to which the databases may grow; the files grow with their content."""
MAX_PROOF_BYTES = 64 * KIB
"""One sealed proof, as it fits into a request."""
MAX_PROOF_BATCH_BYTES = 192 * KIB
"""Sealed proofs of one request."""

# HTTP
MAX_HTTP_BODY_BYTES = 2 * MIB
MAX_HTTP_HEAD_BYTES = 16 * KIB
"""Request line and headers."""
HTTP_BODY_TIMEOUT_S = 30.0
"""From a request's head to the end of its body."""
HTTP_SEND_TIMEOUT_S = 20.0
"""How long a client may leave one write unread."""
HTTP_KEEP_ALIVE_S = 15.0
"""A connection without a complete request head for this long is closed."""
HTTP_LINGER_S = 1.0
"""After an answer that ends its connection: unread input is discarded this long, so that the answer is not lost to a reset."""
HTTP_GRACE_S = 10.0
"""Answers in flight at a shutdown may take this much longer."""
MAX_HTTP_CONNECTIONS = 512
MAX_QUERY_FIELDS = 16
"""Parameters of one query."""
SSE_PING_S = 15.0
MAX_CHAT_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_CHOICES = 8
"""Answers to one prompt of a request."""
MAX_PROMPTS_AND_CHOICES = 64
"""Answers to all prompts of a request."""
MAX_CONCURRENT_CHOICES = 8
"""Of those, how many are generated at a time."""
SHARED_PROMPT_TOKENS = 128
"""From how many tokens on a prompt is read once before further choices follow: two pages of a stage's prefix cache."""
MAX_LEGACY_LOGPROBS = 5
"""Alternatives beside a token of a text completion."""
LEGACY_MAX_TOKENS = 16
"""Tokens of a text completion that says no number."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_EMBEDDING_INPUTS = 1024
"""Texts of one request for vectors, each of which is a session; langchain sends 1,000 at a time."""
MAX_EMBEDDINGS_AT_ONCE = 8
"""Of those, sessions that are open at a time."""
MAX_EXTRA_CHUNKS = 256
"""Pieces of other files that come with one request of an editor."""
MAX_RESPONSE_FIELDS = 64
"""Fields that one request of an editor may name as those that it reads …"""
MAX_RESPONSE_FIELD_CHARS = 128
"""… and the length of such a name."""

# Sessions over hops
MAX_QUEUED_BYTES = 4 * MIB
"""Bytes of frames that wait for one neighbour's stream; one frame alone may be longer."""
MAX_QUEUED_CONTROL = 1024
"""Receipts, errors and closes that wait for one neighbour's stream; a peer that reads none of them is dropped."""
MAX_HOP_LINKS = 256
"""Outbound hop streams of one node; an idle one makes room."""
MAX_HOP_SESSIONS = 4 * MAX_SESSIONS_PER_STAGE
"""Sessions of one node, those that wait for a place, and those that freed their KV and wait for a last receipt, included."""
FULL_PATIENCE_S = HOP_TIMEOUT_S
"""How long an entry waits for a place at full stages before a request's first token."""
MAX_HOP_STREAMS_PER_PEER = 4
"""Inbound hop streams of one peer: one is used, the others may be the remains of broken connections."""
SESSION_IDLE_S = 120.0
"""A stage ends a session that gets no step for so long, and an entry waits no longer for one token."""
RECEIPT_PATIENCE_S = 4 * CHECKPOINT_S
"""A receiver that signs for nothing for so long, while rows wait for its signature, is dropped."""
FINAL_RECEIPT_S = 2.0
"""How long a closing stage waits for its receiver's last signature."""
TOKEN_STREAM_OPEN_S = 10.0
"""From a token stream's first byte to its capability."""
TOKEN_STREAM_DRAIN_S = 5.0
"""How long the tail of a closed session may keep its token stream open."""
MAX_ENTRY_SESSIONS = 256
"""Sessions of one entry."""
MAX_ENTRY_WAITING = 64
"""Requests of one tier that wait for one to end."""
ENTRY_PATIENCE_S = 10.0
"""How long they wait."""
MAX_OPEN_ADDRESS_BYTES = 32 * KIB
"""Addresses in one chain-open, of all stages together."""
MAX_BLAMED_PEERS = 1024
"""Peers whose failures an entry remembers."""
REPORT_PERIOD_S = 10.0
"""How long failures are collected before they are reported, each peer once."""
MAX_WAITING_REPORTS = 32
"""Peers whose failures wait to be reported."""
REPORT_RATE_PER_S = 1.0
REPORT_BURST = 64
"""Reports of one peer that an orchestrator counts."""
MAX_PROOF_MARKS = 512
"""Marks of one proof; beyond them every second one is left out, then three of four, and so on."""
HELD_RETRY_S = 24 * 3600.0
"""Held proofs are sent again after this."""
OPENS_PER_S = 100.0
OPEN_BURST = 200
"""Chain-opens that one upstream may have verified."""

# Sampling
MAX_GRAMMAR_CHARS = 32 * KIB
"""Of a JSON schema or grammar that an answer has to follow; as many bytes of UTF-8."""
MAX_LOGIT_BIASES = 300
"""Biased tokens of one request."""
MAX_TOP_LOGPROBS = 20
"""Alternatives that come with one token."""
MAX_HISTORY_IDS = 24 * KIB
"""Token ids that a chain-open gives the tail's penalties: 96 KiB of it."""
MAX_OPEN_BYTES = 160 * KIB
"""A sealed chain-open: the history, the addresses, and the rest. A control frame holds it and its capability."""

# Recipes
MAX_DRIFT_CLASS_CHARS = 64
"""The part of a published recipe's name behind the ``@``."""
QUANTIZE_CHUNK_BYTES = 16 * MIB
"""Float32 numbers that exist at once while a matrix is converted at load."""

# Engines in trouble, asleep and in turns
OOM_STREAK = 3
"""So many failures of an engine …"""
STREAK_WINDOW_S = 30.0
"""… within this mean saturated: no new session until as much time has passed without one."""
RELOAD_RETRY_S = 5.0
"""An engine that does not load is tried again after this."""
GATHER_S = 0.001
"""How long a turn of a chain's stage waits for a full group of decoding sessions."""
MAX_WAITING_OPENS = 32
"""Opens of one tier that wait for a place at one stage."""
PLACE_RETRY_S = 1.0
"""An open that found a place, but no room in the KV, is tried again after this: sessions that do nothing become idle."""
MAX_WAITING_BODY_BYTES = 8 * MIB
"""Rows that one session may send ahead while it waits for a place."""
MAX_PLACE_WAIT_MS = 60_000
"""How long an open may ask to wait for a place."""
LOOP_STALL_S = 0.05
"""An event loop that does not come round for so long is reported."""
STALL_LOG_S = 10.0
"""Stalls within this are reported in one line."""

# The orchestrator's surface
MAX_PAGE_ROWS = 500
"""Rows of one page of any table that is read over the network."""
MAX_SERVED_MODELS = 64
"""Models that one orchestrator serves."""
MAX_TERMS = 64
"""Pairs of recipe and device that one model has terms for."""
MAX_COUNTERS = 512
"""Counters in one answer."""
MAX_FEDERATION_PEERS = 16
"""Other orchestrators that one follows."""
MAX_ADMIN_TOKEN_CHARS = 512
MIN_ADMIN_TOKEN_CHARS = 16
MAX_CANARIES_NAMED = 8
"""Canaries that one audit order names."""

# Orders and re-sharding
ORDER_S = 10.0
"""From the first byte of an order to the last of its answer."""
MOVE_TIMEOUT_S = 600.0
"""How long a worker may take to load and show the layers that it was ordered to; then the order is forgotten."""
REPAIR_LOOK_S = 10.0
"""How often an orchestrator looks for holes that a replica could fill."""
REPAIR_AFTER_S = 60.0
"""A hole that is there for so long is repaired: most workers that vanish are back before."""
REPAIR_PERIOD_S = 60.0
"""Between two repairs of one mesh."""
SUSPECT_REPORTERS = 3
"""So many workers have to report one of them as failing …"""
SUSPECT_WINDOW_S = 120.0
"""… within this, for it to be suspected, …"""
SUSPECT_SHARE = 4
"""… and one of so many may be suspected at a time."""

# The ledger
REPUTATION_HALF_LIFE_S = 7 * 24 * 3600.0
"""In this time the distance of a reputation from a clean slate halves."""
SNAPSHOT_PAGE_BYTES = 160 * KIB
"""Entries and proofs of one page of the journal, so that it fits into an envelope with what is signed around them."""
SNAPSHOT_ROW_BYTES = 512
"""What the signature around one entry adds to it."""
PROOF_GRACE_S = 24 * 3600.0
"""A settled proof's bytes are kept for so long after its ticket's last day, for federated orchestrators that were away."""
MAX_DROPPED_PROOFS = 1024
"""Proofs' bytes that one transaction drops."""
MAX_REMEMBERED_ENVELOPES = 8192
MAX_REMEMBERED_ROUTES = 2048
MAX_REMEMBERED_BYTES = 1 * KIB
"""Tickets and leases, together, and route statements, that are opened once for all proofs that carry them; and how long a ticket or a
lease may be for that."""
RESTORED_SERIALS = 1 << 32
RESTORED_SEQUENCES = 86_400_000_000
"""Lease serials and envelope sequences that a restored ledger leaves out: more than were ever used since the backup. A sequence is a
microsecond or later, so these are a day ahead of the clock."""
SETTLE_PROCESSES = 2
"""Processes that verify proofs, where batches of them come."""
MAX_SETTLE_PROCESSES = 64
MAX_SETTLED_TOGETHER = 4096
"""Proofs of waiting requests that one transaction takes."""

# The topology stream, and outages
MAX_TOPOLOGY_STREAMS = 4096
"""Streams on which an orchestrator tells of changes."""
TOPOLOGY_PAUSE_S = 1.0
"""Changes within this go out together."""
TOPOLOGY_KEEPALIVE_S = 5.0
"""How often an orchestrator says that there is nothing new."""
TOPOLOGY_REFRESH_S = 20.0
"""How often the whole list goes out: stage records run out, and gossip may not reach everybody."""
TOPOLOGY_SILENCE_S = 15.0
"""A stream on which nothing comes for so long is dead."""
TOPOLOGY_SEND_S = 10.0
"""How long one message of it may take."""
TOPOLOGY_RESUBSCRIBE_S = 60.0
"""Where no stream can be had, one is asked for again after this, and the list meanwhile."""
FOLLOW_S = 5.0
"""How often the list is read while no complete route is known."""
FOLLOW_ROUTED_S = 20.0
"""How often it is read otherwise: gossip and the DHT are fresher, and lists cost the orchestrator entries × stages."""
FOLLOW_RETRY_S = 5.0
"""How often an entry tries to reach an orchestrator that does not answer."""
FOLLOW_SOON_S = 0.5
"""The first pause after a stream that broke."""
GRANT_TIMEOUT_S = 3.0
"""How long a request waits for its grant; whoever comes next does not wait then."""
MAX_HELD_TICKETS = 16
"""Unspent tickets that an entry holds for an outage."""
MAX_HELD_TICKETS_UNUSED = 2
"""Those of an entry that nobody has asked anything yet."""
TICKET_CHECK_S = 30.0
"""How often held tickets are looked at."""
HELD_TICKET_LEFT_S = 1800.0
"""A held ticket that is good for less than this is replaced."""

# Federation
FEDERATION_PULL_S = 5.0
"""How often each followed orchestrator is asked for what is new."""
MAX_LEDGER_ENTRY_BYTES = 160 * KIB
"""One sealed ledger entry: the journal's bytes, and the sealed proof that they rest on."""
MIRROR_MAP_BYTES = 64 * 1024 * MIB
"""Size to which one mirrored ledger may grow; the file grows with its content."""
MAX_KEPT_ENTRIES = 1024
"""Sealed entries of a followed orchestrator that are kept as they came, as evidence against later ones."""
TRUST_LIMIT_CREDITS = 1_000
"""Credits of one identity that count here at most, of those that one other orchestrator says it has."""
ORCHESTRATOR_PROBE_S = 10.0
"""How often a node looks whether an orchestrator that failed it answers again."""

# Audits
AUDIT_SHARE = 0.02
"""Share of all settled proofs that are recomputed."""
AUDIT_RECHECK_SHARE = 0.1
"""Share of the audits in which a second auditor is asked although the first one found nothing."""
AUDIT_QUORUM = 3
"""Auditors that have to give the same answer before another answer is a lie …"""
AUDIT_QUORUM_LEAST = 2
"""… and as many where no more can be asked."""
MAX_AUDITORS = 5
"""Auditors that one audit hears, at most."""
MAX_AUDITORS_ASKED = 12
"""Auditors that one audit asks, those included that decline or cannot be reached."""
MAX_AUDIT_POSITIONS = 32_768
"""An audit recomputes no more: of a longer session its first part."""
MAX_OPEN_AUDITS = 64
"""Audits that one orchestrator has under way; and as many wait."""
AUDIT_REPORT_S = 60.0
AUDIT_REPORT_PER_POSITION_S = 0.02
"""How long an auditor has for its report: so long, and so much longer for each position."""
MAX_KEPT_AUDITS = 2 * MAX_OPEN_AUDITS
"""Audits that a restart takes up again."""
AUDITS_RESUMED_AFTER_S = 60.0
"""How long after a start that happens: until then the workers have been heard."""
MAX_AUDIT_REPORT_BYTES = 8 * KIB
"""One sealed report."""
AUDIT_EVIDENCE_S = 30 * 24 * 3600.0
"""How long the proof and the reports are kept that a verdict rests on; longer than any proof of the journal."""
MAX_AUDIT_EVIDENCE = 16_384
"""Verdicts whose evidence is kept; where as many are, nothing is kept of a new one, and that is counted."""
MIN_PENALTY_CREDITS = 10
"""What a lie costs at least."""
BLACKLIST_AFTER_FAILED = 2
"""Failed audits of one peer after which it is excluded: a first one may be a machine's fault, a second one is a habit."""
MAX_TOLERANCES = 256
"""Pairs of recipes whose tolerance was measured."""

# What is kept for audits
HISTORY_BYTES = 128 * MIB
"""What one node sent and received of paid sessions, kept for auditors; the oldest makes room."""
HISTORY_TRACK_BYTES = HISTORY_BYTES // 4
"""Of one direction of one session; of a longer one the beginning is kept."""
HISTORY_TTL_S = 900.0
"""How long after a session's end it is kept."""
HISTORY_FRAME_BYTES = 128
"""What a kept frame costs beside its rows."""
MAX_HISTORY_TRACKS = 4096
MAX_HISTORY_READS = 8
"""How often one direction of one session is shown to one auditor."""
MAX_HISTORY_READERS = 16
"""To how many auditors: more than one audit asks, and a second one of the same proof."""
HISTORY_SHOWN_PER_S = 1.0
HISTORY_SHOWN_BURST = 8
"""Requests for history of one peer."""
MAX_HISTORY_STREAMS = 4
"""Histories that one node shows at a time."""
MAX_AUDITOR_STREAMS = 2
"""Of those, to one auditor: the one that it reads, and the one that it broke off."""
HISTORY_REQUEST_S = 10.0
"""From a history stream's first byte to its request, and how long one frame may take."""
MAX_WAITING_AUDITS = 4
"""Audit orders that one worker takes before it has carried them out."""
GUEST_KEPT_S = 20.0
"""How long a range that was loaded for an audit stays loaded, for the next order may be of the same one."""
AUDIT_LOAD_S = 120.0
"""How much longer an auditor has that loads the range first."""
AUDIT_ROWS = 32
"""Rows of one step of a recomputation: what a turn of paying sessions may have to wait for."""

# Revocation
MAX_REVOCATIONS = MAX_MEMBERS
"""Revocations that one orchestrator remembers; the oldest makes room."""
MAX_LISTED_REVOCATIONS = 384
"""Revocations in one answer, the newest: beside `MAX_LISTED_BYTES` they fit into an envelope."""
MAX_SWARM_REVOCATIONS = 4 * MAX_REVOCATIONS
"""Revocations that one node remembers, of all its orchestrators; they are told again and again."""
REVOCATION_TOLD_S = LEASE_TTL_S + OUTAGE_GRACE_S
"""How long a revocation is told: after that no node counts the revoked leases any more."""
REVOCATION_KEPT_S = LEASE_TTL_S + TICKET_OPEN_S + TICKET_SETTLE_S
"""How long it is remembered: after that no work under the revoked leases can be settled any more."""
MAX_REMEMBERED_OPENS = 1 << 17
"""Paid sessions of the last hour that a stage knows again; so many a stage does not open in an hour."""

# What one peer may ask of an orchestrator, and what it may leave there
PEER_REQUESTS_PER_S = 100.0
PEER_REQUEST_BURST = 2_000
"""Requests of one peer: over P2P counted before a signature is verified, over HTTP after. An honest node sends a heartbeat every 5 s,
and an entry a grant for each request beside it, which has a rate of its own (`GRANT_RATE_PER_S`)."""
PEER_MEMBERSHIP_PER_S = 2.0
PEER_MEMBERSHIP_BURST = 120
"""Of those, what may cost a durable write: register, ready, announce and deregister."""
PEER_PROOFS_PER_S = 256.0
PEER_PROOF_BURST = 16_384
"""Proofs of one peer, each of which costs several signatures: four full batches a second, and what a day's outage leaves at once."""
MAX_TRACKED_PEERS = 65_536
"""Peers whose rates are remembered."""
HTTP_VERIFICATIONS_PER_S = 1_000.0
HTTP_VERIFICATION_BURST = 5_000
"""Envelopes that are verified for whoever comes over HTTP, where nobody is known before: all together."""
MAX_SETTLING_REQUESTS = 256
"""Requests whose proofs are verified, or wait for it, at a time: of all peers together."""
SETTLED_BYTES_PER_WORKER_DAY = 1024 * MIB
"""Bytes of settled proofs, and of their entries in the journal, that one worker may add to the ledger in one day (UTC): about 300,000
sessions of an ordinary length."""
MAX_KEPT_RUMOURS = 16
"""Heads of one followed orchestrator that others saw and that are ahead of what was followed: the nearest ones."""

# Whoever asks a node over HTTP
API_KEY_BYTES = 32
"""Of randomness in an API key."""
MAX_API_KEYS = 4096
"""API keys of one node."""
MAX_API_KEY_FILE_BYTES = 16 * MIB
MAX_KEY_LABEL_CHARS = 64
MAX_REQUESTS_PER_MINUTE = 1_000_000
MAX_TOKENS_PER_MINUTE = 1_000_000_000
"""What an API key's limits may say."""
API_KEYS_LOOK_S = 1.0
"""How often a node looks whether its API keys have changed."""
MAX_CORS_ORIGINS = 16
"""Origins whose pages may use a node."""
PREFLIGHT_S = 600
"""How long a browser may remember what a preflight allowed."""
MAX_CORS_HEADER_CHARS = 1024
"""Of the names of headers that one preflight asks for."""
MAX_DELEGATION_BYTES = 1 * KIB
DELEGATION_TTL_S = 366 * 24 * 3600.0
"""For how long an identity may let an entry ask in its name, at most."""

# The dashboard
PICTURE_PERIOD_S = 1.0
"""Between two pictures of the mesh."""
MAX_PICTURE_WATCHERS = 32
"""Clients that are shown pictures at once."""
MAX_PICTURE_WATCHERS_PER_KEY = 8
"""Of those, with one API key: no key takes the places of all others."""
MAX_PICTURED_STAGES = 256
MAX_PICTURED_RECIPES = 8
MAX_PICTURED_FLIGHTS = 32
MAX_PICTURED_ENDED = 16
PICTURED_RATE_S = 180
"""Seconds of token rates in a picture."""

# What an entry remembers of its own requests, and for how long it believes in a route
MAX_KEPT_REQUESTS = 1024
"""Requests that ended and can still be asked about."""
MAX_LISTED_REQUESTS = 100
"""Of those, how many are listed at once."""
READY_S = 30.0
"""How long a model is listed after a complete route of stages has answered."""
PROBE_S = 15.0
"""How long a route may take over its proof, one token: an engine that slept has to load."""
PROBE_RETRY_S = 3.0
"""A route that failed its proof is not tried again before this."""
PROBE_RETRY_MAX_S = 60.0
"""Where nobody asks, each failure in a row doubles the wait, up to this."""
MAX_PROBED_PATHS = 3
"""Routes of one attempt, one after the other."""
MAX_PROVEN_PATHS = 64
"""Routes that are remembered to have answered."""

# Grammars that answers follow: what llguidance may do for one of them
GRAMMAR_TRIAL_CPU_S = 2
GRAMMAR_TRIAL_BYTES = 256 * MIB
"""What compiling one may take, in a process of its own. A schema of the longest honest kind takes 0.3 s and under 96 MiB;
each open session may keep as much as its grammar took."""
GRAMMAR_TRIAL_S = 10.0
"""How long that process may take by the clock, where the machine has other things to do."""
MAX_REMEMBERED_TRIALS = 1024
"""Grammars of which is known whether they compile within these bounds."""
GRAMMAR_COMPILE_FUEL = 1_000_000
"""Steps of building one grammar's expressions: about 20 ms."""
GRAMMAR_STEP_FUEL = 100_000
"""Steps of finding out which tokens may come next: about 7 ms."""
MAX_GRAMMAR_ITEMS = 20_000
"""Items of all the parser's rows at that: about 1 ms … 20 ms with very short lexemes."""
MAX_GRAMMAR_ROW_ITEMS = 500
"""Items of one row, and there is one for each byte of a token: an ambiguous grammar takes the square of it, up to 5 ms, in which no
other thread of Python runs. An object with 120 optional properties has as many."""
GRAMMAR_ANSWER_CPU_S = 0.5
GRAMMAR_TOKEN_CPU_S = 0.0001
GRAMMAR_DRAW_CPU_S = 0.01
"""CPU that following a grammar may take over one answer: so much in all, and so much more for each of its tokens and for each draw. A
schema of an honest kind takes 0.02 ms and 0.2 ms."""
MAX_GRAMMAR_STATES = 10_000
"""States of one answer's lexer, of up to 2 KiB each."""
MAX_GRAMMAR_SYMBOLS = 200_000
"""Symbols of one compiled grammar."""
MAX_GRAMMAR_REASON_CHARS = 400
"""Of what is said of a grammar that is none."""
GRAMMAR_WAIT_S = 20.0
"""How long a session waits for those before it to be compiled."""

# The command line
MAX_SESSION_FILE_BYTES = 4 * MIB
"""Of a conversation that `chat` keeps in a file."""
