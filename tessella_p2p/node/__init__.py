"""Configuration, key file, logging and the root nursery: the one place that wires everything."""
