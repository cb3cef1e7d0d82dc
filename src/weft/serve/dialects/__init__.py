"""Dialects: endpoints of OpenAI, Anthropic and routers, and the shapes of their events."""
