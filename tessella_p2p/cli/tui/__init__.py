"""The terminal UI: what ``tessella-p2p`` is without arguments on a terminal.

It is a client of a node's HTTP API, in textual's asyncio loop; a node that it starts itself is a child process. Text of peers and
models is shown as it is: it never becomes markup, and nothing that drives a terminal gets through.
"""
