"""Documents built from their mirror: `kinds` computes a cut's changes, `following` applies them."""
