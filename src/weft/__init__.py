"""Weft: placements, planned collectives, and a serving engine for parallel LLM inference."""

__version__ = "0.1.0"
