"""The offline page that shows a run's attention."""
