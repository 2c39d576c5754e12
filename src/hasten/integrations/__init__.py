"""Other people's loops, and the articles' plain one."""
