"""What follows a finished run: its model as files that others load."""
