"""What an answer is worth: rules in processes of their own, judges, shaping."""
