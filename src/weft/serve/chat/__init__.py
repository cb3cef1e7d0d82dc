"""Chats: templates, tools, reasoning and the parts of an output, for every dialect."""
