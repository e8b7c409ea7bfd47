"""The worker role: register, load, serve hops, prove."""
