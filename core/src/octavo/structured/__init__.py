"""Answers of a given shape: JSON schemas, regular expressions, grammars and tags, as masks over the vocabulary."""
