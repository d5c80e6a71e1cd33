"""What can be found out about a run before its chips are paid for."""
