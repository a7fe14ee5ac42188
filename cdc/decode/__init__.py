"""pgoutput bytes to typed messages: pure, no I/O.

`messages` holds the nouns, `pgoutput` reads them, `types` names the built-in types.
"""
