"""Faults that are injected into a server under load; nothing may be lost, hang or stay behind."""
