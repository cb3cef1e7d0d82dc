"""OpenAI-compatible HTTP server, and the commands."""
