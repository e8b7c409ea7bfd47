"""The orchestrator role: admission, allocation, leases, grants, settlement."""
