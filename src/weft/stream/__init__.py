"""The residual stream that a model reads and adds to, and the ops by which its plan is carried out."""
