"""Networks of many peers in one process: the daemons' own roles over the in-memory network, under virtual time."""
