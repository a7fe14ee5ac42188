"""One suite for every store: the guarantees of `lockstep.contract`, tested on a sink.

```console
$ pytest --pyargs lockstep.conformance --sink=my_tests:store
```

`my_tests.store` is a function that gets an empty folder and returns a `StoreUnderTest` of its own.
To run the suite among tests of yours, define a fixture `store` that returns one, and import the
other fixtures of `lockstep.conformance.plugin` and the tests:
`from lockstep.conformance.test_contract import *`.
"""
