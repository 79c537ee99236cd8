"""How often a run of `mmplan execute --health` takes all readings. Imports nothing."""

DEFAULT_HEALTH_INTERVAL = 10  # steps; a sampled one costs no forward of its own
