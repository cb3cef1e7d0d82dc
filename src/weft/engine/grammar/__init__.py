"""Grammars that outputs follow, compiled in a process of their own."""
