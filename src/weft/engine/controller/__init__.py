"""The controller's side of the ranks: how they are started, watched, told what to do and restarted."""
