"""A question in; runs, paired statistics and a report out. Imports all packages but commands."""
