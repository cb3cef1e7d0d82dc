"""Chats for every dialect: templates, tools, reasoning and the parts of an output."""
