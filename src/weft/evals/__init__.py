"""Problems with checkable answers, to score a served model by."""
