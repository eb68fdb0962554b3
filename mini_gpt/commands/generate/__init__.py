"""What sample.py is asked for, and how it prints it."""
