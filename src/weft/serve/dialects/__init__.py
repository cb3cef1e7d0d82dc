"""Dialects: the endpoints of OpenAI, of Anthropic and of routers, and the shapes of their events."""
