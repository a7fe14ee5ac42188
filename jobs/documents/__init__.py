"""Documents made from their mirror: `kinds` what a cut does to them, `following` applies it."""
