"""Measuring: seeded work, offline runs of an engine, a load generator for servers. No torch, no network at import."""
