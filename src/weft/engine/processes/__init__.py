"""Rank processes: how they are forked, watched and ended."""
