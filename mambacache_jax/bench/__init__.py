"""Traces, and what they show: real traffic through the engine, with the cache and without."""
