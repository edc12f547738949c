"""Speculation: cheap guesses at the next tokens, of which the model checks several in one step."""
