"""Frozen state and pure reducers: events in, state out."""
