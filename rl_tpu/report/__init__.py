"""A run's directory as something to look at: a picture, a page, a trace."""
