"""Models written with `read` and `add` alone: no collectives, no rank arithmetic, no layout branches."""
