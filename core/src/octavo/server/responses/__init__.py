"""OpenAI's Responses API: `/v1/responses` and what hangs on it, with stored state and background runs."""
