"""pgoutput bytes to typed messages: pure, no I/O.

`messages` defines them, `pgoutput` reads them, `types` names the built-in types.
"""
