"""The console: a page that shows the pipeline, for `cdc console`. Read `app` first.

One thread measures (`collector`) and one follows the log (`feed`), for any number of viewers; what
they have found is all that a request gets, so a page never queries a server. `guard` decides which
requests are answered. Nothing here changes the source, the log or a store; where viewers may act
(`actions`), they run commands.
"""
