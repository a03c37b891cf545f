"""Measurements, as ratios: run them by hand, keep the last tables in docs/benchmarks.md."""
