"""Portable Triton kernels. A platform opts in by registering them, with its own tuning.

    from octavo.triton.attention_backend import AttentionTuning, TritonAttention

    registry.attention(TritonAttention.with_tuning(AttentionTuning(shared_memory=160 * 1024)), priority=10)

The only part of core that imports triton; nothing here is imported before a platform asks for it.
"""
