"""Keys, canonical CBOR, signed envelopes, messages and frames: bytes in, values out, no I/O."""
