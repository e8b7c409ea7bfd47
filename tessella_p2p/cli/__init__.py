"""The tessella-p2p command."""
