"""The oracle: the log folded into tables, and checked for everything that it promises."""
