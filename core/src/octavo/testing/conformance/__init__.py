"""The conformance kit: `octavo plugin check NAME` runs the tests of this folder on one platform.

    tier 0  hygiene     light import, pure probe, spawn-safe, nothing patched
    tier 1  device      dtypes, streams, memory figures, capture
    tier 2  ops         every kernel against its float32 reference on the CPU
    tier 3  attention   paged attention against dense attention, over layouts and shapes
    tier 6  engine      whole models: equal tokens whatever the settings

Tiers 4 (experts, expert parallelism) and 5 (collectives) will come with the features they test.
"""
