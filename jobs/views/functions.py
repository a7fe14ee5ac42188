"""The functions of ours that views' queries call in Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lockstep.jobs.views import jsonb_functions as jsonb
from lockstep.jobs.views import roots

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

# By name, with what they return.
_FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], str]]] = {
    jsonb.MEMBER: (jsonb.member, "string"),
    jsonb.AT_PATH: (jsonb.at_path, "string"),
    jsonb.CONTAINS: (jsonb.contains, "boolean"),
    jsonb.HAS_KEYS: (jsonb.has_keys, "boolean"),
    jsonb.LENGTH: (jsonb.length, "int"),
    roots.STDDEV: (roots.stddev, "string"),
}


def are_called(query: str) -> bool:
    """Return whether a query may call one of them."""
    return any(name in query for name in _FUNCTIONS)


def register(spark: SparkSession) -> None:
    """Make the functions known to a session: in a JVM that has just started, it takes a second."""
    from pyspark.sql.functions import udf  # noqa: PLC0415 - pyspark takes a second to import

    for name, (function, returned) in _FUNCTIONS.items():
        spark.udf.register(name, udf(function, returned, useArrow=False))
