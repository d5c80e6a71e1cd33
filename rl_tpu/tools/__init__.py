"""Tools that a policy may call; what it hands them is hostile input."""
