"""Documents built from their mirror: `mirror_cuts` finds a cut, `kinds` computes its changes."""
