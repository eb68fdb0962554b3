"""What each attention head attends to: scores, report, figure."""
