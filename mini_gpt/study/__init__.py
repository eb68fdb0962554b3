"""A question in; runs, paired statistics and a report out. Imports from all other packages."""
