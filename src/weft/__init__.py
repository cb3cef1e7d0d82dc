"""Weft: placements, planned collectives, and a serving engine for parallel LLM inference."""
