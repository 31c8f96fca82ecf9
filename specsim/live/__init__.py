"""Running engines: one of our own that drives the simulator's schedulers for real."""
