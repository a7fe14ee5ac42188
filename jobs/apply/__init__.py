"""Cuts into stores: a follower's session, its retries and reports."""
