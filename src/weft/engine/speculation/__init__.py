"""Speculative decoding: sources of drafts, and the number of drafts of each sequence."""
