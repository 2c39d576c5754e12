"""Shows runs during and after training: a page, a terminal, figures for other tools."""
