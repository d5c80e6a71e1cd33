"""A pod that is not there: its clock, its generators, its service times."""
