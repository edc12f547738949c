"""The conformance kit: `octavo plugin check NAME` runs the tests of this folder on one platform.

    tier 0  hygiene     light import, pure probe, spawn-safe, nothing patched
    tier 1  device      dtypes, streams, memory figures, capture
    tier 2  ops         every op kernel against its float32 reference on the CPU
    tier 3  attention   paged attention against dense attention, over layouts and shapes
    tier 4  products    linear layers and experts, plain and in every quantization scheme that a kernel takes
    tier 5  ranks       every claimed collective between two processes, and an engine of two ranks
    tier 6  engine      whole models: equal tokens whatever the settings

`run` starts pytest on them, again where a test ended the process (`journal`), `levels` judges what came back, `page`
shows it. What a vendor says about its own results
is `conformance.toml` (`settings`).
"""
