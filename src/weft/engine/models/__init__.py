"""Models, written with `read` and `add` alone: no collective, no rank arithmetic, no layout branch."""
