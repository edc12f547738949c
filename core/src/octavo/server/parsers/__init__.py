"""A model's text taken apart: content, reasoning and tool calls, in the format the model was trained on.

`events.py` is what comes out, `registry.py` chooses a format and makes a parser of it.
"""
