"""Protocol ids ``/tessella/<name>/<major>`` and their versioning rule.

A change that an old peer would misread bumps the major. A node serves the majors it knows; a stream for another one is answered
with `VersionMismatch`, which names both.
"""

from __future__ import annotations

ORCHESTRATOR = "/tessella/orchestrator/1"
KAD = "/tessella/kad/1"
GOSSIP = "/tessella/gossip/1"
HOP = "/tessella/hop/1"
TOKENS = "/tessella/tokens/1"
TOPOLOGY = "/tessella/topology/1"
ORDERS = "/tessella/orders/1"
HISTORY = "/tessella/history/1"
PING = "/tessella/ping/1"
