"""The OpenAI-compatible routes: one file per route, bodies in `bodies`, answers in `answers`."""
