"""Shows runs during and after training: a page, a terminal, data for other tools."""
