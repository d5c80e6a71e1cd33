"""Models: one decoder that learner and generator share, and tokenizers."""
