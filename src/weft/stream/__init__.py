"""The residual stream that a model reads and adds to, and the ops that execute its plan."""
