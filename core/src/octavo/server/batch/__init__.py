"""Batch files as OpenAI has them: a file of requests in, a file of answers out, through the server's own handlers."""
