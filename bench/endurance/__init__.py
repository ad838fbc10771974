"""A long run of the engine under everything at once, whose memory must not grow: `python -m bench.endurance`."""
